// ---------------------------------------------------------------- asking

// what: "read" or "ask". wrote(text, reads, reasoning) is called with every chunk.
async function stream(messages, settings, wrote, what) {
  const running = new AbortController(), began = performance.now();
  let ended = null;
  state.running = running;
  state.ended = new Promise((resolve) => { ended = resolve; });
  state.told = null;
  $("stop").disabled = false;
  $("send").disabled = $("retry").disabled = $("read").disabled = true;
  tell(what === "read" ? state.why + "Reading" : "Thinking");
  let usage = null, error = null, evidence = null, finish = null, first = 0;
  const omnikv = { progress: true, figures: what === "ask", method: state.sparse ? document.querySelector("[name=method]:checked").value : "sparse" };
  if (state.sparse && what === "ask" && omnikv.method !== "full" && state.text) Object.assign(omnikv, { sources: 8, live: true });
  const body = { messages, stream: true, stream_options: { include_usage: true }, reasoning_format: "none", omnikv, ...settings };
  try {
    const reply = await call("/v1/chat/completions", body, running.signal);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const lines = held.split("\n");
      held = lines.pop();
      for (const line of lines) {
        const progress = /^: reading (\d+)\/(\d+)(?:, ([\d.]+) s left)?$/.exec(line);
        if (progress && !first) reading(Number(progress[1]), Number(progress[2]), progress[3], what);
        if (line === ": waiting") tell("Waiting: other answers are being written", true);
        if (!line.startsWith("data: {")) continue;
        const data = JSON.parse(line.slice(6)), choice = (data.choices || [])[0];
        if (data.error) throw new Error(data.error.message);
        usage = data.usage || usage;
        if (!choice) continue;
        const { content, reasoning_content: reasoning } = choice.delta;
        if (content || reasoning) first = first || performance.now();
        wrote(content || "", (choice.omnikv && choice.omnikv.reads) || [], reasoning || "");
        if (choice.finish_reason) { finish = choice.finish_reason; evidence = choice.omnikv || null; }
      }
    }
    if (!usage) throw new Error("the server ended before the answer did");
  } catch (caught) { error = caught; }
  const seconds = (performance.now() - began) / 1000;
  ended();
  if (state.running !== running) return { error: Object.assign(new Error("stopped"), { name: "AbortError" }) };
  state.running = null;
  $("stop").disabled = true;
  $("send").disabled = $("read").disabled = false;
  $("retry").disabled = !state.turns.length;
  $("bar").hidden = true;
  tell(said(error, what, usage, seconds));
  return { error, evidence, finish, usage, seconds, first, method: omnikv.method };
}

function said(error, what, usage, seconds) {
  if (error) return error.name !== "AbortError" ? (what === "read" ? error.message : "") : what === "read" ? "Stopped. The next question reads the rest." : "Stopped.";
  const held = usage.prompt_tokens_details.cached_tokens, all = usage.prompt_tokens;
  if (what !== "read") return "Prompt: " + number(all) + " tokens" + (held ? ", " + number(held) + " of them held already" : "");
  if (all - held < 32) return state.why + "Read " + number(all) + " tokens: held already, nothing was read again";
  return state.why + "Read " + number(all) + " tokens" + (held ? ", " + number(held) + " of them held already" : "") + ", in " + seconds.toFixed(1) + " s";
}

// end what is under way
async function settled() {
  while (state.running) { state.running.abort(); await state.ended; }
}

// what is sent: the documents stand at the begin of the first question
function messagesOf(question, { system, turns, text } = state) {
  const all = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.answer) all.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer });
  }
  all.push({ role: "user", content: question });
  const first = all.find(({ role }) => role === "user");
  if (text) first.content = text + "\n\n" + first.content;
  return all;
}

