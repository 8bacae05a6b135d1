"""Quantisers of the literature: each against a slow writing of its formula in float64, on random
and hostile rows; its bytes against a count by hand; the bounds that a format implies.

Stops: a group along the wrong axis, a scale that is not what float16 holds, a part of a format that
is not counted, a token that is rounded though its format keeps it.
"""

from types import SimpleNamespace

import pytest
import torch

from engine.base.errors import UsageError
from tests.tools.bank_oracles import ORACLES, gear
from tools.banks.base import Run
from tools.banks.gear import Gear, low_rank
from tools.banks.kvquant import codebook
from tools.banks.registry import FAMILIES, checked, quantiser, shown
from tools.banks.rotatekv import hadamard
from tools.banks.uniform import affine

LENGTHS = (1, 31, 32, 33, 41)
WIDTH = 16


def rows(count, kind="random", heads=2, width=WIDTH, seed=0):
    """k and v [heads, count, width] in float64."""
    made = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, heads, count, width, generator=made, dtype=torch.float64)
    k[..., 3] += 5.0  # a channel off centre, as keys have
    if kind == "zero":
        k[:, ::2], v[:, ::2] = 0.0, 0.0
    if kind == "nothing":
        k, v = torch.zeros_like(k), torch.zeros_like(v)
    if kind == "outlier":
        k[0, count // 2, 1], v[1, count // 2, 2] = -3e4, 2e4
    if kind == "subnormal":
        k, v = k * 1e-40, v * 1e-39
    return k, v


def run_of(k, v, first=0, seed=1):
    """A Run with weights and queries."""
    made = torch.Generator().manual_seed(seed)
    weights = torch.rand(k.shape[1], generator=made, dtype=torch.float64)
    queries = torch.rand(k.shape[0], k.shape[2], generator=made, dtype=torch.float64) + 0.1
    return Run(k, v, first, weights.to(k.dtype), queries.to(k.dtype))


def plain(run):
    """The same as arrays."""
    parts = {name: getattr(run, name).numpy() for name in ("k", "v", "attention", "queries")}
    return SimpleNamespace(first=run.first, **parts)


def of(family, bits):
    return FAMILIES[family](1 if family == "sign" else bits)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("family", sorted(ORACLES))
def test_a_quantiser_is_its_formula(family, bits):
    for number, count in enumerate(LENGTHS):
        heads = 3 if count == 33 else 2
        run = run_of(*rows(count, heads=heads, seed=number), first=0 if count < 40 else 64)
        found = of(family, bits).rounded(run, {})
        k, v, taken = ORACLES[family](plain(run), bits)
        torch.testing.assert_close(found.k, torch.from_numpy(k), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.v, torch.from_numpy(v), rtol=1e-6, atol=1e-6)
        assert found.bits == taken


@pytest.mark.parametrize("kind", ["zero", "nothing", "outlier", "subnormal"])
@pytest.mark.parametrize("family", sorted(ORACLES))
def test_hostile_rows(family, kind):
    run = run_of(*rows(32, kind), first=32)
    found = of(family, 3).rounded(run, {})
    k, v, taken = ORACLES[family](plain(run), 3)
    assert found.k.isfinite().all() and found.v.isfinite().all()
    torch.testing.assert_close(found.k, torch.from_numpy(k), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.v, torch.from_numpy(v), rtol=1e-6, atol=1e-6)
    assert found.bits == taken
    if kind == "nothing":
        assert not found.k.any() and not found.v.any()


@pytest.mark.parametrize("kind", ["random", "outlier", "zero"])
@pytest.mark.parametrize("count", [1, 33, 64])
def test_gear_is_backbone_apart_and_the_residuals_projection(count, kind):
    run = run_of(*rows(count, kind, width=64))
    found = Gear(2).rounded(run, {})
    parts, taken = gear(plain(run), 2)
    assert found.bits == taken
    for rounded, (dense, backbone, apart, rank) in zip((found.k, found.v), parts):
        rest = torch.from_numpy(dense - backbone)
        left = rounded - torch.from_numpy(backbone + apart)  # the product of low rank
        assert torch.linalg.matrix_rank(left, rtol=1e-2).max() <= rank
        error = torch.linalg.matrix_norm(rest - left)
        best = torch.linalg.svdvals(rest)[:, rank:].square().sum(-1).sqrt()
        size = torch.linalg.matrix_norm(rest)
        # float16's factors move it by 2^-10 of the residual
        assert (error <= size * (1 + 2**-9)).all() and (error >= best * (1 - 2**-9)).all()
        if count == 64 and kind == "random":  # three turns come near the best
            assert (error <= best + 0.25 * (size - best)).all()


def test_low_rank_finds_what_is_of_low_rank():
    made = torch.Generator().manual_seed(3)
    a = torch.randn(2, 40, 2, generator=made) @ torch.randn(2, 2, 64, generator=made)
    left, right = low_rank(a, 2)
    torch.testing.assert_close(left @ right.transpose(1, 2), a, rtol=0.0, atol=2e-2)


# one run of 2 heads, 64 tokens, 64 channels behind the sinks: 8,192 elements of K and as many of V
N = 8192
BY_HAND = {
    # 256 groups of 32 in each, a scale and a zero of 16 bits
    "kivi2": 2 * N * 2 + 2 * 256 * 32,
    "token4": 2 * N * 4 + 2 * 128 * 32,
    "saq2": 2 * N * 8 + 2 * 128 * 32,  # at its first stage
    "sign": 2 * N + 2 * 128 * 16,
    # two blocks of 32 channels per token and head
    "bfp4": 2 * N * 4 + 2 * 256 * 8,
    # a group of both heads' 128 channels per token in each, 7 bits for a channel's place
    "rotatekv2": 2 * N * 2 + 2 * 64 * 32 + 128 * 7,
    # limits of 128 channels and 64 tokens, 64 pointers twice, two codebooks of 4; apart: none of a
    # channel's 64 (0.3 rounds down), one at either end of a token's 128
    "kvquant2": 2 * N * 2 + 128 * 32 + 64 * 32 + 2 * 64 * 32 + 2 * 4 * 16 + 128 * 32,
    # 38 tokens in 4 bits, 26 in 2; per subset 128 channels of K, per token one group of V; 128
    # sizes, 64 marks
    "zipcache2": 2 * 128 * (38 * 4 + 26 * 2) + 2 * 128 * 32 + 64 * 32 + 128 * 16 + 64,
    # 13 tokens in 8 bits, 51 in 2, one group per token and head in each; 128 balances, 64 marks
    "mikv2": 2 * 128 * (13 * 8 + 51 * 2) + 2 * 128 * 32 + 128 * 16 + 64,
    # one group of 64 in each of 128 vectors, K and V; apart: one at either end of 128 channels'
    # 64 tokens and of 64 tokens' 128 channels; rank 2 for 2 heads, twice
    "gear2": 2 * N * 2 + 2 * 128 * 32 + (256 + 128) * 32 + 2 * 2 * 2 * (64 + 64) * 16,
}


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_bytes_are_those_counted_by_hand(name):
    run = run_of(*(x.float() for x in rows(64, width=64)), first=64)
    assert quantiser(name).rounded(run, {}).bits == BY_HAND[name]


def test_every_family_is_counted():
    assert {name.rstrip("0123456789") for name in BY_HAND} == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sixteen_bits_keep_rows_as_they_are(family):
    if family == "sign":
        return
    run = run_of(*rows(37))
    found = quantiser(f"{family}16").rounded(run, {})
    assert torch.equal(found.k, run.k) and torch.equal(found.v, run.v)
    assert found.bits == 16 * 2 * run.k.numel()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"sign", "zipcache", "mikv"}))
