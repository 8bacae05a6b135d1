"""A machine with GPUs that compute nothing: torch.cuda's calls are noted, with the card that was
current, while tensors stay on the CPU.

It shows what the engine asks of torch.cuda and in which order, never whether a GPU would agree.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.launch import shapes

# operators that wait for the device: their results' sizes or values are the host's
READS = ("_local_scalar_dense", "nonzero", "_unique2", "bincount", "masked_select", "equal")


class _Operators(TorchDispatchMode):
    """A capture. count: operators of torch so far. One that waits for the device is refused."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        self._tolist = mock.patch.object(torch.Tensor, "tolist", self._refused)
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *raised):
        self._tolist.stop()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if func._schema.name.split("::")[1] in READS:
            self._refused()
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _refused(*given):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class FakeGPU:
    """`cards` GPUs. now: the current one. asked: (what, card) of every call. clock: seconds that
    the cards' work has taken, at which events stand. finished: whether their work has ended.
    used: the cards that this process has a context on.
    """

    def __init__(self, monkeypatch, cards=2):
        self.now, self.asked, self.clock, self.cards = 0, [], 0.0, cards
        self.finished, self.used = True, {0}
        fake = self

        class Event:
            """Stands at the clock at which it was recorded."""

            def __init__(self, enable_timing=False):
                self.timed, self.at = enable_timing, None

            def record(self, stream=None):
                fake.note("record", stream)
                self.at = fake.clock

            def query(self):
                return fake.finished

            def synchronize(self):
                fake.note("wait for an event")

            def elapsed_time(self, other):
                assert self.timed and other.timed, "events without timing"
                return 1e3 * (other.at - self.at)

        class Stream:
            """One card's stream: waits and records are noted."""

            def __init__(self, device=None, priority=0):
                self.device, self.priority = torch.device("cuda", fake.index(device)), priority
                self.cuda_stream = 0
                fake.note("stream", self.device)

            def wait_stream(self, other):
                fake.note("wait_stream", self.device)

            def wait_event(self, event):
                fake.note("wait_event", self.device)

            def record_event(self, event=None):
                event = event or Event()
                event.record(self.device)
                return event

            def synchronize(self):
                fake.note("synchronize a stream", self.device)

        class Graph:
            """A CUDA graph: a replay is noted and costs `launch` seconds and `kernel` for each
            operator that it captured.
            """

            operators = 0

            def pool(self):
                return id(self)

            def replay(self):
                fake.note("replay")
                fake.clock += fake.launch + self.operators * fake.kernel

        @contextlib.contextmanager
        def graph(graph, pool=None, stream=None, **named):
            fake.captures.append({"pool": pool, **named})
            with _Operators() as seen:
                yield
            graph.operators = seen.count

        self.Event, self.Stream = Event, Stream
        self.captures, self.launch, self.kernel = [], 7e-6, 1e-6
        self.memory = [(70 << 30, 80 << 30)] * cards
        self.capability = (9, 0)
        self.processors = 132
        self.integrated = False  # whether the cards have no memory of their own
        for name, stand_in in {
            "is_available": lambda: cards > 0,
            "device_count": lambda: cards,
            "current_device": lambda: self.now,
            "device": self.entered,
            "current_stream": lambda device=None: Stream(device),
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda device=None: self.note("synchronize", device),
            "mem_get_info": lambda device=None: self.memory[self.index(device)],
            "get_device_name": lambda device=None: "Fake GPU",
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: SimpleNamespace(
                total_memory=self.memory[self.index(device)][1],
                name="Fake GPU",
                is_integrated=self.integrated,
                multi_processor_count=self.processors,
            ),
            "is_initialized": lambda: bool(self.used),
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        shapes._asked.cache_clear()
        has_context = lambda card: card in self.used  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context, raising=False)

    def index(self, device):
        """The number of the card that `device` means here."""
        if device is None:
            return self.now
        found = device if isinstance(device, int) else torch.device(device).index
        return self.now if found is None else found

    def note(self, what, device=None):
        """Note a call: (what, card)."""
        if not isinstance(device, (int, str, torch.device, type(None))):
            device = device.device  # a stream
        self.asked.append((what, self.index(device)))

    @contextlib.contextmanager
    def entered(self, device):
        """torch.cuda.device."""
        before, self.now = self.now, self.index(device)
        try:
            yield
        finally:
            self.now = before

    def of(self, what):
        """The cards that were asked for `what`."""
        return [card for name, card in self.asked if name == what]
