// ---------------------------------------------------------------- taking texts

$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { take([...$("file").files]); $("file").value = ""; });
$("read").addEventListener("click", () => begin([{ name: "pasted text", text: $("paste").value }]));
$("other").addEventListener("click", async () => { await renew(); $("paste").focus(); });
$("back").addEventListener("click", () => { look(false); $("document").focus(); });
$("list").addEventListener("click", () => {
  const start = $("start").hidden || !state.documents.length;
  if (start) drawShelf();
  look(start);
  if (start) ($("shelf").querySelector("button") || $("paste")).focus();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  // anywhere: a file that misses would open in place of this page
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("left").classList.toggle("over", kind === "dragover");
    if (kind !== "drop") return;
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]);
    else if (event.dataTransfer.getData("text")) begin([{ name: "dropped text", text: event.dataTransfer.getData("text") }]);
  });
}

// Add documents to the conversation and read them: [{name, text, note}]; note: what one was that
// was no text. Whether they were read.
async function begin(given, questions = []) {
  await settled();
  const held = state.documents, found = given.map((one) => ({ note: "", tokens: 0, ...one, text: one.text.replace(/\r\n?/g, "\n").trim() })).filter(({ text }) => text);
  if (!found.length) { tell("There is no text yet."); $("paste").focus(); return false; }
  // The name of the first, where it came alone, is not put before it later: all would be read again.
  if (held.length || found.length > 1) for (const one of found) one.titled = true;
  for (const { words } of state.turns) if (!held.length) words.unread();
  show([...held, ...found]);
  if (questions.length || !held.length) suggest(questions);
  const error = await readAll("", held.length ? found[0].head / state.text.length : 0);
  if (error && error.name !== "AbortError") {
    if (state.documents.includes(found[0])) show(held); // too long, most often
    return false;
  }
  if (state.documents.includes(found[0]) && $("paste").value.trim() === found[0].text) $("paste").value = "";
  return !error;
}

// Take a document away: what stands behind it is read again, since each token is held as one behind
// all those before it.
async function removeDocument(one) {
  await settled();
  const at = state.documents.indexOf(one), rest = state.documents.filter((other) => other !== one);
  if (at < 0) return;
  for (const { words, article } of state.turns) { words.unread(); article.querySelector(".sources")?.remove(); }
  show(rest);
  ($("documents").querySelectorAll("li button:first-child")[Math.min(at, rest.length - 1)] || $("paste")).focus();
  if (rest.length) await readAll(one.name + " is removed" + (at < rest.length ? "; what stood behind it is read again. " : ". "));
  else { tell(one.name + " is removed."); if (state.entry && state.turns.length) await shelve(); }
}

// Read what the next question will stand behind. why: said before. An error; null where all is read.
async function readAll(why, share = 0) {
  await settled();
  const text = state.text, lost = document.activeElement;
  state.why = why;
  dim(share);
  // one token, so that it is read and held
  const { error, usage, seconds } = await stream(messagesOf("?"), { max_tokens: 1, temperature: 0 }, () => {}, "read");
  state.why = "";
  if (state.text !== text) return error;
  if (!error) {
    dim(1);
    Object.assign(state, { total: usage.prompt_tokens, seconds });
    await shelve();
    measure();
  }
  // only a focus that was lost with a control that is gone goes on to the question
  if (document.activeElement === document.body || !lost?.getClientRects().length) $("question").focus();
  return error;
}

// how many tokens each document has
async function measure() {
  for (const one of state.documents) {
    if (one.tokens) continue;
    try { one.tokens = (await (await call("/v1/tokenize", { text: one.text })).json()).count; } catch (none) { return; }
    if (state.documents.includes(one)) drawDocuments();
  }
  if (state.entry) await shelve();
}

function suggest(questions) {
  $("ideas").hidden = !questions.length;
  $("ideas").open = true;
  $("ideas").lastElementChild.replaceChildren(...questions.map((question) => pressed(question, "", () => ask(question))));
}

// ---------------------------------------------------------------- time left

// left: seconds that the server expects from its chunks so far; the next one is under way since
function reading(done, total, left, what) {
  const now = performance.now() / 1000;
  if (left !== undefined && (!state.told || state.told.done !== done)) state.told = { done, until: now + Number(left) };
  const seconds = state.told ? Math.max(0, state.told.until - now) : null;
  $("bar").hidden = false;
  $("bar").value = done / total;
  if (what === "read") dim(done / total);
  tell(state.why + "Reading: " + number(done) + " of " + number(total) + " tokens" +
    (seconds === null ? "" : ", about " + (seconds < 90 ? Math.round(seconds) + " s" : Math.round(seconds / 60) + " min") + " left"), true);
}
