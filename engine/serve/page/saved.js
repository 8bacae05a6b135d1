// ---------------------------------------------------------------- documents read before
// The page remembers what it has read until it is closed. Where its user says so the texts are kept
// in the browser's own storage, on a server with a key encrypted with a key that follows from it, so
// that neither another user of this server nor whoever opens this browser without the key can list
// them. The server keeps no list: it knows a text by its content alone.

let shelf = []; // {id, name, characters, tokens, seconds, when, sum, questions, text (once loaded), kept}
let cipher = null; // CryptoKey; null: the server has no key
const store = { name: "documents", tables: ["facts", "texts"] };

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(store.name, 1);
    asked.onupgradeneeded = () => store.tables.forEach((table) => asked.result.createObjectStore(table));
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
        if (found && !shelf.some(({ id }) => id === found.id)) shelf.push({ ...found, text: null, kept: true });
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
    const item = made("li"), open = made("button"), remove = made("button", "", "Remove");
    const when = new Date(entry.when).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.type = remove.type = "button";
    open.append(made("span", "", entry.name), " ", made("span", "soft", number(entry.tokens) + " tokens, read in " + entry.seconds.toFixed(1) + " s · " + when));
    remove.setAttribute("aria-label", "Remove " + entry.name);
    open.addEventListener("click", () => reopen(entry));
    remove.addEventListener("click", () => forget(entry));
    item.append(open, remove);
    return item;
  }));
}

const summed = (text) => {
  let sum = text.length;
  for (let at = 0; at < text.length; at += 1) sum = (Math.imul(sum, 31) + text.charCodeAt(at)) | 0;
  return sum;
};

async function shelve(text, name, tokens, seconds, questions) {
  const sum = summed(text), same = shelf.find((entry) => entry.characters === text.length && entry.sum === sum);
  const id = same ? same.id : [...crypto.getRandomValues(new Uint8Array(8))].map((n) => n.toString(16).padStart(2, "0")).join("");
  const entry = same || { id, name, characters: text.length, tokens, seconds, sum, questions };
  Object.assign(entry, { when: Date.now(), text });
  if (!same) shelf.push(entry);
  if ($("keep").checked) await keep(entry);
}

async function keep(entry) {
  const { text, kept, ...facts } = entry, [sealedFacts, sealedText] = [await sealed(facts), await sealed(text)];
  try {
    await within("readwrite", (table) => { table("facts").put(sealedFacts, entry.id); return table("texts").put(sealedText, entry.id); });
    entry.kept = true;
  } catch (error) { $("state").textContent = entry.name + " is not kept: " + error.message; }
}

async function load(entry) {
  if (entry.text === null) entry.text = await unsealed(await within("readonly", (table) => table("texts").get(entry.id)));
  return entry.text;
}

async function drop(entry) {
  if (!entry.kept) return;
  await within("readwrite", (table) => { table("facts").delete(entry.id); table("texts").delete(entry.id); });
  entry.kept = false;
}

async function reopen(entry) {
  const text = await load(entry);
  if (text) begin(text, entry.name, entry.questions);
  else $("state").textContent = entry.name + " cannot be read from this browser any more.";
}

async function forget(entry) {
  const at = shelf.indexOf(entry), text = await load(entry);
  shelf.splice(at, 1);
  await drop(entry);
  drawShelf();
  ($("shelf").querySelectorAll("li button:first-child")[Math.min(at, shelf.length - 1)] || $("paste")).focus();
  $("state").textContent = entry.name + " is removed from this browser.";
  if (!text) return;
  try {
    const { sessions, blocks } = await (await call("/v1/forget", { messages: [{ role: "user", content: text }] })).json();
    $("state").textContent = entry.name + " is removed from this browser and the server (" + sessions + (sessions === 1 ? " session, " : " sessions, ") + blocks + (blocks === 1 ? " block)." : " blocks).");
  } catch (error) { $("state").textContent += " The server keeps what it holds of it: " + error.message; }
}

$("keep").addEventListener("change", async () => {
  localStorage.setItem("keep", $("keep").checked ? "yes" : "no");
  for (const entry of shelf) {
    await load(entry);
    await ($("keep").checked ? keep(entry) : drop(entry));
  }
  drawShelf();
});
