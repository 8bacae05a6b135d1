"""Signs of life in a stream, by a clock that the test holds.

Stops: a comment that comes because the machine is slow, one that does not come, one after each
event, one that splits an answer's first event from its begin.
"""

import asyncio

import pytest

from engine.batch.worker import Ended, Reading
from engine.plan.prefill_time import PrefillProgress
from engine.serve.openai.streaming import stream
from engine.serve.worker.worker import Wrote
from tests.clocks import HeldClock


class Plain:
    """An interface whose lines are the names of what it was told."""

    def found(self, tokens):
        """Nobody asks."""

    count = found

    def begin(self):
        return [("", "begin")]

    def quiet(self):
        return [("", "quiet")]

    def step(self, event):
        return [("", event.text)]

    def end(self):
        return [("", "end")]


def reading(done):
    return Reading(0, PrefillProgress(done, 100, 0.0, 0.0, None))


def wrote(text):
    return Wrote(0, text, 1, None, (), None)


def lines(events, ping=3.0):
    """The lines of a stream whose clock goes on by so many seconds before each event."""
    clock = HeldClock()

    async def come():
        for seconds, event in events:
            clock.now += seconds
            yield event

    async def streamed():
        return [line.strip() async for line in stream(come(), Plain(), lambda: ping, clock)]

    return [line.removeprefix("data: ") for line in asyncio.run(streamed())]


@pytest.mark.parametrize("ping, every", [(3.0, 12), (0.5, 2), (0.25, 1)])
def test_a_prompt_gets_a_comment_every_so_many_seconds(ping, every):
    """Whatever the number of its chunks: one comes when the time is over, and then the next."""
    said = lines([(0.25, reading(done)) for done in range(1, 25)], ping)
    comments = [line for line in said if line.startswith(": ")]
    assert comments == [f": reading {done}/100" for done in range(every, 25, every)]
    assert said.count("quiet") == len(comments) and said.count("begin") == 1


def test_a_clock_that_stands_still_lets_no_comment_through():
    events = [(0.0, None)] * 3 + [(0.0, reading(n)) for n in range(50)]
    events += [(0.0, None), (0.0, wrote("a")), (0.0, None), (0.0, wrote("b")), (0.0, Ended(None))]
    assert lines(events) == ["begin", "a", "b", "end"]


def test_what_waits_for_a_slot_is_told_so_and_an_answer_is_a_sign_of_life():
    """Before the answer begins only comments come: the interface has said nothing yet."""
    said = lines(
        [(3.0, None), (2.875, None), (0.125, None), (0.0, reading(1)), (2.875, wrote("a"))]
    )
    assert said == [": waiting", ": waiting", "begin", "a"]
    said = lines(
        [(0.0, reading(1)), (2.875, wrote("a")), (2.875, None), (0.125, None), (0.0, Ended(None))]
    )
    assert said == ["begin", "a", ": reading 1/100", "quiet", "end"]
