// ---------------------------------------------------------------- export

// the conversation as Markdown: what was asked and answered
function asMarkdown() {
  const parts = ["# " + titled()], quoted = (text) => text.split("\n").map((line) => "> " + line).join("\n");
  parts.push(["Model: " + state.model.id, "Temperature: " + state.temperature,
    ...state.documents.map(({ name, tokens }) => "Document: " + name + (tokens ? ", " + counted(tokens, "token") : ""))].map((line) => "- " + line).join("\n"));
  if (state.system.trim()) parts.push("## System prompt", quoted(state.system));
  for (const { question, answer } of state.turns) if (answer) parts.push("## Question", quoted(question), "## Answer", answer);
  return parts.join("\n\n") + "\n";
}

// and as JSON, with all that it was made from
function asJson() {
  return JSON.stringify({
    title: titled(), model: state.model.id, exported: new Date().toISOString(),
    system: state.system, temperature: state.temperature, max_tokens: state.most,
    documents: state.documents.map(({ name, note, tokens, text }) => ({ name, note, tokens, text })),
    messages: state.turns.filter(({ answer }) => answer).flatMap(({ question, answer, reasoning }) =>
      [{ role: "user", content: question }, { role: "assistant", content: answer, ...(reasoning ? { reasoning_content: reasoning } : {}) }]),
  }, null, 2) + "\n";
}

// hand a text to the browser as a file
function download(text, kind, ending) {
  const link = made("a"), address = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = (titled().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation") + ending;
  link.href = address;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
  $("d-export").close();
  tell(link.download + " is written");
}

$("as-markdown").addEventListener("click", () => download(asMarkdown(), "text/markdown", ".md"));
$("as-json").addEventListener("click", () => download(asJson(), "application/json", ".json"));
