// ---------------------------------------------------------------- Markdown
// An answer's Markdown becomes elements, made one by one; its text becomes text nodes, and nothing
// of it an attribute but the address of a link, which must be of http, https or mailto. Nothing is
// loaded: an image is a link to it. What is not understood stays as it was written.
//
// A line is {text, at}: at is the place of its first character in the answer, so that each word on
// the page is known to be one of the answer. put(parent, text, at) appends text to an element.

const DEEPEST = 8; // lists and quotes in one another
const NESTED = 20; // elements in one line in one another
const LONGEST_LINK = 2048; // characters of an address
// each runs through a line once: none has two ways to take a character
const FENCE = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/, QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,3}[.)])(?:[ \t]+|$)/;
const DELIMITER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const MARK = /[!-/:-@[-`{-~]/, SPACE = /^\s?$/, SIGN = /[\p{P}\p{S}]/u;

// Draws a text that grows. Blocks before the last are drawn once: nothing that follows changes them.
class Markdown {
  constructor(root, put) { Object.assign(this, { root, put, from: 0, kept: 0 }); }

  draw(text) {
    while (this.root.childNodes.length > this.kept) this.root.lastChild.remove();
    let at = this.from;
    const lines = text.slice(at).split("\n").map((line) => { const here = at; at += line.length + 1; return { text: line, at: here }; });
    const last = build(this.root, lines, 0, this.put);
    if (last) { this.from = last.at; this.kept = last.kept; }
  }
}

// what a line has behind its first characters
const behind = (line, count) => ({ text: line.text.slice(count), at: line.at + count });
const blank = (line) => !line.text.trim();

// columns of the white space that a text begins with
function indent(text) {
  let columns = 0;
  for (let n = 0; text[n] === " " || text[n] === "\t"; n += 1) columns += text[n] === "\t" ? 4 : 1;
  return columns;
}

function outdented(line, columns) {
  let count = 0;
  for (let left = columns; left > 0 && (line.text[count] === " " || line.text[count] === "\t"); count += 1) left -= line.text[count] === "\t" ? 4 : 1;
  return behind(line, count);
}

// the blocks of some lines; where the last of them begins, in the answer and among the children
function build(parent, lines, depth, put) {
  let last = null;
  for (let n = 0; n < lines.length;) {
    if (blank(lines[n])) { n += 1; continue; }
    last = { at: lines[n].at, kept: parent.childNodes.length };
    n = block(parent, lines, n, depth, put);
  }
  return last;
}

const opens = (text) => FENCE.test(text) || HEADING.test(text) || QUOTE.test(text) || RULE.test(text);

// draw the block that begins at line n; the line after it
function block(parent, lines, n, depth, put) {
  const { text } = lines[n];
  if (FENCE.test(text)) return code(parent, lines, n, put);
  if (HEADING.test(text)) { heading(parent, lines[n], put); return n + 1; }
  if (RULE.test(text)) { parent.append(made("hr")); return n + 1; }
  if (depth < DEEPEST && QUOTE.test(text)) {
    const inside = [];
    for (; n < lines.length && QUOTE.test(lines[n].text); n += 1) inside.push(behind(lines[n], QUOTE.exec(lines[n].text)[0].length));
    build(parent.appendChild(made("blockquote")), inside, depth + 1, put);
    return n;
  }
  if (depth < DEEPEST && ITEM.test(text)) return list(parent, lines, n, depth, put);
  if (heads(lines, n)) return table(parent, lines, n, put);
  const begin = n;
  do n += 1; while (n < lines.length && !blank(lines[n]) && !opens(lines[n].text) && !interrupts(lines[n].text) && !heads(lines, n));
  inline(parent.appendChild(made("p")), lines.slice(begin, n), put);
  return n;
}

// whether a list may begin right behind a line of text: "1986." there is the end of a sentence
const interrupts = (text) => { const found = ITEM.exec(text); return Boolean(found) && (!/\d/.test(found[2]) || /^1[.)]/.test(found[2])); };

function code(parent, lines, n, put) {
  const begun = FENCE.exec(lines[n].text), fence = begun[1] || begun[3], about = begun[2] ?? begun[4], columns = indent(lines[n].text), box = made("pre"), inside = made("code");
  const language = /^[\w+#.-]{1,30}$/.exec(about.trim().split(/\s/)[0]);
  box.tabIndex = 0; // it scrolls, also by keyboard
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", language ? "code, " + language[0] : "code");
  parent.append(box);
  box.append(inside);
  for (n += 1; n < lines.length; n += 1) {
    const end = FENCE.exec(lines[n].text), marks = end && (end[1] || end[3]);
    if (end && marks[0] === fence[0] && marks.length >= fence.length && !(end[2] ?? end[4]).trim()) return n + 1;
    const line = outdented(lines[n], columns);
    put(inside, line.text, line.at);
    inside.append("\n");
  }
  return n;
}

function heading(parent, line, put) {
  const marks = HEADING.exec(line.text)[1].length, from = line.text.indexOf("#") + marks;
  const inside = behind(line, from), tag = "h" + Math.min(6, marks + 2); // the page has h1 and h2
  inside.text = inside.text.trimEnd().replace(/(?<=[ \t])#+$/, "");
  const space = inside.text.length - inside.text.trimStart().length;
  inline(parent.appendChild(made(tag)), [behind(inside, space)], put);
}

function list(parent, lines, n, depth, put) {
  const read = (line) => { const found = RULE.test(line.text) ? null : ITEM.exec(line.text); return found && { columns: indent(found[1]), mark: found[2], size: found[0].length }; };
  const kind = (mark) => mark[mark.length - 1], first = read(lines[n]), ordered = /\d/.test(first.mark);
  const same = (item) => item && kind(item.mark) === kind(first.mark) && item.columns < first.columns + 2;
  const next = (from) => { while (from < lines.length && blank(lines[from])) from += 1; return from; };
  const element = parent.appendChild(made(ordered ? "ol" : "ul"));
  if (ordered && parseInt(first.mark, 10) !== 1) element.start = parseInt(first.mark, 10);
  for (let item = first; same(item); item = n < lines.length ? read(lines[n]) : null) {
    const inside = [behind(lines[n], item.size)];
    for (n += 1; n < lines.length; n += 1) {
      if (blank(lines[n])) {
        const after = next(n);
        if (after === lines.length || indent(lines[after].text) < first.columns + 2) break;
        inside.push({ text: "", at: lines[n].at });
        n = after;
      }
      const { text } = lines[n], deep = indent(text) >= first.columns + 2;
      if (!deep && (read(lines[n]) || opens(text))) break;
      inside.push(deep ? outdented(lines[n], item.size) : lines[n]);
    }
    build(element.appendChild(made("li")), inside, depth + 1, put);
    const after = next(n);
    if (after < lines.length && same(read(lines[after]))) n = after;
  }
  return n;
}

// ---- tables

// whether line n is the head of a table
function heads(lines, n) {
  if (!lines[n].text.includes("|") || n + 1 >= lines.length || !DELIMITER.test(lines[n + 1].text.trim())) return false;
  return cells(lines[n]).length === cells(lines[n + 1]).length;
}

function cells(line) {
  const found = [], text = line.text.trimEnd();
  let from = text.length - text.trimStart().length;
  if (text[from] === "|") from += 1;
  for (let n = from; n <= text.length; n += 1) {
    if (text[n] === "\\") { n += 1; continue; }
    if (n < text.length && text[n] !== "|") continue;
    if (n === text.length && from === n && found.length) break; // the line ends with a bar
    const cell = { text: text.slice(from, n), at: line.at + from }, space = cell.text.length - cell.text.trimStart().length;
    found.push({ text: cell.text.trim(), at: cell.at + space });
    from = n + 1;
  }
  return found;
}

function table(parent, lines, n, put) {
  const box = made("div", "table"), element = made("table"), sides = cells(lines[n + 1]).map(({ text }) => text.endsWith(":") ? (text.startsWith(":") ? "centre" : "right") : "");
  box.tabIndex = 0; // it scrolls, also by keyboard
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "table");
  parent.append(box);
  box.append(element);
  const row = (group, tag, line) => {
    const found = group.appendChild(made("tr"));
    for (const [at, cell] of cells(line).entries()) {
      const inside = found.appendChild(made(tag, sides[at] || ""));
      if (tag === "th") inside.scope = "col";
      inline(inside, [cell], put);
    }
  };
  row(element.appendChild(made("thead")), "th", lines[n]);
  const body = element.appendChild(made("tbody"));
  for (n += 2; n < lines.length && lines[n].text.includes("|") && !opens(lines[n].text); n += 1) row(body, "td", lines[n]);
  return n;
}

// ---- within a block

// the address of a link, if it is one that a person may follow; else null
function safe(address) {
  try {
    const { protocol, href } = new URL(address);
    return ["http:", "https:", "mailto:"].includes(protocol) ? href : null;
  } catch (none) { return null; }
}

// "(address)" or "(address "title")" from a place on: {href, stop}; null where no link is
function target(text, at) {
  if (text[at] !== "(") return null;
  let n = at + 1, level = 0;
  const most = Math.min(text.length, at + LONGEST_LINK);
  while (n < most && text[n] === " ") n += 1;
  const from = n;
  for (; n < most && !/\s/.test(text[n]); n += 1) {
    if (text[n] === "(") level += 1;
    if (text[n] === ")" && (level -= 1) < 0) break;
  }
  const href = safe(text.slice(from, n).replace(/^<(.*)>$/, "$1"));
  if (text[n] === " ") {
    const title = /^ +(?:"[^"\n]{0,500}"|'[^'\n]{0,500}')? *(?=\))/.exec(text.slice(n, n + 600));
    if (!title) return null;
    n += title[0].length;
  }
  return href && text[n] === ")" ? { href, stop: n + 1 } : null;
}

// Opening and closing marks of emphasis, each as often as it stands, as CommonMark pairs them.
function pair(marks) {
  const stack = [], floors = new Map(); // floors: below which no mark fits a kind of closing mark
  for (const mark of marks) {
    while (mark.closes && mark.left) {
      const kind = mark.sign + mark.opens + mark.count % 3, floor = floors.get(kind) ?? 0;
      let n = stack.length - 1;
      const fits = (other) => other.sign === mark.sign && !((other.closes || mark.opens) && (other.count + mark.count) % 3 === 0 && (other.count % 3 || mark.count % 3));
      while (n >= floor && !fits(stack[n])) n -= 1;
      if (n < floor) { floors.set(kind, stack.length); break; }
      const other = stack[n], used = mark.left > 1 && other.left > 1 ? 2 : 1, tag = mark.sign === "~" ? "del" : used === 2 ? "strong" : "em";
      other.begun.push(tag);
      mark.ended += 1;
      other.left -= used;
      mark.left -= used;
      stack.length = other.left ? n + 1 : n;
      for (const [key, height] of floors) floors.set(key, Math.min(height, stack.length));
    }
    if (mark.opens && mark.left) stack.push(mark);
  }
}

// The pieces of a text: {from, stop} and what begins and ends around them.
function pieces(text) {
  const found = [], brackets = [], marks = [], runs = new Map(), address = /https?:\/\/[^\s<>"'`]{1,2048}/y;
  let plain = 0; // where the text begins that is in no piece yet
  const add = (piece, from, next) => { if (from > plain) found.push({ from: plain, stop: from }); plain = next; if (piece) found.push(piece); return next; };
  // where as many backticks stand again
  const closing = (size, from) => {
    if (!runs.size) {
      for (const { 0: run, index } of text.matchAll(/`+/g)) {
        if (!runs.has(run.length)) runs.set(run.length, []);
        runs.get(run.length).push(index);
      }
      for (const places of runs.values()) places.reverse();
    }
    const places = runs.get(size) || [];
    while (places.length && places[places.length - 1] < from) places.pop();
    return places.length ? places[places.length - 1] : -1;
  };
  for (let n = 0; n < text.length;) {
    const sign = text[n];
    if (sign === "\\" && MARK.test(text[n + 1] || "")) { add(null, n, n + 1); n += 2; continue; }
    if (sign === "`") {
      let stop = n;
      while (text[stop] === "`") stop += 1;
      const end = closing(stop - n, stop);
      n = end < 0 ? stop : add({ from: stop, stop: end, tag: "code" }, n, end + stop - n);
      continue;
    }
    if (sign === "*" || sign === "_" || sign === "~") {
      let stop = n;
      while (text[stop] === sign) stop += 1;
      const before = text[n - 1] || "", after = text[stop] || "", count = stop - n;
      const left = !SPACE.test(after) && (!SIGN.test(after) || SPACE.test(before) || SIGN.test(before));
      const right = !SPACE.test(before) && (!SIGN.test(before) || SPACE.test(after) || SIGN.test(after));
      const word = sign === "_", piece = { from: n, stop, sign, count, left: count, begun: [], ended: 0, opens: left && (!word || !right || SIGN.test(before)), closes: right && (!word || !left || SIGN.test(after)) };
      n = stop;
      if (sign === "~" && count !== 2) continue;
      add(piece, piece.from, stop);
      marks.push(piece);
      continue;
    }
    if (sign === "[" || (sign === "!" && text[n + 1] === "[")) {
      const stop = n + (sign === "[" ? 1 : 2), piece = { from: n, stop, href: null, marks: marks.length };
      brackets.push(piece);
      n = add(piece, n, stop);
      continue;
    }
    if (sign === "]" && brackets.length) {
      const begin = brackets.pop(), link = begin.stop === n ? null : target(text, n + 1);
      if (link) {
        begin.href = link.href;
        pair(marks.splice(begin.marks));
        brackets.length = 0; // no link within a link
        n = add({ from: n, stop: n, ends: true }, n, link.stop);
        continue;
      }
    }
    if (sign === "h" && !/\w/.test(text[n - 1] || "")) {
      address.lastIndex = n;
      let stop = n + (brackets.length ? 0 : (address.exec(text) || [""])[0].length);
      while (stop > n && ".,:;!?)]}*_~".includes(text[stop - 1])) stop -= 1;
      const href = stop > n ? safe(text.slice(n, stop)) : null;
      if (href) { n = add({ from: n, stop, tag: "a", href }, n, stop); continue; }
    }
    n += 1;
  }
  add(null, text.length, text.length);
  pair(marks);
  return found;
}

function linked(href) {
  const element = made("a");
  Object.assign(element, { href, target: "_blank", rel: "noopener noreferrer", title: href });
  return element;
}

// draw a text without blocks
function inline(parent, lines, put) {
  const text = lines.map((line) => line.text).join("\n"), path = [parent], starts = [];
  let sum = 0, row = 0;
  for (const line of lines) { starts.push(sum); sum += line.text.length + 1; }
  const enter = (element) => { if (path.length < NESTED) { path[path.length - 1].append(element); path.push(element); } else path.push(path[path.length - 1]); };
  const write = (from, stop) => {
    for (let here = from; here < stop;) {
      while (row + 1 < starts.length && starts[row + 1] <= here) row += 1;
      const end = Math.min(stop, starts[row] + lines[row].text.length), inside = path[path.length - 1];
      if (end > here) put(inside, text.slice(here, end), lines[row].at + here - starts[row]);
      if (end < stop) inside.append("\n");
      here = end + 1;
    }
  };
  for (const piece of pieces(text)) {
    if (piece.ends) { path.pop(); continue; }
    for (let n = 0; n < (piece.ended || 0); n += 1) path.pop();
    if (piece.tag) { enter(piece.tag === "a" ? linked(piece.href) : made(piece.tag)); write(piece.from, piece.stop); path.pop(); }
    else if (piece.href) enter(linked(piece.href));
    else write(piece.from, piece.sign ? piece.from + piece.left : piece.stop);
    for (const tag of (piece.begun || []).reverse()) enter(made(tag));
  }
}
