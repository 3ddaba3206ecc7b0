// What all views use: the node and its key, and elements.
import { ERRORS } from "./texts.js";

export const byId = (id) => document.getElementById(id);

// An element; what came from outside becomes text or an attribute, never markup.
export function make(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const svg = ["svg", "rect", "polyline", "text", "line", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...some(children));
  return made;
}

const some = (children) => children.flat().filter((child) => child != null);

export const fill = (id, ...children) => byId(id).replaceChildren(...some(children));

export function table(caption, columns, rows) {
  const cell = (content, place) => place ? make("td", { "data-column": columns[place] }, content) : make("th", { scope: "row" }, content);
  return make("table", {}, make("caption.sr", {}, caption),
    make("thead", {}, make("tr", {}, columns.map((column) => make("th", { scope: "col" }, column)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell)))));
}

// Boxes over an image; their corners are shares of its width and height.
export function boxes(objects, name, written) {
  return objects.map((each) => {
    const [left, top, right, bottom] = each.box;
    return make(`rect.${name}`, { x: left, y: top, width: right - left, height: bottom - top }, make("title", {}, written(each)));
  });
}

export function badge(status, texts) {
  return make(`span.badge.${status}`, {}, make("span", { "aria-hidden": "true" }, `${texts.sign} `), texts.short);
}

// --------------------------------------------------------------------------------------------------- the node

let key = ""; // in the tab's memory alone
export const keyed = () => key !== "";
export const useKey = (given) => { key = given; };

export class Refused extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.againMs = 1000 * (Number(retryAfter) || 2);
  }
}

// Ask the node. `scope` is what the request needs, for the message where the key lacks it.
export async function ask(path, scope, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(ERRORS.offline, 0);
  }
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({ error: `${reply.status} ${reply.statusText}` }));
  if (reply.status === 401) {
    byId("sign-in").open = true;
    throw new Refused(key ? `${ERRORS.wrongKey} ${ERRORS.scope[scope]}` : ERRORS.scope[scope], 401);
  }
  const why = reply.status === 403 && key ? `${ERRORS.scope[scope]} ${said.error}` : said.error;
  throw new Refused(why, reply.status, reply.headers.get("Retry-After"));
}

export const post = (body) => ({ method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

// Show an image that needs the key; gives back whether it could be had.
export async function show(image, path, scope) {
  try {
    const url = URL.createObjectURL(await (await ask(path, scope)).blob());
    image.onload = image.onerror = () => URL.revokeObjectURL(url);
    image.src = url;
    return true;
  } catch { return false; }
}

export function notice(error) {
  if (error?.name === "AbortError") return;
  byId("notice").textContent = error ? error.message : "";
}

// The choices of a task, once for all views.
export async function tasks(select, scope) {
  const { tasks: all } = await (await ask("v1/tasks", scope)).json();
  const served = all.filter((each) => each.status === "ready");
  const chosen = select.value;
  select.replaceChildren(...served.map((each) => make("option", { value: each.task, selected: each.task === chosen }, each.task)));
}
