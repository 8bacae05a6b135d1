"""Settings of methods that give tokens up for good: a budget per K/V head and layer, and the bytes
that their stores take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.bank.row_origins import Span
from engine.base.checks import at_most_one, boolean, fraction, integer
from engine.base.errors import SettingError
from engine.base.figures import human
from engine.methods.base import Method
from engine.methods.evict.shared.store import ROOM, reserved, row_bytes
from engine.methods.evict.shared.windows import evicting_plan
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs

# tokens of an answer that a plan counts behind the longest prompt: the most that the chat writes
# unless it is told otherwise
ANSWER = 1024


@dataclass(frozen=True)
class Evicting(Method):
    """Budget: tokens | share, at most one, per K/V head and layer; share is of the bank's length at
    the end of the latest prefill. Where neither is given the method's published default holds.
    forget: free the rows that the store does not take; going back further than a savepoint, and
    another method, read the tokens again. False: the whole bank stays beside the store.
    """

    tokens: int | None = None
    share: float | None = None
    forget: bool = True

    named = False
    # whether heads of different counts lie in one run (engine/methods/evict/shared/ragged.py)
    ragged = False
    scored = False  # whether the store keeps float32 scores with every token (`scores_of`)
    # when a first prompt is cut: at its end, or after the "first_step" of the answer
    cut = "prefill"
    min_tokens = 1  # that a head keeps whatever the budget

    def __post_init__(self) -> None:
        at_most_one(self, "tokens", "share")
        boolean("forget", self.forget)
        if self.tokens is not None:
            integer("tokens", self.tokens, self.min_tokens)
        elif self.share is not None:
            fraction("share", self.share)
        else:
            for name, value in self.default_budget().items():
                object.__setattr__(self, name, value)

    @property
    def own_prefill(self) -> bool:
        """Whether prompts are read otherwise than by full attention, so that a session read under
        another method cannot continue with this one.
        """
        return False

    @property
    def cannot_draft(self) -> str:
        return "it forgets rows that full attention reads"

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """A later prompt attends to what the store has kept."""
        spans = super().prompt_origins(plan, begin, first, stop, total)
        return [(stop, None)] if begin else spans

    def streamed(self, config: ModelConfig) -> Method:
        raise self.no_stream("holds a prompt until its end")

    def default_budget(self) -> dict[str, Any]:
        """The published budget: {"tokens": n} or {"share": x}."""
        return {"share": 0.2}

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Every layer that sees all tokens reads what it has retained; others stay as they are."""
        return evicting_plan(self.name, config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        prompt, waiting = capacity - 1, self.waiting(capacity) if self.forget else 0
        store = self.store_bytes(plan, config, itemsize, capacity)
        if waiting >= capacity:
            # as a layer is cut, the rows that stay take the place of those that waited
            store -= self.store_rows(plan, capacity) * config.kv_bytes(itemsize)
        return Needs(
            store_bytes=store,
            store_note=self.store_note(plan, config, itemsize, capacity),
            retained=min(capacity, self.budget(plan, capacity)),
            retained_bytes=self.kv_bytes(plan, config, itemsize, prompt, 1) if prompt else 0,
            offload=() if self.forget else plan.each_layer,
            whole_layer=True,
            step_rows=0,  # a step reads its store
            history="store",
            forgets=self.forget,
            waiting=waiting,
            point_bytes=self.point_bytes(plan, config, itemsize, capacity) if self.forget else 0,
            proportional=self.tokens is None,
            sliding=True,
            capped=True,
        )

    def scores_of(self, config: ModelConfig) -> int:
        """Float32 scores that the store keeps with each row of a K/V head."""
        return config.group if self.scored else 0

    def waiting(self, capacity: int) -> int:
        """Rows of a layer beside a chunk's that wait for a cut, in a session of `capacity` tokens
        that forgets: by default a prompt's, until its end.
        """
        return capacity

    def point_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """Bytes of the store at a prompt's end, which a session that forgets keeps to go back to; 0
        where the first step of an answer makes it.
        """
        if self.cut == "first_step":
            return 0
        rows = sum(min(capacity, budget) for budget in self.budgets(plan, capacity))
        return rows * config.num_kv_heads * row_bytes(config, itemsize, self.scores_of(config))

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """All so far, the chunk included, and once more where the prompt ends and is cut."""
        return stop if stop < total else 2 * stop

    def budget(self, plan: LayerPlan, length: int) -> int:
        """Tokens that a K/V head keeps, mean over heads and the layers that evict, where the latest
        prefill ended at `length`.
        """
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(self.min_tokens, math.floor(self.share * length))

    def budgets(self, plan: LayerPlan, length: int) -> list[int]:
        """Budget of each layer that evicts, ascending."""
        return [self.budget(plan, length)] * len(plan.partial_layers)

    def max_rows(self, budget: int) -> int | None:
        """Rows that a store of this budget never exceeds, one for the step under way included; None
        where generated tokens stay.
        """
        return None

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        """(base, held): tokens of a layer, mean over its heads, when its store was made and now,
        after a prompt of `length` and `generated` tokens.
        """
        kept = min(length, budget)
        return kept, kept + generated

    def rows_reserved(self, plan: LayerPlan, prompt: int, generated: int = 0) -> int:
        """Rows that the stores of all layers that evict hold per K/V head, in use or not, after one
        prompt and `generated` tokens.
        """
        return sum(
            reserved(*self.course(budget, prompt, generated), self.max_rows(budget))
            for budget in self.budgets(plan, prompt)
        )

    def kv_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        """Bytes of K and V that are needed then: the stores', or the bank's where nothing is cut
        yet.
        """
        if self.cut == "first_step" and generated == 0:
            return len(config.keeping_layers) * prompt * config.kv_bytes(itemsize)
        return self.rows_reserved(plan, prompt, generated) * config.kv_bytes(itemsize)

    def held_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        """Bytes of the stores then, positions and scores included: exactly what a session allocates
        beside its bank, or without one.
        """
        rows = self.rows_reserved(plan, prompt, generated)
        return rows * config.num_kv_heads * row_bytes(config, itemsize, self.scores_of(config))

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """Most bytes that a session of `capacity` tokens holds after a prompt and an answer of
        ANSWER tokens, which stay where nothing is evicted in an answer.
        """
        rows = self.store_rows(plan, capacity)
        return rows * config.num_kv_heads * row_bytes(config, itemsize, self.scores_of(config))

    def store_rows(self, plan: LayerPlan, capacity: int) -> int:
        """Rows of all layers in `store_bytes`, per K/V head."""
        answer, rows = answer_tokens(capacity), 0
        prompt = capacity - answer
        for short, budget in zip(self.budgets(plan, prompt), self.budgets(plan, capacity)):
            most = self.max_rows(budget)
            if most is None:
                # a store grows by ROOM, always with room for one more
                rows += min(prompt, short) + answer + ROOM
            else:
                rows += min(most, capacity + ROOM)
        return rows

    def store_note(self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int) -> str:
        """What `store_bytes` counts, for the plan."""
        if self.forget and self.waiting(capacity) >= capacity:
            kept = self.point_bytes(plan, config, itemsize, capacity)
            kept = kept or self.held_bytes(plan, config, itemsize, capacity - 1, 1)
            return f"scores and positions; {human(kept)} with K and V after the prompt's cut"
        if all(self.max_rows(budget) is not None for budget in self.budgets(plan, capacity)):
            return f"the most that is kept{'' if self.forget else ' beside the bank'}"
        answer = answer_tokens(capacity)
        token = (
            len(plan.partial_layers)
            * config.num_kv_heads
            * row_bytes(config, itemsize, self.scores_of(config))
        )
        return (
            f"{'' if self.forget else 'beside the bank, '}after a prompt of {capacity - answer} "
            f"tokens and an answer of {answer}; {human(token)} a token of a longer answer"
        )

    def validate_switch(self, length: int) -> None:
        if self.own_prefill:
            raise SettingError(
                f"{self.name}: reads prompts in its own way, and this session has read {length} "
                "tokens already; make a session with it"
            )


def answer_tokens(capacity: int) -> int:
    """Tokens of a session of `capacity` tokens that a plan takes for an answer; the rest is the
    prompt.
    """
    return min(ANSWER, capacity - 1)
