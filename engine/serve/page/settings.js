// ---------------------------------------------------------------- settings and keys

// each shortcut: its keys, what it does, the control that it presses or goes to
const SHORTCUTS = [
  ["Enter", "asks the question"], ["Shift+Enter", "begins a new line in it"],
  ["Escape", "stops an answer or a reading; then leaves a word; closes a window or a question that is edited"],
  ["← →", "in an answer: what the word before or after read; Home and End: the first and last word"],
  ["Alt+Q", "goes to the question", "question"], ["Alt+R", "asks the last question anew", "retry"],
  ["Alt+C", "copies the last answer"], ["Alt+O", "opens files", "open"],
  ["Alt+L", "shows the conversations, and the documents again", "list"], ["Alt+N", "begins a new conversation", "other"],
  ["Alt+X", "exports the conversation", "export"], ["Alt+G", "opens the settings", "settings"], ["Alt+K", "shows these keys", "keys"],
];

function shortcut(event) {
  if (!event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || document.querySelector("dialog[open]")) return;
  // with Alt some keyboards write another letter
  const letter = /^[a-z]$/i.test(event.key) ? event.key.toUpperCase() : (/^Key([A-Z])$/.exec(event.code) || [])[1];
  const found = SHORTCUTS.find(([keys]) => letter && keys === "Alt+" + letter);
  if (!found) return;
  event.preventDefault();
  const control = found[2] ? $(found[2]) : [...$("log").querySelectorAll(".answer .acts button")].at(-1);
  if (control?.id === "question") control.focus();
  else control?.click();
}

function openSettings() {
  $("system").value = state.system;
  $("temperature").value = state.temperature;
  $("most").value = state.most ?? "";
  $("d-settings").showModal();
}

// take the settings when their window is closed, however that was done
function closeSettings() {
  const system = $("system").value, changed = system.trim() !== state.system.trim();
  const temperature = Number($("temperature").value), most = Math.floor(Number($("most").value));
  Object.assign(state, { system, temperature: Math.min(2, Math.max(0, temperature || 0)), most: most > 0 ? most : null });
  if (!changed) { if (state.entry) shelve(); return; }
  for (const { words } of state.turns) words.unread();
  if (state.documents.length) readAll("The system prompt is another: ");
}

for (const [keys, work] of SHORTCUTS) $("shortcuts").append(made("dt", "", keys), made("dd", "", work));
$("settings").addEventListener("click", openSettings);
$("d-settings").querySelector("button").addEventListener("click", () => $("d-settings").close());
$("d-settings").addEventListener("close", closeSettings);
$("keys").addEventListener("click", () => $("d-keys").showModal());
$("export").addEventListener("click", () => $("d-export").showModal());
for (const button of document.querySelectorAll("dialog .close")) button.addEventListener("click", () => button.closest("dialog").close());
