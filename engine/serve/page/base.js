"use strict";
const $ = (id) => document.getElementById(id);
const state = {
  key: "", model: null, sparse: true, running: null, entry: null, // entry: of the shelf, once there is something to keep
  documents: [], text: "", // text: of all documents, as it is sent
  turns: [], // {question, answer, reasoning, figures, asked, article}
  system: "", temperature: 0, most: null,
  told: null, why: "", // told: when which time left was said; why: what made the documents be read
};
const number = (n) => n.toLocaleString("en");
const counted = (n, one, many = one + "s") => number(n) + " " + (n === 1 ? one : many);

function made(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

function pressed(text, kind, work) {
  const button = made("button", kind, text);
  button.type = "button";
  button.addEventListener("click", work);
  return button;
}

async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (state.key) headers.Authorization = "Bearer " + state.key;
  let reply = null;
  try { reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal }); } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Is it running?");
  }
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
    if (!state.turns.length) greet();
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
  $("example").onclick = () => begin([{ name: found.name, text: found.text }], found.questions);
}

// ---------------------------------------------------------------- what is said

// What happens stands in a line; a screen reader hears of it, of progress every ten seconds.
function tell(text, quiet = false) {
  $("state").textContent = text;
  if (!quiet || performance.now() - tell.when > 10000) { tell.when = performance.now(); $("spoken").textContent = text; }
}
tell.when = 0;

// An answer is heard while it is written: what is whole of it, a sentence or a line, at most every
// two seconds, politely, and without taking the focus.
class Spoken {
  constructor() { this.text = ""; this.said = 0; this.when = 0; }

  add(text, end = false) {
    this.text += text;
    const now = performance.now(), rest = this.text.slice(this.said);
    if (!end && now - this.when < 2000) return;
    const whole = end ? rest.length : Math.max(...[". ", "! ", "? ", "\n"].map((mark) => rest.lastIndexOf(mark) + mark.length * rest.includes(mark)), 0);
    const next = rest.slice(0, whole).replace(/[*_`#|~>]+/g, " ").trim();
    if (!next) return;
    this.said += whole;
    this.when = now;
    $("spoken").textContent = next;
  }
}
