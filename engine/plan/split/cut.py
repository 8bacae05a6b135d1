"""The cut of a model's layers into parts that follow each other, one on each device.

A group of sparse layers may be cut: what its filter layer chooses then crosses to the devices after
it. A method that cannot do that keeps each group on one device. Layers that read another's rows lie
on its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from engine.base.errors import SettingError
from engine.plan.layers import Group, LayerPlan, Role


@dataclass(frozen=True)
class Cut:
    """Part i has the layers starts[i] .. starts[i + 1] - 1 and lies on devices[i]."""

    starts: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """(first layer, one past the last) of each part."""
        return pairwise(self.starts)

    def of(self, layer: int) -> tuple[int, int]:
        """(part, number within it) of a layer."""
        return found_in(self.starts, layer)

    def layers(self, plan: LayerPlan) -> list[LayerPlan]:
        """The layer plan of each part."""
        return [part_plan(plan, first, stop) for first, stop in self.spans]

    def require_whole(self, name: str, plan: LayerPlan) -> None:
        """Raise SettingError where a method, `name`, has a group that the cut would divide."""
        free = set(boundaries(plan))
        for start in self.starts[1:-1]:
            if start not in free:
                raise SettingError(
                    f"method: found {name}, whose layers {_around(plan, start)} share a "
                    f"selection, but layer {start} begins a device; make another LLM for it, whose "
                    "plan cuts elsewhere"
                )


def found_in(starts: Sequence[int], layer: int) -> tuple[int, int]:
    """(part, number within it) of a layer, by the first layer of each part."""
    part = max(i for i, first in enumerate(starts[:-1]) if first <= layer)
    return part, layer - starts[part]


def part_plan(plan: LayerPlan, first: int, stop: int) -> LayerPlan:
    """The layer plan of the layers first .. stop-1, numbered from 0: with the groups that they
    choose for, with those of other layers that some of them read, and in exact mode with those that
    some of them read in a step in which no layer chooses.
    """
    groups: list[Group] = []
    number: dict[int, int] = {}
    kept = set(map(plan.kept_group, range(first, stop))) if plan.whole and plan.chooses else set()
    for i, group in enumerate(plan.groups):
        layers = tuple(layer - first for layer in group.layers if first <= layer < stop)
        here = first <= group.filter_layer < stop
        if layers or here or i in kept:
            number[i] = len(groups)
            beyond = here and (group.beyond or any(layer >= stop for layer in group.layers))
            groups.append(Group(group.filter_layer - first, layers, beyond, here))
    group_of = tuple(None if g is None else number[g] for g in plan.group_of[first:stop])
    own = plan.roles[first:stop], tuple(groups), group_of
    return LayerPlan(*own, plan.whole, plan.all, plan.first + first)


def boundaries(plan: LayerPlan, divides: bool = False, row_layers: Sequence[int] = ()) -> list[int]:
    """The layers that may begin a part: all but the first and, unless groups may be divided, but
    those within a group. row_layers: the layer whose rows each one reads; none lies between the
    two.
    """
    inside = set[int]()
    for layer, rows in enumerate(row_layers):
        inside.update(range(rows + 1, layer + 1))
    for group in plan.groups:
        if group.layers and not divides:
            inside.update(range(group.filter_layer + 1, max(group.layers) + 1))
    return [layer for layer in range(1, plan.num_layers) if layer not in inside]


def choose_cut(
    name: str,
    plan: LayerPlan,
    devices: Sequence[torch.device],
    bytes_of: Sequence[float],
    room: Sequence[float],
    split: Sequence[int] | None = None,
    divides: bool = False,
    row_layers: Sequence[int] = (),
) -> Cut:
    """Return the cut under which the fullest device is least full, of a method, `name`, with this
    plan. divides: whether its groups may be. row_layers: as of `boundaries`.

    bytes_of: of each layer with its part of the bank, of the first with the embedding, of the last
    with the head. room: bytes of each device. split: the layers of each part, or what they are to
    be in proportion to; each boundary is then the nearest that may be one. Every part has a layer
    that attends. Raises SettingError where there are fewer places to cut than devices.
    """
    free, parts, count = boundaries(plan, divides, row_layers), len(devices), plan.num_layers
    seen = list(accumulate((role is not Role.RECURRENT for role in plan.roles), initial=0))
    most, why = min(len(free) + 1, seen[count]), ", whose groups stay on one device each"
    if most < parts:
        if divides and row_layers:
            why = f", of which those from {free[-1] if free else 0} on read each other's rows"
        if parts > seen[count]:
            most, why = seen[count], " that attend" * (seen[count] < count)
        raise SettingError(
            f"devices: found {parts}, expected at most {most} for {name} over {count} layers{why}"
        )
    if split is not None:
        return Cut(_nearest(free, split, seen), tuple(devices))
    sums = [0.0]
    for size in bytes_of:
        sums.append(sums[-1] + size)
    # best[c]: (how full the fullest is, the starts so far) where the parts so far end at layer c
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in range(parts):
        last = part == parts - 1
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in [count] if last else free:
            ways = [
                (max(full, (sums[stop] - sums[first]) / max(room[part], 1.0)), (*starts, first))
                for first, (full, starts) in best.items()
                if seen[first] < seen[stop]
            ]
            if ways:
                found[stop] = min(ways)
        best = found
    return Cut((*best[count][1], count), tuple(devices))


def _nearest(free: Sequence[int], split: Sequence[int], seen: Sequence[int]) -> tuple[int, ...]:
    """The starts nearest to the proportions `split`, each of them in `free`, and the number of
    layers. seen: how many of the layers before each number attend, one at least in every part.
    """
    starts, done, count = [0], 0, len(seen) - 1
    for part, share in enumerate(split[:-1]):
        done += share
        wanted, later = done * count / sum(split), len(split) - 2 - part
        open_ = [layer for layer in free if seen[layer] > seen[starts[-1]]]
        open_ = open_[: len(open_) - later]  # those after it need a place each
        open_ = [layer for layer in open_ if seen[count] - seen[layer] > later]
        starts.append(min(open_, key=lambda layer: abs(layer - wanted)))
    return (*starts, count)


def _around(plan: LayerPlan, layer: int) -> str:
    """The layers of the group that reaches over a layer, in words."""
    for group in plan.groups:
        if group.layers and group.filter_layer < layer <= max(group.layers):
            return f"{group.filter_layer} to {max(group.layers)}"
    return str(layer)
