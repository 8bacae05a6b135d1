// ---------------------------------------------------------------- the document, in blocks
// The browser lays out the blocks in view (content-visibility). Only blocks with marks are made
// anew, so that a document of a megabyte is marked as fast as a short one.

const BLOCK = 4000; // characters, cut at the end of a line, else of a word
let blocks = []; // {start, stop, element, marked}
let unread = 0; // the first block that is not read yet

// The text of documents as it is sent, each with its place in it. The name of one that did not come
// alone stands before it.
function joined(documents) {
  let text = "";
  for (const one of documents) {
    if (text) text += "\n\n";
    one.head = text.length;
    if (one.titled) text += one.name + ":\n\n";
    one.start = text.length;
    text += one.text;
  }
  return text;
}

function show(documents) {
  const text = joined(documents);
  Object.assign(state, { documents, text });
  blocks = [];
  choose(null);
  $("ruler").replaceChildren();
  const all = document.createDocumentFragment(), top = $("document").scrollTop;
  for (let start = 0; start < text.length;) {
    const stop = splitAt(text, start), element = made("div", "", text.slice(start, stop));
    blocks.push({ start, stop, element, marked: false });
    all.append(element);
    start = stop;
  }
  $("document").replaceChildren(all);
  $("document").scrollTop = top;
  $("readout").textContent = "";
  units.points = null;
  unread = blocks.length;
  drawDocuments();
  look(!documents.length);
  guessHeights();
}

// the place to read something new, or the documents
function look(start) {
  $("start").hidden = $("open").hidden = $("read").hidden = !start;
  $("reader").hidden = start;
  $("readout").hidden = start || !state.sparse;
  $("back").hidden = !start || !state.documents.length;
  $("list").setAttribute("aria-expanded", String(start));
}

// the list of them: each leads to its place, and can be taken away
function drawDocuments() {
  const sum = state.documents.every(({ tokens }) => tokens) && state.documents.reduce((all, { tokens }) => all + tokens, 0);
  $("name").textContent = state.documents.length ? counted(state.documents.length, "document") + " · " + (sum ? counted(sum, "token") : counted(state.text.length, "character")) : "";
  $("documents").hidden = !state.documents.length;
  $("documents").replaceChildren(...state.documents.map((one) => {
    const item = made("li"), remove = pressed("×", "", () => removeDocument(one)), about = one.tokens ? counted(one.tokens, "token") : counted(one.text.length, "character");
    const go = pressed("", "", () => { look(false); $("document").scrollTop = 0; reach(one.head, true); });
    go.append(made("span", "", one.name), " ", made("span", "soft", about + (one.note ? " · " + one.note : "")));
    remove.setAttribute("aria-label", "Remove " + one.name);
    item.append(go, remove);
    return item;
  }), ...(state.documents.length ? [made("li")] : []));
  if (state.documents.length) {
    const add = pressed("Add", "", () => { look(true); $("paste").focus(); });
    add.id = "add";
    add.setAttribute("aria-label", "Add a document");
    $("documents").lastChild.append(add);
  }
}

function splitAt(text, start) {
  const most = start + BLOCK;
  if (most >= text.length) return text.length;
  const line = text.lastIndexOf("\n", most - 1) + 1;
  if (line > start + BLOCK / 8) return line;
  const space = text.lastIndexOf(" ", most - 1) + 1;
  if (space > start) return space;
  return text.charCodeAt(most) >> 10 === 0x37 ? most - 1 : most; // not within a surrogate pair
}

// What a block out of view will measure, so that the scroll bar tells the truth before it is seen.
function guessHeights() {
  const view = $("document"), style = getComputedStyle(view), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.fontSize + " " + style.fontFamily;
  const sample = state.text.slice(0, 2000).replace(/\n/g, "");
  const wide = view.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const columns = Math.max(10, (wide * sample.length) / Math.max(1, pen.measureText(sample).width));
  for (const { start, stop, element } of blocks) {
    let lines = 0;
    for (let at = start; at < stop;) {
      const end = state.text.indexOf("\n", at), next = end < 0 || end >= stop ? stop : end + 1;
      lines += Math.max(1, Math.ceil((next - at) / columns));
      at = next;
    }
    element.style.containIntrinsicBlockSize = "auto " + Math.round(lines * parseFloat(style.lineHeight)) + "px";
  }
}

