"use strict";
const $ = (id) => document.getElementById(id);
const state = {
  key: "", model: null, sparse: true, running: null, turns: [], last: null,
  text: "", name: "", told: null, // of the document; told: when which time left was said
};
const number = (n) => n.toLocaleString("en");

function made(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (state.key) headers.Authorization = "Bearer " + state.key;
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (reply.ok) return reply;
  let text = "the server answered " + reply.status;
  try { text = (await reply.json()).error.message; } catch (none) { /* no JSON */ }
  throw Object.assign(new Error(text), { status: reply.status });
}

async function connect() {
  try {
    state.model = (await (await call("/v1/models")).json()).data[0];
    state.sparse = state.model.meta.sparse;
    $("about").textContent = state.model.id + ", context of " + number(state.model.meta.n_ctx) + " tokens";
    $("unlock").hidden = true;
    $("methods").hidden = !state.sparse;
    document.querySelector(`[name=method][value=${state.model.meta.method}]`).checked = true;
    if (!blocks.length) clear();
    $("follow").parentElement.hidden = !state.sparse;
    await Promise.all([openShelf(), offerExample()]);
  } catch (error) {
    $("about").textContent = error.status === 401 ? "this server asks for a key" : error.message;
    $("unlock").hidden = error.status !== 401;
    if (error.status === 503) setTimeout(connect, 500); // it is being loaded
  }
}

// a document that comes with the model, and questions about it
async function offerExample() {
  if (!state.model.meta.example) return;
  const found = await (await call("/example")).json();
  $("example").textContent = "Read the example, " + found.name;
  $("example").hidden = false;
  $("example").onclick = () => begin(found.text, found.name, found.questions);
}
