"""Scratch: its bytes are known before it exists, its contents do not matter, and one serves every
kernel of a step.
"""

import pytest
import torch

from kernels.attention.dense import decode_dense
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch, scratch_bytes
from kernels.attention.sparse import decode_sparse
from kernels.launch.dispatch import choose
from kernels.select.topk import select_topk
from kernels.select.window_scores import window_scores
from tests.kernels.support.kernel_checks import ints


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    "shape",
    [
        ScratchShape(1, 1, 32, 8, 128, 131072, 2048, scored=True),
        ScratchShape(2, 8, 8, 8, 96, 1000, 1),
        ScratchShape(3, 3, 8, 2, 64, 50000, 900, scored=True, window=16),
    ],
)
def test_bytes_are_what_is_allocated(shape, backend):
    scratch = make_scratch(shape, "meta", backend)
    found = sum(
        t.numel() * t.element_size() for t in vars(scratch).values() if isinstance(t, torch.Tensor)
    )
    assert found == scratch_bytes(shape, "meta", backend)


def step(
    scratch: Scratch | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run every kernel of a step at 600 of 700 rows; return everything they leave."""
    lengths, scale, scores = ints([600, 99], "cpu"), 0.2, torch.zeros(2, 700)
    index, counts = torch.zeros(2, 1, 40, dtype=torch.int32), ints([0, 0], "cpu")
    dense = decode_dense(q, k, v, lengths, scale, scores, "softmax", scratch, backend="triton")
    select_topk(
        scores,
        ints([0, 0], "cpu"),
        ints([500, 60], "cpu"),
        ints([40, 30], "cpu"),
        index[:, 0],
        counts,
        scratch,
        backend="triton",
    )
    sparse = decode_sparse(
        q, k, v, index, counts, ints([500, 60], "cpu"), lengths, scale, scratch, backend="triton"
    )
    window = torch.zeros(2, 700)
    window_scores(
        q.repeat(1, 8, 1, 1),
        k,
        lengths,
        scale,
        torch.ones(16),
        "softmax",
        window,
        scratch,
        backend="triton",
    )
    return dense, scores, index, counts, sparse, window


def test_one_scratch_for_a_step_whatever_it_held():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 2, 32), torch.randn(2, 1, 700, 32), torch.randn(2, 1, 700, 32)
    alone = step(None, q, k, v)
    scratch = make_scratch(ScratchShape(2, 2, 2, 1, 32, 1300, 64, True, 16), "cpu", "triton")
    for name, buffer in vars(scratch).items():
        if name not in ("hist", "tickets") and isinstance(buffer, torch.Tensor):
            buffer.fill_(float("nan") if buffer.is_floating_point() else -1)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(alone, step(scratch, q, k, v)))


def test_too_small_a_scratch_is_refused():
    """A bank of 1300 rows with scratch for 600: an error, not a write past its end."""
    scratch = make_scratch(ScratchShape(1, 1, 4, 2, 32, 600, scored=True), "cpu", "triton")
    q, kv, scores = torch.randn(1, 1, 4, 32), torch.randn(2, 1, 2, 1300, 32), torch.zeros(1, 1300)
    with pytest.raises(ValueError, match="scratch.part: found 256 elements, this call needs 384"):
        decode_dense(q, kv[0], kv[1], ints([1300], "cpu"), 0.2, scratch=scratch, backend="triton")
    with pytest.raises(ValueError, match="scratch.logits: found 2400"):
        decode_dense(
            q,
            kv[0][:, :, :1000],
            kv[1][:, :, :1000],
            ints([900], "cpu"),
            0.2,
            scores,
            scratch=scratch,
            backend="triton",
        )


def test_dispatch():
    cpu = torch.zeros(1)
    assert (
        choose("auto", cpu) == "cpu"
        and choose("reference", cpu) == "reference"
        and choose("triton", cpu) == "triton"
    )
    assert choose("auto", torch.zeros(1, device="meta")) == "reference"
    with pytest.raises(ValueError, match="backend: found 'fast', expected one of auto"):
        choose("fast", cpu)
