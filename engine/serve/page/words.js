// ---------------------------------------------------------------- what each word read

let chosen = null; // {words, at, held}: the word that is looked at; held: by a click or the keyboard

class Words {
  // message: the one that has the documents
  constructor(article, message) {
    this.text = "";
    this.spans = []; // per word {start, stop, elements, reads: start -> [start, stop, share], steps}
    this.all = []; // what the whole answer read
    this.open = false; // whether the last word may go on
    this.early = []; // reads of steps that wrote no letter yet
    this.moved = this.later = this.took = 0; // later: a timer; took: ms of the latest drawing
    this.message = message;
    this.element = made("div", "words");
    this.element.words = this;
    this.markdown = new Markdown(this.element, (parent, text, at) => this.put(parent, text, at));
    article.append(this.element);
  }

  get count() { return this.spans.filter(({ steps, elements }) => steps && elements.length).length; }

  add(text, reads = []) {
    if (!text && !reads.length) return;
    let at = this.text.length;
    this.text += text;
    if (reads.length) this.early.push(reads);
    for (const piece of text.split(/(\s+)/)) {
      if (!piece) continue;
      at += piece.length;
      if (/^\s/.test(piece)) { this.open = false; continue; }
      if (!this.open) this.spans.push({ start: at - piece.length, stop: 0, elements: [], reads: new Map(), steps: 0 });
      this.open = true;
      const word = this.spans[this.spans.length - 1];
      word.stop = at;
      for (const step of this.early) this.give(word, step);
    }
    if (/\S/.test(text)) this.early = [];
    this.later ||= setTimeout(() => this.draw(), Math.max(30, 4 * this.took)); // a long block leaves time for others
    this.follow();
  }

  // the Markdown, from its last block on
  draw() {
    clearTimeout(this.later);
    this.later = 0;
    const began = performance.now();
    const bottom = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
    for (let n = this.spans.length - 1; n >= 0 && this.spans[n].stop > this.markdown.from; n -= 1) this.spans[n].elements = [];
    this.markdown.draw(this.text);
    this.took = performance.now() - began;
    if (bottom && state.running) $("log").scrollTop = $("log").scrollHeight;
  }

  // append a text that stands at a place of the answer, each word in an element of its own
  put(parent, text, at) {
    for (const { 0: piece, index } of text.matchAll(/\s+|\S+/g)) {
      if (/^\s/.test(piece)) { parent.append(piece); continue; }
      let low = 0, high = this.spans.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.spans[middle].start <= at + index) low = middle; else high = middle - 1;
      }
      const word = this.spans[low], element = made("span", word.reads.size ? "read" : "", piece);
      element.word = low;
      if (chosen && chosen.words === this && chosen.at === low) element.classList.add("now");
      word.elements.push(element);
      parent.append(element);
    }
  }

  give(word, step) {
    word.steps += 1;
    for (const [message, start, stop, share] of step) {
      if (message !== this.message) continue;
      const from = units(start), to = units(stop), held = word.reads.get(from) || [from, to, 0];
      if (to <= state.text.length) word.reads.set(from, [from, to, held[2] + share]);
    }
    if (!this.element.hasAttribute("tabindex")) {
      this.element.tabIndex = 0;
      this.element.setAttribute("role", "group");
      this.element.setAttribute("aria-label", "the answer's words; the left and right arrow keys say what each read");
    }
    if (chosen && chosen.words === this && this.spans[chosen.at] === word) this.look(chosen.at, chosen.held);
  }

  // the next word that is seen, from one on
  near(at, step) {
    while (this.spans[at] && !this.spans[at].elements.length) at += step;
    return this.spans[at] ? at : -1;
  }

  // the documents are others now: places in them mean nothing any more
  unread() {
    for (const word of this.spans) { word.reads.clear(); word.steps = 0; for (const element of word.elements) element.classList.remove("read"); }
    this.all = [];
    for (const name of ["tabindex", "role", "aria-label"]) this.element.removeAttribute(name);
  }

  // while it writes, show what the newest word read, unless somebody looks at another
  follow() {
    const last = this.spans[this.spans.length - 1];
    if (chosen || !$("follow").checked || !last || !last.reads.size) return;
    const spans = this.read(last);
    mark(spans);
    const now = performance.now(), still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (!still && now - this.moved > 800 && spans.length) { this.moved = now; reach(spans[0][0]); }
  }

  // [start, stop, share of the best], best first; what is next to nothing beside it left out
  read(word) {
    const found = [...word.reads.values()].sort((a, b) => b[2] - a[2]);
    return found.map(([start, stop, share]) => [start, stop, share / found[0][2]]).filter(([, , share]) => share > .03);
  }

  look(at, held) {
    const word = this.spans[at];
    if (!word) return;
    if (this.later) this.draw();
    if (chosen) chosen.words.now(chosen.at, false);
    chosen = { words: this, at, held };
    this.now(at, true);
    const spans = this.read(word);
    mark(spans);
    if (spans.length) reach(spans[0][0]);
    $("readout").textContent = "“" + this.text.slice(word.start, word.stop) + "” read " + (spans.length ? this.told(word) : "nothing in particular: its step read everything, or more passages equally than can be listed");
  }

  told(word) {
    const found = [...word.reads.values()].sort((a, b) => b[2] - a[2]), whole = found.reduce((sum, [, , share]) => sum + share, 0);
    return found.slice(0, 3).map(([start, stop, share]) => Math.round(100 * share / whole) + "% " + placed(start) + ": " +
      state.text.slice(start, stop).replace(/\s+/g, " ").slice(0, 90)).join(" · ");
  }

  now(at, on) { for (const element of this.spans[at].elements) element.classList.toggle("now", on); }

  end() { this.open = false; this.draw(); }
}