async function ask(question) {
  if (state.running) return;
  if (!question.trim()) { $("question").focus(); return; }
  if (!state.text && $("paste").value.trim() && !await begin([{ name: "pasted text", text: $("paste").value }])) return;
  const messages = messagesOf(question), turn = shown({ question, answer: "", reasoning: "", figures: "" });
  const words = new Words(turn.article, state.system.trim() ? 1 : 0), spoken = new Spoken();
  turn.words = words;
  state.turns.push(turn);
  $("ideas").open = false;
  choose(null);
  mark([]);
  const log = $("log");
  log.scrollTop = log.scrollHeight;
  turn.article.classList.add("writing");
  const settings = { temperature: state.temperature, ...(state.most ? { max_tokens: state.most } : {}) };
  const result = await stream(messages, settings, (text, reads, reasoning) => {
    if (reasoning) { reason(turn, reasoning); if (!text) return; }
    words.add(text, reads);
    spoken.add(text);
  }, "ask");
  const end = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  words.end();
  turn.article.classList.remove("writing");
  spoken.add("", true);
  turn.answer = words.text;
  if (result.first) dim(1); // also what a stopped reading had left
  if (!state.turns.includes(turn)) return; // a new conversation has begun
  $("retry").disabled = false;
  if (result.error && result.error.name !== "AbortError") {
    const failed = made("p", "error", result.error.message);
    failed.setAttribute("role", "alert");
    turn.article.append(failed);
    return;
  }
  if (result.finish === "length") turn.article.append(made("p", "soft", state.most && result.usage.completion_tokens >= state.most ? "It ends here because of the longest answer that the settings allow." : "It ends here because the context is full."));
  if (result.usage) turn.figures = figures(result);
  finish(turn);
  if (result.evidence && result.evidence.sources) sources(turn.article, result.evidence.sources, words, result);
  if (end) log.scrollTop += turn.asked.getBoundingClientRect().top - log.getBoundingClientRect().top;
  if (turn.answer) await shelve();
}

function figures({ method, usage, first, seconds, evidence }) {
  const n = usage.completion_tokens, found = evidence && evidence.figures;
  const parts = [(state.sparse ? method + ": " : "") + counted(n, "token")];
  const rate = found && found.seconds ? n / found.seconds : n / Math.max(1e-3, seconds);
  if (first) parts.push(rate.toFixed(1) + " a second");
  if (found && state.sparse) {
    const mega = (bytes) => (bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0);
    parts.push(found.speedup.toFixed(2) + " times full attention's speed, by counted bytes (" + mega(found.step_bytes) + " of " + mega(found.full_step_bytes) + " MB a token)");
    if (found.drafted) parts.push(found.accepted + " of " + found.drafted + " drafts accepted");
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------- what the whole answer read

// why an answer has no passages
function nothing({ method, evidence: { selections, figures: counted } }) {
  if (selections) return "It read more passages equally than can be listed: none is ranked above the others.";
  if (method !== "exact") return "Every step read everything: no passage was chosen.";
  return "Full attention read everything and decided every word" + (counted && counted.drafted
    ? "; its drafts were copied from where the same words stood before (lookup), so that no passage was chosen." : "; nothing was drafted.");
}

function sources(article, listed, words, result) {
  const found = listed.filter((source) => source.message === words.message && state.text)
    .map((source) => ({ ...source, start: units(source.start), stop: units(source.stop) }))
    .filter((source) => source.stop <= state.text.length);
  const box = article.appendChild(made("div", "sources"));
  box.append(made("p", "soft", found.length ? "What " + (result.method === "exact" ? "its drafts" : "it") + " read most in the documents" + (words.count ? "; point at a word, or step through them with the arrow keys, for what each read" : "") + ":"
    : listed.length ? "What it read most stands in the conversation, not in the documents." : nothing(result)));
  const top = Math.max(...found.map(({ share }) => share), 1e-9);
  const spans = found.map(({ start, stop, share }) => [start, stop, share / top]), list = made("ol");
  for (const { start, share, text } of found) {
    const about = Math.round(100 * share) + "% · " + placed(start) + " · " + text.replace(/\s+/g, " ").slice(0, 120);
    list.appendChild(made("li")).append(pressed(about, "", () => { choose(null); mark(spans); reach(start); }));
  }
  box.append(list);
  words.all = spans;
  if (!chosen) { mark(spans); if (found.length) reach(found[0].start); }
}