def test_more_bits_are_nearer(family):
    """Every further two bits leave less than half of the error."""
    run = run_of(*(x.float() for x in rows(96, width=64)), first=32)
    errors = []
    for bits in (2, 4, 6, 8):
        q = of(family, bits)
        found = q.rounded(run, {}, len(q.ages) - 1)
        errors.append(float((found.k - run.k).norm() + (found.v - run.v).norm()))
    assert all(after < before / 2 for before, after in zip(errors, errors[1:]))


@pytest.mark.parametrize("kind", ["random", "outlier", "zero", "subnormal"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_an_element_is_off_by_half_a_step(bits, kind):
    x = rows(48, kind)[0].float()
    for dim, group in ((1, 32), (2, 5), (2, None)):
        found = affine(x, bits, dim, group).values
        for part, back in zip(
            x.split(group or x.shape[dim], dim), found.split(group or x.shape[dim], dim)
        ):
            low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
            # zero and scale are off by 2^-11 of themselves, or 2^-25 where they are subnormal
            slack = 2**-10 * (low.abs() + (high - low)) + 2**bits * 2**-24
            bound = (high - low) / (2**bits - 1) / 2 + slack
            assert ((back - part).abs() <= bound).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_block_floats_are_off_by_half_a_step_and_the_largest_by_one(bits):
    for kind in ("random", "outlier", "zero"):
        run = run_of(*rows(16, kind, width=32))
        found = of("bfp", bits).rounded(run, {})
        largest = run.k.abs().amax(-1, keepdim=True)
        step = torch.where(largest > 0, 2.0 ** (largest.log2().floor() - bits + 2), 0.0)
        error = (found.k - run.k).abs()
        assert (error <= step).all()
        inside = run.k.abs() <= (2 ** (bits - 1) - 1) * step
        assert (error <= step / 2)[inside].all()


def test_what_a_format_keeps_apart_is_exact():
    k, v = (x.float() for x in rows(256, width=64))
    k[0, 100, 7], v[1, 100, 9] = 900.0, -900.0
    found = quantiser("kvquant2").rounded(run_of(k, v), {})
    assert found.k[0, 100, 7] == 900.0 and found.v[1, 100, 9] == -900.0
    assert torch.equal(found.k[:, 0], k[:, 0]) and not torch.equal(found.k[:, 1], k[:, 1])
    sinks = quantiser("rotatekv2").rounded(run_of(k, v), {})
    assert torch.equal(sinks.k[:, :4], k[:, :4]) and torch.equal(sinks.v[:, :4], v[:, :4])
    assert not torch.equal(sinks.k[:, 4], k[:, 4])


@pytest.mark.parametrize("name", ["zipcache2", "mikv2"])
def test_tokens_that_matter_are_nearer(name):
    run = run_of(*(x.float() for x in rows(128, width=64)))
    found = quantiser(name).rounded(run, {})
    order = run.attention.argsort(descending=True)
    for rounded, exact in ((found.k, run.k), (found.v, run.v)):
        error = (rounded - exact).square().mean((0, 2))[order]
        assert error[:25].mean() < error[-50:].mean() / 4


def test_rotation_spreads_an_outlier_channel():
    """What the format is for: one large channel no longer takes the precision of the others."""
    k, v = (x.float() for x in rows(64, width=64))
    k[..., 5] *= 40
    run = run_of(k, v, first=64)
    turned, straight = (
        (quantiser(name).rounded(run, {}).k - k)[..., [c for c in range(64) if c != 5]].norm()
        for name in ("rotatekv4", "token4")
    )
    assert turned < straight / 2


def test_walsh_hadamard_is_its_own_inverse():
    x = torch.randn(3, 64, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(), x.norm())
    with pytest.raises(ValueError, match="power of two"):
        hadamard(torch.zeros(2, 48))


def test_calibration_comes_from_the_first_run_only():
    first, later = (run_of(*(x.float() for x in rows(64, seed=s)), first=64 * s) for s in (1, 2))
    for name in ("kvquant3", "rotatekv3", "bfp3", "mikv3"):
        memo = {}
        before = quantiser(name).rounded(first, memo)
        kept = {key: value for key, value in memo.items()}
        after = quantiser(name).rounded(later, memo)
        assert kept and all(memo[key] is value for key, value in kept.items())
        if name in ("rotatekv3", "mikv3"):  # whose runs of one length take the same otherwise
            assert after.bits < before.bits  # what was calibrated is not counted again


def test_a_codebook_lies_where_the_values_are():
    values = torch.cat((torch.full((500,), -0.5), torch.full((500,), 0.25), torch.ones(20)))
    assert codebook(values, 4)[0] == -0.5 and 0.25 in codebook(values, 4).tolist()
    found = codebook(torch.randn(4000), 8)
    assert (found[1:] > found[:-1]).all()


def test_a_staircase_falls_and_one_step_is_uniform():
    stairs, one = quantiser("saq2"), quantiser("token2")
    assert stairs.ages == (32, 256, 1024) and stairs.widths == (8, 4, 2)
    assert quantiser("saq4").widths == (8, 8, 4) and quantiser("saq8").widths == (8, 8, 8)
    run = run_of(*(x.float() for x in rows(64)))
    last, uniform = stairs.rounded(run, {}, 2), one.rounded(run, {})
    assert torch.equal(last.k, uniform.k) and last.bits == uniform.bits
    assert stairs.rounded(run, {}, 0).bits > stairs.rounded(run, {}, 1).bits > last.bits


def test_names():
    assert quantiser("kivi").bits == 4 and quantiser("sign").bits == 1
    assert checked(["int8", "kivi2", "int8"]) == ("int8", "kivi2")
    assert shown("int8") == "int8" and shown("kivi2") == "kivi2 (simulated)"
    for name in ("", "kivi0", "kivi9", "kivi32", "bfp1", "sign2", "int5", "kivi-2", "KIVI2"):
        with pytest.raises(UsageError, match="--bank"):
            checked([name])
