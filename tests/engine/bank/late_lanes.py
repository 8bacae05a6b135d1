"""Side streams that run their work as late as they may, on a CPU. Work that nobody waits for has
not happened, and when it runs it finds what came after it.

A CUDA stream beside the main one may run at any time between the event it waits for and the event
that somebody waits for. A fast machine, or one that does everything in order, hides a missing wait.
A late lane runs nothing before somebody waits for it. Work on the main stream runs at once. Late
lanes cannot show a stream that begins too early (a missing `after_main`).
"""

import contextlib
import importlib
import sys

import torch


class Event:
    """Behind the first `position` pieces of a lane's work."""

    def __init__(self, lane, position):
        self.lane, self.position = lane, position

    def happen(self):
        self.lane.run(self.position)

    def query(self):
        return self.lane.done >= self.position


class LateLane:
    """engine.bank.host.streams.SideStream with a list of work instead of a stream."""

    # every lane since `install`; the one that work is issued on now; the waits left out
    made, now, skip = [], None, ""

    def __init__(self, device):
        self.work, self.done = [], 0
        LateLane.made.append(self)

    @contextlib.contextmanager
    def after_main(self):
        before, LateLane.now = LateLane.now, self
        try:
            yield
        finally:
            LateLane.now = before

    def wait_event(self, event):
        if event is not None and sys._getframe(1).f_code.co_name != LateLane.skip:
            self.work.append(event.happen)

    def record_event(self):
        return Event(self, len(self.work))

    def synchronize(self):
        if sys._getframe(1).f_code.co_name != LateLane.skip:
            self.run(len(self.work))

    def run(self, position):
        before, LateLane.now = LateLane.now, None
        try:
            while self.done < position:
                self.done += 1
                self.work[self.done - 1]()
                self.work[self.done - 1] = None
        finally:
            LateLane.now = before


def sources(name, arguments, named):
    """The tensors that a piece of work reads and that only the main stream writes: they must hold
    still until it has run.
    """
    if name == "plan_slots":
        return arguments[:2]  # the selection and its length
    if name == "copy_rows":
        return arguments[1:]
    if name == "move_rows" and named.get("to_host"):
        _, _, _, buffer, _, first, count = arguments[:7]
        return [buffer[first : first + count]]
    return []


def late(name, function):
    """The same function, put on the current lane's list where there is one. Tensors are held, so
    they are read when it runs.
    """

    def issued(*arguments, **named):
        if LateLane.now is None:
            return function(*arguments, **named)
        read = sources(name, arguments, named)
        held = [tensor.clone() for tensor in read]

        def run():
            assert all(map(torch.equal, read, held)), (
                f"{name}: what it reads was written again before it ran"
            )
            function(*arguments, **named)

        LateLane.now.work.append(run)
        return None

    return issued


# modules of engine.bank.host that copy rows, plan slots or wait
MODULES = (
    "block_stream",
    "host_rows",
    "row_reader",
    "tiered",
    "whole_layers",
    "working_set",
    "write_back",
)


def install(monkeypatch, skip=""):
    """Put late lanes under the host tier. skip: a function whose waits do nothing, to see that they
    matter.
    """

    def wait(event, device):
        if event is not None and sys._getframe(1).f_code.co_name != skip:
            assert LateLane.now is None, "a lane follows, it does not wait"
            event.happen()

    LateLane.made, LateLane.now, LateLane.skip = [], None, skip
    patched = set()
    for name in MODULES:
        module = importlib.import_module(f"engine.bank.host.{name}")
        for function in ("move_rows", "copy_rows", "plan_slots", "forget_slots"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, late(function, getattr(module, function)))
                patched.add(function)
        for function, stand_in in (("wait", wait), ("SideStream", LateLane)):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, stand_in)
                patched.add(function)
    assert len(patched) == 6, "a name that late lanes replace has moved"
