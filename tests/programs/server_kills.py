"""Kill the server in the middle of anything, again and again, over one --cache folder.

python -m tests.programs.server_kills --kills 20 --seed 0

Each round starts the server with the shipped model, asks about documents from several threads and
kills it (SIGKILL) after a random time: while it reads, writes, keeps blocks, or idles. After every
kill each block in the folder must be whole, a reader must get from it the rows that reading gives
(by the answer), and the next server must find again what an ended request had read. Every answer
that came must be the one that the library gives alone. Exit code 0, or 1 with a line that names
round and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from engine import LLM, SamplingParams
from engine.methods.full import Full
from engine.saved.cache import SUFFIX, BlockCache, name_of
from engine.saved.container import Reader
from engine.saved.rows import PIECE
from engine.serve.request.prompts import Prompts
from tests.builders import POCKET, ROOT

TOKENS = 8  # of an answer
CONTEXT = 2048
FLAGS = (
    f"--port 0 --slots 2 --ctx {CONTEXT} --method full --chunk 128 --threads 1 --grace 1".split()
)


@dataclass
class Kills:
    """The state of a run. expected: answers alone, by document. kept: documents whose request has
    ended, so that a later server must find them.
    """

    folder: Path
    rng: random.Random
    expected: dict[str, str]
    kept: set[str] = field(default_factory=set)
    answers: int = 0
    found: int = 0
    wrong: list[str] = field(default_factory=list)


def documents(rng: random.Random, count: int) -> list[str]:
    """Texts of 1 to 4 blocks, some of which begin alike."""
    words = (POCKET / "welcome.txt").read_text(encoding="utf-8").split()
    start = words[:220]
    made = []
    for number in range(count):
        own = rng.sample(words, rng.randrange(150, 500))
        made.append(" ".join([*(start if number % 2 else []), *own]))
    return made


def asked(text: str) -> list[dict[str, str]]:
    """The messages of a request."""
    return [{"role": "user", "content": f"{text}\n\nWhat is this about?"}]


def alone(llm: LLM, prompts: Prompts, text: str, cache: BlockCache | None = None) -> str:
    """What the library answers, perhaps from the cache's rows."""
    ids = prompts.chat(asked(text)).ids
    with llm.session() as session:
        held = cache.fill(session, ids) if cache is not None else 0
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        return "".join(p.text for p in session.generate(ids[held:], params)).lstrip()


def start(
    folder: Path | None, log: Path, flags: Sequence[str] = FLAGS
) -> tuple[subprocess.Popen[bytes], str]:
    """A server and its address, once it is ready. folder: of its cache, None: it has none."""
    command = [sys.executable, "-m", "engine.serve", *flags]
    command += [] if folder is None else ["--cache", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "OMNIKV_API_KEY"}
    with open(log, "wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, stderr=said, env=environment)
    end = time.monotonic() + 300
    while " is ready: " not in (text := log.read_text(errors="replace")):
        assert process.poll() is None and time.monotonic() < end, text
        time.sleep(0.05)
    return process, text.split("ready: ")[1].split(",")[0]


def ask(run: Kills, url: str, text: str) -> None:
    """One request; what came whole must be right."""
    body = {"messages": asked(text), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    known = text in run.kept
    try:
        reply = httpx.post(f"{url}/chat/completions", json=body, timeout=120)
    except httpx.HTTPError:
        return  # it was killed
    if reply.status_code != 200:
        run.wrong.append(f"status {reply.status_code}: {reply.text[:200]}")
        return
    answer = reply.json()
    run.answers += 1
    said = answer["choices"][0]["message"]["content"]
    if said != run.expected[text]:
        run.wrong.append(f"found {said!r}, expected {run.expected[text]!r}")
    usage = answer["usage"]
    blocks = (usage["prompt_tokens"] - 1) // PIECE * PIECE
    if known:
        run.found += 1
        if usage["prompt_tokens_details"]["cached_tokens"] < blocks:
            run.wrong.append(f"a document that was read is gone: {json.dumps(usage)}")
    run.kept.add(text)


def whole(folder: Path) -> int:
    """Read every block in a folder; raises SavedFileError for one that is not whole."""
    count = 0
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        with Reader(path) as reader:
            held = {name: reader.load(name, 1 << 30) for name in reader.tensors}  # by checksum
            parent, origin = reader.facts["parent"], reader.facts["origin"]
            name = name_of(parent, held["ids"].numpy().tobytes(), origin)
            assert name == reader.facts["name"] == path.name.removesuffix(SUFFIX), path
        count += 1
    return count


def one_round(run: Kills, log: Path) -> None:
    """A server's life."""
    process, url = start(run.folder, log)
    try:
        texts = list(run.expected)

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while process.poll() is None:
                ask(run, url, rng.choice(texts))

        threads = [
            threading.Thread(target=client, args=(run.rng.randrange(2**32),)) for _ in range(3)
        ]
        if run.kept:
            ask(run, url, sorted(run.kept)[0])
        for thread in threads:
            thread.start()
        # none, some or many answers later: on a slow machine too
        goal, end = run.answers + run.rng.randrange(4), time.monotonic() + 120
        while run.answers < goal and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(run.rng.uniform(0.0, 2.0))
        process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    finally:
        process.kill()
        process.wait()


def kill(folder: Path, kills: int, seed: int, say=print) -> Kills:
    """Run `kills` rounds. Raises AssertionError where something was wrong."""
    rng = random.Random(seed)
    llm = LLM(str(POCKET), max_context=CONTEXT, threads=1, chunk=128, method=Full())
    prompts = Prompts(llm.tokenizer, llm.config.vocab_size, llm.end_token_ids)
    texts = documents(rng, 6)
    run = Kills(folder / "cache", rng, {text: alone(llm, prompts, text) for text in texts})
    for number in range(kills):
        one_round(run, folder / "log")
        blocks = whole(run.folder)
        cache = BlockCache(run.folder, announce=run.wrong.append)
        for text in texts:
            if (said := alone(llm, prompts, text, cache)) != run.expected[text]:
                run.wrong.append(f"from disk: found {said!r}, expected {run.expected[text]!r}")
        assert not run.wrong, f"round {number} of seed {seed}: {run.wrong}"
        say(
            f"kill {number + 1}: {blocks} blocks whole, {run.answers} answers right, "
            f"{run.found} of them to documents read before"
        )
    return run


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            kill(Path(folder), args.kills, args.seed)
        except AssertionError as error:
            print(f"wrong: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
