// ---------------------------------------------------------------- files
// Plain text is decoded here. Whatever else a file holds, the server looks at its first bytes and
// takes the text out, or refuses it in the chat's words.

// the text of bytes that are plainly UTF-8 text; null: the server must look
function plain(bytes) {
  let text = "";
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch (invalid) { return null; }
  return /^\s*(<|%PDF-|\{\\rtf)|\0/.test(text) ? null : text;
}

function base64(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += 8190) parts.push(btoa(String.fromCharCode(...bytes.subarray(at, at + 8190))));
  return parts.join("");
}

async function take(files) {
  const file = files[0];
  if (!file) return;
  $("state").textContent = file.name + " is looked at";
  try {
    if (files.length > 1) throw new Error("Found " + files.length + " files; this page reads one document, the chat several (-f ONE -f OTHER).");
    const bytes = new Uint8Array(await file.arrayBuffer()), text = plain(bytes);
    const found = text !== null ? { text, note: "" } : await (await call("/v1/text", { name: file.name, data: base64(bytes) })).json();
    begin(found.text, file.name, [], found.note);
  } catch (error) { $("state").textContent = error.name === "NotFoundError" || error.name === "NotReadableError" ? file.name + ": cannot be read; is it a folder?" : error.message; }
}
