"""Where layers are cut: groups are whole, or their parts know each other; the fullest device is as
empty as it can be; and what cannot be is said in one line.
"""

import random
from itertools import combinations, pairwise

import pytest
import torch

from engine.base.errors import SettingError
from engine.plan.layers import Role, layer_plan, single_layer_groups
from engine.plan.split.cut import Cut, boundaries, choose_cut, part_plan

CPU = torch.device("cpu")
PLANS = [
    layer_plan(7),
    layer_plan(7, (1, 4)),
    layer_plan(12, (2, 5, 8), 1),
    layer_plan(10, (1, 5, 9), 0, (2, 6)),
    single_layer_groups(9, range(2, 9)),
    layer_plan(32, (2, 8, 18), 1),
]


@pytest.mark.parametrize("plan", PLANS)
def test_parts_are_the_layers_and_no_group_reaches_over_a_boundary(plan):
    for count in range(1, min(4, len(boundaries(plan)) + 1)):
        for starts in list(combinations(boundaries(plan), count))[:40]:
            cut = Cut((0, *starts, plan.num_layers), (CPU,) * (count + 1))
            cut.require_whole("omnikv", plan)
            parts = cut.layers(plan)
            assert tuple(role for part in parts for role in part.roles) == plan.roles
            groups = [
                (first + group.filter_layer, tuple(first + layer for layer in group.layers))
                for part, first in zip(parts, cut.starts)
                for group in part.groups
            ]
            assert groups == [(group.filter_layer, group.layers) for group in plan.groups]
            for number, (part, first) in enumerate(zip(parts, cut.starts)):
                assert part.dense_share == plan.dense_share
                for layer, role in enumerate(part.roles):
                    if role is Role.SPARSE:
                        own = plan.groups[plan.group_of[first + layer]].filter_layer
                        assert part.groups[part.group_of[layer]].filter_layer == own - first
                        assert cut.of(first + layer) == (number, layer)


@pytest.mark.parametrize("plan", PLANS)
def test_a_divided_group_is_known_wherever_its_layers_are(plan):
    """Whatever the boundaries: every sparse layer lies in a group with its number, its filter
    layer and no other's layers; whoever has the filter layer knows whether others read its choice.
    """
    draw = random.Random(len(plan.roles))
    for _ in range(30):
        count = draw.randint(1, min(4, plan.num_layers - 1))
        assert boundaries(plan, True) == list(range(1, plan.num_layers))
        starts = sorted(draw.sample(boundaries(plan, True), count))
        cut = Cut((0, *starts, plan.num_layers), (CPU,) * (count + 1))
        seen = {number: () for number in range(len(plan.groups))}
        for part, first in zip(cut.layers(plan), cut.starts):
            stop = first + part.num_layers
            for number, group in enumerate(part.groups):
                whole = plan.groups[part.number_of(number)]
                assert whole.filter_layer == first + group.filter_layer
                assert group.here == (first <= whole.filter_layer)
                later = any(layer >= stop for layer in whole.layers)
                assert group.beyond == (group.here and later)
                assert group.layers or group.here
                seen[part.number_of(number)] += tuple(first + layer for layer in group.layers)
            for layer, role in enumerate(part.roles):
                if role is Role.SPARSE:
                    assert layer in part.groups[part.group_of[layer]].layers
                    assert part.number_of(part.group_of[layer]) == plan.group_of[first + layer]
            again = part_plan(part, 0, part.num_layers)
            assert again == part
            assert part.chooses == any(group.serves for group in part.groups)
        assert all(seen[number] == group.layers for number, group in enumerate(plan.groups))


@pytest.mark.parametrize("plan", PLANS)
def test_a_cut_within_a_group_is_refused_with_its_layers(plan):
    for layer in set(range(1, plan.num_layers)) - set(boundaries(plan)):
        with pytest.raises(SettingError, match=f"layer {layer} begins a device"):
            Cut((0, layer, plan.num_layers), (CPU, CPU)).require_whole("omnikv", plan)


@pytest.mark.parametrize("seed", range(12))
def test_the_fullest_device_is_as_empty_as_it_can_be(seed):
    draw = random.Random(seed)
    plan = PLANS[seed % len(PLANS)]
    count = min(draw.randint(2, 4), len(boundaries(plan)) + 1)
    sizes = [draw.uniform(1, 9) for _ in range(plan.num_layers)]
    sizes[0] += draw.uniform(0, 20)
    sizes[-1] += draw.uniform(0, 20)
    room = [draw.uniform(1, 9) for _ in range(count)]

    def fullest(starts):
        spans = pairwise((0, *starts, plan.num_layers))
        return max(sum(sizes[a:b]) / space for (a, b), space in zip(spans, room, strict=True))

    found = choose_cut("omnikv", plan, (CPU,) * count, sizes, room)
    best = min(map(fullest, combinations(boundaries(plan), count - 1)))
    assert fullest(found.starts[1:-1]) == pytest.approx(best, rel=1e-9)
    found.require_whole("omnikv", plan)


def test_a_split_takes_the_nearest_boundaries():
    even, room = [1.0] * 32, [1.0, 1.0]
    full, omnikv = layer_plan(32), layer_plan(32, (2, 8, 18))

    def starts(plan, *split, divides=False):
        devices = (CPU,) * len(split)
        given = even, room, split, divides
        return choose_cut("x", plan, devices, *given).starts

    assert starts(full, 1, 3) == (0, 8, 32) and starts(full, 12, 20) == (0, 12, 32)
    assert starts(omnikv, 1, 3) == (0, 8, 32) and starts(omnikv, 1, 1) == (0, 18, 32)
    assert starts(omnikv, 1, 3, divides=True) == (0, 8, 32)
    assert starts(omnikv, 1, 1, 1, 1, divides=True) == (0, 8, 16, 24, 32)
    assert starts(full, 31, 1, 1, 1)[-2] <= 31  # each device has a layer
    assert starts(full, 1, 1, 1, 997) == (0, 1, 2, 3, 32)
    assert starts(layer_plan(4), 1000, 1, 1, 1) == (0, 1, 2, 3, 4)


def test_more_devices_than_places_to_cut_are_refused():
    with pytest.raises(SettingError, match="found 5, expected at most 4 for full over 4 layers"):
        choose_cut("full", layer_plan(4), (CPU,) * 5, [1.0] * 4, [1.0] * 5)
    with pytest.raises(SettingError, match="at most 3 for omnikv over 7 layers, whose groups"):
        choose_cut("omnikv", layer_plan(7, (1, 4)), (CPU,) * 4, [1.0] * 7, [1.0] * 4)


def test_a_part_of_a_part_keeps_the_share_of_all():
    plan = layer_plan(32, (2, 8, 18))
    part = part_plan(part_plan(plan, 8, 32), 0, 10)
    assert part.dense_share == plan.dense_share and part.groups[0].layers == tuple(range(1, 10))
