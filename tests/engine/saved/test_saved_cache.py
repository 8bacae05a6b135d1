"""Blocks on disk are found by content, by another process too, and never change an answer.

Stops: a block of other tokens, weights or another method; a damaged one that is used; an entry that
a full disk leaves half written; a cache that grows over its limit.
"""

import resource
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, Full, OmniKV, SnapKV
from engine.base.errors import SettingError
from engine.methods.exact import Exact
from engine.methods.select.infllm import InfLLM
from engine.methods.select.minference import MInference
from engine.methods.select.pod import PodUntrained
from engine.methods.select.quest import Quest
from engine.model.low_bits import Held
from engine.model.tensors import random_stream
from engine.saved.cache import BlockCache, names_of
from tests.builders import random_ids, session_config, tiny_llm

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
SETTINGS = dict(backend="reference", max_context=1500)
_LLMS = {}


def llm_of(method=SPARSE, **changes):
    key = repr((method, changes))
    changes.pop("again", None)
    if key not in _LLMS:
        _LLMS[key] = tiny_llm(method, **SETTINGS, **changes)
    return _LLMS[key]


def rounded_llm():
    stream = partial(random_stream, seed=0, sharpness=2.5)
    given = dict(method=SPARSE, device="cpu", weights="int8", chunk=64, **SETTINGS)
    return LLM.from_stream(session_config(), stream, **given)


