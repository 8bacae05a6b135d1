"""A conversation over a server whose model has recurrent layers: what each turn reads again.

    python -m tests.programs.hybrid_turns [--turns 20] [--savepoints 0 12] [--method full|omnikv]

Two clients send the whole history with every turn. One has edited the last answer from its third
word on. The other has left out what the model thought, as most clients do. A turn should read what
no earlier turn has read, and at most the distance between two savepoints beside it. The model is
small and random and its answers are scripted; the server that keeps and reads them is whole. Prints
a table of tokens read again per turn. Exit code 0, or 1 where a turn reads more than that.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import LLM, Full, OmniKV
from engine.bank.recurrent.savepoints import SPACING
from engine.batch.slots import common
from engine.load.options import SAVEPOINTS
from engine.methods.base import Method
from tests.builders import POCKET
from tests.engine.serve.conftest import Running, serving
from tests.engine.serve.scripted import saying
from tools.families.models import make

CHUNK = 256
METHODS: dict[str, Method] = {
    "full": Full(),
    "omnikv": OmniKV(filter_layers=(3,), tokens=128, dense_below=0),
}
# an answer begins inside a thought; one that the client sends back has none
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|end|>' }}
    {%- else %}
        {{- '<|user|>' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is not defined or enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
WORDS = "the river runs past an old mill where nobody has worked since the war ended".split()


@dataclass
class Turn:
    """One request: tokens of its prompt, those that no earlier turn held, and those it read."""

    prompt: int
    new: int
    read: int

    @property
    def again(self) -> int:
        """Tokens read though an earlier turn had held them."""
        return self.read - self.new


def checkpoint(folder: Path) -> Path:
    """Write a small random Qwen3.5 with the shipped model's tokenizer into an empty folder."""
    ends = dict(bos_token_id=1, eos_token_id=4, pad_token_id=0)
    make(folder, "qwen3.5", vocab_size=5120, max_position_embeddings=32768, **ends)
    shutil.copy(POCKET / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((POCKET / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def talk(server: Running, kind: str, turns: int, seed: int, words: int) -> list[Turn]:
    """The turns of one client. kind: edited or stripped. words: about as many as the longest text
    has.
    """
    draw, messages = random.Random(seed), list[dict[str, str]]()
    found, held = list[Turn](), list[int]()
    llm, thinks = server.service.llm, kind == "stripped"
    variables = {"enable_thinking": thinks}

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))

    for _ in range(turns):
        messages.append({"role": "user", "content": text(10, words)})
        thought = f"{text(10, words // 2)}\n</think>\n\n" if thinks else ""
        said = thought + text(10, words // 2)
        body = {
            "model": "pocket",
            "messages": messages,
            "temperature": 0,
            "chat_template_kwargs": variables,
        }
        with saying(llm, said, pytest.MonkeyPatch()):
            reply = server.post("/v1/chat/completions", body, timeout=600)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        (slot,) = server.worker.slots.slots
        ids = list(slot.session.ids)
        prompt = usage["prompt_tokens"]
        read = prompt - usage["prompt_tokens_details"]["cached_tokens"]
        found.append(Turn(prompt, prompt - common(ids[:prompt], held), read))
        held = ids
        answer = reply.json()["choices"][0]["message"]["content"]
        assert answer == said[len(thought) :]
        if not thinks:
            answer = " ".join([*answer.split()[:3], text(5, words // 2)])
        messages.append({"role": "assistant", "content": answer})
    return found


def run(
    folder: Path,
    kind: str,
    savepoints: int,
    method: str,
    turns: int,
    seed: int,
    words: int = 160,
) -> list[Turn]:
    """The turns of one client over a server of its own. folder: of the checkpoint."""
    settings = dict(max_context=32768, chunk=CHUNK, threads=1, savepoints=savepoints, load=False)
    llm = LLM(str(folder), method=METHODS[method], device="cpu", **settings)
    with serving(llm, slots=1, most=8 << 20) as server:
        return talk(server, kind, turns, seed, words)


def bound() -> int:
    """The most tokens between two savepoints where a client goes back: one begins at every chunk of
    a prompt, and in an answer at every SPACING tokens.
    """
    return max(CHUNK, SPACING)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=20, help="requests of a conversation")
    parser.add_argument("--savepoints", type=int, nargs="+", default=[0, SAVEPOINTS])
    parser.add_argument("--method", default="full", choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0, help="of the words")
    given = parser.parse_args(arguments)
    columns, names = list[list[Turn]](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoint(Path(name))
        for kind in ("edited", "stripped"):
            for savepoints in given.savepoints:
                names.append(f"{kind}, {savepoints} savepoints")
                shared = given.method, given.turns, given.seed
                columns.append(run(folder, kind, savepoints, *shared))
    print("| turn | " + " | ".join(f"{name}: prompt, new, again" for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for number, turns in enumerate(zip(*columns), 1):
        cells = (f"{turn.prompt:,}, {turn.new:,}, {turn.again:,}" for turn in turns)
        print(f"| {number} | " + " | ".join(cells) + " |")
    totals = (
        f"{sum(t.again for t in turns):,} (most {max(t.again for t in turns):,})"
        for turns in columns
    )
    print("| all | " + " | ".join(totals) + " |")
    kept = [turns for name, turns in zip(names, columns) if " 0 " not in name]
    return int(any(turn.again > bound() for turns in kept for turn in turns))


if __name__ == "__main__":
    sys.exit(main())
