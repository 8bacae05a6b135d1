"""The layer plan: the role of every layer, and the first position of the tail.

The plan is computed once, from the model's depth and the method's settings. Only this file decides
a layer's role by its number. It does not import torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

from engine.base.errors import SettingError

if TYPE_CHECKING:
    import torch

# The paper's number of layers after a filter that attend to everything. They buy time for the load
# from the host tier and nothing else (measured: docs/LOG.md), so they are off unless asked for.
PAPER_WAIT = 1
TAIL_BLOCK = 64  # tokens; the tail moves by whole blocks


class Role(enum.Enum):
    """The role of a layer in a decode step."""

    FULL = "full"  # below the first filter layer: attends to everything
    FILTER = "filter"  # attends to everything and selects for the group after it
    WAIT = "wait"  # attends to everything while its group's selection is fetched
    SPARSE = "sparse"  # attends to its group's selection and the tail
    LOCAL = "local"  # attends to a sliding window, by the model's own design
    RECURRENT = (
        "recurrent"  # has a state of constant size in place of attention, by the model's own
    )
    RETAINED = "retained"  # attends to the tokens that its method kept; the others are gone


# roles that the model gives, whatever the method: such layers are no filters and in no group
BY_DESIGN = (Role.LOCAL, Role.RECURRENT)


@dataclass(frozen=True)
class Group:
    """The sparse layers that share the selection of one filter layer; possibly none.

    Of a part of a model's layers, numbered from 0: here: the filter layer lies in the part, else in
    another, and its number is beside those of the part. beyond: layers of later parts read the
    selection too.
    """

    filter_layer: int
    layers: tuple[int, ...]
    beyond: bool = False
    here: bool = True

    @property
    def serves(self) -> bool:
        """Whether any layer reads the selection, in this part or a later one."""
        return bool(self.layers) or self.beyond


@dataclass(frozen=True)
class LayerPlan:
    """The role of every layer, the groups, and every layer's group.

    group_of: index of a SPARSE or FILTER layer's group, None for other layers. whole: SPARSE layers
    are read whole too, and more bytes of them so (exact mode): the bank lays them out for that.
    of, first: of a part of a model's layers, the plan of all, and the number of its first layer.
    """

    roles: tuple[Role, ...]
    groups: tuple[Group, ...]
    group_of: tuple[int | None, ...]
    whole: bool = False
    of: LayerPlan | None = None
    first: int = 0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.roles)

    def count(self, role: Role) -> int:
        """Return how many layers have this role."""
        return self.roles.count(role)

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """The SPARSE layers, ascending."""
        return tuple(i for i, role in enumerate(self.roles) if role is Role.SPARSE)

    @property
    def chooses(self) -> bool:
        """Whether some layer reads a selection: one of these, or one of a later part."""
        told = any(group.beyond or not group.here for group in self.groups)
        return bool(self.sparse_layers) or told

    def number_of(self, group: int) -> int:
        """The number of a group among all of the model's."""
        if self.of is None:
            return group
        layer = self.first + self.groups[group].filter_layer
        return next(i for i, one in enumerate(self.of.groups) if one.filter_layer == layer)

    @property
    def all(self) -> LayerPlan:
        """The plan of all the model's layers."""
        return self if self.of is None else self.of

    def own(self, values: Sequence[int]) -> list[int]:
        """Of one value for each of the model's `partial_layers` those of this part's."""
        layers = (layer - self.first for layer in self.all.partial_layers)
        return [value for layer, value in zip(layers, values) if 0 <= layer < self.num_layers]

    def is_last(self, layer: int) -> bool:
        """Whether a layer is the model's last."""
        return self.first + layer == self.all.num_layers - 1

    def here(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Those of the model's layers, by their numbers among all, that lie in this part, by their
        numbers in it.
        """
        own = (layer - self.first for layer in layers)
        return tuple(layer for layer in own if 0 <= layer < self.num_layers)

    @cached_property
    def seeing_layers(self) -> tuple[int, ...]:
        """The layers that keep every token: all but sliding and recurrent ones, ascending."""
        return tuple(i for i, role in enumerate(self.roles) if role not in BY_DESIGN)

    @cached_property
    def each_layer(self) -> tuple[tuple[int], ...]:
        """The `seeing_layers`, each alone: offload groups of a method that reads layers whole."""
        return tuple((layer,) for layer in self.seeing_layers)

    @cached_property
    def partial_layers(self) -> tuple[int, ...]:
        """The layers that read less than everything, SPARSE and RETAINED, ascending."""
        return tuple(i for i, role in enumerate(self.roles) if role in (Role.SPARSE, Role.RETAINED))

    def gathers(self, layer: int) -> bool:
        """Whether a layer's rows are mostly gathered one by one, not read whole."""
        return self.roles[layer] is Role.SPARSE and not self.whole

    def kept_group(self, layer: int) -> int:
        """The group whose selection serves a layer when no layer chooses anew: its own, else the
        nearest below that has sparse layers, else the first.
        """
        if self.of is not None:
            number = self.of.kept_group(self.first + layer)
            return next(i for i in range(len(self.groups)) if self.number_of(i) == number)
        serving = [i for i, group in enumerate(self.groups) if group.layers]
        below = [i for i in serving if self.groups[i].filter_layer <= layer]
        return below[-1] if below else serving[0]

    @property
    def dense_share(self) -> float:
        """Share of the layers that read everything, of those that attend: a in the paper's Mem%
        (engine/plan/layers.py).
        """
        if self.of is not None:
            return self.of.dense_share
        return 1.0 - len(self.partial_layers) / (self.num_layers - self.count(Role.RECURRENT))

    def describe(self) -> str:
        """Return one line for people: how many layers have each role, and the groups."""
        others = ", ".join(f"{n} {r.value}" for r in BY_DESIGN if (n := self.count(r)))
        if self.count(Role.RETAINED):
            who = f"{others}, each of the others" if others else "each"
            return f"{self.num_layers} layers, {who} reads what it has retained"
        if not self.groups:
            rest = f"{others}, the others" if others else "all"
            return f"{self.num_layers} layers, {rest} full attention"
        groups = "; ".join(f"{g.filter_layer} -> {_span(g.layers)}" for g in self.groups)
        roles = (Role.FULL, Role.FILTER, Role.WAIT, Role.SPARSE, *BY_DESIGN)
        shown = (role for role in roles if role not in BY_DESIGN or self.count(role))
        counts = ", ".join(f"{self.count(role)} {role.value}" for role in shown)
        return f"{self.num_layers} layers: {counts} ({groups})"


def _span(layers: tuple[int, ...]) -> str:
    """Name the layers of a group; local layers may lie between the first and the last."""
    return "none" if not layers else f"{layers[0]}-{layers[-1]}"


def layer_plan(
    num_layers: int,
    filter_layers: Sequence[int] = (),
    wait_layers: int = 0,
    local_layers: Sequence[int] = (),
    recurrent_layers: Sequence[int] = (),
) -> LayerPlan:
    """Return the roles and groups of a model's layers.

    filter_layers: ascending distinct layer numbers; none means full attention in all layers.
    wait_layers: number of layers after a filter that attend to everything. A group holds the layers
    after those, up to the next filter. local_layers, recurrent_layers: the model's sliding-window
    layers and those without attention, which are never filters, wait for nothing and belong to no
    group. Raises SettingError if the model has no such filter layer.
    """
    filters = tuple(filter_layers)
    if filters and filters[-1] >= num_layers:
        raise SettingError(
            f"filter_layers: found {filters[-1]}, expected numbers from 0 to {num_layers - 1} "
            f"(the model has {num_layers} layers)"
        )
    others = _by_design(local_layers, recurrent_layers)
    for layer in filters:
        if layer in others:
            seeing = [i for i in range(num_layers) if i not in others]
            expected = f"layers that see everything ({_some(seeing)})"
            if not seeing:
                expected = "none: every layer of this model slides"
            found = "a recurrent" if others[layer] is Role.RECURRENT else "a sliding-window"
            raise SettingError(f"filter_layers: found {layer}, {found} layer, expected {expected}")
    roles: list[Role] = []
    group_of: list[int | None] = []
    members: list[list[int]] = []
    since: int | None = None  # layers after the last filter
    for layer in range(num_layers):
        if layer in others:
            roles.append(others[layer])
            group_of.append(None)
            continue
        if layer in filters:
            since = 0
            members.append([])
            roles.append(Role.FILTER)
            group_of.append(len(members) - 1)
            continue
        if since is None:
            roles.append(Role.FULL)
            group_of.append(None)
            continue
        since += 1
        if since <= wait_layers:
            roles.append(Role.WAIT)
            group_of.append(None)
        else:
            roles.append(Role.SPARSE)
            group_of.append(len(members) - 1)
            members[-1].append(layer)
    groups = tuple(Group(f, tuple(m)) for f, m in zip(filters, members))
    return LayerPlan(tuple(roles), groups, tuple(group_of))


def choosers_alike(plan: LayerPlan) -> LayerPlan:
    """Return the plan in which every FILTER layer but the first is a SPARSE layer of its own group:
    it scores everything, and attends to what it chose. A group of such a layer alone stays.
    """
    roles, groups = list(plan.roles), list(plan.groups)
    for number, group in enumerate(groups[1:], 1):
        roles[group.filter_layer] = Role.SPARSE
        groups[number] = Group(group.filter_layer, (group.filter_layer, *group.layers))
    return LayerPlan(tuple(roles), tuple(groups), plan.group_of)


def _by_design(local_layers: Sequence[int], recurrent_layers: Sequence[int]) -> dict[int, Role]:
    """{layer: the role that the model gives it}, of the layers that have one."""
    local = dict.fromkeys(local_layers, Role.LOCAL)
    return local | dict.fromkeys(recurrent_layers, Role.RECURRENT)


def single_layer_groups(
    num_layers: int,
    sparse: Iterable[int],
    local_layers: Sequence[int] = (),
    recurrent_layers: Sequence[int] = (),
) -> LayerPlan:
    """Return the plan in which each of the layers `sparse` is SPARSE in its own group, and all
    others are FULL; local_layers are LOCAL and recurrent_layers RECURRENT, whatever `sparse` says.
    """
    others = _by_design(local_layers, recurrent_layers)
    chosen = sorted(set(sparse) - set(others))
    number = {layer: i for i, layer in enumerate(chosen)}
    roles = tuple(
        Role.SPARSE if layer in number else others.get(layer, Role.FULL)
        for layer in range(num_layers)
    )
    groups = tuple(Group(layer, (layer,)) for layer in chosen)
    return LayerPlan(roles, groups, tuple(map(number.get, range(num_layers))))


def _some(layers: Sequence[int]) -> str:
    """Name the first few layer numbers."""
    return ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")


def spread_over(num_layers: int, others: Sequence[int] = ()) -> tuple[int, ...]:
    """Return `spread_filter_layers` among the layers that see everything: all but `others`."""
    seeing = [layer for layer in range(num_layers) if layer not in others]
    return tuple(seeing[i] for i in spread_filter_layers(len(seeing)))


def spread_filter_layers(num_layers: int) -> tuple[int, ...]:
    """Return filter layers for an uncalibrated model, for use without wait layers.

    The published sets lie near 6%, 25% and 56% of the depth ({2, 8, 18} of 32), with one wait layer
    each. In this set as many layers read everything: for each wait layer a filter stands in the
    middle of its group ({2, 5, 8, 13, 18, 25}). Shallow models get fewer, so that sparse layers
    remain; a model of fewer than 4 layers has none.
    """
    if num_layers < 4:
        return ()
    published: tuple[int, ...] = (1 if num_layers < 6 else 2,)
    if num_layers >= 12:
        published = tuple(max(1, round(num_layers * share)) for share in (0.0625, 0.25, 0.5625))
    ends = (*published[1:], num_layers)
    layers = sorted({*published, *((a + b) // 2 for a, b in zip(published, ends))})
    while layers[0] + 1 in layers:  # it would choose for nobody
        del layers[0]
    return tuple(layers)


@overload
def tail_start(n: int, tail: int) -> int: ...


@overload
def tail_start(n: torch.Tensor, tail: int) -> torch.Tensor: ...


def tail_start(n: int | torch.Tensor, tail: int) -> int | torch.Tensor:
    """Return the first position of the tail of n tokens: max(0, (n // 64) * 64 - tail).

    The tail is the newest tokens, which every layer reads: at least `tail` of them once there are
    as many, at most 63 more. n: an int, or an integer tensor of lengths, for which the result is a
    new tensor of its dtype and device (no sync).
    """
    start = n // TAIL_BLOCK * TAIL_BLOCK - tail
    return max(0, start) if isinstance(start, int) else start.clamp_(min=0)


def budget_from_mem(mem: float, dense_share: float) -> float:
    """Return the share b of the bank that Mem% leaves to the sparse layers: (mem - a) / (1 - a).

    dense_share: a, LayerPlan.dense_share. Raises SettingError if the dense layers alone read `mem`
    or more, or if the plan has no sparse layer.
    """
    if dense_share >= 1.0:
        raise SettingError(
            "mem: this plan has no sparse layer, so every budget is 100%; "
            "choose other filter layers"
        )
    if mem <= dense_share:
        raise SettingError(
            f"mem: found {mem:g}, expected more than {dense_share:.4g}, which the full, filter and "
            "wait layers of this plan take already (fewer filter layers or wait_layers=0 lower it)"
        )
    # 0.7 of a plan at 0.625 is 0.2, not 0.19999999999999996
    return round((mem - dense_share) / (1.0 - dense_share), 12)


def mem_from_budget(tokens: int | float, prompt: int, dense_share: float) -> float:
    """Return the Mem% of a budget of `tokens`: a + b (1 - a), b = tokens / prompt, at most 1."""
    return dense_share + min(1.0, tokens / max(1, prompt)) * (1.0 - dense_share)


def shared_groups(
    sources: Sequence[int], local_layers: Sequence[int] = (), recurrent_layers: Sequence[int] = ()
) -> LayerPlan:
    """Return the plan in which every layer is SPARSE, in the group of sources[layer]: the layer
    itself, or one before it that is its own source. local_layers are LOCAL and recurrent_layers
    RECURRENT, whatever `sources` says.
    """
    others = _by_design(local_layers, recurrent_layers)
    members: dict[int, list[int]] = {}
    for layer, source in enumerate(sources):
        if layer not in others:
            members.setdefault(source, []).append(layer)
    number = {layer: i for i, own in enumerate(members.values()) for layer in own}
    roles = tuple(others.get(layer, Role.SPARSE) for layer in range(len(sources)))
    groups = tuple(Group(source, tuple(own)) for source, own in members.items())
    return LayerPlan(roles, groups, tuple(map(number.get, range(len(sources)))))
