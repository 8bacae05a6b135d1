"""A session that an application drops without closing it gives its memory back at once.

Stops: a reference from a part of a session back to it. What such a ring holds lives until Python's
collector looks for rings, which is many sessions later, and leaves holes in the heap (60 dropped
sessions raised resident memory from 380 MB to 600).
"""

import contextlib
import gc
import weakref

import pytest

from engine import SamplingParams
from engine.base.errors import SettingError
from engine.methods.exact import Exact
from engine.methods.full import Full
from tests.builders import random_ids, tiny_llm
from tests.engine.methods.method_table import OF_SESSIONS

IDS = random_ids(90)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(Full(), max_context=256, threads=1, chunk=32)


@pytest.fixture(autouse=True)
def no_collector():
    gc.disable()
    yield
    gc.enable()


CASES = [
    (row.sparse[0] if row.sparse else row.neutral, ("device", "host")[number % 2])
    for number, row in enumerate(OF_SESSIONS)
]
# drafts of two tokens: whether they would pay is no matter here
CASES += [
    (Exact(method, draft=2), tier)
    for method, _ in CASES
    if not method.cannot_draft
    for tier in ("device", "host")
]


@pytest.mark.parametrize(
    "method, tier", CASES, ids=[f"{m.name}-{getattr(m, 'method', m).name}-{t}" for m, t in CASES]
)
def test_a_dropped_session_is_freed_without_the_collector(llm, method, tier):
    session = llm.session(method, offload=tier)
    session.prefill(IDS)
    session.decode(3)
    with contextlib.suppress(SettingError):  # the published code knows one prompt per session
        list(session.generate([4, 5], SamplingParams(max_tokens=3, ignore_eos=True)))
        unfinished = session.generate([6], SamplingParams(max_tokens=3, ignore_eos=True))
        next(unfinished)
        del unfinished
    held = [weakref.ref(session), weakref.ref(session.bank), weakref.ref(session.runner)]
    del session
    assert [part() for part in held] == [None] * 3


def test_a_session_that_went_back_and_on_is_freed_without_the_collector(llm):
    session = llm.session(offload="host")
    session.prefill(IDS)
    copy = session.fork()
    for row in OF_SESSIONS:
        with contextlib.suppress(SettingError):  # those that read prompts in their own way
            copy.set_method(row.sparse[0] if row.sparse else row.neutral)
            copy.decode(1)
    copy.truncate(80)
    copy.decode(2)
    copy.check()
    held = [weakref.ref(copy), weakref.ref(session), weakref.ref(copy.bank)]
    del copy, session
    assert [part() for part in held] == [None] * 3
    assert llm.load().host_pool.in_use == 0
