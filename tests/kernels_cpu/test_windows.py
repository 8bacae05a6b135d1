"""Scores of a window of queries in C++ against float64: seams of its tiles and splits, windows of
whole vectors and not, queries that see nothing, and values that are not finite.
"""

import pytest
import torch

from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.library import missing
from kernels.select.window import native
from kernels.select.window.native import score_window, scores_window
from kernels.select.window_scores import window_scores
from tests.kernels.support.kernel_checks import check_window
from tests.kernels.support.softmax_checks import check_window_scores

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    assert native._BINDING.usable(), native._BINDING.fault


# a tile has 64 keys, a split 1,024, a vector 4, 8 or 16 queries
LENGTHS = ([1, 2, 15], [16, 17, 63], [64, 65, 127], [1023, 1024, 1025], [2049, 131, 7])


@pytest.mark.parametrize("kind", ("softmax", "raw"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, dtype, kind):
    check_window("cpu", "native", lengths, dtype=dtype, kind=kind)


@pytest.mark.parametrize("window", (1, 3, 4, 8, 9, 15, 17, 33, 48))
@pytest.mark.parametrize("kv_heads, group, dim", ((1, 1, 16), (2, 3, 80), (3, 4, 32), (1, 8, 128)))
def test_shapes(window, kv_heads, group, dim):
    for number, dtype in enumerate(DTYPES):
        kind, layout = ("softmax", "raw")[number % 2], ("heads", "tokens")[window % 2]
        shape = dict(window=window, kv_heads=kv_heads, group=group, head_dim=dim, layout=layout)
        check_window("cpu", "native", [201, 5], dtype=dtype, kind=kind, **shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caps_and_sinks(dtype):
    sinks = torch.tensor([-1.0, 0.5, 3.0, 9.0, 0.0, -2.0])
    for softmax in (Softmax(5.0), Softmax(sinks=sinks), Softmax(2.0, sinks)):
        check_window_scores("native", softmax, dtype, "heads")


def given(dtype, rows=1300, window=16):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(window, 6, 64, generator=generator).to(dtype)
    return q, torch.randn(2, rows, 64, generator=generator).to(dtype), torch.rand(window) + 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ("softmax", "raw"))
def test_scores_do_not_depend_on_the_threads(dtype, kind):
    q, k, alpha = given(dtype)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.empty(1300))
            score_window(q, k, 0.125, alpha, kind, found[-1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_what_is_not_finite_is_so_where_torchs_is(dtype, bad):
    """Among logits its own row; by a softmax's sum all rows, where torch has one of an infinity."""
    q, k, alpha = given(dtype, rows=200)
    k[1, 77, 3] = bad
    lengths = torch.tensor([200], dtype=torch.int32)
    for kind in ("softmax", "raw"):
        found, own = torch.zeros(2, 1, 200)
        for scores, backend in ((found, "native"), (own, "cpu")):
            window_scores(q[None], k[None], lengths, 0.125, alpha, kind, scores, backend=backend)
        if kind == "raw" or bad != bad:
            assert torch.equal(found.isnan(), own.isnan()), kind
        assert not found[~own.isfinite()].isfinite().any() and not own[0, 77].isfinite(), kind


def test_what_it_takes():
    q, k, alpha = given(torch.float32)
    assert scores_window(q[None], k[None])
    assert not scores_window(q[None].double(), k[None].double())
    assert not scores_window(q[None].bfloat16(), k[None])
    assert not scores_window(q[None, ..., :40], k[None, ..., :40])
    assert not scores_window(q[None], k[None].transpose(2, 3))
    native, own = torch.empty(2, 1, 1300)
    lengths = torch.tensor([1300], dtype=torch.int32)
    window_scores(q[None], k[None], lengths, 0.125, alpha, "softmax", native, backend="auto")
    score_window(q, k[:, :1300], 0.125, alpha, "softmax", own[0], PLAIN)
    assert torch.equal(native, own)
