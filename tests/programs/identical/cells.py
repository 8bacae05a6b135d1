"""What is compared: 40 prompts of 200 to 900 tokens for every model and dtype, both tiers.

Budgets and draft lengths take turns over the prompts. A real model reads held-out prose, code,
key-value lists and random token ids; random models read random token ids, each prompt another model
with peaky attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from engine import LLM, Exact, Full, OmniKV, Quest, TidalDecode
from tests.builders import POCKET, random_ids, session_config, tiny_llm
from tools.common.documents import texts

if TYPE_CHECKING:
    from engine.methods.base import Method

PROMPTS = 40
TOKENS = 200
SHORTEST, LONGEST = 200, 900
CONTEXT = 1152
KINDS = ("prose", "code", "key-value", "random")
TEXTS = 10  # of a kind
TIERS = ("device", "host")
BUDGETS = (8, 32)  # tokens beside a tail of 64: the least that a draft can read
DRAFTS = (2, 4, 3, 7)
VOCAB = 61  # of the random models
HEADS = ((4, 4), (4, 2), (8, 2), (8, 1))  # query and K/V heads of the random models
RANDOM_METHODS: tuple[Method, ...] = (
    OmniKV(filter_layers=(1,), tail=64, dense_below=0),
    Quest(dense_layers=1),
    OmniKV(filter_layers=(0, 3), tail=64, dense_below=0, selector="uniform", window=5),
    TidalDecode(select_layer=1),
)
REAL_FILTERS = ((2, 8, 17), (0, 2, 7, 17, 20))


@dataclass(frozen=True)
class Cell:
    """One answer to compare. model: "real", "pocket" or "random"."""

    model: str
    dtype: str
    prompt: int
    offload: str

    @property
    def name(self) -> str:
        """What a record of it is found by."""
        return f"{self.model} {self.dtype} {self.prompt} {self.offload}"

    @property
    def length(self) -> int:
        """Tokens of the prompt, the same for all models."""
        return random.Random(self.prompt).randrange(SHORTEST, LONGEST)

    @property
    def kind(self) -> str:
        """Of the prompt's text."""
        return "random" if self.model == "random" else KINDS[self.prompt % len(KINDS)]

    @property
    def budget(self) -> int:
        """A prompt has one budget on the device and the other over a host tier."""
        turn = self.prompt // len(KINDS) + TIERS.index(self.offload)
        return BUDGETS[turn % len(BUDGETS)]

    @property
    def draft(self) -> int:
        """Tokens drafted before each verification."""
        turn = self.prompt + self.prompt // (len(KINDS) * len(BUDGETS))
        return DRAFTS[turn % len(DRAFTS)]

    @property
    def method(self) -> Exact:
        """Every fifth prompt drafts from its own text too."""
        if self.model == "random":
            method = RANDOM_METHODS[self.prompt // len(HEADS) % len(RANDOM_METHODS)]
            # Quest reads whole pages of 16 tokens, at least three
            budget = self.budget + 40 * isinstance(method, Quest)
        else:
            filters = (2,) if self.model == "pocket" else REAL_FILTERS[self.prompt % 2]
            method = OmniKV(filter_layers=filters, tail=64, dense_below=0)
            budget = self.budget
        inner = replace(method, tokens=budget)  # type: ignore[call-arg]
        return Exact(inner, draft=self.draft, lookup=self.prompt % 5 == 4)


def cells(models: Sequence[str], prompts: int = PROMPTS) -> Iterator[Cell]:
    """All cells, prompt by prompt, so that a part of them is a part of every combination. One
    prompt in four is answered in bfloat16 too, where ties are.
    """
    for prompt in range(prompts):
        for model in models:
            for dtype in ("float32", "bfloat16"):
                if dtype == "bfloat16" and prompt % 4 != prompt // 4 % 4:
                    continue
                for offload in TIERS:
                    yield Cell(model, dtype, prompt, offload)


def llm_of(cell: Cell, folder: str | None) -> LLM:
    """The cell's model; folder: the real checkpoint's."""
    if cell.model == "random":
        return _random_llm(cell.prompt, cell.dtype)
    return _checkpoint(str(POCKET) if cell.model == "pocket" else str(folder), cell.dtype)


def prompt_of(cell: Cell, llm: LLM) -> list[int]:
    """Token ids of the cell's prompt."""
    if cell.kind == "random":
        return random_ids(cell.length, llm.config.vocab_size, seed=cell.prompt)
    found = _texts(cell.model, cell.kind, llm)[cell.prompt // len(KINDS)]
    return list(found[: cell.length])


_TEXTS: dict[tuple[str, str], list[tuple[int, ...]]] = {}


def _texts(model: str, kind: str, llm: LLM) -> list[tuple[int, ...]]:
    if (model, kind) not in _TEXTS:
        assert llm.tokenizer is not None
        found = texts(llm.tokenizer, "held-out", LONGEST, TEXTS, (kind,))
        _TEXTS[model, kind] = [text.ids for text in found]
    return _TEXTS[model, kind]


@lru_cache(maxsize=4)
def _checkpoint(folder: str, dtype: str) -> LLM:
    llm = LLM(folder, device="cpu", dtype=dtype, method=Full(), max_context=CONTEXT, threads=1)
    llm.load()
    return llm


@lru_cache(maxsize=2)
def _random_llm(seed: int, dtype: str) -> LLM:
    heads, kv_heads = HEADS[seed % len(HEADS)]
    config = session_config(
        layers=6, hidden=64, heads=heads, kv_heads=kv_heads, head_dim=16, vocab_size=VOCAB
    )
    settings = {"seed": seed, "sharpness": 2.0, "dtype": dtype, "max_context": CONTEXT}
    return tiny_llm(Full(), config, threads=1, **settings)
