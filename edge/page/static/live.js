// Live: what the node does now, from a stream of its status. A tab that nobody sees holds none, for browsers open only
// six connections to a host.
import { ask, badge, byId, fill, make, notice, show, table } from "./common.js";
import { ERRORS, LIVE, PAGE, REASONS, STATUS, bytes, clock, ms, percent } from "./texts.js";

const POINTS = 240; // two a second, two minutes
const AGAIN_MS = 2000;
const MOST_CHARACTERS = 4_000_000; // of one line
let points = [], thumbnails = new Map();

export function enter(signal) {
  follow(signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    const hidden = new AbortController(), hide = () => { if (document.hidden) hidden.abort(); };
    document.addEventListener("visibilitychange", hide);
    try {
      const asked = { signal: AbortSignal.any([signal, hidden.signal]) };
      if (!document.hidden) await read((await ask("v1/status?watch=true", "observe", asked)).body.getReader());
    } catch (error) {
      if (signal.aborted) return;
      if (!hidden.signal.aborted) {
        const gone = error.status === 404 ? ERRORS.noView : `${ERRORS.offline} ${ERRORS.again}`;
        notice([0, 404, undefined].includes(error.status) ? { message: gone } : error);
        fill("tiles", make("p.quiet", {}, LIVE.stale));
      }
      if ([401, 403, 404].includes(error.status)) return;
    } finally {
      document.removeEventListener("visibilitychange", hide);
      byId("live").classList.add("stale");
    }
    await new Promise((done) => { setTimeout(done, AGAIN_MS); signal.addEventListener("abort", done, { once: true }); });
  }
}

// Draw each line of the stream; of several that came together, the last.
async function read(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    if (rest.length > MOST_CHARACTERS) throw new Error(LIVE.stale);
    const last = lines.filter(Boolean).pop();
    if (last) draw(JSON.parse(last));
  }
}

function draw(status) {
  notice(status.draining ? { message: LIVE.draining } : null);
  byId("live").classList.remove("stale");
  const total = all(status.tasks);
  points = [...points, total].slice(-POINTS);
  fill("tiles", tiles(total, status));
  fill("chart",
    line("rate", LIVE.tiles.rate, (each) => each.per_s, (value) => value.toFixed(1)), line("p99", LIVE.tiles.p99, (each) => each.p99_ms, ms));
  rows("tasks", status.tasks.map(task));
  rows("guarantees", status.tasks.flatMap((each) => each.guarantee.map((row) => guarantee(each.task, row))));
  rows("alarms", status.tasks.flatMap((each) => each.alarms.map((alarm) => (
    { time: alarm.time ? clock(alarm.time) : "–", task: each.task, stream: LIVE.stream(alarm.stream), cause: alarm.cause,
      ended: alarm.ended ? clock(alarm.ended) : LIVE.stands }))));
  rows("answers", status.answers.map(answer));
  for (const id of thumbnails.keys()) if (!status.answers.some((each) => each.id === id)) thumbnails.delete(id);
}

// A table of rows with the same columns, or what there is to say without any.
function rows(id, found) {
  const columns = Object.keys(found[0] ?? {}).map((name) => LIVE.columns[name]);
  fill(id, found.length ? table(PAGE[id], columns, found.map((row) => Object.values(row))) : make("p.quiet", {}, LIVE.empty[id]));
}

function task(each) {
  const shares = Object.fromEntries(["edge", "escalated", "degraded", "refused"].map((name) => [name, percent(each[name])]));
  const times = { rate: each.per_s.toFixed(1), p50: ms(each.p50_ms), p99: ms(each.p99_ms) };
  return { task: each.task, ...times, ...shares, queue: LIVE.of(each.queue, each.queue_limit) };
}

// All tasks together: rates add up, shares are weighted by them, and of times the slowest task's counts.
function all(tasks) {
  const sum = (value) => tasks.reduce((found, each) => found + value(each), 0), per_s = sum((each) => each.per_s);
  const slowest = (name) => tasks.reduce((found, each) => each[name] > (found ?? -1) ? each[name] : found, null);
  const share = (name) => per_s ? sum((each) => each.per_s * each[name]) / per_s : 0;
  return { per_s, p50_ms: slowest("p50_ms"), p99_ms: slowest("p99_ms"), escalated: share("escalated"), degraded: share("degraded"),
    refused: share("refused"), queue: sum((each) => each.queue), several: tasks.length > 1 };
}

function tiles(total, { datacenter, link, memory }) {
  const values = {
    rate: total.per_s.toFixed(1), [total.several ? "slowest50" : "p50"]: ms(total.p50_ms), [total.several ? "slowest99" : "p99"]: ms(total.p99_ms),
    escalated: percent(total.escalated), degraded: percent(total.degraded), refused: percent(total.refused), queue: total.queue,
    datacenter: LIVE.datacenter(datacenter), link: LIVE.link(link), memory: bytes(memory.resident_bytes),
  };
  return Object.entries(values).map(([name, value]) => make("div.tile", {}, make("b", {}, String(value)), LIVE.tiles[name]));
}

// A line over the last two minutes, scaled to its greatest value.
function line(name, title, value, written) {
  const values = points.map((each) => value(each) ?? 0), most = Math.max(...values, 1e-9);
  const drawn = values.map((each, place) => `${POINTS - values.length + place},${40 - 38 * each / most}`).join(" ");
  const text = `${title}: ${written(values.at(-1))}, ${LIVE.most(written(most))}`;
  return make(`figure.${name}.code`, {}, make("figcaption", {}, text),
    make("svg", { viewBox: `0 0 ${POINTS} 40`, preserveAspectRatio: "none", "aria-hidden": "true" }, make("polyline", { points: drawn })));
}

const judged = (name, reason) => make("span", {}, badge(name, STATUS[name]), reason ? ` ${REASONS[reason] ?? reason}` : "");

function guarantee(task, row) {
  return { task, stream: LIVE.stream(row.stream, row.named), status: judged(row.status, row.reason), audits: LIVE.audits(row),
    disagreement: percent(row.disagreement), certified: LIVE.certified(row) };
}

function answer(each) {
  return { time: clock(each.time), task: each.task, answer: make("span", {}, thumbnail(each), each.text), who: `${each.model} (${each.tier})`,
    status: judged(each.status, each.degraded_reason ? "degraded" : null), took: ms(each.ms) };
}

// The image of an answer, fetched once; none where the node keeps none, or the key may not see it.
function thumbnail({ id, image, text }) {
  if (!image) return null;
  if (!thumbnails.has(id)) {
    const made = make("img", { alt: LIVE.thumbnail(text), hidden: true });
    thumbnails.set(id, made);
    show(made, image.slice(1), "review").then((had) => { made.hidden = !had; });
  }
  return thumbnails.get(id);
}
