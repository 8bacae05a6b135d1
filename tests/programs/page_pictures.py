"""Makes the pages' pictures of the page, with the shipped model in a headless Chromium.

python -m tests.programs.page_pictures [FOLDER]
"""

import argparse
import base64
import json
import struct
import tempfile
import time
import zlib
from pathlib import Path

from engine import LLM, OmniKV
from tests.builders import POCKET
from tests.engine.serve.browser import tab
from tests.engine.serve.conftest import serving
from tests.engine.text.papers_made import docx, paragraph

SENTENCES = (
    "The lamp near the river was painted in the winter. Nobody moved the quiet boat before noon.",
    "The baker of the old town counted the loaves again, and the small bridge stayed shut.",
    "A letter came with the evening train. It was a warm room, and the clock noticed it.",
)
QUESTION = "What is the pass key of Alice?"
ENDED = "!state.running && state.turns.length === 1 && state.turns[0].figures"


# a picture's 256 commonest colours, and for each pixel the nearest of them
FEWER = """async (picture) => {
  const bitmap = await createImageBitmap(await (await fetch("data:image/png;base64," + picture)).blob());
  const pen = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
  pen.drawImage(bitmap, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, bitmap.width, bitmap.height).data.buffer), counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  const parts = (c) => [c & 255, (c >> 8) & 255, (c >> 16) & 255];
  const palette = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 256).map(([colour]) => parts(colour)), places = new Map();
  for (const colour of counts.keys()) {
    const far = palette.map((other) => parts(colour).reduce((sum, v, n) => sum + (v - other[n]) ** 2, 0));
    places.set(colour, far.indexOf(Math.min(...far)));
  }
  let text = "";
  for (const pixel of pixels) text += String.fromCharCode(places.get(pixel));
  return [bitmap.width, bitmap.height, palette.flat(), btoa(text)];
}"""  # noqa: E501


def shrink(page, path: Path) -> None:
    """Write a picture with a palette: a third of its bytes."""
    picture = base64.b64encode(path.read_bytes()).decode()
    width, height, palette, text = page.js(f"({FEWER})({json.dumps(picture)})")
    rows = base64.b64decode(text)
    data = b"".join(b"\0" + rows[n * width : (n + 1) * width] for n in range(height))

    def chunk(kind: bytes, held: bytes) -> bytes:
        whole = kind + held
        return struct.pack(">I", len(held)) + whole + struct.pack(">I", zlib.crc32(whole))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", bytes(palette)), (b"IDAT", zlib.compress(data, 9)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*p) for p in (*parts, (b"IEND", b""))))


def notes() -> bytes:
    """A second document, as a word processor writes it."""
    lines = [SENTENCES[n % 3] for n in range(12)]
    lines.insert(7, "The pass key of Nora is 30417. Remember it.")
    return docx("".join(paragraph(line) for line in lines))


def take(page, folder: Path) -> None:
    """All pictures, in the order in which a person comes to see them."""
    page.look(1200, 760)
    page.shot(folder / "page-empty.png")
    files = {"welcome.txt": (POCKET / "welcome.txt").read_bytes(), "notes.docx": notes()}
    page.js("window.given = new DataTransfer(); 0")
    for name, data in files.items():
        text = json.dumps(base64.b64encode(data).decode())
        array = f"Uint8Array.from(atob({text}), (c) => c.charCodeAt(0))"
        page.js(f"given.items.add(new File([{array}], {json.dumps(name)})); 0")
    page.js("document.dispatchEvent(new DragEvent('drop', { dataTransfer: given })); 0")
    page.until("/Reading: 1,\\d+ of .* left/.test($('state').textContent)")
    page.shot(folder / "page-reading.png")
    page.until("!state.running && state.documents.every(({ tokens }) => tokens > 0)")
    page.call("Input.insertText", text=QUESTION)
    page.key("Enter")
    page.until(ENDED)
    page.shot(folder / "page-sources.png")
    words = "$('log').querySelector('.words').words"
    page.js(
        f"choose({{ words: {words}, at: {words}.near({words}.spans.length - 1, -1), held: true }})"
    )
    page.until("document.querySelector('mark.best') !== null")
    page.shot(folder / "page-word.png")
    page.look(1200, 760, dark=True)
    page.shot(folder / "page-dark.png")
    page.look(420, 900)
    page.shot(folder / "page-narrow.png")
    page.look(1200, 760)
    page.js("choose(null); $('list').click(); 0")
    page.shot(folder / "page-saved.png")
    assert page.errors == []


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"))
    folder = parser.parse_args().folder
    method = OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=64, dense_below=0)
    llm = LLM(POCKET, method=method, max_context=8192, threads=1, chunk=128, load=False)
    with (
        serving(llm, slots=2, ping=0.01, clock=time.monotonic) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        tab(profile, "--disable-lcd-text") as page,
    ):
        page.open(server.url)
        page.until("state.model !== null && !$('example').hidden")
        take(page, folder)
        page.call("Page.navigate", url="about:blank")  # whose policy lets a picture be drawn
        paths = sorted(folder.glob("page-*.png"))
        for path in paths:
            shrink(page, path)
    for path in paths:
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
