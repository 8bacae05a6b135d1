"""FastGen: each head keeps what it looks at: special tokens, punctuation, what is looked at most,
the newest, or everything.

Source: Ge et al., Model Tells You What to Discard (ICLR 2024), sections 3.3 and 3.4. At a prompt's
end a head tries the policies special; + punctuation; + frequent; + local; full, and takes the first
whose tokens have at least 1 - eps of its attention. frequent: the 30% of the text that have
received most attention; local: its newest 30%; eps 0.05, all as published. The policy goes on in
the answer. Differs: profiled are a prompt's last `window` queries (the paper: all), which a K/V
head's query heads must each be content with (the paper's models have no groups); an answer is cut
every `every` tokens, and until then keeps what it writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import found, fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.by_head.policies import EVERYTHING, POLICIES, chosen, kept
from engine.methods.evict.shared.ragged import joined, table_bytes
from engine.methods.evict.shared.runtime import Chooser, EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import MOST_WINDOW, Needs
from kernels.select.column_sums import column_sums

Ids = tuple[int, ...]


@dataclass(frozen=True)
class FastGen(Evicting):
    """eps: attention that a head may lose, in [0, 1); 0: full attention. frequent, local: parts of
    the text's length. window: newest queries of a prompt that are profiled; every: tokens of an
    answer between two cuts. special, punctuation: token ids; None: the tokenizer's, without one
    none. tokens, share: none.
    """

    full_prompts = True
    named = True
    ragged = True
    scored = True

    eps: float = 0.05
    frequent: float = 0.3
    local: float = 0.3
    window: int = 64
    every: int = 64
    special: Ids | None = None
    punctuation: Ids | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "share"):
            if getattr(self, name) is not None:
                raise SettingError(
                    f"{name}: found {found(getattr(self, name))}, but fastgen has no budget: its "
                    "heads keep what they look at; set eps, frequent and local"
                )
        super().__post_init__()
        for name in ("eps", "frequent", "local"):
            fraction(name, getattr(self, name), zero=True)
        if self.eps == 1:
            raise SettingError("eps: found 1, expected less: a head would keep nothing")
        for name in ("window", "every"):
            integer(name, getattr(self, name), 1)
            if getattr(self, name) > MOST_WINDOW:
                raise SettingError(
                    f"{name}: found {getattr(self, name)}, expected at most {MOST_WINDOW}"
                )
        for name in ("special", "punctuation"):
            object.__setattr__(self, name, checked_ids(name, getattr(self, name)))

    def default_budget(self) -> dict[str, Any]:
        return {}

    def budget(self, plan: LayerPlan, length: int) -> int:
        """What a head keeps at most; how much it is, nobody knows before."""
        return length

    def scores_of(self, config: ModelConfig) -> int:
        """One: of a group the sum."""
        return 1

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(needs, prompt_window=self.window, ids=True)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """With the tables of where heads lie, and what kind each token is of."""
        rows = super().store_bytes(plan, config, itemsize, capacity)
        return rows + table_bytes(plan, config) + capacity

    def runtime(self, setup: Setup) -> Runtime:
        return FastGenRuntime(self, setup)


def checked_ids(name: str, ids: Any) -> Ids | None:
    """Token ids as a tuple. Raises SettingError where they are none."""
    if ids is None:
        return None
    if not isinstance(ids, Collection) or isinstance(ids, str):
        raise SettingError(f"{name}: found {found(ids)}, expected a list of token ids")
    if any(type(i) is not int or i < 0 for i in ids):
        raise SettingError(f"{name}: found {found(ids)}, expected whole numbers from 0 on")
    return tuple(sorted(ids))


class FastGenRuntime(EvictingRuntime):
    """One session's stores, with a policy per K/V head."""

    method: FastGen

    def __init__(self, method: FastGen, setup: Setup):
        super().__init__(method, setup)
        self.step: Step | None = None  # the step under way
        self.table = self._table(setup)
        # what each token is, by position (policies.kept), of each sequence
        self.kinds = torch.zeros(setup.batch, setup.capacity, dtype=torch.int8, device=setup.device)
        # [sequence][layer][K/V head]; a session begins with everything
        whole = [[EVERYTHING] * self.heads for _ in range(self.plan.num_layers)]
        self.policies = [whole for _ in range(setup.batch)]

    def _table(self, setup: Setup) -> torch.Tensor:
        """The kind int8 [vocab] of each token id."""
        special, punctuation = self.method.special, self.method.punctuation
        if setup.marks is not None and (special is None or punctuation is None):
            given = setup.marks()
            special = tuple(given[0]) if special is None else special
            punctuation = tuple(given[1]) if punctuation is None else punctuation
        size = setup.config.vocab_size
        table = torch.zeros(size, dtype=torch.int8)
        for kind, ids in ((1, punctuation or ()), (2, special or ())):
            table[[i for i in ids if i < size]] = kind
        return table.to(setup.device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.kinds.nbytes

    # ---------------------------------------------------------------- which tokens are what

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Keep the step for the cut that may follow, and what its tokens are."""
        if self.step is not step:
            self.step = step
            if step.tokens is not None:
                kinds = self.table[step.tokens]
                self.kinds.scatter_(1, step.positions, kinds)
        return super().attend(layer, q, step)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        if step is not None and step.tokens is not None:
            self.kinds[0, :length] = self.table[step.tokens[0]]
        super().end_prompt(length, step)

    def commit(self, count: int) -> None:
        super().commit(count)
        self.step = None

    # ---------------------------------------------------------------- cuts

    def _evict(self, b: int, sequence: Sequence) -> None:
        super()._evict(b, sequence)
        due = (sequence.length - sequence.prompt) % self.method.every == 0
        if due and any(p < EVERYTHING for heads in self.policies[b] for p in heads):
            self.fold(b, self.step, self.choose)

    def _made(self, b: int, layer: int, step: Step | None, choose: Chooser | None) -> list[Rows]:
        """A layer's new store: of each head what its policy keeps, found anew at a prompt's end."""
        sequence, parts, policies = self.sequences[b], [], []
        assert self.bank is not None
        ends = sequence.length == sequence.prompt
        count = min(self.method.window, sequence.length - sequence.since)
        count = count if ends else self.method.every
        for number, (heads, k, v, held) in enumerate(
            self.live(layer, self.bank, sequence.length, b)
        ):
            positions = sequence.positions(layer, number, held, len(k), k.device)
            scores = torch.zeros(len(k), 1, k.shape[1], device=k.device)
            if held:
                old = sequence.layers[layer][number].scores if sequence.layers else None
                assert old is not None
                scores[:, :, :held] = old[:, :, :held]
            part = Part(heads, k, v, positions, scores)
            mine = self.policies[b][layer][heads]
            if step is not None and choose is not None and count:
                sums = self._sums(sequence, layer, part, count, step)
                scores += sums.sum(1, keepdim=True)
                mine = self._profiled(b, sequence, part, sums / count) if ends else mine
            policies += mine
            parts += [part.head(i) for i in range(len(k))]
        self.policies[b] = [*self.policies[b][:layer], policies, *self.policies[b][layer + 1 :]]
        found = [self._cut(b, sequence, *pair) for pair in zip(parts, policies, strict=True)]
        return joined(self.method, found, self.softmax[layer])

    def _sums(
        self, sequence: Sequence, layer: int, part: Part, count: int, step: Step
    ) -> torch.Tensor:
        """Attention [h, G, T] of the newest `count` queries, whose rows are the last."""
        q = self.newest_queries(sequence, layer, part.heads, count, step)
        softmax = self.softmax_of(layer, part.heads)
        return column_sums(q, part.k, part.k.shape[1] - count, self.scale, softmax=softmax)

    def _kept(self, b: int, sequence: Sequence, part: Part, policy: int) -> torch.Tensor:
        assert part.scores is not None
        kinds = self.kinds[b, part.positions.long()]
        given = kinds, part.positions, part.scores[:, 0], sequence.length
        return kept(policy, *given, self.method.frequent, self.method.local)

    def _profiled(self, b: int, sequence: Sequence, part: Part, weights: torch.Tensor) -> list[int]:
        """The policy of each head, by the mean attention [h, G, T] that its queries have given."""
        lost = torch.stack(
            [
                (weights * ~self._kept(b, sequence, part, policy)[:, None]).sum(-1).amax(1)
                for policy in range(POLICIES)
            ]
        )
        return chosen(lost, self.method.eps)

    def _cut(self, b: int, sequence: Sequence, part: Part, policy: int) -> Rows:
        """The Rows of one head."""
        index = self._kept(b, sequence, part, policy)[0].nonzero().T
        return Rows.gather(part, index)

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """With the policies, and what the tokens are."""
        state, length = super().state(), self.sequences[0].length
        if state is None:
            return None
        return (*state, [list(heads) for heads in self.policies[0]], self.kinds[0, :length].clone())

    def load(self, state: Any, length: int | None) -> None:
        *rest, policies, kinds = state
        super().load(tuple(rest), length)
        self.policies[0] = [list(heads) for heads in policies]
        self.kinds[0, : len(kinds)] = kinds

    def restored(self, state: Any, length: int) -> Any:
        """Policies and kinds that there are."""
        *rest, policies, kinds = state
        rest = super().restored(tuple(rest), length)
        shape = [len(heads) for heads in policies]
        known = all(type(p) is int and 0 <= p < POLICIES for heads in policies for p in heads)
        if shape != [self.heads] * self.plan.num_layers or not known:
            raise ValueError("policies")
        if kinds.dtype != torch.int8 or tuple(kinds.shape) != (length,):
            raise ValueError("kinds")
        return (*rest, policies, kinds.to(self.setup.device))

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        super().copy_from(other, sequence)
        self.policies[sequence] = [list(heads) for heads in other.policies[0]]
        size = min(self.kinds.shape[1], other.kinds.shape[1])
        self.kinds[sequence, :size] = other.kinds[0, :size]
