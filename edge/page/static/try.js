// Try: one image, what it is asked for, and the answer drawn.
import { ask, badge, boxes, byId, fill, keyed, make, notice, tasks } from "./common.js";
import { ERRORS, PAGE, STATUS, TIMES, TRY, guarantee, ms, percent, whoAndWhy } from "./texts.js";

const SHOWN_BOXES = 100;
let image = null, listings = [], answer = null, asking = null;

export async function enter() {
  draw();
  await tasks(byId("task"), "infer");
  await listTargets();
}

async function listTargets() {
  const { targets } = await (await ask(`v1/targets?task=${encodeURIComponent(byId("task").value)}`, "infer")).json();
  const before = JSON.stringify(listings[byId("target").value]?.accuracy.target ?? { quality: "balanced" });
  const useful = targets.filter((each) => each.accuracy.target.quality || each.escalation > 0); // the others are as `fast`
  listings = useful.sort((one, other) => strictness(one) - strictness(other));
  const chosen = listings.findIndex((each) => JSON.stringify(each.accuracy.target) === before);
  byId("target").max = listings.length - 1;
  byId("target").value = Math.max(0, chosen);
  drawTarget();
}

// The drop by which targets are ordered, from `best` to `fast`.
function strictness({ accuracy: { target, max_drop } }) {
  if (target.quality === "best") return -1;
  return target.quality === "fast" ? 2 : target.max_accuracy_drop ?? max_drop ?? 1;
}

function drawTarget() {
  const listing = listings[byId("target").value];
  if (!listing) return;
  byId("wanted").textContent = TRY.target(listing.accuracy);
  byId("target").setAttribute("aria-valuetext", TRY.target(listing.accuracy));
  byId("cost").textContent = TRY.cost(listing);
  drawRequest();
}

// ------------------------------------------------------------------------------------------------ the request

function fields() {
  const [[name, value] = []] = Object.entries(listings[byId("target").value]?.accuracy.target ?? {});
  const asked = byId("task").value ? { task: byId("task").value } : {};
  if (name) asked[name] = value;
  if (byId("deadline").value) asked.deadline_ms = Number(byId("deadline").value);
  return asked;
}

async function send() {
  if (!image) return;
  asking?.abort();
  const mine = asking = new AbortController();
  notice(null);
  fill("answer", make("p.quiet", {}, TRY.asking));
  try {
    const body = { method: "POST", body: image, headers: { "Content-Type": "application/octet-stream" } };
    answer = await (await ask(`v1/infer?${new URLSearchParams(fields())}`, "infer", { ...body, signal: mine.signal })).json();
  } catch (error) {
    if (mine.signal.aborted) return;
    answer = null;
    notice(error);
  }
  draw();
  byId("answer").scrollIntoView({ block: "nearest" }); // a phone shows the image above it
}

function choose(file) {
  if (!file) return;
  image = file;
  answer = null;
  byId("ask").disabled = false;
  const shown = byId("shown");
  if (shown.src) URL.revokeObjectURL(shown.src);
  byId("unshown").textContent = "";
  byId("picture").hidden = false;
  shown.onerror = () => { byId("picture").hidden = true; byId("unshown").textContent = ERRORS.noImage(file.name); };
  shown.alt = file.name;
  shown.src = URL.createObjectURL(file);
  fill("boxes");
  send();
}

// ------------------------------------------------------------------------------------------------- the answer

function draw() {
  drawRequest();
  byId("least").hidden = !answer?.objects;
  byId("spent").hidden = !answer;
  fill("boxes");
  if (!answer) {
    fill("answer", make("p.quiet", {}, image ? TRY.failed : TRY.waiting));
    return;
  }
  const { accuracy } = answer, status = STATUS[accuracy.status];
  fill("answer", drawPrediction(),
    make("p", {}, whoAndWhy(answer), answer.deadline_met == null ? "" : ` (${TRY.deadline(answer.deadline_met)})`),
    answer.degraded ? make("p", {}, make("span.badge.suspended", {}, TRY.degraded)) : null,
    make("details", { open: accuracy.status !== "certified" },
      make("summary", {}, badge(accuracy.status, status)), guarantee(accuracy).map((line) => make("p", {}, line))));
  drawTime();
}

