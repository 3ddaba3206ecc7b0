// Every text of the page. Functions take what the API said; `percent` and `ms` are how figures are written.

const least = (digits) => 10 ** -digits; // of what is written, in percent
export const percent = (share, digits = 1) => share == null ? "–"
  : share > 0 && 100 * share < least(digits) / 2 ? `< ${least(digits)} %` : `${Number((100 * share).toFixed(digits))} %`;
export const ms = (value) => value == null ? "–" : value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
export const bytes = (value) => value == null ? "–" : value < 1e9 ? `${Math.round(value / 1e6)} MB` : `${(value / 1e9).toFixed(1)} GB`;
export const clock = (time) => new Date(time).toLocaleTimeString();

const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const listed = (names) => names.join(names.length > 2 ? ", " : " or ");

// What stands in index.html, by its `data-text` and `data-label`.
export const PAGE = {
  title: "HawkVision edge node", brand: "HawkVision", views: "Views", try: "Try", live: "Live", review: "Review",
  keyOpen: "Key", key: "Key of this node", keyUse: "Use", keyNote: "It stays in this tab's memory and goes to this node only.",
  noScript: "This page needs JavaScript. The API is described at /docs.",
  choose: "Choose an image", camera: "Take a photograph", drop: "or drop or paste one here", task: "Task",
  words: "The edge is this node's small model; the reference stage is the best that the datacenter has. To escalate is to send the image there.", target: "How accurate", exact: "as the reference stage", fast: "always the edge", deadline: "Deadline", deadlineUnit: "ms, empty for none", ask: "Ask again", confidence: "Boxes from a confidence of",
  answer: "Answer", time: "Where the time went", same: "The same request", curl: "curl", python: "Python", copy: "Copy", api: "API",
  rate: "The last two minutes", tasks: "Tasks", guarantees: "Guarantees", alarms: "Alarms", answers: "Last answers",
  undo: "Undo", certify: "Renew the certificates", certifiable: "What the clicks make certifiable", next: "Next", lookAgain: "Look again at what was judged", other: "Another answer", say: "Say so",
  checked: "I looked again at the labels of the images drawn at random, and they are right",
};

export const ERRORS = {
  scope: { infer: "This view needs a key with the scope infer.", observe: "This view needs a key with the scope observe.",
    review: "This view needs a key with the scope review.", operate: "This needs a key with the scope operate." },
  noView: "This server does not offer this view.", wrongKey: "This node does not know that key.",
  offline: "The node does not answer.", again: "Trying again.",
  noImage: (name) => `${name || "This"} cannot be shown here; the node may still read it.`,
};

// ------------------------------------------------------------------------------------------------------- try

const QUALITY = { fast: "fast: always the edge", balanced: "balanced, the default", best: "best: always the reference" };

export const TRY = {
  waiting: "Choose an image to ask about.", failed: "No answer.", asking: "Asking …",
  target: ({ target }) => target.quality ? QUALITY[target.quality] : `at most ${percent(target.max_accuracy_drop, 2)} less accurate than the best`,
  cost: (listing) => `Escalates ${percent(listing.escalation, 0)} of traffic. ${STATUS[listing.accuracy.status].short}${
    listing.accuracy.max_drop != null && listing.accuracy.target.quality ? `, at most ${percent(listing.accuracy.max_drop, 2)} less accurate` : ""}.`,
  sure: (confidence) => `${percent(confidence, 0)} sure`,
  counts: (group, n) => `${n} ${group}`,
  nothing: "Nothing found.",
  copied: "Copied", degraded: "Below its target",
  deadline: (met) => met ? "in time" : "after the deadline",
};

const WHY = { // why the image was sent, given "the edge was … sure"
  low_confidence: (edge) => `${edge}, so`, target: () => "This target always asks the reference stage, so",
  suspended: () => "The guarantee is suspended, so the reference stage answers as far as it can;", edge_busy: () => "The edge was too busy, so",
  edge_slow: () => "The edge alone would have been too slow for the deadline, so both were asked at once, and",
  edge_not_ready: () => "The edge's models are not in memory, so",
};
const BELOW = {
  no_datacenter: "This node has no datacenter to ask, so the edge's answer stands.", unreachable: "The datacenter does not answer now, so the edge's answer stands.",
  no_time: "The datacenter would not have answered in time, so the edge's answer stands.", no_reply: "The datacenter was asked and did not answer in time, so the edge's answer stands.",
  incomplete: "Only a part of the datacenter's models answered.", partial_image: "Only a part of the image arrived.",
};

