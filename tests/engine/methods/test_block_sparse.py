"""Block-sparse prefill of dense layers: exact where everything is kept, the same for any chunks of
whole blocks, true to its estimate.
"""

import pytest
import torch

import engine.methods.omnikv.block_sparse
from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.prefill_time import PrefillFlops
from kernels.prefill.block_sparse import (
    BLOCK,
    attend_blocks,
    block_mass,
    choose_blocks,
    exact_mass,
)
from kernels.prefill.dense import prefill_dense_lse
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.kernels.support.kernel_checks import assert_close, plain

CONFIG = tiny_config(layers=6, heads=4, kv_heads=2, hidden=32, head_dim=16)
WEIGHTS = tiny_weights(CONFIG, seed=3, sharpness=2.5)
PROMPT = random_ids(1100, seed=5)


def rows(chunk, start, heads=4, kv_heads=2, dim=16, seed=0, dtype=torch.float32, sharpness=2.0):
    """q of a chunk, and k, v with NaN past it."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, kv_heads, start + chunk + 7, dim, generator=generator).to(dtype)
    k[:, :, start + chunk :] = v[:, :, start + chunk :] = float("nan")
    return (sharpness * torch.randn(1, chunk, heads, dim, generator=generator)).to(dtype), k, v


# ------------------------------------------------------------------ the pieces


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_pooled_mass_against_a_loop(stride):
    """The rule written as loops in float64: products of the tiles' means, softmax over the tiles,
    sums per block.
    """
    chunk, start, scale = 2 * BLOCK, BLOCK, 0.25
    q, k, _ = rows(chunk, start)
    mass = block_mass(q, k, start, stride, scale)
    for head in (0, 3):
        one, keys = q[0, :, head].double(), k[0, head // 2].double()
        for block in range(2):
            expected = torch.zeros(start // BLOCK + 2, dtype=torch.float64)
            for i in range(block * BLOCK // stride, (block + 1) * BLOCK // stride):
                last = start // stride + i  # the tile row's own tile column
                query = one[i * stride : (i + 1) * stride].mean(0)
                means = [keys[m * stride : (m + 1) * stride].mean(0) for m in range(last + 1)]
                products = torch.stack([query @ mean for mean in means])
                for m, weight in enumerate(torch.softmax(products * scale, 0)):
                    expected[m * stride // BLOCK] += weight * stride / BLOCK
            torch.testing.assert_close(
                mass[0, head, block].double(), expected, atol=1e-5, rtol=1e-4
            )


def test_masses_are_shares_and_causal():
    q, k, _ = rows(3 * BLOCK, 2 * BLOCK)
    for mass in (block_mass(q, k, 2 * BLOCK, 16, 0.25), exact_mass(q, k, 2 * BLOCK, 0.25)):
        torch.testing.assert_close(mass.sum(-1), torch.ones(1, 4, 3))
        assert all(not mass[0, :, n, 3 + n :].any() for n in range(3))


@pytest.mark.parametrize("threshold", [0.3, 0.9, 1.0])
def test_chosen_blocks_are_the_fewest_with_that_mass(threshold):
    generator = torch.Generator().manual_seed(1)
    mass = torch.rand(1, 2, 3, 12, generator=generator) ** 4
    first = 9 * BLOCK
    for n in range(3):
        mass[0, :, n, 10 + n :] = 0.0
    mass /= mass.sum(-1, keepdim=True)
    keep = choose_blocks(mass, first, threshold)
    for head in range(2):
        for n in range(3):
            taken, total = set(), 0.0
            for value, column in sorted(
                ((float(x), i) for i, x in enumerate(mass[0, head, n])), reverse=True
            ):
                if total >= threshold or value == 0.0:
                    break
                taken.add(column)
                total += value
            forced = {0, 8 + n, 9 + n}
            found = set(keep[0, head, n].nonzero().flatten().tolist())
            # sums round at one
            assert found >= forced and len(found ^ (taken | forced)) <= (threshold == 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_kept_blocks_against_float64(dtype):
    """Per head another set of blocks; blocks that no head of a K/V head keeps hold NaN."""
    chunk, start = 2 * BLOCK, 3 * BLOCK
    q, k, v = rows(chunk, start, dtype=dtype, sharpness=1.0)
    keep = torch.zeros(1, 4, 2, 5, dtype=torch.bool)
    for head, blocks in enumerate(([0], [0, 1], [1], [])):
        keep[0, head, :, blocks] = True
        keep[0, head, 0, 3] = keep[0, head, 1, 4] = True
    k[:, :, 2 * BLOCK : 3 * BLOCK] = v[:, :, 2 * BLOCK : 3 * BLOCK] = float("nan")
    out, lse = attend_blocks(q, k, v, keep, start, 0.25)
    for head in range(4):
        for n in range(2):
            chosen = [i for i in range(5) if keep[0, head, n, i]]
            part = [
                torch.cat([t[0, head // 2, i * BLOCK : (i + 1) * BLOCK] for i in chosen])[None]
                for t in (k, v)
            ]
            visible = [(len(chosen) - 1) * BLOCK + j + 1 for j in range(BLOCK)]
            queries = q[0, n * BLOCK : (n + 1) * BLOCK, head : head + 1]
            exact, logits = plain(queries, *part, visible, 0.25, torch.float64)
            rough, _ = plain(queries, *part, visible, 0.25, dtype)
            found = out[0, n * BLOCK : (n + 1) * BLOCK, head : head + 1]
            assert_close(
                found,
                exact,
                rough,
                torch.bfloat16 if dtype is torch.bfloat16 else torch.float16,
                "out",
            )
            sums = lse[0, n * BLOCK : (n + 1) * BLOCK, head].double()
            torch.testing.assert_close(sums, torch.logsumexp(logits[:, 0], -1), atol=1e-3, rtol=0)


def test_everything_kept_is_dense():
    q, k, v = rows(2 * BLOCK, 3 * BLOCK)
    keep = torch.ones(1, 4, 2, 5, dtype=torch.bool)
    for mine, theirs in zip(
        attend_blocks(q, k, v, keep, 3 * BLOCK, 0.25), prefill_dense_lse(q, k, v, 3 * BLOCK, 0.25)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------ in the engine


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Block-sparse from 256 rows on, not from 16K."""
    monkeypatch.setattr(engine.methods.omnikv.block_sparse, "FROM", 256)


