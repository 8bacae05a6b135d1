"""Streams without end over devices: each part keeps its own rows, in constant memory, and logits
are one device's to the bit, past every limit.
"""

import warnings

import pytest
import torch

from engine import LLM, Full
from engine.base import newest_tokens
from engine.base.errors import SettingError
from engine.load.planner import ENDLESS
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window
from engine.methods.select.infllm import InfLLM
from engine.saved import session_file
from tests.engine.methods.test_streams import turns
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_evicting import held_by_part
from tests.engine.split.test_sessions import TWO, one_of, several

STREAM = dict(forever=True, max_context=None, chunk=16)
KINDS = (StreamingLLM(tokens=24), LMInfinite(tokens=24, sink=5), Window(tokens=24))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def streamed(llm, path):
    """Logits of a stream of some 400 tokens, of a fork, on the way back and from its file."""
    found = []
    with llm.session() as session:
        for turn in range(3):
            for prompt, answer in turns(turn):
                found.append(session.prefill(prompt))
                found += [session.decode(token) for token in answer]
        session.save(path)
        end = len(session)
        with session.fork() as other:
            found.append(other.decode(8))
        session.truncate(end - 2)  # into the last answer: the store of its prompt's end
        found.append(session.decode(7))
        told = session.forgotten, session.bank.nbytes, session.stats.store_bytes
    again, _ = llm.restore(path)
    with again:
        found.append(again.decode(9))
    return torch.stack(found), told


@pytest.mark.parametrize("method", KINDS, ids=lambda method: method.name)
def test_streams_are_one_device_s(folder, tmp_path, monkeypatch, method):
    for module in (newest_tokens, session_file):  # ids go too
        monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(newest_tokens, "KEPT", 128)
    want, told = streamed(one_of(folder, method=method, **STREAM), tmp_path / "one")
    for split in ((3, 4), (1, 2, 4)):
        llm = several(folder, ("cpu",) * len(split), split=split, method=method, **STREAM)
        assert llm.max_context == ENDLESS and llm.planner.max_context == 40
        found, mine = streamed(llm, tmp_path / "several")
        assert torch.equal(found, want) and mine == told and told[0] > 300


def test_a_stream_s_memory_is_as_planned_on_each_device(folder):
    llm = several(folder, split=(3, 4), method=KINDS[0], **STREAM)
    plan, sizes = llm.plan(), []
    assert plan.forever and plan.total == sum(part.total for part in plan.by_device)
    assert [any(item[0] == "token ids" for item in part.items) for part in plan.by_device] == [
        True,
        False,
    ]
    with llm.session() as session:
        commit = session.runtime.commit

        def look(count):
            sizes.append(held_by_part(session))
            commit(count)

        session.runtime.commit = look
        for _ in range(6):
            session.prefill(ids_of(70))
            session.decode(5)
    names = ("context bank", "retained rows", "savepoints")
    for part, most in zip(plan.by_device, map(max, zip(*sizes)), strict=True):
        due = sum(size for name, size, _ in part.items if name in names)
        assert 0.95 * due <= most <= 1.002 * due, (most, due)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        again, finite = LLM.sharing(llm), LLM.sharing(llm, forever=False, max_context=512)
        assert (again.max_context, finite.max_context) == (ENDLESS, 512)


def test_methods_without_a_stream_over_devices_are_refused(folder):
    for method, line in (
        (Full(), "forever: found full"),
        (SnapKV(tokens=40), "forever: found snapkv"),
        (InfLLM(), "several devices, but it|forever: found infllm"),
    ):
        with pytest.raises(SettingError, match=line):
            LLM(folder, load=False, devices=TWO, method=method, forever=True)
