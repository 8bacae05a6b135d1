"""Kascade's prompts: what a tile's queries choose together, index by index against float64, what
the anchor and the layers behind it read of that, and where it meets full attention.

Stops: a tile that chooses from itself or its future, a softmax that leaves the tile out, a head
that reads its own list where the map leads elsewhere, lists of another chunk.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Full, Kascade, KascadeTiles
from engine.base.errors import SettingError
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.softmax import Softmax
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_table import crossed_heads
from tests.kernels.support.by_head_checks import by_rule

SCALE = 0.25  # of head_dim 16


def chosen_by_rule(q, k, local, kept):
    """Ascending rows below `local` per K/V head, and the least gap at a list's end: the highest
    sums over a tile's queries and a group's heads of the causal softmax. q [C, H, D], k [Hkv, n, D]
    float64, the queries the newest.
    """
    lists, gaps = [], []
    group, newest = q.shape[1] // len(k), k.shape[1] - len(q)
    for head, rows in enumerate(k):
        sums = torch.zeros(local, dtype=torch.float64)
        for place, own in enumerate(q):
            seen = rows[: newest + place + 1]
            for one in own[head * group : (head + 1) * group]:
                sums += torch.softmax(seen @ one * SCALE, 0)[:local]
        order = sums.argsort(descending=True)
        lists.append(sorted(order[:kept].tolist()))
        gaps.append(float(sums[order[kept - 1]] - sums[order[kept]]) if kept < local else 1.0)
    return lists, min(gaps)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.sampled_from(((32, 32), (64, 31), (64, 96), (96, 1), (97, 40), (100, 101))),
    st.sampled_from((dict(tokens=24, tile=32), dict(share=0.3, least=5, tile=31))),
    st.integers(0, 9),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_an_anchors_tile_chooses_and_layers_behind_read_the_list_of_the_mapped_head(
    backend, shape, chunk, given_, seed
):
    """Anchor 2 reads what it chose, layer 3 what the map leads to, with NaN in every other row."""
    (start, count), table = chunk, crossed_heads(5, shape[1])
    method = KascadeTiles(anchors=(0, 2), head_map=table, **given_)
    world = World(method, shape, 400, 1, backend, seed=seed, layers=5)
    for layer in (2, 3):
        world.fill(layer, 0, start + count)
    asked, q, blocks = world.queries(count), world.queries(count), []
    out = world.runtime.attend_prompt(2, asked, world.bank, start)
    read = torch.zeros(shape[1], 400, dtype=torch.bool)
    for first, last, local, kept in method.blocks(start, start + count):
        own, lists = asked[0, first - start : last - start].double(), torch.zeros(shape[1], 0)
        if kept:
            lists, gap = chosen_by_rule(own, world.bank.kv(2)[0][0, :, :last].double(), local, kept)
            if gap < 1e-6:
                return
            lists = torch.tensor(lists)
        blocks.append((first, last, local, lists.long()))
        mapped = lists.long()[list(table[3])]
        read.scatter_(1, mapped, True)
        read[:, local:last] = True
    for part in world.bank.kv(3):
        part[0].masked_fill_(~read.unsqueeze(-1), float("nan"))
    behind = world.runtime.attend_prompt(3, q, world.bank, start)
    for layer, given_q, found in ((2, asked, out), (3, q, behind)):
        rows = [part[0].double() for part in world.bank.kv(layer)]
        for first, last, local, lists in blocks:
            part = slice(first - start, last - start)
            lists = lists[list(table[3])] if layer == 3 else lists
            # what no head reads may be anything: NaN times a weight of zero is none
            clean = [r.nan_to_num(0.0) for r in rows]
            expected = by_rule(given_q[0, part].double(), *clean, lists, local, first, Softmax())
            torch.testing.assert_close(found[0, part].double(), expected, atol=2e-5, rtol=2e-5)


CONFIG = tiny_config(layers=5, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=6, sharpness=2.0)


def opened(method, **more):
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=1024, **more).session(method)


def test_a_prompt_reads_less_and_its_steps_are_kascades():
    """A step over the bank that the prompt left has the bits of Kascade's; whole tiles give the
    same whatever the chunks.
    """
    ids, given_ = (
        random_ids(500, seed=1),
        dict(tokens=40, anchors=(0, 2), head_map=crossed_heads(5)),
    )
    tiles = KascadeTiles(tile=64, **given_)
    with opened(tiles, chunk=128) as one, opened(tiles, chunk=448) as two, opened(Full()) as dense:
        found = one.prefill(ids)
        torch.testing.assert_close(found, two.prefill(ids), atol=2e-4, rtol=2e-4)
        assert (found - dense.prefill(ids)).abs().max() > 1e-3
        past = sum(first for first in range(0, 500, 64)) * 3
        assert 0 < one.runtime.past_read < past
        first = [one.decode(token) for token in (3, 1, 4)]
        one.truncate(500)
        one.set_method(Kascade(**given_))
        assert all(torch.equal(one.decode(t), logits) for t, logits in zip((3, 1, 4), first))


def test_work_is_counted_and_bad_tiles_are_named():
    work = PrefillFlops.of(CONFIG)
    small, large, whole = (
        opened(KascadeTiles(tokens=k, anchors=(0, 2), tile=32)).runtime.prompt_flops(work, 0, 1000)
        for k in (24, 300, 2048)
    )
    assert small[0] == whole[0] and small[1] < large[1]
    assert whole[1] == pytest.approx(work.parts(0, 1000)[1])
    with pytest.raises(SettingError, match="tile: found 0"):
        KascadeTiles(tile=0)
