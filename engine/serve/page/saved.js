// ---------------------------------------------------------------- conversations
// The page remembers conversations until it is closed. Where its user says so they are kept, with
// their documents, in the browser's own storage, on a server with a key encrypted with a key that
// follows from it, so that neither another user of this server nor whoever opens this browser
// without the key can list them. The server keeps no list: it knows a text by its content alone.

// {id, title, names, characters, tokens, seconds, when, sum, questions, turns (how many), kept,
// documents and talk (once loaded)}
let shelf = [];
let cipher = null; // CryptoKey; null: the server has no key
const store = { name: "documents", version: 2, tables: ["facts", "texts", "talks"] };

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(store.name, store.version);
    asked.onupgradeneeded = () => {
      for (const table of asked.result.objectStoreNames) asked.result.deleteObjectStore(table); // of another form
      for (const table of store.tables) asked.result.createObjectStore(table);
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

// run work(table -> its store) in one transaction; its result when all is written
async function within(mode, work) {
  const base = await opened();
  try {
    return await new Promise((resolve, reject) => {
      const all = base.transaction(store.tables, mode), asked = work((table) => all.objectStore(table));
      all.oncomplete = () => resolve(asked && asked.result);
      all.onerror = all.onabort = () => reject(all.error || new Error("it could not be stored"));
    });
  } finally { base.close(); }
}

// whether this browser can keep documents for this server, else why not
function cannotKeep() {
  if (!window.indexedDB) return "this browser stores nothing here";
  if (state.key && !crypto.subtle) return "over plain HTTP from another machine this browser cannot encrypt them";
  return "";
}

async function deriveKey() {
  if (!state.key || cannotKeep()) return null;
  const held = localStorage.getItem("salt"), salt = held ? Uint8Array.from(JSON.parse(held)) : crypto.getRandomValues(new Uint8Array(16));
  localStorage.setItem("salt", JSON.stringify([...salt]));
  const secret = await crypto.subtle.importKey("raw", new TextEncoder().encode(state.key), "PBKDF2", false, ["deriveKey"]);
  return crypto.subtle.deriveKey({ name: "PBKDF2", hash: "SHA-256", salt, iterations: 200000 }, secret, { name: "AES-GCM", length: 256 }, false, ["encrypt", "decrypt"]);
}

async function sealed(value) {
  const plain = JSON.stringify(value);
  if (!cipher) return { plain };
  const iv = crypto.getRandomValues(new Uint8Array(12));
  return { iv, data: await crypto.subtle.encrypt({ name: "AES-GCM", iv }, cipher, new TextEncoder().encode(plain)) };
}

// null where another key sealed it, or none did and the server has one now
async function unsealed(held) {
  try {
    if (!held || !held.iv !== !cipher) return null;
    if (!cipher) return JSON.parse(held.plain);
    return JSON.parse(new TextDecoder().decode(await crypto.subtle.decrypt({ name: "AES-GCM", iv: held.iv }, cipher, held.data)));
  } catch (none) { return null; }
}

async function openShelf() {
  const reason = cannotKeep();
  $("keep").disabled = Boolean(reason);
  try {
    cipher = await deriveKey();
    $("keep").checked = !reason && localStorage.getItem("keep") === "yes";
    if (!reason) {
      for (const facts of await within("readonly", (table) => table("facts").getAll())) {
        const found = await unsealed(facts);
        if (found && !shelf.some(({ id }) => id === found.id)) shelf.push({ ...found, documents: null, talk: null, kept: true });
      }
    }
  } catch (error) { $("kept").textContent = error.message; }
  drawShelf(reason);
}

function drawShelf(reason = cannotKeep()) {
  $("kept").textContent = reason ? "They are forgotten when this page is closed: " + reason + "." : $("keep").checked
    ? "Their text is kept here" + (cipher ? ", encrypted with the API key" : ", readable by whoever uses this browser") + ", until you remove them."
    : "They are forgotten when this page is closed.";
  $("saved").hidden = !shelf.length;
  shelf.sort((a, b) => b.when - a.when);
  $("shelf").replaceChildren(...shelf.map((entry) => {
    const item = made("li"), open = pressed("", "", () => reopen(entry)), remove = pressed("Remove", "", () => forget(entry));
    const when = new Date(entry.when).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const about = [entry.names.length && entry.names.join(", ") !== entry.title ? entry.names.join(", ") : "", entry.turns ? counted(entry.turns, "question") : "",
      entry.tokens ? counted(entry.tokens, "token") + ", read in " + entry.seconds.toFixed(1) + " s" : "", when];
    open.append(made("span", "", entry.title), " ", made("span", "soft", about.filter(Boolean).join(" · ")));
    if (entry === state.entry) open.setAttribute("aria-current", "true");
    remove.setAttribute("aria-label", "Remove " + entry.title);
    item.append(open, remove);
    return item;
  }));
}

const summed = (text) => {
  let sum = text.length;
  for (let at = 0; at < text.length; at += 1) sum = (Math.imul(sum, 31) + text.charCodeAt(at)) | 0;
  return sum;
};

// what a conversation is called: its first question, else its documents
function titled() {
  const first = state.turns.find(({ answer }) => answer);
  const text = first ? first.question.trim().replace(/\s+/g, " ") : state.documents.map(({ name }) => name).join(", ");
  return (text.length > 80 ? text.slice(0, 79) + "…" : text) || "conversation";
}

// note what this conversation is now
async function shelve() {
  const turns = state.turns.filter(({ answer }) => answer), sum = summed(state.text);
  if (!turns.length && !state.documents.length) return;
  // the same documents, read anew, make no second entry while nothing was asked
  const same = state.entry || shelf.find((entry) => !entry.turns && !turns.length && entry.characters === state.text.length && entry.sum === sum);
  const id = same ? same.id : [...crypto.getRandomValues(new Uint8Array(8))].map((n) => n.toString(16).padStart(2, "0")).join("");
  const entry = same || { id, kept: false }, documents = state.documents.map(({ name, note, text, tokens, titled: named }) => ({ name, note, text, tokens, titled: named }));
  const known = entry.sum === sum && entry.documents && entry.documents.every(({ tokens }, n) => tokens === documents[n]?.tokens);
  Object.assign(entry, {
    title: titled(), names: documents.map(({ name }) => name), characters: state.text.length, sum, when: Date.now(), turns: turns.length, documents,
    tokens: documents.length ? state.total || 0 : 0, seconds: state.seconds || 0, questions: [...$("ideas").lastElementChild.children].map((button) => button.textContent),
    talk: { system: state.system, temperature: state.temperature, most: state.most, turns: turns.map(({ question, answer, reasoning, figures: told }) => ({ question, answer, reasoning, figures: told })) },
  });
  if (!shelf.includes(entry)) shelf.push(entry);
  state.entry = entry;
  if ($("keep").checked) await keep(entry, known && entry.kept);
  if (!$("start").hidden) drawShelf();
}

// Write an entry as it is then; known: its documents are written already. One at a time: an older
// state must not come after a newer.
let writes = Promise.resolve();
function keep(entry, known = false) {
  writes = writes.then(() => write(entry, known)).catch((error) => tell(entry.title + " is not kept: " + error.message));
  return writes;
}

async function write(entry, known) {
  const { documents, talk, kept, ...facts } = entry, held = { facts: await sealed(facts), talks: await sealed(talk), ...(known ? {} : { texts: await sealed(documents) }) };
  if (!shelf.includes(entry)) return; // removed meanwhile
  await within("readwrite", (table) => { for (const [name, value] of Object.entries(held)) table(name).put(value, entry.id); });
  entry.kept = true;
}

async function load(entry) {
  for (const [name, table] of [["documents", "texts"], ["talk", "talks"]]) {
    if (!entry[name]) entry[name] = await unsealed(await within("readonly", (all) => all(table).get(entry.id)));
  }
  return entry.documents && entry.talk ? entry : null;
}

async function drop(entry) {
  await writes;
  if (!entry.kept) return;
  await within("readwrite", (table) => { for (const name of store.tables) table(name).delete(entry.id); });
  entry.kept = false;
}

async function reopen(entry) {
  if (entry === state.entry) { look(!state.documents.length); $("question").focus(); return; }
  if (!await load(entry)) { tell(entry.title + " cannot be read from this browser any more."); return; }
  await renew();
  const { turns, ...settings } = entry.talk;
  Object.assign(state, { entry, ...settings });
  show(entry.documents.map((one) => ({ ...one })));
  suggest(entry.questions);
  if (turns.length) $("ideas").open = false;
  drawTurns(turns);
  look(false);
  if (entry.documents.length) await readAll("");
  else { tell("The next question sends this conversation again."); $("question").focus(); }
}

async function forget(entry) {
  const at = shelf.indexOf(entry), found = await load(entry);
  shelf.splice(at, 1);
  await drop(entry);
  if (entry === state.entry) await renew();
  drawShelf();
  ($("shelf").querySelectorAll("li button:first-child")[Math.min(at, shelf.length - 1)] || $("paste")).focus();
  tell(entry.title + " is removed from this browser.");
  if (!found) return;
  try {
    const { sessions, blocks: dropped } = await (await call("/v1/forget", { messages: forgotten(found) })).json();
    tell(entry.title + " is removed from this browser and the server (" + counted(sessions, "session") + ", " + counted(dropped, "block") + ").");
  } catch (error) { tell($("state").textContent + " The server keeps what it holds of it: " + error.message); }
}

// the messages with which all that was read of a conversation begins: its documents, else all of it
function forgotten({ documents, talk: { system, turns } }) {
  const text = joined(documents);
  return text ? messagesOf(text, { system, turns: [], text: "" }) : messagesOf(turns.at(-1).question, { system, turns: turns.slice(0, -1), text: "" });
}

$("keep").addEventListener("change", async () => {
  localStorage.setItem("keep", $("keep").checked ? "yes" : "no");
  for (const entry of [...shelf]) {
    await load(entry);
    await ($("keep").checked ? keep(entry) : drop(entry));
  }
  drawShelf();
});
