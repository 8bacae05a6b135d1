"""What runs where, decided before anything is allocated: layer roles, placement, bytes."""

from engine.plan.layers import (
    PAPER_WAIT,
    TAIL_BLOCK,
    Group,
    LayerPlan,
    Role,
    layer_plan,
    spread_filter_layers,
    tail_start,
)
from engine.plan.memory import make_plan
from engine.plan.placement import Placement
from engine.plan.report import Plan

__all__ = [
    "Group",
    "LayerPlan",
    "PAPER_WAIT",
    "Placement",
    "Plan",
    "Role",
    "TAIL_BLOCK",
    "layer_plan",
    "make_plan",
    "spread_filter_layers",
    "tail_start",
]
