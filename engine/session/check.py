"""Proof on the user's own prompt: full and sparse steps at the same positions over the same bank.

All keys and values are kept, so the comparison needs no second read. At every position of the last
answer the full step runs first, then the session's own step. Rows, queries and the method's state
are restored afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from engine.base.checks import callables
from engine.base.errors import SettingError
from engine.base.interrupts import complete
from engine.forward.decode import Decoder
from engine.methods.mass_meter import DELTA, MassMeter
from engine.plan.needs import MOST_WINDOW, RING
from engine.runner.ranks.led import led
from engine.runner.recurrent.catch_up import standing_at
from engine.runner.rewind import replay
from engine.runner.rollback import exclusive, rewound_on_error
from engine.runner.state import SessionState

# A windowed selector needs its queries before the first position that is checked.
MOST_STEPS = RING - MOST_WINDOW


@dataclass(frozen=True)
class StepCheck:
    """One position: both steps' most likely tokens, KL(full || sparse) in nats, the attention mass
    kept per sparse layer, and how far one that estimates the rest may be off (MassMeter.errors).
    """

    position: int
    full_token: int
    sparse_token: int
    kl: float
    mass: dict[int, float]
    errors: dict[int, float] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether the most likely tokens are equal."""
        return self.full_token == self.sparse_token

    @property
    def mean_mass(self) -> float:
        """Mass kept, mean over the sparse layers."""
        return sum(self.mass.values()) / max(1, len(self.mass))