// where a place is, in words
function placed(place) {
  const inside = state.documents.filter(({ head }) => head <= place).at(-1), from = inside ? inside.start : 0;
  if (place < from) return "the name of a document";
  let line = 1;
  for (let at = state.text.indexOf("\n", from); at >= 0 && at < place; at = state.text.indexOf("\n", at + 1)) line += 1;
  return (state.documents.length > 1 && inside ? inside.name + ", " : "") + "line " + line;
}

// null: look at no word, but at what the whole answer read
function choose(found) {
  if (found) { found.words.look(found.at, found.held); return; }
  if (!chosen) return;
  const { words, at } = chosen;
  chosen = null;
  words.now(at, false);
  $("readout").textContent = "";
  mark(words.all);
}

function wordAt(event) {
  const element = event.target.closest(".words span");
  return element ? { words: element.closest(".words").words, at: element.word, held: event.type === "click" } : null;
}

$("log").addEventListener("pointerover", (event) => {
  const found = wordAt(event);
  if (event.pointerType === "mouse" && !chosen?.held && found) choose(found);
});
$("log").addEventListener("pointerout", (event) => {
  if (event.pointerType === "mouse" && chosen && !chosen.held && !event.relatedTarget?.closest?.(".words")) choose(null);
});
$("log").addEventListener("click", (event) => {
  const found = wordAt(event);
  if (!found) return;
  const same = chosen?.held && chosen.words === found.words && chosen.at === found.at;
  choose(same ? null : found);
});
$("log").addEventListener("focusin", (event) => {
  const words = event.target.words;
  if (words?.spans.length && event.target.matches(":focus-visible") && chosen?.words !== words) choose({ words, at: words.near(0, 1), held: true });
});
$("log").addEventListener("focusout", (event) => { if (event.target.words && chosen?.held) choose(null); });
$("log").addEventListener("keydown", (event) => {
  const words = event.target.words, last = words ? words.near(words.spans.length - 1, -1) : -1;
  if (last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const at = chosen?.words === words ? chosen.at : -1;
  const ways = { ArrowRight: [at + 1, 1], ArrowLeft: [at - 1, -1], Home: [0, 1], End: [last, -1] }, way = ways[event.key];
  if (!way) return;
  event.preventDefault();
  const next = words.near(...way);
  choose({ words, at: next < 0 ? Math.max(at, words.near(0, 1)) : next, held: true });
  words.spans[chosen.at].elements[0].scrollIntoView({ block: "nearest" });
});
