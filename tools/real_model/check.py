"""Compare the engine with transformers on ten prompts: the greedy tokens of the same folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import EngineError
from engine.llm import LLM
from engine.methods.full import Full
from engine.sampling.params import SamplingParams

NEW_TOKENS = 32
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    "Translate to Spanish: good morning",
    "List three fruits.",
    "Why is the sky blue?",
    "What does the Python function len() do?",
    "Count from 1 to 10.",
    "My key is 48213. What is my key?",
    "Explain in one sentence what a licence is. \N{GRINNING FACE} \N{CJK UNIFIED IDEOGRAPH-4E2D}",
)


@dataclass(frozen=True)
class Answer:
    """A rendered prompt's ids and the greedy ids after it, without the end token."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Row:
    """One prompt, both answers, and our answer as text."""

    prompt: str
    ours: Answer
    theirs: Answer
    text: str

    @property
    def equal(self) -> bool:
        """Whether prompt ids and answers are the same."""
        return self.ours == self.theirs


def has_transformers() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("transformers") is not None


def require_transformers() -> None:
    """Raise EngineError with the remedy where transformers is missing."""
    if not has_transformers():
        raise EngineError(
            "the check needs transformers: pip install transformers (or pip install -r "
            "requirements-dev.txt), or leave it out with --no-check"
        )


def ours(llm: LLM, prompt: str) -> Answer:
    """The engine's answer, with full attention."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None  # the folder has one
    text = tokenizer.render([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(text, special=False)
    answer = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    return Answer(ids, _without_end(answer.token_ids, llm.end_token_ids))


class Peer:
    """transformers with the same folder, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()

    def prompt(self, prompt: str) -> list[int]:
        """The ids of a rendered prompt."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def answer(self, prompt: str) -> Answer:
        """Its greedy answer."""
        import torch

        ids = self.prompt(prompt)
        out = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        ends = (self.model.config.eos_token_id,)
        return Answer(ids, _without_end(out[0, len(ids) :].tolist(), ends))

    def greedy(self, ids: list[int]) -> list[int]:
        """The likeliest id after each prefix of `ids`: one forward pass."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()


def _without_end(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    """The ids before the first end token."""
    stop = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:stop])


def compare(folder: Path) -> Iterator[Row]:
    """Both answers to each prompt, in float32 on the CPU."""
    require_transformers()
    llm = LLM(str(folder), device="cpu", dtype="float32", method=Full(), max_context=512)
    peer = Peer(folder)
    for prompt in PROMPTS:
        mine = ours(llm, prompt)
        assert llm.tokenizer is not None
        yield Row(prompt, mine, peer.answer(prompt), llm.tokenizer.decode(mine.tokens))


def table_head() -> str:
    """The first line of the table."""
    return f"{'prompt':42} tokens  same tokens as transformers   answer"


def table_line(row: Row) -> str:
    """One prompt of the table."""
    same = sum(1 for _ in _common(row.ours.tokens, row.theirs.tokens))
    verdict = "all" if row.equal else f"NO: {same}, then another"
    text = " ".join(row.text.split())
    return f"{row.prompt[:42]:42} {len(row.ours.tokens):6}  {verdict:27}   {text[:48]}"


def _common(first: list[int], second: list[int]) -> Iterator[int]:
    """The tokens that two answers begin with."""
    for a, b in zip(first, second):
        if a != b:
            return
        yield a
