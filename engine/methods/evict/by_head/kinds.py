"""Settings of methods whose K/V heads are of two kinds: some keep every token, the others few; and
the bytes that their stores take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.base.checks import found
from engine.base.errors import SettingError
from engine.base.figures import human
from engine.methods.base import Method
from engine.methods.evict.shared.settings import Evicting, answer_tokens
from engine.methods.evict.shared.store import ROOM, reserved, row_bytes
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class HeadKinds(Evicting):
    """A method says which heads keep every token (`whole`) and how many the others hold."""

    named = False

    @property
    def whole(self) -> tuple[tuple[bool, ...], ...]:
        """Whether each K/V head of each layer keeps every token; empty where nobody knows yet."""
        raise NotImplementedError

    def few(self, length: int) -> int:
        """Tokens that one of the other heads holds at most, after a prompt of `length`."""
        raise NotImplementedError

    def few_reserved(self, prompt: int, generated: int) -> int:
        """Rows in such a head's store, used or not, after a prompt and `generated` tokens."""
        base, most = min(prompt, self.few(prompt)), self.few(prompt)
        return reserved(base, min(base + generated, most))

    def few_most(self, capacity: int) -> int:
        """Rows in such a head's store at most, used or not, in a session of `capacity` tokens."""
        return min(capacity, self.few(capacity)) + ROOM

    def extra_bytes(self, config: ModelConfig, rows: int, layer: int) -> int:
        """Bytes beside K, V and positions of a layer's `rows`, rows of single heads."""
        return 0

    def streamed(self, config: ModelConfig) -> Method:
        raise self.no_stream("keeps every token in some heads")

    def heads_of(self, layer: int) -> tuple[int, int]:
        """(heads that keep everything, others) of a layer; (1, 0) where nobody knows yet."""
        if not self.whole:
            return 1, 0
        many = sum(self.whole[layer])
        return many, len(self.whole[layer]) - many

    def budgets(self, plan: LayerPlan, length: int) -> list[int]:
        """Tokens that a layer keeps, mean over its heads, rounded up."""
        small, found = min(length, self.few(length)), []
        for layer in range(plan.num_layers):
            many, few = self.heads_of(layer)
            found.append(max(1, math.ceil((many * length + few * small) / (many + few))))
        return found

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Kinds are of every layer; heads of few tokens attend by a plain softmax."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(needs, sliding=False, capped=False)

    def budget(self, plan: LayerPlan, length: int) -> int:
        budgets = self.budgets(plan, length)
        return math.ceil(sum(budgets) / len(budgets))

    def rows_of(self, config: ModelConfig, layer: int, whole: int, small: int) -> int:
        """Rows of single heads of a layer, of so many in each head of both kinds."""
        if not self.whole:
            return config.num_kv_heads * whole
        many, few = self.heads_of(layer)
        return many * whole + few * small

    def total_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, whole: int, small: int
    ) -> int:
        """Bytes of the stores of all layers, of so many rows in each head of both kinds."""
        found, row = 0, row_bytes(config, itemsize, 0)
        for layer in range(plan.num_layers):
            rows = self.rows_of(config, layer, whole, small)
            found += rows * row + self.extra_bytes(config, rows, layer)
        return found

    def _reserved(self, prompt: int, generated: int) -> tuple[int, int]:
        """Rows that a head of each kind has after a prompt and `generated` tokens."""
        return reserved(prompt, prompt + generated), self.few_reserved(prompt, generated)

    def kv_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        sizes = self._reserved(prompt, generated)
        rows = sum(self.rows_of(config, layer, *sizes) for layer in range(plan.num_layers))
        return rows * (config.kv_bytes(itemsize) // config.num_kv_heads)

    def held_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        return self.total_bytes(plan, config, itemsize, *self._reserved(prompt, generated))

    def point_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        sizes = capacity, min(capacity, self.few(capacity))
        return self.total_bytes(plan, config, itemsize, *sizes)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """After the longest prompt and its answer, of which whole heads keep everything."""
        sizes = capacity + ROOM, self.few_most(capacity)
        return self.total_bytes(plan, config, itemsize, *sizes)

    def store_rows(self, plan: LayerPlan, capacity: int) -> int:
        """Rows of all layers in `store_bytes`, mean over heads."""
        rows, small = 0, self.few_most(capacity)
        for layer in range(plan.num_layers):
            many, few = self.heads_of(layer)
            rows += (many * (capacity + ROOM) + few * small) // (many + few)
        return rows

    def store_note(self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int) -> str:
        answer = answer_tokens(capacity)
        token = self.total_bytes(plan, config, itemsize, 1, 0) - self.total_bytes(
            plan, config, itemsize, 0, 0
        )
        return (
            f"{'' if self.forget else 'beside the bank, '}after a prompt of {capacity - answer} "
            f"tokens and an answer of {answer}; {human(token)} a token of a longer answer"
        )


def highest(scores: Sequence[Sequence[float]], share: float) -> set[tuple[int, int]]:
    """(layer, head) of the `share` of all heads with the highest scores [layer][head], rounded; of
    equal scores the earlier heads'.
    """
    places = [(i, j) for i, row in enumerate(scores) for j in range(len(row))]
    places.sort(key=lambda place: -scores[place[0]][place[1]])  # stable
    return set(places[: math.floor(share * len(places) + 0.5)])


def no_budget(name: str, tokens: int | None, instead: str) -> SettingError:
    """The error for a budget of all heads where heads have none."""
    return SettingError(
        f"tokens: found {found(tokens)}, but {name} has no budget for all heads; set {instead}"
    )
