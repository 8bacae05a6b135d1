"""The radix select, interpreted, against a stable sort: ties, order, padding and independence of
the grid.
"""

import pytest
import torch

import kernels.select.topk
from kernels.attention.scratch import SELECT_PROGRAMS, ScratchShape, make_scratch
from kernels.select.topk import select_span
from tests.kernels.support.kernel_checks import HOSTILE_ROWS, check_topk, hostile_row


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_hostile_rows(name, generator):
    rows = [hostile_row(name, 2500, generator) for _ in range(3)]
    check_topk("cpu", "triton", rows, [0, 17, 1024], [2500, 2049, 2400], [300, 64, 1000], 1000)


def test_histograms_are_left_zero_and_scratch_is_reused(generator):
    scratch = make_scratch(ScratchShape(2, 1, 1, 1, 16, 3000, scored=True), "cpu", "triton")
    for name in ("equal", "normal", "nan", "normal"):
        check_topk(
            "cpu",
            "triton",
            [hostile_row(name, 3000, generator) for _ in range(2)],
            [0, 5],
            [3000, 900],
            [77, 1],
            80,
            scratch=scratch,
        )
        assert not scratch.hist.any()
        scratch.ranks.fill_(-7)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1023, 1024, 1025])
def test_counts_around_k(n, generator):
    row = hostile_row("two", 1100, generator)
    check_topk("cpu", "triton", [row, row, row], [0, 3, 9], [n, 3 + n, 2], [64, n, 5], 64)


def test_budget_of_zero_and_range_beyond_the_row(generator):
    row = hostile_row("normal", 300, generator)
    check_topk("cpu", "triton", [row, row], [0, 10], [300, 300], [0, 999], 290)


@pytest.mark.parametrize("name", ["two", "normal"])
def test_result_does_not_depend_on_the_grid(name, generator):
    row = hostile_row(name, 1300, generator)
    results = [
        check_topk("cpu", "triton", [row], [70], [1250], [333], 400, span=span)
        for span in (64, 256, 1024, 2048)
    ]
    results.append(
        check_topk("cpu", "triton", [torch.cat([row, torch.zeros(800)])], [70], [1250], [333], 400)
    )
    assert all(torch.equal(results[0], other) for other in results)


def test_a_long_row(generator, monkeypatch):
    """As many programs as there may be (8 for speed, 128 ship), and two tiles in each."""
    monkeypatch.setattr(kernels.select.topk, "SELECT_PROGRAMS", 8)
    row = torch.softmax(torch.randn(2**14 - 3, generator=generator) * 6, 0)
    assert select_span(len(row)) == 2048
    check_topk("cpu", "triton", [row], [0], [len(row) - 300], [2048], 2048)


def test_no_row_needs_more_programs_than_one_vector_counts():
    for capacity in (1, 1024, 1025, 2**17, 2**17 + 1, 2**18 - 3, 2**20, 2**24 + 1):
        span = select_span(capacity)
        assert span & (span - 1) == 0 and -(-capacity // span) <= SELECT_PROGRAMS
