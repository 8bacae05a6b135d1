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

// Read files, in their order. One that is refused is named, and the others are read.
async function take(files) {
  const found = [], refused = [];
  for (const file of files) {
    tell(file.name + " is looked at");
    try {
      const bytes = new Uint8Array(await file.arrayBuffer()), text = plain(bytes);
      found.push({ name: file.name, ...(text !== null ? { text, note: "" } : await (await call("/v1/text", { name: file.name, data: base64(bytes) })).json()) });
    } catch (error) {
      refused.push(error.name === "NotFoundError" || error.name === "NotReadableError" ? file.name + ": cannot be read; is it a folder?" : error.message);
    }
  }
  const done = found.length ? begin(found) : null;
  if (refused.length) { await done; tell([...refused, ...(found.length ? ["The others were read."] : [])].join(" ")); }
}