def opened(method, chunk):
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=2048, chunk=chunk, backend="auto").session(
        method
    )


def method_of(**changes):
    settings = dict(
        filter_layers=(2,),
        wait_layers=1,
        tokens=32,
        tail=64,
        dense_below=0,
        dense_layers="block_sparse",
        prefill_dense_end=128,
    )
    return OmniKV(**settings | changes)


def test_all_the_mass_is_dense_prefill():
    """The estimate gives every causal block some mass, so a threshold of one keeps (nearly) all; a
    small one does not.
    """
    with (
        opened(method_of(dense_mass=1.0), 512) as session,
        opened(Full(), 512) as dense,
        opened(method_of(dense_mass=0.2), 512) as sparse,
    ):
        exact = dense.prefill(PROMPT)
        torch.testing.assert_close(session.prefill(PROMPT), exact, atol=2e-3, rtol=0)
        assert (sparse.prefill(PROMPT) - exact).abs().max() > 2e-3
        counts = sparse.runtime.prefill.block_sparse
        assert 0 < counts.blocks_kept < 0.9 * counts.blocks_causal


@pytest.mark.parametrize("ratio", [None, 1])
@pytest.mark.parametrize("chunk", [128, 256, 384])
def test_chunks_of_whole_blocks_are_one_shot(chunk, ratio):
    settings = dict(dense_mass=0.5, prefill_ratio=ratio, prefill_block=128)
    with (
        opened(method_of(**settings), chunk) as session,
        opened(method_of(**settings), 2048) as whole,
    ):
        torch.testing.assert_close(
            session.prefill(PROMPT), whole.prefill(PROMPT), atol=2e-4, rtol=0
        )
        mine, theirs = (s.runtime.prefill.block_sparse for s in (session, whole))
        assert (
            mine.blocks_kept == theirs.blocks_kept > 0
            and mine.blocks_causal == theirs.blocks_causal
        )


def test_recall_and_density_are_reported():
    with opened(method_of(dense_mass=0.7), 256) as session:
        session.runtime.prefill.block_sparse.meter = seen = []
        session.prefill(PROMPT)
        assert {record["layer"] for record in seen} == {0, 1, 3}
        for record in seen:
            assert (
                (record["recall"] <= 1.0001).all()
                and (record["density"] <= 1).all()
                and record["recall"].shape[1] == 4
            )
        assert sum(float(r["recall"].mean()) for r in seen) / len(seen) > 0.4


def test_work_and_settings():
    work = PrefillFlops.of(CONFIG)
    with opened(method_of(), 256) as session, opened(Full(), 256) as dense:
        for s in (session, dense):
            s.runtime.begin_prompt(0, 1100)
        mine, full = (s.runtime.prompt_flops(work, 256, 512) for s in (session, dense))
        assert mine[0] == full[0] and mine[1] < full[1]
        assert session.runtime.prompt_flops(work, 0, 256) == dense.runtime.prompt_flops(
            work, 0, 256
        )
    for bad in (
        dict(dense_layers="sparse"),
        dict(dense_mass=0.0),
        dict(dense_mass=True),
        dict(dense_stride=5),
    ):
        with pytest.raises(SettingError):
            method_of(**bad)
