"""Blocks on disk are found by content, by another process too, and never change an answer.

Stops: a block of other tokens, weights or another method; a damaged one that is used; an entry that
a full disk leaves half written; a cache that grows over its limit.
"""

import resource
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Full, OmniKV, SnapKV
from engine.errors import SettingError
from engine.saved.cache import BlockCache, follows_from_tokens
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


def test_other_tokens_weights_rope_and_methods_find_nothing(stored):
    folder, ids, _ = stored
    changed = [ids[0] ^ 1, *ids[1:]]
    late = [*ids[:300], ids[300] ^ 1, *ids[301:]]
    rope = session_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    for llm, asked, found in [
        (llm_of(), changed, 0),
        (llm_of(), late, 256),
        (llm_of(seed=1), ids, 0),
        (llm_of(config=rope), ids, 0),
        (llm_of(Full()), ids, 0),
    ]:
        with llm.session() as session:
            assert BlockCache(folder).fill(session, asked) == found == len(session)


def test_a_damaged_block_is_removed_and_read_again(tmp_path):
    with llm_of().session() as session:
        session.prefill(ids := random_ids(600, seed=3))
        BlockCache(tmp_path).store(session)
        names = [
            p for n in BlockCache(tmp_path)._names(session, ids) for p in tmp_path.glob(f"*/{n}*")
        ]
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


def test_methods_and_ropes_whose_rows_do_not_follow_from_the_tokens_use_none(tmp_path):
    dynamic = session_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for llm in (llm_of(SnapKV()), llm_of(config=dynamic)):
        with llm.session() as session:
            session.prefill(random_ids(300))
            assert not follows_from_tokens(session)
            assert BlockCache(tmp_path).store(session) == 0
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="file"):
        BlockCache(tmp_path / "file")