export function whoAndWhy(answer) {
  const { edge_score: score, edge_threshold: needed, timing_ms: took } = answer;
  const sure = score == null ? "The edge did not look at the image"
    : `The edge scored ${percent(score)}` + (needed == null ? "" : `, this target needs ${percent(needed)}`);
  const below = answer.degraded ? ` ${BELOW[answer.degraded_reason] ?? ""}` : "";
  if (answer.tier === "edge") return `${sure}${answer.degraded ? "." : `; it answered in ${ms(took.total)}.`}${below}`;
  return `${(WHY[answer.reason] ?? (() => `${sure};`))(sure)} the datacenter answered in ${ms(took.uplink + took.dc)}.${below}`;
}

export const TIMES = { queue: "waiting", decode: "decoding", infer: "edge model", uplink: "link", dc: "datacenter", rest: "rest" };

export const STATUS = {
  certified: { short: "Certified", sign: "✓" }, best_effort: { short: "Best effort", sign: "~" }, suspended: { short: "Suspended", sign: "!" },
};
const BASIS = { shipped: "the images named on the model's card", site: "a folder of this site's own images", review: "this node's own traffic",
  agreement: "how often the stages agree" };
export const REASONS = {
  alarm: "audits show that the traffic is not as certified", degraded: "it is below what the target asks for", partial_image: "a part of the image was missing",
  uncertified_version: "what runs is not known to be what was certified", no_certificate: "no certificate covers this target",
  min_accuracy: "an accuracy that nobody can watch without labels was asked for", agreement_only: "only the agreement of both stages is certified",
  unmonitored: "too few audits take place", expired: "the images behind the certificate are too old", late: "too many answers to this target come late or below it",
};

export function guarantee(accuracy) {
  const drop = accuracy.max_drop == null ? null : `at most ${percent(accuracy.max_drop, 2)} less accurate than the reference stage`;
  if (accuracy.status !== "certified") {
    const why = REASONS[accuracy.status_reason] ?? accuracy.status_reason;
    return [`Nothing is promised for this answer: ${why}.`];
  }
  if (accuracy.basis == null) return ["The reference stage itself answers to this target, so nothing is lost against it."];
  const watched = accuracy.watched_max_drop;
  return [
    `Answers to this target are ${drop ?? `different from the reference stage's on at most ${percent(accuracy.max_disagreement)}`}, on average over traffic like that which was tested.`,
    `That rests on ${BASIS[accuracy.basis]}: ${plural(accuracy.n, "image")}, ${accuracy.labels} of them labelled. The test errs with a probability of at most ${percent(accuracy.delta, 2)}.`,
    watched == null ? "" : `Without new labels, watching the traffic holds the loss to ${percent(watched)}.`,
  ].filter(Boolean);
}

// ------------------------------------------------------------------------------------------------------ live

export const LIVE = {
  tiles: { rate: "requests/s", p50: "P50", p99: "P99", slowest50: "P50, slowest task", slowest99: "P99, slowest task", escalated: "escalated", degraded: "below target", refused: "refused", queue: "waiting", datacenter: "datacenter", link: "link", memory: "memory" },
  columns: { task: "Task", rate: "Requests/s", p50: "P50", p99: "P99", edge: "At the edge", escalated: "Escalated", degraded: "Below target", refused: "Refused", queue: "Waiting",
    stream: "Stream", status: "Status", audits: "Audits made", disagreement: "Edge answers that differ", certified: "Certified for",
    time: "Time", who: "By", cause: "Cause", ended: "Ended", answer: "Answer", took: "Took" },
  stream: (hash, named) => hash == null ? "all traffic" : `${named === false ? "caller " : ""}${hash.slice(0, 8)}`, of: (some, all) => `${some} of ${all}`,
  datacenter: ({ configured, up, circuit_breaker: breaker }) => !configured ? "none"
    : [up ? "answers" : "gone", breaker && breaker !== "closed" ? `circuit breaker ${breaker.replace("_", "-")}` : ""].filter(Boolean).join(", "),
  link: (link) => !link.transport ? "–" : [link.transport, link.rtt_ms == null ? "" : ms(link.rtt_ms), link.loss == null ? "" : `${percent(link.loss)} lost`].filter(Boolean).join(", "),
  audits: (row) => `${row.audits_made} of ${row.audits_due}${row.audits_waiting ? `, ${row.audits_waiting} waiting` : ""}`,
  most: (value) => `at most ${value}`,
  certified: (row) => row.certified_disagreement == null ? row.status === "certified" ? "the reference stage answers" : "–"
    : `${row.max_drop == null ? "" : `a drop of ${percent(row.max_drop, 2)}, `}${percent(row.certified_disagreement)} different`,
  empty: { tasks: "No task is served.", guarantees: "Nothing is watched.", alarms: "No alarm.", answers: "No answer yet." },
  stands: "stands", stale: "Not connected.", draining: "The node is shutting down.",
  thumbnail: (text) => `The image answered with ${text}`,
};

