// ---------------------------------------------------------------- taking a text

$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { take([...$("file").files]); $("file").value = ""; });
$("read").addEventListener("click", () => begin($("paste").value));
$("other").addEventListener("click", () => {
  if (state.running) state.running.abort();
  $("start").hidden = $("open").hidden = $("read").hidden = false;
  $("reader").hidden = $("other").hidden = $("readout").hidden = $("ideas").hidden = true;
  $("paste").value = $("name").textContent = $("state").textContent = "";
  clear();
  Object.assign(state, { text: "", name: "", turns: [], last: null });
  $("retry").disabled = true;
  drawShelf();
  $("paste").focus();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  // anywhere: a file that misses would open in place of this page
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("left").classList.toggle("over", kind === "dragover");
    if (kind !== "drop") return;
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]);
    else if (event.dataTransfer.getData("text")) begin(event.dataTransfer.getData("text"));
  });
}

// note: what a document was that was no text
async function begin(text, name = "pasted text", questions = [], note = "") {
  text = text.replace(/\r\n?/g, "\n").trim();
  if (!text) { $("state").textContent = "There is no text yet."; $("paste").focus(); return; }
  if (state.running) state.running.abort();
  show(text, name, note);
  suggest(questions);
  dim(0);
  // one token, so that the document is read and held for the questions
  const { error, usage, seconds } = await stream([{ role: "user", content: text + "\n\n?" }], { max_tokens: 1 }, () => {}, "read");
  if (state.text !== text) return;
  dim(1);
  if (!error) await shelve(text, name, usage.prompt_tokens, seconds, questions);
  $("question").focus();
}

function suggest(questions) {
  $("ideas").hidden = !questions.length;
  $("ideas").open = true;
  $("ideas").lastElementChild.replaceChildren(...questions.map((question) => {
    const button = made("button", "", question);
    button.type = "button";
    button.addEventListener("click", () => ask(question));
    return button;
  }));
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
  $("state").textContent = "Reading: " + number(done) + " of " + number(total) + " tokens" +
    (seconds === null ? "" : ", about " + (seconds < 90 ? Math.round(seconds) + " s" : Math.round(seconds / 60) + " min") + " left");
}
