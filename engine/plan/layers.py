"""The layer plan: which layer does what. Computed once from the model's depth and the method's
settings, read by everybody.

The only file that compares layer numbers. Needs no torch.
"""

import enum
from dataclasses import dataclass

from engine.errors import SettingError

PAPER_WAIT = 1  # layers after a filter that attend to everything: the paper's


class Role(enum.Enum):
    """What a layer does in a decode step (DESIGN.md, "The words")."""

    FULL = "full"  # below the first filter layer: attends to everything
    FILTER = "filter"  # attends to everything and chooses for the group after it
    WAIT = "wait"  # attends to everything while a packed load is under way
    SPARSE = "sparse"  # attends to its group's selection and the tail
    # attends to the rows that its method has kept; what was dropped is never read again
    RETAINED = "retained"


@dataclass(frozen=True)
class Group:
    """The sparse layers that share the selection of one filter layer; may be empty."""

    filter_layer: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class LayerPlan:
    """Roles of all layers, the groups, and for every SPARSE or FILTER layer the index of its group
    (else None).
    """

    roles: tuple[Role, ...]
    groups: tuple[Group, ...]
    group_of: tuple[int | None, ...]

    @property
    def num_layers(self):
        """Layers in all."""
        return len(self.roles)

    def count(self, role):
        """How many layers have this role."""
        return self.roles.count(role)

    @property
    def sparse_layers(self):
        """Numbers of the SPARSE layers, ascending."""
        return tuple(i for i, role in enumerate(self.roles) if role is Role.SPARSE)

    @property
    def partial_layers(self):
        """Numbers of the layers that read less than everything, ascending: SPARSE and RETAINED."""
        return tuple(i for i, role in enumerate(self.roles) if role in (Role.SPARSE, Role.RETAINED))

    @property
    def dense_share(self):
        """a of the paper's Mem% formula: (FULL + FILTER + WAIT) / layers."""
        return 1.0 - len(self.partial_layers) / self.num_layers

    def describe(self):
        """One line for people: roles counted, filter layers and groups named."""
        if self.count(Role.RETAINED):
            return f"{self.num_layers} layers, each reads what it has retained"
        if not self.groups:
            return f"{self.num_layers} layers, all full attention"
        groups = "; ".join(f"{g.filter_layer} -> {_span(g.layers)}" for g in self.groups)
        return (
            f"{self.num_layers} layers: {self.count(Role.FULL)} full, {self.count(Role.FILTER)} filter, "
            f"{self.count(Role.WAIT)} wait, {self.count(Role.SPARSE)} sparse ({groups})"
        )


def _span(layers):
    return "none" if not layers else f"{layers[0]}-{layers[-1]}"


def layer_plan(num_layers, filter_layers=(), wait_layers=PAPER_WAIT):
    """Roles and groups of a model's layers (METHODS.md 3.1; groups run from WAIT+1 to the next
    filter - 1).

    num_layers: int > 0. filter_layers: ascending distinct layer numbers; empty means full attention
    everywhere. wait_layers: how many layers after a filter attend to everything, clipped at the
    next filter, whose own range starts anew. Raises SettingError where a filter layer is beyond the
    model.
    """
    filters = tuple(filter_layers)
    if filters and filters[-1] >= num_layers:
        raise SettingError(
            f"filter_layers: found {filters[-1]}, expected numbers from 0 to {num_layers - 1} "
            f"(the model has {num_layers} layers)"
        )
    roles, group_of, members, since = [], [], [], None
    for layer in range(num_layers):
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


def spread_filter_layers(num_layers):
    """Filter layers for a model that nobody has calibrated: three, spread as the published ones
    are.

    The published sets lie near 6%, 25% and 56% of the depth ({2,8,18} of 32); shallower models get
    fewer, so that sparse layers remain.
    """
    if num_layers < 6:
        return (1,) if num_layers >= 4 else ()
    if num_layers < 12:
        return (2,)
    return tuple(sorted({max(1, round(num_layers * share)) for share in (0.0625, 0.25, 0.5625)}))


TAIL_BLOCK = 64  # tokens; a block goes home when complete (DESIGN.md, "tail")


def tail_start(n, tail):
    """First position of the tail of n tokens: max(0, (n // 64) * 64 - tail). Works on ints and on
    integer tensors' host twins.
    """
    return max(0, (n // TAIL_BLOCK) * TAIL_BLOCK - tail)
