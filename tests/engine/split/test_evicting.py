"""Methods that evict, over devices: each part has the stores of its own layers, beside its part of
the bank or as all that there is, and a session goes back to what they were together.

The control is the same on one device, to the bit, with every figure of its memory but scratch.
"""

from dataclasses import replace

import pytest
import torch

from engine import Full, SamplingParams
from engine.bank.pool import heap_limit
from engine.base.errors import SettingError
from engine.methods.evict.h2o import H2O
from engine.methods.evict.h2o_plus import H2OPlus
from engine.methods.evict.pyramidkv import PyramidKV
from engine.methods.evict.random_eviction import RandomEviction
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.window import Window
from engine.methods.split.allowed import EVICT
from engine.methods.split.stores import joined, shares
from tests.engine.methods.method_checks import allocated
from tests.engine.methods.method_table import ROWS
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_sessions import one_of, several
from tools.families.models import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def method_of(name, forget=False):
    """A method that cuts, beside a bank of all rows."""
    rows = [m for row in ROWS for m in row.sparse or (row.neutral,)]
    found = [m for m in (*rows, RandomEviction(tokens=40)) if m.name == name]
    return replace(found[0], forget=forget)


def walked(llm):
    """Logits of two prompts, an answer, the way back into it and before it, and of a fork."""
    with llm.session() as session:
        found = [session.prefill(ids_of(170))]
        found += [session.decode(token) for token in ids_of(5, seed=9)]
        found.append(session.prefill(ids_of(70, seed=3)))
        found.append(session.decode(7))
        with session.fork() as other:
            found.append(other.decode(8))
        session.truncate(173)
        found += [session.decode(token) for token in ids_of(4, seed=8)]
        session.truncate(120)
        found.append(session.decode(7))
        runtime, stats = session.runtime, session.stats
        return torch.stack(found), (runtime.nbytes, stats.store_bytes, stats.rows_read_sparse)


# one of each kind of store; `python -m tests.programs.devices` runs all of EVICT
KINDS = (
    "ada_pyramid",
    "expected_attention",
    "h2o",
    "keyformer",
    "random_eviction",
    "snapkv",
    "streaming_llm",
    "vase",
)


@pytest.mark.parametrize("name", KINDS)
def test_stores_of_parts_are_one_device_s(folder, name):
    assert name in EVICT
    method = method_of(name)
    (want, counted), (found, mine) = (
        walked(make(folder, method=method)) for make in (one_of, several)
    )
    assert torch.equal(found, want) and mine == counted


def test_a_pyramid_is_of_all_layers(folder):
    method = PyramidKV(tokens=40, forget=False, window=8)
    several_ = several(folder, ("cpu",) * 3, split=(1, 2, 4), method=method)
    assert torch.equal(walked(several_)[0], walked(one_of(folder, method=method))[0])


def test_states_of_parts_are_joined_and_shared_again():
    starts = (0, 2, 3, 7)
    layers = [[("part", layer)] for layer in range(7)]
    for held, sums in ((layers, None), (None, list(range(7))), (None, None)):
        whole = (90, (0, 90, False, 90), list(range(7)) if held else [], held, sums)
        parts = shares(whole, starts)
        assert joined(parts) == whole
        assert [len(part[3] or ()) for part in parts] == ([2, 1, 4] if held else [0, 0, 0])
    assert joined([parts[0], None]) is None


# ---------------------------------------------------------------- stores that hold the only rows

UNEQUAL = ("prefill_seconds", "decode_seconds", "rerun_seconds", "scratch_bytes")


def figures(session):
    """What a session says of itself but for seconds, and for scratch, which each device has."""
    found = session.stats.to_dict()
    return {name: value for name, value in found.items() if name not in UNEQUAL}


def all_walked(llm, path):
    """Logits and figures of a session that forgets: two prompts and answers, a fork, ways back to
    a store and to before it, other methods, its file, and a batch.
    """
    found, said = [], []

    def note(session, logits):
        found.append(logits)
        said.append(figures(session))

    with llm.session() as session:
        note(session, session.prefill(ids_of(170)))
        for token in ids_of(3, seed=9):
            note(session, session.decode(token))
        session.save(path)
        note(session, session.prefill(ids_of(70, seed=3)))
        with session.fork() as other:
            note(other, other.decode(8))
        for length in (171, 120):
            session.truncate(length)
            note(session, session.decode(7))
        session.set_method(Full())
        note(session, session.decode(3))
        if not llm.method.own_prefill:
            session.set_method(llm.method)
            note(session, session.decode(4))
    again, _ = llm.restore(path)
    with again:
        note(again, again.decode(3))
        again.truncate(171)
        note(again, again.decode(2))
    with llm.batch(slots=2) as batch:
        sessions = [batch.session() for _ in range(2)]
        for number, session in enumerate(sessions):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            batch.write(session, ids_of(70 + 60 * number, seed=number), params)
        for _ in batch.run():
            pass
        said.append([list(session.ids) for session in sessions])
    return torch.stack(found), said


