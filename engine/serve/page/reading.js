// ---------------------------------------------------------------- taking a text

$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { take($("file").files[0]); $("file").value = ""; });
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
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
    else if (event.dataTransfer.getData("text")) begin(event.dataTransfer.getData("text"));
  });
}

async function take(file) {
  if (!file) return;
  const text = await file.text();
  if (text.includes("\0")) { $("state").textContent = file.name + " is no text."; return; }
  begin(text, file.name);
}

async function begin(text, name = "pasted text", questions = []) {
  text = text.replace(/\r\n?/g, "\n").trim();
  if (!text) { $("state").textContent = "There is no text yet."; $("paste").focus(); return; }
  if (state.running) state.running.abort();
  show(text, name);
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

function left(done, total) {
  // seconds = a*tokens + b*tokens^2, by least squares: attention makes later tokens dearer
  const p = state.points;
  if (!p.length || p[p.length - 1][0] < done) p.push([done, performance.now() / 1000]);
  if (p.length < 2) return null;
  const [d0, t0] = p[0];
  let s2 = 0, s3 = 0, s4 = 0, y1 = 0, y2 = 0;
  for (const [d, t] of p.slice(1)) {
    const x = d - d0, z = d * d - d0 * d0;
    s2 += x * x; s3 += x * z; s4 += z * z; y1 += x * (t - t0); y2 += z * (t - t0);
  }
  const det = s2 * s4 - s3 * s3;
  let a = y1 / s2, b = 0;
  if (p.length > 3 && det > 1e-6 * s2 * s4) { a = (y1 * s4 - y2 * s3) / det; b = (s2 * y2 - s3 * y1) / det; }
  if (a < 0 || b < 0) { a = y1 / s2; b = 0; }
  const [d1, t1] = p[p.length - 1]; // since then the next chunk is under way
  return Math.max(0, a * (total - d1) + b * (total * total - d1 * d1) - (performance.now() / 1000 - t1));
}

function reading(done, total, what) {
  const seconds = left(done, total);
  $("bar").hidden = false;
  $("bar").value = done / total;
  if (what === "read") dim(done / total);
  $("state").textContent = "Reading: " + number(done) + " of " + number(total) + " tokens" +
    (seconds === null ? "" : ", about " + (seconds < 90 ? Math.ceil(seconds) + " s" : Math.round(seconds / 60) + " min") + " left");
}