// A share as a bar, with its text beside it.
function bar(text, share, written) {
  const meter = make("span.bar", { "aria-hidden": "true" }, make("span"));
  meter.firstChild.style.width = `${100 * Math.min(1, share)}%`;
  return make("li", {}, make("span.name", {}, text), meter, make("span.figure", {}, written));
}

function drawPrediction() {
  if (answer.counts) return make("ul", {}, Object.entries(answer.counts).flatMap(drawCounts));
  const found = answer.objects ? drawBoxes() : answer.top_k ?? answer.labels;
  if (!found) return make("pre", {}, JSON.stringify(answer, null, 1));
  if (!found.length) return make("p", {}, TRY.nothing);
  return make("ol.bars", {}, found.map((each) => bar(each.label, each.confidence, percent(each.confidence))));
}

function drawCounts([region, groups], _, { length }) {
  return Object.entries(groups).map(([group, n]) => make("li", {}, (length > 1 ? `${region}: ` : "") + TRY.counts(group, n)));
}

function drawBoxes() {
  const least = Number(byId("confidence").value);
  const objects = answer.objects.filter((each) => each.confidence >= least).slice(0, SHOWN_BOXES);
  byId("least").querySelector("output").textContent = percent(least, 0);
  fill("boxes", boxes(objects, "first", (each) => `${each.label} ${percent(each.confidence)}`));
  return objects;
}

function drawTime() {
  const took = answer.timing_ms, known = took.decode + took.queue + took.infer + took.uplink + took.dc;
  const parts = { ...took, rest: Math.max(0, took.total - known) };
  const named = Object.entries(TIMES).filter(([part]) => parts[part] > 0);
  const said = named.map(([part, name]) => `${name} ${ms(parts[part])}`);
  const whole = make("div.stack", { role: "img", "aria-label": said.join(", ") });
  for (const [part] of named) {
    const piece = make(`span.${part}`);
    piece.style.flexGrow = parts[part];
    whole.append(piece);
  }
  const legend = named.map(([part], place) => make("li", {}, make(`span.dot.${part}`), said[place]));
  fill("time", whole, make("ul.legend", { "aria-hidden": "true" }, legend));
}

function drawRequest() {
  const asked = fields(), base = location.origin + location.pathname.replace(/\/$/, "");
  const quoted = (text) => `'${String(text).replaceAll("'", `'\\''`)}'`;
  const name = image?.name || "image.jpg", url = `${base}/v1/infer?${new URLSearchParams(asked)}`;
  const python = Object.entries(asked).map(([field, value]) => `, ${field}=${JSON.stringify(value)}`).join("");
  const header = keyed() ? `-H "Authorization: Bearer $HAWKVISION_API_KEY" ` : "";
  const examples = {
    [PAGE.curl]: `curl --data-binary ${quoted(`@${name}`)} ${header}${quoted(url)}`,
    [PAGE.python]: `from hawkvision import Client

with Client(${JSON.stringify(base)}) as client:
    answer = client.infer(${JSON.stringify(name)}${python})
    print(answer.prediction, answer.accuracy.status)`,
  };
  fill("same", Object.entries(examples).map(([title, text]) => {
    const click = () => copy(text, button), hidden = !navigator.clipboard; // none without TLS
    const button = make("button", { type: "button", hidden, click, "aria-label": `${PAGE.copy} ${title}` }, PAGE.copy);
    return make("figure.code", {}, make("figcaption", {}, title, button), make("pre", { tabindex: "0" }, text));
  }));
}

async function copy(text, button) {
  await navigator.clipboard.writeText(text).then(() => { button.textContent = TRY.copied; }, notice);
}

// --------------------------------------------------------------------------------------------------- listening

for (const id of ["file", "camera"]) {
  byId(id).addEventListener("change", ({ target }) => { choose(target.files[0]); target.value = ""; });
}
byId("asked").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("target").addEventListener("input", drawTarget);
byId("target").addEventListener("change", send);
byId("deadline").addEventListener("change", () => { drawRequest(); send(); });
byId("task").addEventListener("change", () => listTargets().then(send, notice));
byId("confidence").addEventListener("input", draw);
addEventListener("paste", (event) => { if (!byId("try").hidden) choose([...event.clipboardData.files][0]); });
for (const type of ["dragover", "drop"]) {
  addEventListener(type, (event) => {
    if (byId("try").hidden || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    if (type === "drop") choose(event.dataTransfer.files[0]);
  });
}
