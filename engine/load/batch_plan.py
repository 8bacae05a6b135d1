"""How many sequences fit side by side: what the sessions of a batch share, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.base.errors import OutOfMemoryPlan
from engine.base.figures import human
from engine.load.report import Plan
from engine.plan.free_memory import HEADROOM

# once for a batch: only one session reads at a time, and all have the same weights
SHARED = ("weights", "weight buffers", "host weights", "sparse prefill", "prefill workspace")
SHORTEST = 1024  # tokens; shorter contexts are not listed
LISTED = 5  # contexts of the table


@dataclass(frozen=True)
class SlotPlan:
    """The memory of `slots` sessions of `context` tokens each, in bytes.

    shared, each: on the device, once and per session; each_host: host memory per session, for
    offloaded layers of a GPU. free, host_free: what a plan may use of either. fitting: (context,
    slots that fit) from this context downwards, by halves.
    """

    slots: int
    context: int
    shared: int
    each: int
    each_host: int
    free: int
    host_free: int
    fitting: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.shared + self.slots * self.each

    @property
    def most(self) -> int:
        """Sessions of this context that fit."""
        return self.fitting[0][1]

    def require_fit(self) -> None:
        """Raise OutOfMemoryPlan where the slots do not fit."""
        if self.slots <= self.most:
            return
        raise OutOfMemoryPlan(
            f"{self.slots} sessions of {self.context} tokens need {human(self.total)}"
            + (f" and {human(self.slots * self.each_host)} of host memory" * bool(self.each_host))
            + f", but only {human(self.free)} may be used; remedies: --slots {max(1, self.most)}, "
            f"a smaller --ctx"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON."""
        return {**vars(self), "fitting": dict(self.fitting), "total": self.total}

    def __str__(self) -> str:
        host = f" and {human(self.each_host)} of host memory" if self.each_host else ""
        fits = ", ".join(f"{count} of {context}" for context, count in self.fitting)
        return (
            f"slots     {self.slots} of {self.context} tokens: {human(self.shared)} for all and "
            f"{human(self.each)}{host} each, {human(self.total)} of {human(self.free)}\n"
            f"          that fit here, by tokens of context: {fits}"
        )


def plan_slots(
    plan_of: Callable[[int], Plan], context: int, slots: int, vocab: int, listed: int = LISTED
) -> SlotPlan:
    """Plan `slots` sessions of `context` tokens. plan_of(context): one session's plan; vocab: of
    the logits that every session keeps; listed: contexts that are tried.
    """
    fitting: list[tuple[int, int]] = []
    length = context
    while not fitting or (length >= SHORTEST and len(fitting) < listed):
        fitting.append((length, _most(plan_of(length), vocab)))
        length //= 2
    plan = plan_of(context)
    shared, each, host = _parts(plan, vocab)
    free, host_free = (int(size * HEADROOM) for size in (plan.free, plan.host_free))
    return SlotPlan(slots, context, shared, each, host, free, host_free, tuple(fitting))


def _parts(plan: Plan, vocab: int) -> tuple[int, int, int]:
    """(device bytes once, device bytes of each session, host bytes of each beside the device)."""
    shared = sum(size for name, size, _ in plan.items if name in SHARED)
    # of a step and of the session: float32
    each = plan.total - shared + 2 * 4 * vocab
    host = sum(part.host_bytes for part in plan.by_device if part.device != "cpu")
    return shared, each, host


def _most(plan: Plan, vocab: int) -> int:
    """Sessions that fit; of a model over several devices, on the one with least room."""
    if len(plan.by_device) > 1:
        return min(_most(part, vocab) for part in plan.by_device)
    shared, each, host = _parts(plan, vocab)
    count = max(0, int((plan.free * HEADROOM - shared) // each))
    left = max(0, int(plan.host_free * HEADROOM) - plan.staged_bytes)
    return min(count, left // host) if host else count
