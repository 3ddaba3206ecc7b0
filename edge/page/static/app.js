// The frame of the page: the three views, and the key.
import { byId, notice, useKey } from "./common.js";
import { ERRORS, PAGE } from "./texts.js";

const views = { try: () => import("./try.js"), live: () => import("./live.js"), review: () => import("./review.js") };
let leave = () => {};

// Enter the view that the address names; it is asked anew after a sign-in too.
async function enter(event) {
  const name = Object.hasOwn(views, location.hash.slice(1)) ? location.hash.slice(1) : "try";
  leave();
  notice(null);
  const gone = new AbortController();
  leave = () => gone.abort();
  try {
    const view = await views[name](); // shown once it listens
    if (gone.signal.aborted) return;
    for (const each of Object.keys(views)) byId(each).hidden = each !== name;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (event) byId(name).focus();
    await view.enter(gone.signal);
  } catch (error) {
    if (!gone.signal.aborted) notice(error.status === 404 ? { message: ERRORS.noView } : error);
  }
}

for (const element of document.querySelectorAll("[data-text]")) element.textContent = PAGE[element.dataset.text];
for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", PAGE[element.dataset.label]);
document.title = PAGE.title;
byId("sign-in").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim().replace(/[^\x21-\x7e]/g, "?")); // a header takes no others, and no key has any
  byId("key").value = "";
  byId("sign-in").open = false;
  enter();
});
addEventListener("hashchange", enter);
enter();
