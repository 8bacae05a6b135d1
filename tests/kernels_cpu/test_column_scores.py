"""Column scores in plain torch against the float64 oracle, on hostile shapes."""

import pytest
import torch

import kernels.select.column_scores
from kernels.select.column_scores import column_scores
from kernels.select.window.native import scores_window
from tests.kernels.support.prefill_checks import check_column_scores

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "backend, dtype",
    [
        *(("native", F32), ("native", F16), ("native", BF16)),
        *(("cpu", F32), ("cpu", F16), ("cpu", BF16), ("reference", F32)),
    ],
)
@pytest.mark.parametrize(
    "chunk, stop, shape",
    [
        (1, 1, dict()),
        (5, 63, dict(group=1, kv_heads=3, layout="tokens")),
        (64, 64, dict(group=8, kv_heads=1, head_dim=96)),
        (33, 65, dict(head_dim=40, batch=1)),
        (17, 300, dict(kv_heads=4, group=1, head_dim=128)),
        (60, 90, dict(blocks=[(0, 20, 40), (20, 41, 90), (41, 60, 1)], stride=4)),
        # one row takes nearly all, most weights underflow
        (9, 200, dict(sharpness=6.0)),
        (9, 200, dict(sharpness=0.0)),  # all weights equal
        (70, 70, dict(group=3, kv_heads=2, stride=3)),
    ],
)
def test_against_float64(backend, dtype, chunk, stop, shape, monkeypatch):
    monkeypatch.setattr(kernels.select.column_scores, "ROWS", 64)
    check_column_scores("cpu", backend, chunk, stop, dtype=dtype, **shape)


def test_the_kernel_runs_and_threads_change_no_bit():
    if not scores_window(torch.empty(1, 1, 4, 64), torch.empty(1, 2, 8, 64)):
        pytest.skip("no C++ kernels here")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*s, generator=generator) for s in ((1, 70, 6, 64), (1, 2, 2100, 64)))
    lse, found = torch.randn(1, 70, 6, generator=generator).abs() + 60, []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums = torch.full((1, 1, 2100), 7.0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernels.select.column_scores, "column_scores_cpu", None)
                column_scores(q, k, lse, [(2030, 2100, 2030)], 2030, 1, 0.3, sums)
            found.append(sums)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert (found[0][..., 2030:] == 7.0).all() and not (found[0][..., :2030] == 7.0).any()


def test_nothing_to_score_writes_nothing():
    sums = torch.full((1, 8), 7.0)
    column_scores(
        torch.randn(1, 2, 4, 16),
        torch.randn(1, 2, 8, 16),
        torch.zeros(1, 2, 4),
        [(0, 2, 0)],
        0,
        1,
        0.25,
        sums[None],
    )
    assert (sums == 7.0).all()