@pytest.mark.parametrize("name", ["snapkv", "h2o", "h2o_plus", "pyramidkv", "streaming_llm"])
def test_sessions_that_forget_are_one_device_s(folder, tmp_path, name):
    """`python -m tests.programs.devices` runs all of EVICT."""
    method = method_of(name, forget=True)
    want, counted = all_walked(one_of(folder, method=method), tmp_path / "one")
    for devices, split in ((2, (6, 1)), (3, (1, 2, 4))):
        llm = several(folder, ("cpu",) * devices, split=split, method=method)
        found, mine = all_walked(llm, tmp_path / "several")
        assert torch.equal(found, want) and mine == counted
    assert counted[0]["forgets"] and counted[0]["bank_bytes"] < counted[-3]["tokens"] * 7 * 512


def test_files_of_stores_go_on_over_other_devices(folder, tmp_path):
    method = SnapKV(tokens=40, window=8)
    one, two = (make_llm(folder, method=method) for make_llm in (one_of, several))
    for source, target in ((one, two), (two, one)):
        with source.session() as session:
            session.prefill(ids_of(180))
            session.decode(4)
            session.save(tmp_path / "saved")
            want = session.decode(5)
        again, _ = target.restore(tmp_path / "saved")
        with again:
            assert torch.equal(again.decode(5), want)


def test_a_file_whose_stores_are_of_other_layers_is_refused(folder):
    llm = several(folder, method=SnapKV(tokens=40, window=8))
    with llm.session() as session:
        session.prefill(ids_of(90))
        at, prompt, budgets, layers, sums = session.runtime.state()
        for wrong in ((budgets + [40], layers), (budgets, layers[:-1]), (budgets, layers[::-1])):
            with pytest.raises(ValueError):
                session.runtime.restored((at, prompt, *wrong, sums), 90)
                session.runtime.restored((at, prompt, *wrong, sums), 90 + len(wrong[1]))
        state = session.runtime.restored((at, prompt, budgets, layers, sums), 90)
        assert [len(part) for part in state[2:4]] == [7, 7]


@pytest.mark.parametrize("family", ["gemma3", "qwen2-window"])
def test_parts_whose_layers_all_slide_evict_nothing(tmp_path, family):
    """The last device, or the first, has sliding layers alone."""
    make(tmp_path / family, family)
    method = Window(tokens=40)
    want = all_walked(one_of(tmp_path / family, method=method), tmp_path / "one")
    layers = len(several(tmp_path / family, method=method).config.windows)
    for split in ((1, layers - 1), (layers - 1, 1)):
        llm = several(tmp_path / family, split=split, method=method)
        found = all_walked(llm, tmp_path / "two")
        assert torch.equal(found[0], want[0]) and found[1] == want[1]


def test_parts_on_one_cpu_share_the_heap_s_limit(folder, monkeypatch):
    """What nothing was written to yet in one part's rows is not what the other has left free."""
    seen = []
    monkeypatch.setattr(heap_limit, "_idle", lambda untouched: seen.append(untouched))
    llm = several(folder, method=SnapKV(tokens=40, window=8))
    with llm.session() as session:
        session.prefill(ids_of(170))
        rows = [(170 + 1) * part.num_layers * 512 for part in session.bank.parts]
    # both parts have room for the whole prompt after its first chunk
    assert 0 < max(seen) < sum(rows) and max(seen) > max(rows) - 64 * 4 * 512
    assert seen[-1] <= 1024  # the step that cuts has a row in the last layer


def held_by_part(session):
    """Bytes of a part's rows, stores and ways back, for each part: every tensor once."""
    starts, found = session.loaded.cut.starts, []
    points = session.history.savepoints
    for number, bank in enumerate(session.bank.parts):
        own = [p.state and shares(p.state, starts)[number] for p in points]
        own += [point.logits for point in points if number == 0]
        kept = [queries.parts[number] for queries in session.query_ring.kept.values()]
        found.append(allocated([bank, session.runtime.by_part[number], own, kept]))
    return found


@pytest.mark.parametrize(
    ("method", "close"),
    [
        (Window(tokens=40), 0.02),
        (H2O(tokens=40), 0.02),
        (H2OPlus(tokens=40, segment=50), 0.02),
        (SnapKV(tokens=40, window=8), 0.025),
        (SnapKV(share=0.2, window=4), 0.06),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_device_holds_what_the_plan_says(folder, method, close):
    """Before each commit, where most is held: two short prompts leave the stores to go back to, and
    a long one fills the context. A share of a text is less of a shorter one.
    """
    llm, sizes = several(folder, split=(3, 4), method=method), []
    ids, last = ids_of(llm.max_context), llm.max_context - 4
    with llm.session() as session:
        commit = session.runtime.commit

        def look(count):
            sizes.append(held_by_part(session))
            commit(count)

        session.runtime.commit = look
        for first, stop in ((0, 64), (64, 65), (65, last)):
            session.prefill(ids[first:stop])
        for token in ids[last:]:
            session.decode(token)
    names = ("context bank", "retained rows", "savepoints")
    for plan, most in zip(llm.plan().by_device, map(max, zip(*sizes)), strict=True):
        due = sum(size for name, size, _ in plan.items if name in names)
        assert (1 - close) * due <= most <= 1.002 * due, (most, due)


def test_what_one_device_refuses_of_a_session_that_forgets_is_refused(folder):
    llm = several(folder, method=H2O(tokens=40))
    with llm.session() as session:
        with pytest.raises(SettingError, match="adopt: found h2o with forget=True"):
            session.adopt(ids_of(40))
        session.prefill(ids_of(90))
        with pytest.raises(SettingError, match="90 tokens of h2o that are not cut yet"):
            session.save("nowhere")
