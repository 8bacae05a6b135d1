// ---------------------------------------------------------------- what each word read

let chosen = null; // {words, at, held}: the word that is looked at; held: by a click or the keyboard

class Words {
  constructor(article) {
    this.text = "";
    this.spans = []; // per word {element, reads: start -> [start, stop, share], steps}
    this.all = []; // what the whole answer read
    this.open = false; // whether the last word may go on
    this.early = []; // reads of steps that wrote no letter yet
    this.moved = 0;
    this.element = made("p", "words");
    this.element.words = this;
    article.append(this.element);
  }

  get count() { return this.spans.filter(({ steps }) => steps).length; }

  add(text, reads) {
    if (!text && !reads.length) return;
    this.text += text;
    if (reads.length) this.early.push(reads);
    for (const piece of text.split(/(\s+)/)) {
      if (!piece) continue;
      if (/^\s/.test(piece)) { this.element.append(piece); this.open = false; continue; }
      if (!this.open) {
        this.spans.push({ element: this.element.appendChild(made("span")), reads: new Map(), steps: 0 });
        this.open = true;
      }
      const word = this.spans[this.spans.length - 1];
      word.element.textContent += piece;
      for (const step of this.early) this.give(word, step);
    }
    if (/\S/.test(text)) this.early = [];
    this.follow();
  }

  give(word, step) {
    word.steps += 1;
    for (const [message, start, stop, share] of step) {
      if (message !== 0) continue;
      const from = units(start), to = units(stop), held = word.reads.get(from) || [from, to, 0];
      if (to <= state.text.length) word.reads.set(from, [from, to, held[2] + share]);
    }
    word.element.classList.toggle("read", word.reads.size > 0);
    if (!this.element.hasAttribute("tabindex")) {
      this.element.tabIndex = 0;
      this.element.setAttribute("role", "group");
      this.element.setAttribute("aria-label", "the answer's words; the left and right arrow keys say what each read");
    }
    if (chosen && chosen.words === this && this.spans[chosen.at] === word) this.look(chosen.at, chosen.held);
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
    chosen?.words.spans[chosen.at].element.classList.remove("now");
    chosen = { words: this, at, held };
    word.element.classList.add("now");
    const spans = this.read(word);
    mark(spans);
    if (spans.length) reach(spans[0][0]);
    $("readout").textContent = "“" + word.element.textContent + "” read " + (spans.length ? this.told(word) : "nothing in particular: its step read everything, or more passages alike than can be listed");
  }

  told(word) {
    const found = [...word.reads.values()].sort((a, b) => b[2] - a[2]), whole = found.reduce((sum, [, , share]) => sum + share, 0);
    return found.slice(0, 3).map(([start, stop, share]) => Math.round(100 * share / whole) + "% line " + lineOf(start) + ": " +
      state.text.slice(start, stop).replace(/\s+/g, " ").slice(0, 90)).join(" · ");
  }

  end() { this.open = false; }
}

function lineOf(place) {
  let line = 1;
  for (let at = state.text.indexOf("\n"); at >= 0 && at < place; at = state.text.indexOf("\n", at + 1)) line += 1;
  return line;
}

// null: look at no word, but at what the whole answer read
function choose(found) {
  if (found) { found.words.look(found.at, found.held); return; }
  if (!chosen) return;
  const { words, at } = chosen;
  chosen = null;
  words.spans[at].element.classList.remove("now");
  $("readout").textContent = "";
  mark(words.all);
}

function wordAt(event) {
  const element = event.target.closest(".words span"), words = element?.parentElement.words;
  return words ? { words, at: words.spans.findIndex((word) => word.element === element), held: event.type === "click" } : null;
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
  if (words?.spans.length && event.target.matches(":focus-visible") && chosen?.words !== words) choose({ words, at: 0, held: true });
});
$("log").addEventListener("focusout", (event) => { if (event.target.words && chosen?.held) choose(null); });
$("log").addEventListener("keydown", (event) => {
  const words = event.target.words, last = words ? words.spans.length - 1 : -1;
  if (last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const at = chosen?.words === words ? chosen.at : -1;
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose({ words, at: Math.max(0, Math.min(last, next)), held: true });
  words.spans[chosen.at].element.scrollIntoView({ block: "nearest" });
});
