// ---------------------------------------------------------------- controls

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value;
  if (state.running) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => { if (state.running) state.running.abort(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") { shortcut(event); return; }
  if (document.querySelector("dialog[open]")) return; // it closes
  if (state.running) state.running.abort();
  else choose(null);
});
$("retry").addEventListener("click", askAnew);
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  $("key").value = "";
  connect();
});
connect();
