"""Times the page in a headless Chromium over a document of a megabyte: its frames while it scrolls,
and what showing and marking it take. Prints the browser and the CPU with the figures.

    python -m tests.programs.page_frames [--megabytes 1]
"""

import argparse
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path

from engine import LLM
from tests.builders import POCKET
from tests.engine.serve.browser import found, tab
from tests.engine.serve.conftest import serving

WORDS = "the grass is green and the sky is blue while a small river goes around the old town"
# a frame is begun when the one before it is on its way: its interval holds all that it took
SCROLL = """(step) => new Promise((done) => {
  const view = $("document"), frames = [];
  let last = performance.now();
  view.scrollTop = 0;
  const next = (now) => {
    frames.push(now - last);
    last = now;
    view.scrollTop += step;
    if (frames.length < 400 && view.scrollTop + view.clientHeight < view.scrollHeight - 1) requestAnimationFrame(next);
    else done(frames.slice(2));
  };
  requestAnimationFrame(next);
})"""  # noqa: E501
TIMED = """(count, work) => { const took = [];
  for (let n = 0; n < count; n += 1) {
    const t = performance.now();
    work(n);
    document.body.getBoundingClientRect();
    took.push(performance.now() - t);
  }
  return took; }"""


def document(size: int) -> str:
    """Lines of 20 to 400 characters, no two alike."""
    words, lines, length, n = WORDS.split(), list[str](), 0, 0
    while length < size:
        n += 1
        line = f"{n} " + " ".join(words[(n * k) % len(words)] for k in range(4 + n * 7 % 70))
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines)


def shown(name: str, times: list[float]) -> str:
    """Median, 95th percentile and worst of times in ms."""
    ranked = sorted(times)
    p95 = ranked[int(0.95 * (len(ranked) - 1))]
    return (
        f"{name}: median {statistics.median(ranked):.1f}, p95 {p95:.1f}, worst {ranked[-1]:.1f} ms "
        f"({len(ranked)})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=float, default=1.0)
    size = int(parser.parse_args().megabytes * 1e6)
    version = subprocess.run([found(), "--version"], capture_output=True, text=True).stdout.strip()
    cpu = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    print(f"{version}, headless, software rendering, 1200x760, {cpu}, {size / 1e6:g} MB")
    llm = LLM(POCKET, max_context=1024, threads=1, load=False)
    with (
        serving(llm) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tab(folder) as page,
    ):
        page.look(1200, 760)
        page.open(server.url)
        page.until("state.model !== null")
        page.js(f"window.big = {document(size)!r}; 0")
        print(
            shown(
                "show the document",
                page.js(f"({TIMED})(5, () => show([{{ name: 'big', text: big }}]))"),
            )
        )
        for step in (100, 1000, 10_000):
            print(shown(f"frames, {step} px each", page.js(f"({SCROLL})({step})")))
        spans = (
            "Array.from({ length: 12 }, (_, k) => { const at = (n * 7919 + k * big.length / 12) "
            "% (big.length - 99) | 0; return [at, at + 99, 1 / (k + 1)]; })"
        )
        work = f"(n) => {{ const spans = {spans}; mark(spans); reach(spans[0][0]); }}"
        print(shown("mark 12 passages and go to one", page.js(f"({TIMED})(100, {work})")))
        assert page.errors == []


if __name__ == "__main__":
    main()