def test_int8_weights_in_another_form_find_nothing(tmp_path, monkeypatch):
    """With a compiler they have a scale for 32 columns, without one for a row."""
    ids = random_ids(300)
    with rounded_llm().session() as session:
        session.prefill(ids)
        BlockCache(tmp_path).store(session)
    form = Held("int8", 16, outliers=0)
    for found in (256, 0):
        with rounded_llm().session() as session:
            assert BlockCache(tmp_path).fill(session, ids) == found
        monkeypatch.setattr("engine.model.low_bits.whole_bytes", lambda *_: form)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A cache with the 512 first tokens of a text, and what a session that never met it says."""
    folder, ids = tmp_path_factory.mktemp("cache"), random_ids(600)
    with llm_of().session() as session:
        session.prefill(ids)
        assert BlockCache(folder).store(session) == 2
        assert BlockCache(folder).store(session) == 0
        return folder, ids, torch.stack([session.decode(t) for t in (3, 4)])


@settings(max_examples=4, deadline=None)
@given(
    cut=st.integers(1, 600),
    held=st.integers(0, 400),
    tier=st.sampled_from(["host", "device"]),
)
def test_what_is_found_is_what_would_have_been_read(stored, cut, held, tier):
    folder, ids, wanted = stored
    with llm_of(again=True).session(offload=tier) as session:
        held = held // 64 * 64  # whole chunks: their rows are those of the whole prompt to the bit
        if held:
            session.prefill(ids[:held])
        asked = ids[: max(cut, held + 1)]
        whole = (len(asked) - 1) // 256 * 256
        assert BlockCache(folder).fill(session, asked) == max(held, whole) == len(session)
        session.prefill(ids[len(session) :])
        assert torch.equal(torch.stack([session.decode(t) for t in (3, 4)]), wanted)
        assert session.stats.sparse_steps == 2


def test_other_tokens_weights_ropes_and_forms_find_nothing(stored):
    folder, ids, _ = stored
    changed = [ids[0] ^ 1, *ids[1:]]
    late = [*ids[:300], ids[300] ^ 1, *ids[301:]]
    rope = session_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    for llm, asked, found in [
        (llm_of(), changed, 0),
        (llm_of(), late, 256),
        (llm_of(seed=1), ids, 0),
        (llm_of(config=rope), ids, 0),
        (llm_of(bank="int8"), ids, 0),
        (llm_of(dtype="bfloat16"), ids, 0),
        (rounded_llm(), ids, 0),
        (llm_of(Full()), ids, 512),
    ]:
        with llm.session() as session:
            assert BlockCache(folder).fill(session, asked) == found == len(session)


def test_a_damaged_block_is_removed_and_read_again(tmp_path):
    with llm_of().session() as session:
        session.prefill(ids := random_ids(600, seed=3))
        BlockCache(tmp_path).store(session)
        made = llm_of()
        named = names_of(made.load(), made.planner, SPARSE, ids)
        names = [BlockCache(tmp_path).path(n) for n in named]
    for spoil in (
        lambda data: data[:-100],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"",
        lambda data: names[0].read_bytes(),  # a sound block under another's name
    ):
        good, said = names[1].read_bytes(), []
        names[1].write_bytes(spoil(good))
        with llm_of().session() as session:
            assert BlockCache(tmp_path, announce=said.append).fill(session, ids) == 256
            assert len(said) == 1 and "\n" not in said[0] and not names[1].exists()
            session.prefill(ids[256:])
            assert BlockCache(tmp_path).store(session) == 1
        assert names[1].read_bytes() == good


def test_the_least_recently_used_blocks_go_and_a_chain_loses_its_end_first(tmp_path):
    with llm_of().session() as session:
        session.prefill(random_ids(1100))
        BlockCache(tmp_path).store(session)
        size = next(tmp_path.glob("*/*")).stat().st_size
        small = BlockCache(tmp_path, 5 * size)
        session.truncate(0)
        session.prefill(other := random_ids(600, seed=5))
        assert small.store(session) == 2
        session.truncate(0)
        assert small.fill(session, random_ids(1100)) == 768  # its fourth block has gone
        session.truncate(0)
        assert small.fill(session, other) == 512
    assert sum(p.stat().st_size for p in tmp_path.glob("*/*")) <= 5 * size


def test_a_full_disk_loses_the_entry_alone(tmp_path):
    said = []
    with llm_of().session() as session:
        session.prefill(random_ids(300))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            assert BlockCache(tmp_path, announce=said.append).store(session) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(said) == 1 and not list(tmp_path.glob("*/*")) + list(tmp_path.glob("*/.*"))
        session.decode(1)
        assert BlockCache(tmp_path).store(session) == 1


def test_two_writers_share_a_folder(tmp_path):
    errors = []

    def work(seed):
        try:
            llm = tiny_llm(SPARSE, **SETTINGS)
            for text in (1, 2):
                with llm.session() as session:
                    session.prefill(random_ids(600, seed=text))
                    BlockCache(tmp_path, announce=errors.append).store(session)
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(list(tmp_path.glob("*/*"))) == 4
    assert not list(tmp_path.glob("*/.*"))


def test_ropes_whose_rows_do_not_follow_from_the_tokens_use_none(tmp_path):
    dynamic = session_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with llm_of(config=dynamic).session() as session:
        session.prefill(random_ids(300))
        assert BlockCache(tmp_path).store(session) == 0


def test_a_model_whose_rows_are_not_kept_is_told_so(tmp_path):
    windows = session_config(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=70
    )
    dynamic = session_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for config, why in ((windows, "sliding-window layers"), (dynamic, "dynamic")):
        said = BlockCache(tmp_path).note(SimpleNamespace(config=config, method=Full()))
        assert why in said and str(tmp_path) in said and "\n" not in said
        with tiny_llm(Full(), config, **SETTINGS).session() as session:
            session.prefill(random_ids(300))
            assert BlockCache(tmp_path).store(session) == 0
    fits = SimpleNamespace(config=session_config(), method=Full())
    assert BlockCache(tmp_path).note(fits) == ""


def test_a_method_with_a_store_keeps_its_first_prompt_for_others_and_takes_none(tmp_path):
    """Its later prompts attend to what it has kept."""
    ids = random_ids(900)
    with llm_of().session(SnapKV(tokens=96, forget=False)) as session:
        session.prefill(ids[:300])
        session.prefill(ids[300:])
        assert BlockCache(tmp_path).store(session) == 1
        session.truncate(0)
        assert BlockCache(tmp_path).fill(session, ids) == 0
    held, found, fresh = kept(tmp_path, ids, Full(), llm_of())
    with found, fresh:
        assert held == 256 and torch.equal(rows_of(found), rows_of(fresh))


def test_a_method_that_forgets_has_no_rows_for_others_and_says_so(tmp_path):
    method, cache = SnapKV(tokens=96), BlockCache(tmp_path)
    with llm_of().session(method) as session:
        session.prefill(random_ids(600))
        assert cache.store(session) == 0 and cache.fill(session, random_ids(600)) == 600
        session.truncate(0)
        assert cache.fill(session, random_ids(600)) == 0
    said = cache.note(SimpleNamespace(config=session_config(), method=method))
    assert "snapkv frees rows" in said and "forget=False" in said and "\n" not in said


def test_a_file_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="file"):
        BlockCache(tmp_path / "file")


# ------------------------------------------------------------- what a block's name says

LARGER = replace(SPARSE, tokens=48)
RATIO = OmniKV(
    filter_layers=(1, 4), tokens=24, dense_below=0, tail=64, prefill_ratio=1, prefill_block=64
)


def rows_of(session, stop=None):
    """K and V of all layers: [layers, 2, Hkv, n, D]."""
    bank, stop = session.bank, len(session) if stop is None else stop
    return torch.stack(
        [torch.stack([side[0, :, :stop] for side in bank.kv(i)]) for i in range(bank.num_layers)]
    )


def kept(folder, ids, method, llm):
    """(tokens found on disk, session that then read the rest of `ids`, one that read all)."""
    found, fresh = llm.session(method), llm.session(method)
    held = BlockCache(folder).fill(found, ids)
    for session, rest in ((found, ids[held:]), (fresh, ids)):
        session.prefill(rest)
    return held, found, fresh


@pytest.mark.parametrize(
    "reader",
    [LARGER, Full(), Exact(SPARSE), Quest(tokens=80, page=8), replace(SPARSE, filter_layers=(2,))],
    ids=lambda method: method.name,
)
def test_a_prompt_that_full_attention_read_is_found_under_every_method_and_budget(stored, reader):
    folder, ids, _ = stored
    held, found, fresh = kept(folder, ids, reader, llm_of())
    with found, fresh:
        assert held == 512
        assert torch.equal(rows_of(found), rows_of(fresh))
        for token in (3, 4):
            assert torch.equal(found.decode(token), fresh.decode(token))


@pytest.mark.parametrize("reader", [RATIO, Full(), SPARSE], ids=("ratio", "full", "omnikv"))
@pytest.mark.parametrize("more", [0, 300])
def test_rows_of_a_prompt_read_with_a_prefill_ratio_are_found_where_they_would_be_read_so(
    tmp_path, reader, more
):
    """Its end was read by full attention, over rows that were not."""
    ids, llm = random_ids(1400, seed=8), llm_of()
    with llm.session(RATIO) as session:
        session.prefill(ids[:1100])
        assert BlockCache(tmp_path).store(session) == 4
    held, found, fresh = kept(tmp_path, ids[: 1100 + more], reader, llm)
    with found, fresh:
        assert torch.equal(rows_of(found), rows_of(fresh))
        assert torch.equal(found.last_logits, fresh.last_logits)
        assert held == (0 if reader != RATIO else 512 if more else 1024)


@pytest.mark.parametrize(
    "changes",
    [
        dict(filter_layers=(2, 4)),
        dict(wait_layers=1),
        dict(tail=128),
        dict(prefill_ratio=2),
        dict(prefill_block=128),
        dict(prefill_stride=2),
        dict(prefill_dense_end=256),
        dict(tokens=50),
        dict(selector="uniform"),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_setting_that_changes_rows_is_part_of_their_name_and_another_is_not(tmp_path, changes):
    ids, llm, reader = random_ids(1100, seed=8), llm_of(), replace(RATIO, **changes)
    with llm.session(RATIO) as session:
        session.prefill(ids)
        BlockCache(tmp_path).store(session)
    held, found, fresh = kept(tmp_path, ids, reader, llm)
    with found, fresh:
        assert torch.equal(rows_of(found), rows_of(fresh))
        assert held == {"tokens": 1024, "selector": 1024, "prefill_dense_end": 512}.get(
            next(iter(changes)), 0
        )


def test_rows_that_sparse_answer_steps_wrote_are_not_kept_and_dense_ones_are(tmp_path):
    ids, llm = random_ids(1400, seed=2), llm_of()
    for method, blocks in ((SPARSE, 2), (Full(), 5)):
        folder = tmp_path / method.name
        with llm.session(method) as session:
            session.prefill(ids[:600])
            for token in ids[600:1030]:
                session.decode(token)
            session.prefill(ids[1030:])
            assert BlockCache(folder).store(session) == blocks
        held, found, fresh = kept(folder, ids, SPARSE, llm)
        with found, fresh:
            assert held == 256 * blocks
            torch.testing.assert_close(rows_of(found), rows_of(fresh), atol=1e-3, rtol=1e-3)


def test_a_session_that_was_cut_below_an_answer_keeps_what_it_reads_then(tmp_path):
    ids, llm = random_ids(1100, seed=2), llm_of()
    with llm.session(SPARSE) as session:
        session.prefill(ids[:600])
        for token in (5, 6, 7):
            session.decode(token)
        with session.fork() as twin:
            assert BlockCache(tmp_path / "twin").store(twin) == 2
        session.truncate(600)
        session.prefill(ids[600:])
        assert BlockCache(tmp_path).store(session) == 4


@pytest.mark.parametrize(
    "method",
    [
        InfLLM(block=8, init=8, local=64, topk=9, cached=12, chunk=32),
        MInference(("a_shape", 30, 50)),
        PodUntrained((0, 2, 5), first=8, recent=64),
    ],
    ids=lambda method: method.name,
)
def test_rows_that_a_method_read_in_its_own_way_are_not_kept(tmp_path, method):
    with llm_of().session(method) as session:
        session.prefill(random_ids(600))
        assert BlockCache(tmp_path).store(session) == 0


def test_rows_whose_beginning_is_unknown_are_not_kept(tmp_path):
    """Those of a file, or of a bank that somebody filled."""
    llm, ids = llm_of(), random_ids(600)
    with llm.session() as session:
        session.adopt(ids[:300])
        session.prefill(ids[300:])
        assert BlockCache(tmp_path).store(session) == 0
        session.truncate(0)
        session.prefill(ids)
        assert BlockCache(tmp_path).store(session) == 2
        session.save(tmp_path / "file")
    restored, _ = llm.restore(tmp_path / "file")
    with restored:
        assert BlockCache(tmp_path / "other").store(restored) == 0


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["omnikv", "ratio", "full", "quest"]),
        st.integers(1, 500),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=3,
)
NAMED = {"omnikv": SPARSE, "ratio": RATIO, "full": Full(), "quest": Quest(tokens=80, page=8)}


@settings(max_examples=12, deadline=None)
@given(
    turns=TURNS,
    reader=st.sampled_from(sorted(NAMED)),
    more=st.integers(0, 200),
    held=st.integers(0, 700),
)
def test_whatever_was_kept_rows_are_those_that_a_session_reads_by_itself(
    tmp_path_factory, turns, reader, more, held
):
    """Sessions of several methods take turns and keep what they hold; another, which holds some
    tokens, finds of it what it would have read.
    """
    folder, llm, ids = tmp_path_factory.mktemp("turns"), llm_of(), random_ids(1500, seed=4)
    with llm.session() as session:
        for name, prompt, steps in turns:
            session.set_method(NAMED[name])
            at = len(session)
            stop = min(at + prompt, 1400)
            if at < stop:
                session.prefill(ids[at:stop])
            for token in ids[stop : min(stop + steps, 1450)]:
                session.decode(token)
            BlockCache(folder).store(session)
        asked = ids[: len(session) + more]
    held = min(held, len(asked) - 1) // 64 * 64
    found, fresh = llm.session(NAMED[reader]), llm.session(NAMED[reader])
    with found, fresh:
        for session in (found, fresh):
            if held:
                session.prefill(asked[:held])
        BlockCache(folder).fill(found, asked)
        for session in (found, fresh):
            session.prefill(asked[len(session) :])
        torch.testing.assert_close(rows_of(found), rows_of(fresh), atol=1e-3, rtol=1e-3)
