// Review: one image after the other, one click each, and what the clicks make certifiable.
import { ask, boxes, byId, fill, make, notice, post, show, tasks } from "./common.js";
import { ERRORS, PAGE, REVIEW } from "./texts.js";

const AHEAD = 5; // images; what a person was given is kept from others for two minutes
const FEW = 3; // so few are left when further ones are asked for
const NOTHING_MS = 15_000; // between questions whether something waits now
const SHARE_OF_HEIGHT = 0.45, MOST_TIMES = 12; // of the window, and of the image's own size
const reviewer = sessionStorage.reviewer ??= String(Math.random()); // by which work is divided between people; a tab keeps it
let review = null, item = null, said = [], passed = 0, busy = false, questions = 0, ahead = false, timer = 0, left = null;

const task = () => encodeURIComponent(byId("review-task").value);

export async function enter(signal) {
  byId("hint").textContent = REVIEW.hint;
  await tasks(byId("review-task"), "review");
  left = signal;
  await load();
}

// Begin anew with what waits. Where the node is gone or busy, and where nothing waits, ask again.
async function load() {
  clearTimeout(timer);
  if (left.aborted) return;
  item = null;
  try {
    await refill();
  } catch (error) {
    if (![0, 429, 503].includes(error.status)) throw error;
    notice({ message: `${error.message} ${ERRORS.again}` });
    fill("item");
    timer = setTimeout(() => load().catch(notice), error.againMs);
    return;
  }
  if (!item) timer = setTimeout(() => load().catch(notice), NOTHING_MS);
}

// Ask for what waits, and what the clicks made of it, without taking away the image that is looked at.
async function refill() {
  const mine = ++questions, labelled = byId("again").checked;
  const asked = `task=${task()}&reviewer=${reviewer}&limit=${AHEAD}&offset=${passed}&labelled=${labelled}`;
  const fresh = await (await ask(`v1/review?${asked}`, "review")).json();
  if (mine !== questions) return; // a later question was asked meanwhile
  notice(null);
  review = fresh;
  review.items = review.items.filter((each) => each.id !== item?.id && (labelled || !said.includes(each.id)));
  if (item) drawGain();
  else next();
}

function next() {
  item = review.items.shift() ?? null;
  if (review.items.length < FEW && review.next != null && !ahead) {
    ahead = true; // one question at a time; what fails is asked again when none is left
    refill().catch(() => {}).finally(() => { ahead = false; });
  }
  draw();
}

// ---------------------------------------------------------------------------------------------------- judging

async function judge(label) {
  if (!item || busy) return;
  await once(async () => {
    const path = `v1/review/${item.id}?task=${task()}`, before = item.label;
    if (before != null && before !== label) await ask(path, "review", { method: "DELETE" });
    if (before !== label) await ask(path, "review", post({ label }));
    if (before == null) {
      said.push(item.id);
      review.labelled += 1;
      review.waiting -= 1;
    } else passed += 1;
    if (review.items.length) next();
    else await load();
  });
}

async function undo() {
  const last = said.at(-1);
  if (last === undefined || busy) return;
  await once(async () => {
    await ask(`v1/review/${last}?task=${task()}`, "review", { method: "DELETE" });
    said.pop();
    await load();
    byId("progress").textContent = `${REVIEW.undone} ${byId("progress").textContent}`;
  });
}

async function certify() {
  if (busy || !review || !confirm(REVIEW.replace(review))) return;
  await once(async () => {
    const body = { task: byId("review-task").value, labels_checked: byId("checked").checked };
    const made = await (await ask("v1/certificates", "operate", post(body))).json();
    await load();
    byId("made").textContent = REVIEW.made(made);
  });
}

// One request at a time, so that a second tap does not judge the next image.
async function once(work) {
  busy = true;
  byId("made").textContent = "";
  notice(null);
  try { await work(); } catch (error) { notice(error); } finally { busy = false; }
}

// ---------------------------------------------------------------------------------------------------- drawing

function drawGain() {
  byId("undo").disabled = said.length === 0;
  byId("progress").textContent = review.audits ? REVIEW.progress(review) : "";
  byId("trust").textContent = REVIEW.trust(review);
  fill("gain", make("ul.gain", {}, review.targets.map((each) =>
    make("li", {}, make("b", {}, `${REVIEW.target(each)}: `), REVIEW.can(each), make("span.quiet", {}, ` (${REVIEW.more(each, review)})`)))));
}