let resized = 0;
new ResizeObserver(() => {
  clearTimeout(resized);
  resized = setTimeout(() => blocks.length && guessHeights(), 200);
}).observe($("document"));

// the last block that begins at or before a character
function blockAt(place) {
  let low = 0, high = blocks.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (blocks[middle].start <= place) low = middle; else high = middle - 1;
  }
  return low;
}

// spans: [start, stop, share of the best] in UTF-16 units
function mark(spans) {
  if (!blocks.length) return;
  const wanted = new Map();
  for (const span of spans) {
    for (let n = blockAt(span[0]); n < blocks.length && blocks[n].start < span[1]; n += 1) {
      if (!wanted.has(n)) wanted.set(n, []);
      wanted.get(n).push(span);
    }
  }
  for (const [n, block] of blocks.entries()) {
    if (block.marked && !wanted.has(n)) {
      block.element.textContent = state.text.slice(block.start, block.stop);
      block.marked = false;
    }
  }
  for (const [n, inside] of wanted) fill(blocks[n], inside.sort((a, b) => a[0] - b[0]));
  rule(spans);
}

function fill(block, spans) {
  const parts = [];
  let here = block.start;
  for (const [start, stop, share] of spans) {
    const from = Math.max(start, here), to = Math.min(stop, block.stop);
    if (from >= to) continue;
    const found = made("mark", share === 1 ? "best" : "", state.text.slice(from, to));
    found.style.setProperty("--share", share.toFixed(2));
    found.dataset.at = start;
    parts.push(state.text.slice(here, from), found);
    here = to;
  }
  block.element.replaceChildren(...parts, state.text.slice(here, block.stop));
  block.marked = true;
}

// where the marks are in the whole
function rule(spans) {
  $("ruler").replaceChildren(...spans.map(([start, , share]) => {
    const block = blocks[blockAt(start)].element, tick = made("i");
    const inside = (start - blocks[blockAt(start)].start) / Math.max(1, block.textContent.length);
    tick.style.top = (100 * (block.offsetTop + inside * block.offsetHeight) / $("document").scrollHeight).toFixed(2) + "%";
    tick.style.setProperty("--share", share.toFixed(2));
    return tick;
  }));
}

// bring a marked place into view, without moving anything but the document
function reach(place, top = false) {
  const view = $("document");
  const centre = () => {
    const block = blocks[blockAt(place)];
    if (!block) return; // the documents are gone meanwhile
    const found = block.element.querySelector('mark[data-at="' + place + '"]') || block.element;
    const seen = (found === block.element ? placeOf(block, place) : found).getBoundingClientRect(), frame = view.getBoundingClientRect();
    if (top || seen.top < frame.top + 20 || seen.bottom > frame.bottom - 20) view.scrollTop += seen.top - frame.top - (top ? 4 : frame.height / 3);
  };
  centre();
  requestAnimationFrame(centre); // what came into view may measure more than was guessed
}

// a range at a place of a block
function placeOf(block, place) {
  const range = document.createRange(), walker = document.createTreeWalker(block.element, NodeFilter.SHOW_TEXT);
  let left = place - block.start, node = walker.nextNode();
  while (node && node.length < left) { left -= node.length; node = walker.nextNode(); }
  if (!node) return block.element;
  range.setStart(node, left);
  range.setEnd(node, Math.min(node.length, left + 1));
  return range;
}

// the server counts code points, this page UTF-16 units; points: units at every 1024th code point
function units(count) {
  const text = state.text;
  if (!units.points) {
    units.points = /[\ud800-\udbff]/.test(text) ? [0] : [];
    for (let at = 0, n = 0; units.points.length && at < text.length;) {
      at += text.codePointAt(at) > 0xffff ? 2 : 1;
      n += 1;
      if (n % 1024 === 0) units.points.push(at);
    }
  }
  if (!units.points.length) return count;
  let at = units.points[Math.min(units.points.length - 1, count >> 10)];
  for (let n = count & 1023; n > 0 && at < text.length; n -= 1) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}

// dim what is not read yet: a share of tokens, shown as the same share of characters
function dim(share) {
  const next = share >= 1 ? blocks.length : blockAt(share * state.text.length);
  for (let n = Math.min(unread, next); n < Math.max(unread, next); n += 1) blocks[n].element.classList.toggle("unread", n >= next);
  unread = next;
}