@dataclass(frozen=True)
class Report:
    """The result of a check. texts: the answer's tokens as text, one per step; empty without a
    tokenizer.
    """

    steps: tuple[StepCheck, ...]
    context: int
    budget: int
    texts: tuple[str, ...] = field(default=())

    @property
    def agreement(self) -> float:
        """Share of positions at which both say the same token."""
        return sum(s.agrees for s in self.steps) / len(self.steps)

    @property
    def mean_kl(self) -> float:
        """Mean KL(full || sparse) in nats."""
        return sum(s.kl for s in self.steps) / len(self.steps)

    @property
    def worst(self) -> StepCheck:
        """The step with the largest KL."""
        return max(self.steps, key=lambda s: s.kl)

    def mass_by_layer(self) -> dict[int, float]:
        """{sparse layer: mean mass kept}."""
        layers = self.steps[0].mass
        return {layer: sum(s.mass[layer] for s in self.steps) / len(self.steps) for layer in layers}

    def error_by_layer(self) -> dict[int, float]:
        """{sparse layer that estimates: the bound of its relative error, median over steps}."""
        layers = sorted({layer for step in self.steps for layer in step.errors})
        found = {i: [s.errors[i] for s in self.steps if i in s.errors] for i in layers}
        return {layer: median(errors) for layer, errors in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return {
            "context": self.context,
            "budget": self.budget,
            "agreement": self.agreement,
            "mean_kl": self.mean_kl,
            "mass_by_layer": self.mass_by_layer(),
            "texts": list(self.texts),
            "steps": [asdict(s) for s in self.steps],
        }

    def __str__(self) -> str:
        worst, same = self.worst, sum(s.agrees for s in self.steps)
        at = self.steps.index(worst)
        words = f" near {''.join(self.texts[max(0, at - 8) : at + 1])!r}" if self.texts else ""
        mass = self.mass_by_layer()
        chosen = min(self.budget, self.context)
        lines = [
            f"checked {len(self.steps)} steps at {self.context} tokens of context, {chosen} chosen "
            f"per step:",
            f"  same next token as full attention  {same}/{len(self.steps)} "
            f"({100 * self.agreement:.1f}%)",
            f"  KL(full || sparse)                 mean {self.mean_kl:.2g}, worst {worst.kl:.2g} "
            f"nats at position {worst.position}{words}",
        ]
        if mass:
            low = min(mass, key=lambda layer: mass[layer])
            mean = sum(mass.values()) / len(mass)
            lines += [
                f"  attention mass kept                mean {mean:.3f}, least {mass[low]:.3f} in "
                f"layer {low}",
                "    by layer  " + "  ".join(f"{layer}:{kept:.3f}" for layer, kept in mass.items()),
            ]
        errors = self.error_by_layer()
        if errors:
            most = max(errors, key=lambda layer: errors[layer])
            lines.append(
                f"  attention with its estimate is off   by {median(errors.values()):.2g} of its "
                f"length at most, {errors[most]:.2g} in layer {most}, in {100 * (1 - DELTA):g}% of "
                "draws (medians)"
            )
        return "\n".join(lines)


@led
def check(
    session: SessionState, steps: int = 32, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Compare full and sparse attention at the last `steps` positions of a session's answer. The
    session is left as it was.

    Positions that a prefill read are never checked: their rows come from a chunk, and a step would
    leave its own there. progress(done, total) is called after every position. Raises SettingError
    where there is nothing to compare: too few tokens, or a method without sparse layers.
    """
    callables(progress=progress)
    last = len(session)
    steps = min(steps, MOST_STEPS, session.answer_length)
    if not session.plan.sparse_layers:
        raise SettingError(
            "check: this method has no sparse layer, there is nothing to compare; use "
            "method=OmniKV(...)"
        )
    if session.bank.forgets:
        raise SettingError(
            f"check: found {session.method.name} with rows that it has freed, expected those of "
            f"all {last:,} tokens, which full attention reads; use a session that keeps them"
        )
    if steps < 1:
        raise SettingError(
            f"check: found a session of {last} tokens, expected a prompt and at least one token of "
            f"an answer"
        )
    found = []
    with exclusive(session.loaded):
        replay(session)
        pair = Pair(session)
        at_first = standing_at(session, last - steps, session.runner)
        with at_first, unchanged(session, last - steps), rewound_on_error(session):
            for position in range(last - steps, last):
                found.append(pair.at(position))
                if progress is not None:
                    progress(len(found), steps)
    words = session.loaded.tokenizer.stream() if session.loaded.tokenizer is not None else None
    texts = tuple(words.push(token) for token in session.ids[last - steps :]) if words else ()
    return Report(tuple(found), last, session.runtime.k, texts)


@contextlib.contextmanager
def unchanged(session: SessionState, first: int) -> Iterator[None]:
    """Restore the query ring and the runtime after steps from position `first` on. The bank
    restores its rows itself (Bank.replaying).
    """
    ring, runtime = session.query_ring, session.runtime
    slots, selected = ring.slots.clone(), session.selected
    state, choice = runtime.state(), runtime.choice()

    def restore() -> None:
        ring.slots.copy_(slots)
        ring.changes += 1  # drafted queries lay in the slots that the steps wrote
        runtime.truncate(first)  # it has looked at rows that are gone
        runtime.load(state, None)
        runtime.load_choice(choice)
        session.selects_again(selected)

    try:
        yield
    finally:
        complete(restore)


class Pair:
    """A full and a metered sparse step over one session's bank, eager."""

    def __init__(self, session: SessionState):
        self.session = session
        model, rotary, ring = session.runner.model, session.loaded.rotary, session.query_ring
        self.meter = MassMeter(session.runtime)
        self.full = Decoder(model, rotary, session.dense_runtime, ring)
        self.sparse = Decoder(model, rotary, self.meter, ring)

    def _token(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The token at `position` [1, 1] and the bank's length before it [1]."""
        device = self.session.runner.model.device
        token = torch.tensor([[self.session.ids[position]]], device=device)
        return token, torch.tensor([position], dtype=torch.int32, device=device)

    def at(self, position: int) -> StepCheck:
        """Compare the steps of the token at `position`: full first, the session's own last."""
        token, length = self._token(position)
        with self.session.bank.replaying(position + 1):
            full = self.full.step(token, length, self.session.bank)[0, -1]
            sparse = self.sparse.step(token, length, self.session.bank)[0, -1]
        state = self.session.bank.recurrent
        if state is not None and state.length == position:
            state.commit(position + 1)  # by the rows of the session's own step
        p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(sparse.double(), -1)
        return StepCheck(
            position,
            int(full.argmax()),
            int(sparse.argmax()),
            max(0.0, float((p.exp() * (p - q)).sum())),
            dict(self.meter.mass),
            dict(self.meter.errors),
        )