function draw() {
  drawGain();
  if (!item) {
    fill("item", make("p", {}, REVIEW.nothing(review)));
    return;
  }
  const kind = item.choices.length ? item.kind : "look";
  const asked = kind === "random" && item.answers.length > 1 ? "disagreement" : kind;
  const picture = make("img", { alt: REVIEW.image(item.answers) });
  const drawn = item.answers.flatMap(({ label }, place) => boxes(label?.objects ?? [], place ? "second" : "first", (each) => each.label));
  const over = make("svg.boxes", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" }, drawn);
  const why = make("p.quiet", {}, REVIEW.why[kind]);
  fill("item", make("h2", {}, REVIEW.ask[asked]), make("figure.picture", {}, picture, over), answers(item),
    item.label == null ? null : make("p", {}, REVIEW.said(item.label)), choices(item), why);
  picture.addEventListener("load", () => {
    const { naturalWidth: width, naturalHeight: height } = picture;
    picture.width = width * Math.min(byId("item").clientWidth / width, SHARE_OF_HEIGHT * innerHeight / height, MOST_TIMES);
  });
  const shown = item.image == null ? Promise.resolve(false) : show(picture, item.image.slice(1), "review");
  shown.then((had) => { if (!had) picture.replaceWith(make("p.quiet", {}, REVIEW.gone)); });
}

function answers({ answers }) {
  const several = answers.length > 1;
  return make("ol.answers", {}, answers.map((each, place) =>
    make("li", {}, several ? `${REVIEW.position[place]}: ` : "", make("b", {}, each.text || REVIEW.none))));
}

function choices({ choices, answers }) {
  if (!choices.length) return make("button", { type: "button", click: () => { passed += 1; next(); } }, PAGE.next);
  const buttons = choices.map((choice) => {
    const key = make("kbd.pointer", { "aria-hidden": "true" }, REVIEW.keys[choice]);
    return make("button", { type: "button", click: () => judge(choice), "aria-keyshortcuts": REVIEW.keys[choice] }, REVIEW.choices[choice], " ", key);
  });
  return make("div", {}, make("div.choices", {}, buttons), corrected(answers[0].label));
}

// A form for what the choices cannot say: numbers of counts, names of a set of labels; a class needs none.
function corrected(label) {
  if (typeof label !== "number" && (label === null || typeof label !== "object")) return null;
  const read = Array.isArray(label) ? names(label) : typeof label === "number" ? single(label) : numbers(label);
  const submit = (event) => { event.preventDefault(); judge(read.value()); };
  return make("form", { submit }, make("p", {}, PAGE.other), read.inputs, make("button", {}, PAGE.say));
}

function names(label) {
  const input = make("input", { type: "text", value: label.join(", "), "aria-label": REVIEW.labels });
  return { inputs: input, value: () => input.value.split(",").map((each) => each.trim()).filter(Boolean) };
}

function single(label) {
  const { inputs, value } = numbers({ [REVIEW.count]: label });
  return { inputs, value: () => value()[REVIEW.count] };
}

// `{group: number}`, or `{region: {group: number}}`.
function numbers(label) {
  const inputs = [], readers = Object.entries(label).map(([name, value]) => {
    if (typeof value === "object") {
      const inner = numbers(value);
      inputs.push(make("fieldset", {}, make("legend", {}, name), inner.inputs));
      return [name, inner.value];
    }
    const input = make("input", { type: "number", min: 0, max: 10000, step: 1, value, required: true, inputmode: "numeric" });
    inputs.push(make("label.field", {}, make("span", {}, name), input));
    return [name, () => Number(input.value)];
  });
  return { inputs, value: () => Object.fromEntries(readers.map(([name, value]) => [name, value()])) };
}

// --------------------------------------------------------------------------------------------------- listening

byId("undo").addEventListener("click", undo);
byId("again").addEventListener("change", () => { passed = 0; load().catch(notice); });
byId("certify").addEventListener("click", certify);
byId("review-task").addEventListener("change", () => { said = []; passed = 0; load().catch(notice); });
addEventListener("keydown", (event) => {
  if (byId("review").hidden || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input:not([type=checkbox])")) return;
  if (event.key.toLowerCase() === "u") undo();
  const choice = item?.choices.find((each) => REVIEW.keys[each] === event.key);
  if (choice) judge(choice);
});
