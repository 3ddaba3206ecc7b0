// Pressing a run in a legend fades the others in every chart; pressing it again brings them back.
const buttons = [...document.querySelectorAll(".legend button")];
for (const button of buttons) {
  button.addEventListener("click", () => {
    const chosen = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.run;
    for (const other of buttons) other.setAttribute("aria-pressed", String(other.dataset.run === chosen));
    for (const mark of document.querySelectorAll("figure .run")) {
      const own = [...mark.classList].find((name) => /^r\d+$/.test(name));
      mark.style.opacity = chosen === null || own === undefined || own === chosen ? "" : "0.12";
    }
  });
}
