"""A plan of one plan for each device: what it holds, whether all of them fit, and how to say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.bank.split.placement import SplitPlacement
from engine.base.errors import OutOfMemoryPlan
from engine.base.figures import human
from engine.forward.staged.staging import Staging
from engine.load.report import Item, Plan
from engine.plan.free_memory import HEADROOM


@dataclass(frozen=True)
class SplitPlan(Plan):
    """As Plan, of a model whose layers lie on several devices: its items are sums over them. parts:
    each device's plan, whose layers are numbered from 0; starts: the first layer of each, and the
    number of layers.
    """

    parts: tuple[Plan, ...] = ()
    starts: tuple[int, ...] = ()

    @classmethod
    def of(cls, whole: Plan, parts: tuple[Plan, ...], starts: tuple[int, ...]) -> SplitPlan:
        """Join the plans of the parts. whole: of the model as on one device, for what is said of
        its method.
        """
        placements = tuple(part.placement for part in parts)
        any_host = any(placement is not None for placement in placements)
        placement: Any = SplitPlacement(placements, starts) if any_host else None
        own = dict(
            device=", ".join(part.device for part in parts),
            items=_sums(parts, {name: note for name, _, note in whole.items}),
            largest_context=min(part.largest_context for part in parts),
            free=sum(part.free for part in parts),
            free_name=f"{human(sum(part.free for part in parts))} free on {len(parts)} devices",
            placement=placement,
            host_bytes=sum(part.host_bytes for part in parts),
            host_free=sum(part.host_free for part in parts),
            host_name=parts[0].host_name,
            full_bank=sum(part.full_bank for part in parts),
            prompt_link_bytes=sum(part.prompt_link_bytes for part in parts),
            step_link_bytes=sum(part.step_link_bytes for part in parts),
            head_copy=0,
            staging=_joined(parts, starts),
            parts=parts,
            starts=starts,
        )
        return cls(**{**vars(whole), **own})

    def without_end(self, selected: int = 0) -> SplitPlan:
        """As Plan's. The token ids are kept once: they count with the first device."""
        first, *others = self.parts
        rest = (replace(part, forever=True, selected=selected) for part in others)
        parts = first.without_end(selected), *rest
        items = _sums(parts, {name: note for name, _, note in self.items})
        return replace(self, forever=True, items=items, selected=selected, parts=parts)

    @property
    def by_device(self) -> tuple[Plan, ...]:
        return self.parts

    @property
    def fits_device(self) -> bool:
        return all(part.fits_device for part in self.parts)

    @property
    def fits(self) -> bool:
        return all(part.fits for part in self.parts)

    @property
    def where(self) -> str:
        """One line on what lives where."""
        if self.placement is None:
            kept = "everything" if self.staging is None else "all of the bank"
            return f"{kept} on its device{self.unheeded and f'; {self.unheeded}'}"
        found = []
        for part, first in zip(self.parts, self.starts):
            if part.placement is not None:
                groups = part.placement.offload_groups
                moved = tuple(tuple(first + layer for layer in group) for group in groups)
                found.append(replace(part.placement, offload_groups=moved).describe())
        return f"{'; '.join(found)}; {human(self.host_bytes)} of host memory"

    @property
    def lines(self) -> list[str]:
        """A line for each device: its layers and bytes."""
        found = []
        for number, part in enumerate(self.parts):
            first, stop = self.starts[number], self.starts[number + 1]
            more = " and the embedding" if number == 0 else ""
            more = " and the head" if number == len(self.parts) - 1 else more
            host = f", {human(part.host_bytes)} in host memory" if part.host_bytes else ""
            if part.staging is not None:
                host += f", {human(part.staged_bytes)} of weights in host memory"
            found.append(
                f"device {number}  {part.device}: layers {first}-{stop - 1}{more}, "
                f"weights {human(part.bytes_of('weights'))}, "
                f"bank {human(part.bytes_of('context bank'))}{host}, "
                f"{human(part.total)} at the peak of {part.free_name}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        found["devices"] = [
            {
                "device": part.device,
                "layers": [self.starts[number], self.starts[number + 1] - 1],
                "items": {name: size for name, size, _ in part.items},
                "total_bytes": part.total,
                "free_bytes": part.free,
                "host_bytes": part.host_bytes,
                "staged_weight_bytes": part.staged_bytes,
                "fits": part.fits,
            }
            for number, part in enumerate(self.parts)
        ]
        return found

    def __str__(self) -> str:
        return "\n".join((super().__str__(), *self.lines))

    def require_fit(self, flag: str = "max_context") -> None:
        """Raise OutOfMemoryPlan, which names the device, its bytes and the remedies, if one of the
        devices is too small for its part.
        """
        for number, part in enumerate(self.parts):
            if part.fits:
                continue
            first, stop = self.starts[number], self.starts[number + 1]
            least = "a smaller model"
            if self.largest_context:
                least = f"{flag}={self.largest_context}"
            kind, need, have = "", part.total, part.free * HEADROOM
            rest = "weights in host memory (weights_offload='all'), then another device"
            if part.total <= have:
                kind, need, have = " of host memory", part.host_total, part.host_free * HEADROOM
                rest = "weights='int4', then another device"
            elif self.staging is not None:
                rest = "then another device"
            raise OutOfMemoryPlan(
                f"device {number} ({part.device}) needs {human(need)}{kind} for layers {first} to "
                f"{stop - 1} of {self.model} at {self.max_context} tokens, but only {human(have)} "
                f"may be used there; remedies: fewer layers there (split), {least}, {rest}"
            )


def _joined(parts: tuple[Plan, ...], starts: tuple[int, ...]) -> Staging | None:
    """The layers that stream, by their numbers among all; None for none."""
    if all(part.staging is None for part in parts):
        return None
    layers: list[int] = []
    sizes: list[int] = []
    for part, first, stop in zip(parts, starts, starts[1:]):
        own = part.staging or Staging((), (0,) * (stop - first))
        layers += [first + layer for layer in own.layers]
        sizes += own.sizes
    return Staging(tuple(layers), tuple(sizes))


def _sums(parts: tuple[Plan, ...], notes: dict[str, str]) -> tuple[Item, ...]:
    """The items of all parts by name, in the order of their first, with the whole model's notes."""
    found: dict[str, tuple[int, str]] = {}
    for part in parts:
        for name, size, note in part.items:
            before, said = found.get(name, (0, notes.get(name, note)))
            found[name] = before + size, said
    return tuple((name, size, note) for name, (size, note) in found.items())