// ---------------------------------------------------------------------------------------------------- review

export const REVIEW = {
  choices: { right: "Right", wrong: "Wrong", cannot_tell: "Cannot tell", first: "The first", second: "The second", neither: "Neither" },
  ask: { random: "Is this answer right?", disagreement: "Which answer is right?", look: "The stages answered differently." },
  why: { random: "Drawn at random from all images: these show whether the labels can be believed.", disagreement: "The two stages answered differently; it is not said which is whose.",
    look: "Detection is for looking only: to certify it, label boxes and use hawkvision certify --data." },
  image: (answers) => `The image to judge; ${answers.length > 1 ? "two answers" : "the answer"}: ${listed(answers.map((each) => each.text))}`,
  position: ["First", "Second"], none: "nothing", count: "Number", labels: "The right labels, separated by commas",
  progress: (review) => `${plural(review.labelled, "image")} judged, ${review.waiting} wait. Both stages answered ${review.audits} of ${review.size} images, and differ on ${review.disagreements}.`,
  trust: (review) => [review.before_alarm ? "An alarm stands that came after these images: certificates of them cannot end it, those of later images can." : "",
    REVIEW.random(review), REVIEW.contradictions(review), review.doubt ? REVIEW.doubt(review.doubt) : ""].filter(Boolean).join(" "),
  random: (review) => review.random_labelled >= review.random_needed ? ""
    : review.newest > review.block && review.waiting === 0 ? "A restart cut these images short: too few were drawn at random for labels to count. Later ones come once there are enough."
      : `Judge ${review.random_needed - review.random_labelled} more of the images drawn at random before labels count.`,
  contradictions: (review) => review.repeated ? `Shown twice: ${review.repeated}; judged differently: ${review.contradictions} (${percent(review.contradictions / review.repeated, 0)}). Those count as lost.` : "",
  target: (target) => `drop of ${percent(target.max_accuracy_drop, 2)}`,
  can: (target) => target.certified ? `certifiable, escalates ${percent(target.escalation, 0)}` : "not certifiable yet",
  more: (target, review) => target.more === 0 ? review.audits < review.size && !target.certified ? "it needs more images" : "no further click would help" : `${plural(target.more, "more click")} may bring that to ${percent(target.then, 0)}`,
  nothing: (review) => review.audits === 0 ? "No audits yet: the node checks a share of its traffic by the reference stage. Come back when there is some."
    : !review.keeps_images ? "This node keeps no images to look at. Set review_max_bytes and review_max_days, or review a folder with hawkvision review FOLDER."
      : review.waiting > 0 ? "Other people look at what is left; it comes back within two minutes." : "Nothing waits for a look.",
  gone: "The image is not kept any more.", undone: "Taken back.", doubt: (why) => `The labels are not believed yet: ${why}`,
  made: (made) => `Certificates made of ${made.n} images and ${plural(made.labels, "label")}: ${made.targets.filter((each) => each.certified).map((each) => percent(each.max_accuracy_drop, 2)).join(", ") || "no drop could be certified"}. They are in ${made.file}; a node that reads it has them in force within seconds.`,
  said: (label) => `It was judged: ${REVIEW.choices[label] ?? JSON.stringify(label)}.`,
  replace: (review) => `Replace the certificates in force by those of ${plural(review.audits, "image")} and ${plural(review.labelled, "label")}?\n\nEscalated then: ${
    review.targets.map((each) => `${percent(each.max_accuracy_drop, 2)}: ${percent(each.escalation, 0)}`).join(", ")}.`,
  keys: { right: "1", first: "1", wrong: "2", second: "2", neither: "3", cannot_tell: "0" }, hint: "Keys: 1, 2, 3, 0, and U to undo.",
};
