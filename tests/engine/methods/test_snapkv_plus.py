"""SnapKV that evicts while it reads: what its segments keep, and that chunks change nothing.

Stops: a cut by other queries than a segment's newest; chunks that show; a head that holds more than
a budget and a segment; a prompt that was not read, or half read, without queries to choose.
"""

from dataclasses import replace

import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.snapkv_plus import SnapKVPlus, SnapPlusRuntime
from engine.plan.needs import MOST_WINDOW
from tests.builders import random_ids
from tests.engine.methods.method_checks import SHAPES, llm_of

METHOD = SnapKVPlus(tokens=40, window=16, segment=50)


def positions(session):
    return [session.runtime.positions(layer) for layer in range(session.plan.num_layers)]


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [16, 49, 50, 66, 250, 317])
def test_segments_are_prompts_of_snapkv(length, shape, forget):
    """The same text as so many prompts: what is held, and every logit afterwards."""
    ids, llm = random_ids(length + 6), llm_of(shape, chunk=512)
    snap = SnapKV(tokens=40, window=16, forget=forget)
    # none is shorter than the window: its last queries would be of the prompt before it
    stops = [*range(0, length - 15, 50), length]
    with (
        llm.session(replace(METHOD, forget=forget)) as session,
        llm.session(snap) as parts,
    ):
        session.prefill(ids[:length])
        assert all(len(head) == min(length, 40) for head in session.runtime.positions(1))
        for first, stop in zip(stops, stops[1:]):
            parts.prefill(ids[first:stop])
        assert positions(session) == positions(parts)
        for token in ids[length:]:
            mine, theirs = session.decode(token), parts.decode(token)
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [64, 1, 17, 50, 51])
def test_chunks_change_nothing(chunk):
    """Nor what the last, short segment chooses by: queries of the segment before it too."""
    ids, found = random_ids(209), []
    for size in (512, chunk):
        with llm_of(chunk=max(size, 1)).session(METHOD) as session:
            logits = session.prefill(ids)
            found.append((positions(session), logits, session.decode(1)))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(found[0][1:], found[1][1:]):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_one_segment_is_snapkv():
    ids = random_ids(180)
    with (
        llm_of().session(replace(METHOD, segment=180)) as session,
        llm_of().session(SnapKV(tokens=40, window=16)) as snap,
    ):
        torch.testing.assert_close(session.prefill(ids), snap.prefill(ids), atol=1e-5, rtol=0)
        assert positions(session) == positions(snap)
        torch.testing.assert_close(session.decode(3), snap.decode(3), atol=1e-5, rtol=0)


def test_no_head_holds_more_than_budget_and_segment(monkeypatch):
    seen, live = [], SnapPlusRuntime._live

    def counted(self, layer, progress, end):
        k, v = live(self, layer, progress, end)
        seen.append(k.shape[1])
        return k, v

    monkeypatch.setattr(SnapPlusRuntime, "_live", counted)
    with llm_of(chunk=512).session(METHOD) as session:
        session.prefill(random_ids(320))
        assert max(seen) == 90
        assert all(len(head) == 40 for head in session.runtime.positions(3))


def test_the_newest_queries_choose():
    """A bank whose keys say which of them are looked at: other queries would keep others."""
    ids = random_ids(100)
    with llm_of().session(METHOD) as session, llm_of().session(METHOD) as other:
        session.prefill(ids)
        other.prefill([*ids[:34], *reversed(ids[34:50]), *ids[50:]])
        assert positions(session) != positions(other)


def test_bad_settings_are_named():
    for bad, words in (
        (dict(segment=0), "segment: found 0"),
        (dict(segment=31), "segment: found 31, expected at least the window of 32"),
        (dict(segment=2.5), "segment: found 2.5"),
        (dict(window=MOST_WINDOW + 1), "window: found"),
    ):
        with pytest.raises(SettingError, match=words):
            SnapKVPlus(**bad)
