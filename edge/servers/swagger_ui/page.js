// Shows /openapi.json with Swagger UI. A node with keys gives the description, too, only to a caller with a key.

async function show(key) {
  const reply = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const description = await reply.json();
  document.getElementById("sign-in").hidden = reply.ok;
  if (!reply.ok) {
    document.getElementById("refusal").textContent = key ? description.error : "";
    document.getElementById("key").focus();
    return;
  }
  const ui = SwaggerUIBundle({
    spec: description,
    dom_id: "#api",
    validatorUrl: null,
    tryItOutEnabled: true,
    onComplete: () => key && ui.preauthorizeApiKey("key", key),
  });
}

document.getElementById("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  show(document.getElementById("key").value.trim());
});
show("");
