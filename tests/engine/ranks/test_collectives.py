"""What carries tensors over cards: NCCL's calls, one-shot sums and the test that they must pass,
and the watch over calls that wait. No card computes here: see tests/engine/ranks/cards.py.
"""

import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from engine.base.errors import DeviceFailed, RankLost, SettingError
from engine.forward.graphs import WARM_UP, captured
from engine.model.config.share import Part
from engine.ranks.collectives import one_shot
from engine.ranks.collectives.cards import OnCard
from engine.ranks.collectives.nccl import Nccl
from engine.ranks.collectives.one_shot import OneShot, tried, wanted
from engine.ranks.collectives.watch import Watch
from engine.ranks.group import Ranks, Sent
from engine.ranks.merge import give, listed
from tests.engine.ranks.cards import CPU, Memory, cards_of, nccl, together
from tests.fake_gpu import FakeGPU

LIES = ("stale", "short", "apart", "raises", "none")


def drawn(rank, count, dtype):
    generator = torch.Generator().manual_seed(100 * rank + count)
    return torch.randn(count, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_lists_of_cards(size):
    """In place, on the current stream, and right beside float64."""

    def work(rank, store):
        carrier, found = nccl(rank, size, store), []
        for dtype in (torch.float32, torch.bfloat16):
            for count in (1, 7, 4096):
                x = drawn(rank, count, dtype)
                out, at = x.new_empty(size, count), x.data_ptr()
                carrier.gather(x, out)
                assert carrier.add(x) is x and x.data_ptr() == at
                found.append((x, out))
        assert [kind for kind, *_ in carrier._group.calls] == ["list", "add"] * 6
        assert all(call[-1].asyncOp is False for call in carrier._group.calls)
        return found

    each = together(size, work)
    for number in range(6):
        dtype, count = each[0][number][0].dtype, each[0][number][0].numel()
        parts = torch.stack([drawn(rank, count, dtype) for rank in range(size)])
        for x, out in (mine[number] for mine in each):
            assert torch.equal(out, parts) and torch.equal(x, each[0][number][0])
            bound = size * torch.finfo(dtype).eps * parts.double().abs().sum(0)
            assert bool(((x.double() - parts.double().sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("wrong", ["add", "list"])
def test_a_library_that_adds_or_lists_wrong_is_not_used(wrong):
    group = Echo(2)
    Nccl(group, CPU, 2).warm_up(torch.float32)
    if wrong == "add":
        group.allreduce = lambda tensors, options: None
    else:
        group._allgather_base = lambda out, x, options: out.zero_() is None or None
    with pytest.raises(DeviceFailed, match="NCCL: 1 ones of 2 ranks"):
        Nccl(group, CPU, 2).warm_up(torch.float32)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_shot_sums_that_pass_their_test_carry_small_tensors(size, dtype):
    cards = cards_of(size, dtype)
    assert all(card.one_shot is not None for card in cards)
    card = cards[0]
    before = len(card.nccl._group.calls)
    took = [8, 64, (128 << 10) // dtype.itemsize]
    left = [7, took[-1] + 8]  # not a multiple of what the kernel reads; more than the buffer
    assert all(card.one_shot.adds(torch.zeros(n, dtype=dtype)) for n in took)
    assert not any(card.one_shot.adds(torch.zeros(n, dtype=dtype)) for n in left)
    assert not card.one_shot.adds(torch.zeros(65, dtype=dtype)[1:])  # lies between
    assert not card.one_shot.adds(torch.zeros(64, dtype=torch.float16))
    assert not card.one_shot.adds(torch.zeros(0, dtype=dtype))
    assert len(card.nccl._group.calls) == before


@pytest.mark.parametrize("lie", LIES)
def test_one_shot_sums_that_lie_are_not_used(lie):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cards = cards_of(3 if lie == "apart" else 2, torch.float32, lie)
    assert [card.one_shot for card in cards] == [None] * len(cards)  # on no rank
    (line,) = [str(one.message) for one in said if "GPUs" in str(one.message)]  # rank 0's alone
    assert line.startswith("sums over GPUs are NCCL's alone: ")


def test_cards_that_may_not_say_nothing_and_try_nothing():
    def may(device, dtype, ranks):
        return "the cards do not reach each other's memory"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [card.one_shot for card in cards_of(2, torch.float32, "none", may)] == [None] * 2


def test_a_replayed_sum_that_stays_as_it_was_is_found(monkeypatch):
    """A stand-in's graphs replay nothing."""
    FakeGPU(monkeypatch)
    left, barrier = [None], threading.Barrier(1)
    one, why = tried(
        lambda: Memory(0, left, barrier),
        torch.float32,
        bool,
        lambda one: one_shot.sums(one.add, 0, CPU, torch.float32),
        lambda made: one_shot.wrong(made, lambda x: x[None]),
    )
    assert one is None and why.startswith("a replayed sum is ")


def test_why_a_card_does_without_one_shot_sums(monkeypatch):
    gpu = FakeGPU(monkeypatch, cards=3)
    reach = {(0, 1): True, (0, 2): False}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach[a, b])
    card = torch.device("cuda:0")
    assert gpu.cards == 3 and wanted(card, torch.bfloat16, 2) == ""
    assert "reach each other" in wanted(card, torch.bfloat16, 3)
    assert "float16" in wanted(card, torch.float16, 2)
    monkeypatch.setenv(one_shot.VARIABLE, "0")
    assert wanted(card, torch.bfloat16, 2) == "OMNIKV_ONE_SHOT=0"


def test_sums_of_a_card_take_the_way_that_takes_them():
    left, barrier = [None], threading.Barrier(1)
    asked = []
    group = SimpleNamespace(allreduce=lambda tensors, options: asked.append(tensors[0].numel()))
    card = OnCard(Nccl(group, CPU, 1), OneShot(Memory(0, left, barrier), torch.float32))
    x = torch.arange(8.0)
    assert card.add(x) is x and torch.equal(x, torch.arange(8.0)) and not asked
    card.add(torch.zeros(7))
    assert asked == [7]


# ---------------------------------------------------------------- in a captured step


class Echo:
    """A group whose other ranks bring what this one does: no thread has to run beside it."""

    def __init__(self, size):
        self.size, self.calls = size, []

    def allreduce(self, tensors, options):
        self.calls.append(("add", tuple(tensors[0].shape)))
        tensors[0].mul_(self.size)

    def _allgather_base(self, out, x, options):
        self.calls.append(("list", tuple(x.shape)))
        out.copy_(x.repeat(self.size))


def echoing(size=2):
    """(Ranks of one rank, its group)."""
    ranks, group = object.__new__(Ranks), Echo(size)
    ranks.rank, ranks.size, ranks.segment, ranks.timeout = 0, size, None, 60.0
    ranks.sent, ranks._alone, ranks._refused = Sent(), False, ""
    ranks.card = OnCard(Nccl(group, CPU, size))
    return ranks, group


def test_what_a_captured_step_tells_the_ranks_waits_for_nothing(monkeypatch):
    """Sums, lists of selections and their merge, and logits side by side: a capture refuses
    whatever asks the host. A step runs WARM_UP times before it, so every rank must capture.
    """
    FakeGPU(monkeypatch)
    ranks, group = echoing()
    scores = torch.randn(1, 64)
    index = scores.topk(8).indices.sort().values.int()
    parts = Part(0, 48, 97), Part(48, 97, 97)

    def step():
        x = ranks.add(torch.ones(1, 1, 48))
        give(scores.clone(), ranks.gathered(listed(scores, index)))
        return ranks.beside(x, parts)

    graph, logits = captured(torch.device("cuda:0"), step)
    one = [("add", (1, 1, 48)), ("list", (2 * 8,)), ("list", (49,))]
    assert group.calls == one * (WARM_UP + 1)
    assert logits.shape == (1, 1, 97) and float(logits[0, 0, 0]) == 2
    assert graph.operators > 0 and ranks.sent.calls == 3 * (WARM_UP + 1)


def test_a_capture_refuses_a_collective_that_asks_the_host(monkeypatch):
    FakeGPU(monkeypatch)
    ranks, _ = echoing()
    with pytest.raises(RuntimeError, match="capturing"):
        captured(torch.device("cuda:0"), lambda: ranks.said(3))


# ---------------------------------------------------------------- nobody waits for ever


class Seen:
    """A Watch over calls that a test makes. ends: lines with which a process would end."""

    def __init__(self, timeout=0.2, leave=0.05):
        self.moves, self.ended, self.ends, self.stalls = 0, False, [], []
        given = lambda: self.moves, lambda: lambda: self.ended, self._stalled  # noqa: E731
        self.watch = Watch(1, timeout, *given, self.ends.append, look=0.005, leave=leave)

    def _stalled(self, seconds):
        self.stalls.append(seconds)
        self.watch.lost("rank 1 waited for the others")


def waited(until, most=5.0):
    """Whether `until` comes true."""
    end = time.monotonic() + most
    while not until() and time.monotonic() < end:
        time.sleep(0.005)
    return until()


def test_a_call_that_does_not_leave_after_a_loss_ends_the_process_with_a_line():
    seen = Seen(timeout=60)
    with seen.watch.inside():
        seen.watch.lost("rank 2 (process 7) was ended by signal 9")
        assert waited(lambda: seen.ends)
    assert seen.ends == [
        "rank 1: rank 2 (process 7) was ended by signal 9; its card waits for what does not come"
    ]


def test_a_call_that_leaves_ends_nothing():
    seen = Seen(timeout=60, leave=0.02)
    with seen.watch.inside():
        seen.watch.lost("rank 2 has gone")
    time.sleep(0.1)
    assert not seen.ends
    seen.watch.close()


@pytest.mark.parametrize("moving", ["collectives", "calls", "card", "nothing"])
def test_a_call_that_stands_still_while_its_card_works_is_given_up(moving):
    seen = Seen()
    for _ in range(40 if moving == "calls" else 1):
        with seen.watch.inside():
            for _ in range(1 if moving == "calls" else 40):
                time.sleep(0.01)
                seen.moves += moving == "collectives"
                seen.ended = moving == "card"  # all that it was given is done
    assert bool(seen.stalls) == bool(seen.ends) == (moving == "nothing")
    seen.watch.close()


def test_a_lost_rank_gives_up_the_card_once_and_spoils_what_comes_from_it():
    ranks, group = echoing()
    aborted = []
    group.abort = lambda: aborted.append(1)
    with pytest.raises(RankLost, match="rank 1 has gone"):
        with ranks.together():
            ranks.refuse("rank 1 has gone")
            ranks.refuse("rank 2 has gone")
    with pytest.raises(RankLost, match="rank 1 has gone"):
        with ranks.together():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert waited(lambda: aborted) and len(aborted) == 1
    ranks.close()
    with pytest.raises(RankLost, match="rank 1"):
        ranks.add(torch.ones(3))
    assert len(aborted) == 1


def test_errors_of_a_call_stay_what_they_are_while_all_ranks_run():
    ranks, _ = echoing()
    with pytest.raises(SettingError, match="token"):
        with ranks.together():
            raise SettingError("token: found none")
