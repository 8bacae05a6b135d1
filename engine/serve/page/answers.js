// ---------------------------------------------------------------- asking

// what: "read" or "ask". wrote(text, reads) is called with every chunk.
async function stream(messages, settings, wrote, what) {
  const running = new AbortController(), began = performance.now();
  state.running = running;
  state.told = null;
  $("stop").disabled = false;
  $("send").disabled = $("retry").disabled = $("read").disabled = true;
  $("log").setAttribute("aria-busy", "true");
  $("state").textContent = what === "read" ? "Reading" : "Thinking";
  let usage = null, error = null, evidence = null, finish = null, first = 0;
  const omnikv = { progress: true, figures: what === "ask", method: state.sparse ? document.querySelector("[name=method]:checked").value : "sparse" };
  if (state.sparse && what === "ask" && omnikv.method !== "full") Object.assign(omnikv, { sources: 8, live: true });
  const body = { messages, stream: true, temperature: 0, stream_options: { include_usage: true }, omnikv, ...settings };
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
        if (line === ": waiting") $("state").textContent = "Waiting: other answers are being written";
        if (!line.startsWith("data: {")) continue;
        const data = JSON.parse(line.slice(6)), choice = (data.choices || [])[0];
        if (data.error) throw new Error(data.error.message);
        usage = data.usage || usage;
        if (!choice) continue;
        if (choice.delta.content) first = first || performance.now();
        wrote(choice.delta.content || "", (choice.omnikv && choice.omnikv.reads) || []);
        if (choice.finish_reason) { finish = choice.finish_reason; evidence = choice.omnikv || null; }
      }
    }
    if (!usage) throw new Error("the server ended before the answer did");
  } catch (caught) { error = caught; }
  const seconds = (performance.now() - began) / 1000;
  if (state.running !== running) return { error: error || new Error("stopped") };
  state.running = null;
  $("stop").disabled = true;
  $("send").disabled = $("read").disabled = false;
  $("log").setAttribute("aria-busy", "false");
  $("bar").hidden = true;
  $("state").textContent = said(error, what, usage, seconds);
  return { error, evidence, finish, usage, seconds, first, method: omnikv.method };
}

function said(error, what, usage, seconds) {
  if (error) return error.name === "AbortError" ? "Stopped." : what === "read" ? error.message : "";
  const held = usage.prompt_tokens_details.cached_tokens, all = usage.prompt_tokens;
  if (what !== "read") return "Prompt: " + number(all) + " tokens" + (held ? ", " + number(held) + " of them held already" : "");
  if (all - held < 32) return "Read " + number(all) + " tokens: held already, nothing was read again";
  return "Read " + number(all) + " tokens" + (held ? ", " + number(held) + " of them held already" : "") + ", in " + seconds.toFixed(1) + " s";
}

async function ask(question) {
  if (state.running) return;
  if (!question.trim()) { $("question").focus(); return; }
  if (!state.text && $("paste").value.trim()) await begin($("paste").value);
  const content = state.turns.length || !state.text ? question : state.text + "\n\n" + question;
  const messages = [...state.turns, { role: "user", content }];
  const asked = made("article", "asked"), article = made("article", "answer"), words = new Words(article);
  asked.setAttribute("aria-label", "question");
  article.setAttribute("aria-label", "answer");
  asked.append(made("p", "", question));
  $("log").querySelector(".empty")?.remove();
  $("ideas").open = false;
  $("log").append(asked, article);
  choose(null);
  mark([]);
  const down = () => { $("log").scrollTop = $("log").scrollHeight; };
  down();
  const result = await stream(messages, {}, (text, reads) => {
    const end = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
    words.add(text, reads);
    if (end) down();
  }, "ask");
  state.last = { question, asked, article, before: state.turns };
  $("retry").disabled = false;
  words.end();
  if (result.error && result.error.name !== "AbortError") {
    const failed = made("p", "error", result.error.message);
    failed.setAttribute("role", "alert");
    article.append(failed);
    return;
  }
  if (words.text) state.turns = [...messages, { role: "assistant", content: words.text }];
  if (result.finish === "length") article.append(made("p", "soft", "It ends here because the context is full."));
  if (result.usage) article.append(made("p", "soft figures", figures(result)));
  if (result.evidence && result.evidence.sources) sources(article, result.evidence.sources, words, result);
  $("log").scrollTop += asked.getBoundingClientRect().top - $("log").getBoundingClientRect().top;
}

function figures({ method, usage, first, seconds, evidence }) {
  const n = usage.completion_tokens, counted = evidence && evidence.figures;
  const parts = [(state.sparse ? method + ": " : "") + number(n) + (n === 1 ? " token" : " tokens")];
  const rate = counted && counted.seconds ? n / counted.seconds : n / Math.max(1e-3, seconds);
  if (first) parts.push(rate.toFixed(1) + " a second");
  if (counted && state.sparse) {
    const mega = (bytes) => (bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0);
    parts.push(counted.speedup.toFixed(2) + " times full attention's speed, by counted bytes (" + mega(counted.step_bytes) + " of " + mega(counted.full_step_bytes) + " MB a token)");
    if (counted.drafted) parts.push(counted.accepted + " of " + counted.drafted + " drafts accepted");
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------- what the whole answer read

// why an answer has no passages
function nothing({ method, evidence: { selections, figures: counted } }) {
  if (selections) return "It read more passages alike than can be listed: none is ranked above the others.";
  if (method !== "exact") return "Every step read everything: no passage was chosen.";
  return "Full attention read everything and decided every word" + (counted && counted.drafted
    ? "; its drafts were copied from where the same words stood before (lookup), so that no passage was chosen." : "; nothing was drafted.");
}

function sources(article, listed, words, result) {
  const found = listed.filter((source) => source.message === 0 && state.text)
    .map((source) => ({ ...source, start: units(source.start), stop: units(source.stop) }))
    .filter((source) => source.stop <= state.text.length);
  article.append(made("p", "soft", found.length ? "What " + (result.method === "exact" ? "its drafts" : "it") + " read most in the document" + (words.count ? "; point at a word, or step through them with the arrow keys, for what each read" : "") + ":"
    : nothing(result)));
  const top = Math.max(...found.map(({ share }) => share), 1e-9);
  const spans = found.map(({ start, stop, share }) => [start, stop, share / top]), list = made("ol");
  for (const { start, share, line, text } of found) {
    const button = made("button", "", Math.round(100 * share) + "% · line " + line + " · " + text.replace(/\s+/g, " ").slice(0, 120)), item = made("li");
    button.type = "button";
    button.addEventListener("click", () => { choose(null); mark(spans); reach(start); });
    item.append(button);
    list.append(item);
  }
  article.append(list);
  words.all = spans;
  if (!chosen) { mark(spans); if (found.length) reach(found[0].start); }
}
