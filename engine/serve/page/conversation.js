// ---------------------------------------------------------------- the conversation

function greet() {
  $("log").replaceChildren(made("p", "empty", "Read a document, then ask about it, or just ask." +
    (state.sparse ? " While an answer is written, each of its words shows which passages it read." : "")));
}

// the articles of a turn: its question, with Edit, and a place for its answer
function shown(turn) {
  const asked = made("article", "asked"), article = made("article", "answer");
  asked.setAttribute("aria-label", "question");
  article.setAttribute("aria-label", "answer");
  asked.append(made("p", "", turn.question), pressed("Edit", "small", () => edit(turn)));
  $("log").querySelector(".empty")?.remove();
  $("log").append(asked, article);
  return Object.assign(turn, { asked, article });
}

// what a model wrote before its answer, folded
function reason(turn, text) {
  turn.reasoning += text;
  let inside = turn.article.querySelector(".reasoning p");
  if (!inside) {
    const folded = made("details", "reasoning");
    inside = made("p");
    folded.append(made("summary", "soft", "Reasoning"), inside);
    turn.article.prepend(folded);
  }
  inside.append(text);
}

// what stands under an answer that has ended
function finish(turn) {
  if (!turn.answer) return;
  const row = made("div", "row acts"), copy = pressed("Copy", "small", async () => {
    copy.textContent = await copied(turn.answer) ? "Copied" : "Not copied";
    $("spoken").textContent = copy.textContent;
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  row.append(made("p", "soft figures", turn.figures), copy);
  turn.article.append(row);
}

// Put a text into the clipboard. Over plain HTTP from another machine there is none but by a
// selection.
async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch (none) { /* the other way */ }
  const held = document.activeElement, area = made("textarea", "away");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  held?.focus();
  return done;
}

// drop the turns from one on
function cut(from) {
  choose(null);
  mark([]);
  for (const { asked, article } of state.turns.splice(from)) { asked.remove(); article.remove(); }
  $("retry").disabled = !state.turns.length;
}

function askAnew() {
  const last = state.turns.at(-1);
  if (!last || state.running) return;
  cut(state.turns.length - 1);
  ask(last.question);
}

// A question becomes a field. Asked anew, what followed it goes.
function edit(turn) {
  if (turn.asked.querySelector("form")) return;
  const form = made("form"), area = made("textarea"), row = made("div", "row"), before = [...turn.asked.childNodes];
  const close = () => { turn.asked.replaceChildren(...before); turn.asked.querySelector("button").focus(); };
  area.value = turn.question;
  area.rows = Math.min(8, 1 + turn.question.split("\n").length);
  area.setAttribute("aria-label", "question, edited; what follows it will be removed");
  const send = made("button", "main", "Ask");
  row.append(send, pressed("Cancel", "", close));
  form.append(area, row);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const question = area.value;
    if (!question.trim()) { area.focus(); return; }
    await settled();
    cut(state.turns.indexOf(turn));
    $("question").focus(); // the field goes
    ask(question);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape") { event.stopPropagation(); close(); }
  });
  turn.asked.replaceChildren(form);
  area.focus();
}

// show turns that were held before
function drawTurns(turns) {
  greet();
  state.turns = turns.map((turn) => shown({ reasoning: "", figures: "", ...turn }));
  for (const turn of state.turns) {
    const { reasoning, answer } = turn;
    turn.reasoning = "";
    if (reasoning) reason(turn, reasoning);
    turn.words = new Words(turn.article, 0);
    turn.words.add(answer);
    turn.words.end();
    finish(turn);
  }
  $("retry").disabled = !turns.length;
  $("log").scrollTop = $("log").scrollHeight;
}

// an empty conversation
async function renew() {
  await settled();
  Object.assign(state, { entry: null, documents: [], turns: [], system: "", temperature: 0, most: null, why: "" });
  show([]);
  suggest([]);
  greet();
  $("retry").disabled = true;
  $("paste").value = $("state").textContent = "";
  drawShelf();
  look(true);
}
