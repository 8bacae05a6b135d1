"""How a step is captured: on one stream of the card, undisturbed by the collector and by other
threads.

Stops: 32 MiB of workspace for every capture, a fetch lane that is the capturing stream, a capture
spoilt by the finalizer of something that was dropped long ago.
"""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from engine.bank.host.streams import SideStream
from engine.base.device import capture_stream
from engine.forward.graphs import WARM_UP, GraphedStep, _anchor
from engine.plan.needs import Needs
from tests.fake_gpu import FakeGPU

CARD = torch.device("cuda:1")


class Decoder:
    """Steps that note the stream they run on and whether the collector may run."""

    def __init__(self, gpu, fails=False):
        self.gpu, self.fails, self.steps = gpu, fails, []
        self.model = SimpleNamespace(replayed=lambda: None)

    def step(self, token, length, bank, bucket):
        self.steps.append((self.gpu.streams[-1], gc.isenabled()))
        if self.fails and len(self.steps) > WARM_UP:
            raise KeyboardInterrupt
        return torch.zeros(1, 1, 5)


@pytest.fixture
def gpu(monkeypatch):
    """Two cards; the second is current. streams: those entered; captures: arguments of each."""
    gpu = FakeGPU(monkeypatch)
    gpu.now, gpu.streams, gpu.captures = 1, [None], []

    @contextlib.contextmanager
    def entered(stream):
        gpu.streams.append(stream)
        yield
        gpu.streams.pop()

    @contextlib.contextmanager
    def graph(graph, stream=None, **named):
        gpu.captures.append(named)  # pool among them
        with entered(stream):
            yield

    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture_stream.cache_clear(), _anchor.cache_clear()
    yield gpu
    capture_stream.cache_clear(), _anchor.cache_clear()


def graphed(gpu, fails=False):
    decoder = Decoder(gpu, fails)
    token = SimpleNamespace(device=CARD)
    bank = SimpleNamespace(capacity=16384, capturable=lambda fetches: True)
    return decoder, GraphedStep(decoder, Needs(cuda_graph=True), token, None, bank, True)


def test_every_capture_runs_on_one_stream_of_its_card(gpu):
    """Warm-ups too; a second session's, and a second bucket's."""
    streams = set()
    for _ in range(2):
        decoder, step = graphed(gpu)
        step(100), step(100), step(5000)
        assert len(decoder.steps) == 2 * (WARM_UP + 1)
        streams |= {stream for stream, _ in decoder.steps}
    assert len(streams) == 1 and streams.pop().device == CARD
    assert gpu.of("wait_stream") == [1] * 8


def test_a_lane_is_never_the_capturing_stream(gpu):
    """torch hands out 32 streams of each priority again and again."""
    assert SideStream(CARD)._stream.priority != capture_stream(CARD).priority


def test_no_finalizer_runs_while_a_step_is_captured(gpu):
    ended = []

    class Dropped:
        def __del__(self):
            ended.append(len(decoder.steps))

    decoder, step = graphed(gpu)
    circle = Dropped()
    circle.itself = circle
    del circle
    step(100)
    assert ended and ended[0] <= WARM_UP, "what was dropped before is collected before"
    assert [enabled for _, enabled in decoder.steps] == [True] * WARM_UP + [False]
    assert gc.isenabled()


def test_the_collector_is_back_after_a_capture_that_broke_off(gpu):
    _, step = graphed(gpu, fails=True)
    with pytest.raises(KeyboardInterrupt):
        step(100)
    assert gc.isenabled()


def test_other_threads_may_call_the_driver_meanwhile(gpu):
    _, step = graphed(gpu)
    step(100)
    assert {named["capture_error_mode"] for named in gpu.captures} == {"thread_local"}


def test_all_graphs_of_a_card_share_one_pool(gpu):
    """A batch keeps 32 of them; each had 4 to 24 MB for itself, which no plan counts. An empty
    graph that nobody drops keeps the pool: torch takes none whose graphs are all gone.
    """
    for _ in range(2):
        _, step = graphed(gpu)
        step(100), step(5000)
    first, *others = [named.get("pool") for named in gpu.captures]
    assert first is None and len(others) == 4 and set(others) == {_anchor(CARD, 0).pool()}
