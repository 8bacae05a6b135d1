"""A session's runtime of one runtime for each part of a model, on the part's device.

A part's runtime knows its own layers alone, numbered from 0, and has a place for each list that an
earlier part's filter layer chooses for some of them (engine/plan/split/cut.py). The list crosses
when the part begins, beside the hidden vector. What a session asks of its runtime is asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.bank.base import Bank, Opened, Step
from engine.base.device import current
from engine.methods.base import Method, Runtime, Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.split.stores import joined, shares
from engine.plan.prefill_time import PrefillFlops
from engine.plan.split.cut import found_in


class SplitRuntime(Runtime):
    """The runtimes `parts`. setup: of the whole model, with the scratch of the first part; starts:
    the first layer of each part, and the number of layers.
    """

    def __init__(
        self, method: Method, setup: Setup, parts: Sequence[Runtime], starts: Sequence[int]
    ) -> None:
        self.method, self.setup, self.plan = method, setup, setup.plan
        self._bank: Bank | None = None
        self.by_part, self.starts = tuple(parts), tuple(starts)
        # whose state is that of all: a part whose layers all read everything has none
        partial = (part for part in parts if part.plan.partial_layers)
        self._stated = next(partial, self.by_part[0])
        self.scale = setup.config.scale
        self.softmax = tuple(one for part in parts for one in part.softmax)
        self.needs = method.needs(setup.plan, setup.config, setup.capacity, setup.dtype.itemsize)

        self._evicts = isinstance(self._stated, EvictingRuntime)
        self._carried = [_carried(own, parts) for own in range(len(parts))]

    def _of(self, layer: int) -> tuple[Runtime, int, int]:
        part, number = found_in(self.starts, layer)
        return self.by_part[part], number, part

    def _here(self, part: Runtime) -> AbstractContextManager[object]:
        return current(part.setup.device)

    def _each(self, work: Callable[[Runtime], object]) -> None:
        for part in self.by_part:
            with self._here(part):
                work(part)

    def _listed(self, rows: Callable[[Runtime], list[int]]) -> list[int]:
        return [count for part in self.by_part for count in rows(part)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.by_part)

    @property
    def kv_bytes(self) -> int:
        return sum(part.kv_bytes for part in self.by_part)

    @property
    def bank(self) -> Bank | None:  # type: ignore[override]
        """The session's."""
        return self._bank

    @bank.setter
    def bank(self, bank: Bank | None) -> None:
        assert bank is not None, "a session has a bank"
        self._bank = bank
        for part, own in zip(self.by_part, bank.parts, strict=True):
            part.bank = own

    @property
    def k(self) -> int:
        """Of a method that evicts, the mean over the layers of all parts that do."""
        if not self._evicts:
            return max(part.k for part in self.by_part)
        parts = [part for part in self.by_part if isinstance(part, EvictingRuntime)]
        budgets = [budget for part in parts for budget in part.sequences[0].budgets]
        return sum(budgets) // max(1, sum(len(part.evicting) for part in parts))

    def clear_scratch(self) -> None:
        self._each(lambda part: part.clear_scratch())

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self._each(lambda part: part.begin_prompt(start, stop, more))

    def chunk_stop(self, first: int, stop: int) -> int:
        return min(part.chunk_stop(first, stop) for part in self.by_part)

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        part, number, at = self._of(layer)
        return part.attend_prompt(number, q, bank.parts[at], start)

    @property
    def reads_whole_prompts(self) -> bool:
        return all(part.reads_whole_prompts for part in self.by_part)

    def attend_opened(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, opened: Opened
    ) -> torch.Tensor:
        part, number, at = self._of(layer)
        return part.attend_opened(number, q, bank.parts[at], start, opened)

    def attend_prompt_local(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, stop: int
    ) -> torch.Tensor:
        part, number, at = self._of(layer)
        return part.attend_prompt_local(number, q, bank.parts[at], start, stop)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        for number, part in enumerate(self.by_part):
            with self._here(part):
                part.end_prompt(length, None if step is None else step.parts[number])

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        # each part counts all layers, by its own roles
        found = [part.prompt_flops(flops, start, stop) for part in self.by_part]
        shares = [part.plan.num_layers / self.plan.num_layers for part in self.by_part]
        linear, attention = zip(*found)
        return (
            sum(a * b for a, b in zip(linear, shares)),
            sum(a * b for a, b in zip(attention, shares)),
        )

    # ---------------------------------------------------------------- a step

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        part, number, at = self._of(layer)
        return part.attend(number, q, step.parts[at])

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        part, number, at = self._of(layer)
        return part.attend_local(number, q, step.parts[at])

    def carry(self, part: int) -> None:
        own = self.by_part[part]
        for group, source, theirs in self._carried[part]:
            if own.plan.groups[group].layers:
                own.receive(group, self.by_part[source], theirs)

    def carry_kept(self, part: int) -> None:
        """Bring to a part, before a step in which no layer chooses, what layers of it read then and
        in no other step.
        """
        own = self.by_part[part]
        for group, source, theirs in self._carried[part]:
            if not own.plan.groups[group].layers:
                own.receive(group, self.by_part[source], theirs)

    def warm(self, steps: Iterable[Step]) -> None:
        if not self.needs.fetches:
            return
        for step in steps:
            for number, part in enumerate(self.by_part):
                with self._here(part):
                    self.carry(number)
                    part.received(step.parts[number])
                    part.warm([step.parts[number]])

    def commit(self, count: int) -> None:
        self._each(lambda part: part.commit(count))

    # ---------------------------------------------------------------- what a step read

    def rows_read(self, n: int) -> list[int]:
        return self._listed(lambda part: part.rows_read(n))

    def kept_rows(self, n: int) -> list[int]:
        return self._listed(lambda part: part.kept_rows(n))

    def choosing_bytes(self, n: int) -> int:
        return sum(part.choosing_bytes(n) for part in self.by_part)

    def selections(self) -> dict[int, torch.Tensor]:
        return self._by_layer(lambda part: part.selections())

    def selection_scores(self) -> dict[int, torch.Tensor]:
        return self._by_layer(lambda part: part.selection_scores())

    def _by_layer(
        self, found: Callable[[Runtime], dict[int, torch.Tensor]]
    ) -> dict[int, torch.Tensor]:
        parts = zip(self.by_part, self.starts)
        return {first + layer: t for part, first in parts for layer, t in found(part).items()}

    def chosen_rows(self, layer: int) -> torch.Tensor:
        part, number, _ = self._of(layer)
        return part.chosen_rows(number)

    def drawn_rows(self, layer: int) -> torch.Tensor:
        part, number, _ = self._of(layer)
        return part.drawn_rows(number)

    def tail_start(self, step: Step) -> torch.Tensor:
        return self.by_part[0].tail_start(step.parts[0] if step.parts else step)

    def choice(self) -> Any:
        return [part.choice() for part in self.by_part]

    def load_choice(self, choice: Any) -> None:
        for part, own in zip(self.by_part, choice, strict=True):
            part.load_choice(own)

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """Of all parts where a method evicts. Else of one: it is the same in all of them."""
        if not self._evicts:
            return self._stated.state()
        return joined([part.state() for part in self.by_part])

    def savepoint(self) -> Any:
        return self.state() if self._evicts else self._stated.savepoint()

    def has_state(self) -> bool:
        return all(part.has_state() for part in self.by_part)

    def load(self, state: Any, length: int | None) -> None:
        states = shares(state, self.starts) if self._evicts else [state] * len(self.by_part)
        for part, own in zip(self.by_part, states, strict=True):
            with self._here(part):
                part.load(own, length)

    def restored(self, state: Any, length: int) -> Any:
        if not self._evicts:
            return super().restored(state, length)
        if any(held is not None and len(held) not in (0, self.starts[-1]) for held in state[2:]):
            raise ValueError("layers")
        states = zip(self.by_part, shares(state, self.starts), strict=True)
        return joined([part.restored(own, length) for part, own in states])

    def loadable(self, state: Any) -> bool:
        states = shares(state, self.starts) if self._evicts else [state] * len(self.by_part)
        return all(part.loadable(own) for part, own in zip(self.by_part, states, strict=True))

    def positions(self, layer: int, sequence: int = 0) -> list[list[int]]:
        """As EvictingRuntime's."""
        part, number, _ = self._of(layer)
        assert isinstance(part, EvictingRuntime)
        return part.positions(number, sequence)

    def waiting_from(self, length: int) -> int:
        return min(part.waiting_from(length) for part in self.by_part)

    def truncate(self, length: int) -> None:
        self._each(lambda part: part.truncate(length))

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        for part, theirs in zip(self.by_part, other.by_part, strict=True):
            with self._here(part):
                part.copy_from(theirs, sequence)


def _carried(own: int, parts: Sequence[Runtime]) -> list[tuple[int, int, int]]:
    """(group, part whose filter layer chooses for it, its number there) of a part's groups that it
    does not choose for itself.
    """
    chosen = {
        part.plan.number_of(i): (number, i)
        for number, part in enumerate(parts)
        for i, group in enumerate(part.plan.groups)
        if group.here
    }
    plan = parts[own].plan
    elsewhere = [i for i, group in enumerate(plan.groups) if not group.here]
    return [(i, *chosen[plan.number_of(i)]) for i in elsewhere]
