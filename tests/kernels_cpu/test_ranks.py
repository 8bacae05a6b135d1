"""Sums and lists over ranks by the C++ kernel, between threads that share a segment."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.ranks import join

pytestmark = pytest.mark.skipif(not join.usable(), reason="no C++ kernels here")
SLOT = 256


class Ranks:
    """`size` places in one segment; each(work): what work(join, rank) gives, of all at once."""

    def __init__(self, size, patience=30.0):
        self.held = torch.zeros(join.segment_bytes(size, SLOT), dtype=torch.uint8)
        given = self.held.data_ptr(), SLOT
        self.joins = [join.Joins(*given, rank, size, patience) for rank in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def each(self, work):
        return list(self.pool.map(work, self.joins, range(len(self.joins))))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_float64_s_of_every_length(size, dtype):
    ranks, generator = Ranks(size), torch.Generator().manual_seed(size)
    for count in (1, 15, 63, 64, 65, 127, 128, 129, 1000):  # slots hold 64 and 128
        parts = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
        found = ranks.each(lambda one, rank, parts=parts: one.add(parts[rank]))
        want = sum(part.double() for part in parts)
        plain = sum(part.float() for part in parts).to(dtype)
        for out, code in found:
            assert code == 0 and torch.equal(out, found[0][0])  # every rank has the same bits
            error = float((out.double() - want).abs().max())
            assert error <= 2 * float((plain.double() - want).abs().max()) + 1e-12


def test_sums_keep_what_is_not_finite():
    ranks = Ranks(2)
    parts = torch.tensor([[float("nan"), float("inf"), 1.0], [1.0, float("-inf"), float("inf")]])
    for out, _ in ranks.each(lambda one, rank: one.add(parts[rank].contiguous())):
        assert out.isnan().tolist() == [True, True, False] and out[2] == float("inf")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16, torch.int64])
def test_lists_have_every_rank_s_bytes(dtype):
    ranks = Ranks(3)
    parts = torch.arange(3 * 77).view(3, 77).to(dtype)
    outs = [torch.empty(3, 77, dtype=dtype) for _ in range(3)]
    codes = ranks.each(lambda one, rank: one.listed(parts[rank].contiguous(), outs[rank]))
    assert codes == [0, 0, 0] and all(torch.equal(out, parts) for out in outs)


def test_a_thousand_sums_in_a_row_read_no_old_slot():
    ranks = Ranks(3)

    def run(one, rank):
        x, found = torch.full((100,), float(rank)), []
        for number in range(1000):
            out, code = one.add(x + number)
            found.append((code, float(out[0]), float(out[-1])))
        return found

    want = [(0, 3.0 + 3 * n, 3.0 + 3 * n) for n in range(1000)]
    assert ranks.each(run) == [want] * 3


def test_who_waits_for_a_dead_rank_leaves():
    late, ended = Ranks(2, patience=0.05), Ranks(2)
    assert late.joins[0].add(torch.ones(4))[1] == join.LATE
    waiting = ended.pool.submit(ended.joins[0].add, torch.ones(4))
    ended.joins[1].end()
    assert waiting.result(30)[1] == join.ENDED
    assert ended.joins[0].add(torch.ones(4))[1] == join.ENDED  # and whoever comes later
