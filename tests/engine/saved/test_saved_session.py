"""A session that was saved and restored is the one that was never closed, and a file that is not
as it was written is refused.

Stops: rows of another tier or layout, a lost query ring or budget, a restore that only looks right,
an altered byte that becomes an answer, a killed process that leaves half a file.
"""

import dataclasses
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Exact, Full, InfLLM, MInference, OmniKV, PodUntrained, Quest, SnapKV, TidalDecode
from engine.base.errors import ContextTooLong, SavedFileError, SettingError
from engine.saved import rows
from engine.saved.ahead import ahead
from engine.saved.container import Reader
from tests.builders import POCKET, ROOT, random_ids, session_config, tiny_llm

SPARSE = dict(filter_layers=(1, 4), dense_below=0)
METHODS = {
    "full": Full(),
    "omnikv": OmniKV(tokens=24, **SPARSE),
    "share": OmniKV(share=0.1, selector="uniform", **SPARSE),
    "official": OmniKV(filter_layers=(1, 4), tokens=24, official=True),
    "quest": Quest(tokens=64),
    "tidal": TidalDecode(tokens=24),
    "minference": MInference(),
    "pod": PodUntrained(),
    "exact": Exact(OmniKV(tokens=24, **SPARSE)),
}
_LLMS = {}


def llm_of(name="omnikv"):
    if name not in _LLMS:
        _LLMS[name] = tiny_llm(METHODS[name], backend="reference", max_context=1024)
    return _LLMS[name]


def steps(session, count, seed=7):
    return torch.stack([session.decode(t) for t in random_ids(count, seed=seed)])


def saved(path, name="omnikv", length=300, made=9, offload=None, extra=None):
    """A session of `made` steps behind a prompt of `length` tokens, and its file."""
    session = llm_of(name).session(offload=offload)
    session.prefill(random_ids(length, seed=length))
    for token in random_ids(made, seed=1):
        session.decode(token)
    session.save(path, extra)
    return session


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=3, deadline=None)
@given(
    length=st.integers(2, 400),
    made=st.integers(0, 30),
    tiers=st.tuples(*[st.sampled_from(["host", "device"])] * 2),
    back=st.integers(1, 40),
)
def test_a_restored_session_is_the_one_that_was_saved(
    tmp_path_factory, name, length, made, tiers, back
):
    path = tmp_path_factory.mktemp("s") / "file"
    with saved(path, name, length, made, tiers[0]) as session:
        restored, _ = llm_of(name).restore(path, offload=tiers[1])
        with restored, restored.fork() as fork:
            assert restored.ids == session.ids and restored.method == session.method
            assert torch.equal(restored.last_logits, session.last_logits)
            wanted = steps(session, 5)
            assert torch.equal(steps(restored, 5), wanted)
            assert torch.equal(steps(fork, 5), wanted)
            if name in ("omnikv", "share", "official", "quest", "tidal") and length > 200:
                assert restored.stats.sparse_steps > 0
            if name == "official":
                return
            for one in (session, restored):
                one.truncate(max(1, len(one) - back))
            assert torch.equal(steps(restored, 3, seed=3), steps(session, 3, seed=3))


@settings(max_examples=4, deadline=None)
@given(length=st.integers(1, 600), made=st.integers(0, 20), keep=st.floats(0, 1))
def test_the_beginning_of_a_longer_file_is_the_session_cut_back(
    tmp_path_factory, length, made, keep
):
    path = tmp_path_factory.mktemp("s") / "file"
    with saved(path, "share", length, made) as session:
        count = max(1, int(keep * len(session)))
        part, _ = llm_of("share").restore(path, tokens=count)
        session.truncate(count)
        with part:
            assert part.ids == session.ids
            assert torch.equal(steps(part, 3), steps(session, 3))


def test_only_the_beginnings_bytes_are_read(tmp_path):
    with saved(tmp_path / "s", length=700):
        pass
    data = bytearray((tmp_path / "s").read_bytes())
    data[-1] ^= 1  # in the last piece
    (tmp_path / "s").write_bytes(data)
    llm_of().restore(tmp_path / "s", tokens=300)[0].close()
    with pytest.raises(SavedFileError, match="rows.2 is damaged"):
        llm_of().restore(tmp_path / "s")


def test_reading_ahead_keeps_order_and_buffers(tmp_path, monkeypatch):
    """Two buffers for four pieces, and a thread that is always late with the first of two."""
    monkeypatch.setattr(rows, "DEPTH", 2)
    whole = Reader.read

    def late(reader, name, out):
        if name in ("rows.0", "rows.2"):
            time.sleep(0.02)
        whole(reader, name, out)

    monkeypatch.setattr(Reader, "read", late)
    with saved(tmp_path / "s", length=900) as session:
        with llm_of().restore(tmp_path / "s")[0] as restored:
            for layer in range(session.plan.num_layers):
                for one, other in zip(session.bank.kv(layer, 900), restored.bank.kv(layer, 900)):
                    assert torch.equal(one, other)


def test_a_damaged_piece_ends_the_threads_that_read_ahead():
    begun = []

    def work(number):
        begun.append(number)
        if number == 2:
            raise SavedFileError("piece 2")
        return number

    with pytest.raises(SavedFileError, match="piece 2"), ahead(work, 50, 3) as results:
        assert [next(results), next(results)] == [0, 1]
        next(results)
    assert len(begun) <= 6 and not [t for t in threading.enumerate() if "saved" in t.name]


def test_what_a_program_adds_comes_back(tmp_path):
    """Also a generator's state: what is drawn goes on as it would have gone on."""
    random, again = torch.Generator().manual_seed(5), torch.Generator()
    torch.rand(4, generator=random)
    with saved(tmp_path / "s") as session:
        extra = {"random": random.get_state(), "text": "é\udc80" * 9000, "list": [1, (2.5, None)]}
        session.save(tmp_path / "s", extra)
        restored, found = llm_of().restore(tmp_path / "s")
        with restored:
            again.set_state(found.pop("random"))
            assert found == {"text": extra["text"], "list": extra["list"]}
            assert torch.equal(torch.rand(6, generator=again), torch.rand(6, generator=random))
        with pytest.raises(SettingError, match="extra: found a object"):
            session.save(tmp_path / "s", object())


@pytest.mark.parametrize("method", [SnapKV(forget=False), InfLLM()], ids=lambda m: m.name)
def test_a_method_with_a_store_of_its_own_is_refused_in_one_line(tmp_path, method):
    with tiny_llm(method, max_context=1024).session() as session:
        session.prefill(random_ids(100))
        with pytest.raises(SettingError, match=method.name) as caught:
            session.save(tmp_path / "s")
        assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files that are not as written


def refused(path, match, llm=None):
    with pytest.raises(SavedFileError, match=match) as caught:
        (llm or llm_of()).restore(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_every_region_of_a_file_is_covered(tmp_path):
    """One bit anywhere: in the length, the header, its padding, or any tensor."""
    with saved(tmp_path / "s", length=40, made=2):
        pass
    good = (tmp_path / "s").read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    spots = {*range(0, header, 13), *range(8), header - 1, len(good) - 1}
    spots |= set(range(header, len(good), max(1, (len(good) - header) // 97)))
    before = llm_of().load().host_pool.in_use
    for spot in sorted(spots):
        data = bytearray(good)
        data[spot] ^= 1 << spot % 8
        (tmp_path / "bad").write_bytes(data)
        refused(tmp_path / "bad", "damaged|no saved session|cut short|expected")
    for size in {0, 1, 7, 8, 9, header - 1, header, header + 1, len(good) // 2, len(good) - 1}:
        (tmp_path / "bad").write_bytes(good[:size])
        refused(tmp_path / "bad", "no saved session|cut short")
    (tmp_path / "bad").write_bytes(good + b"x")
    refused(tmp_path / "bad", "added to")
    assert llm_of().load().host_pool.in_use == before
    llm_of().restore(tmp_path / "s")[0].close()


def test_files_of_other_models_and_other_makers_are_named(tmp_path):
    with saved(tmp_path / "s"):
        pass
    make = dict(method=METHODS["omnikv"], backend="reference", max_context=1024)
    refused(tmp_path / "s", "weights: found", tiny_llm(**make, seed=1))
    longer = session_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    refused(tmp_path / "s", "rope: found", tiny_llm(config=longer, **make))
    refused(tmp_path / "s", "dtype: found float32", tiny_llm(**make, dtype="bfloat16"))
    refused(POCKET / "model.safetensors", "no saved session")
    refused(tmp_path, "cannot be read")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no saved session")
    refused(tmp_path / "none", "No such file")
    small = tiny_llm(**{**make, "max_context": 64})
    with pytest.raises(ContextTooLong):
        small.restore(tmp_path / "s")


def test_a_header_that_lies_under_right_checksums_is_refused(tmp_path):
    """Files may come from others: numbers are bounded before anything follows them."""
    from engine.saved import container

    with saved(tmp_path / "s", "share", length=40, made=2):
        pass
    with container.Reader(tmp_path / "s") as reader:
        facts, entries = reader.facts, reader.tensors
        tensors = {name: reader.load(name, 1 << 30) for name in entries}
    plan = [(name, e.dtype, e.shape) for name, e in entries.items()]
    state = facts["state"]
    at = {pair[0]: i for i, pair in enumerate(state[1:], 1)}
    for field, value in [
        ("state", 10**9),
        ("state", -1),
        ("state", "x"),
        ("ring", ["tuple", 0, 10**9]),
        ("ids", ["tensor", 99]),
        ("last_logits", ["tensor", 0]),
        ("method", ["tuple", "omnikv", ["dict", ["tokens", -4]]]),
        ("method", ["tuple", "os.system", ["dict"]]),
        ("savepoints", ["list", ["tuple", 1]]),
        ("savepoints", {"a": 1}),
    ]:
        changed = [list(pair) if isinstance(pair, list) else pair for pair in state]
        changed[at[field]] = [field, value]
        with container.Writer(tmp_path / "lie", plan, {**facts, "state": changed}) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        refused(tmp_path / "lie", "makes no session|not there", llm_of("share"))


def test_a_field_that_methods_no_longer_have_is_read_past_where_its_value_is_todays(
    tmp_path, monkeypatch
):
    def earlier(estimator):
        def described(method):
            return method.name, dataclasses.asdict(method) | {"dense_estimator": estimator}

        monkeypatch.setattr("engine.saved.session_file._described", described)
        with saved(tmp_path / estimator, length=40, made=2) as session:
            return list(session.ids)

    ids = earlier("pooled")
    with llm_of().restore(tmp_path / "pooled")[0] as session:
        assert session.method == METHODS["omnikv"] and list(session.ids) == ids
    earlier("antidiagonal")
    refused(tmp_path / "antidiagonal", "makes no session", llm_of())


def test_a_full_disk_leaves_the_old_file(tmp_path):
    with saved(tmp_path / "s", length=40) as session:
        good = (tmp_path / "s").read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, hard))
        try:
            with pytest.raises(SavedFileError, match="cannot be written: File too large"):
                session.save(tmp_path / "s")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [p.name for p in tmp_path.iterdir()] == ["s"]
        assert (tmp_path / "s").read_bytes() == good


SAVES = """
import sys
from tests.engine.saved.test_saved_session import saved
session = saved(sys.argv[1] + "/s", length=900)
print("ready", flush=True)
for i in range(10**6):
    session.save(sys.argv[1] + "/s", i)
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path):
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    parts, stops = [], 0
    while stops < 4 or (not parts and stops < 100):  # some stops fall between two saves
        time.sleep((0.011, 0.017, 0.029, 0.041)[stops % 4])
        stops += 1
        os.kill(process.pid, signal.SIGSTOP)  # stopped in the middle, it is as dead as killed
        parts += [p for p in tmp_path.iterdir() if p.suffix == ".part"]
        llm_of().restore(tmp_path / "s")[0].close()
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()
    assert parts, "no save was met in its middle"
    left = [p.name for p in tmp_path.iterdir() if p.name != "s"]
    assert all(re.fullmatch(rf"\.s\.{process.pid}-\w+\.part", name) for name in left)
    restored, _ = llm_of().restore(tmp_path / "s")
    with restored:
        assert len(restored) == 909
        restored.save(tmp_path / "s")
    assert [p.name for p in Path(tmp_path).iterdir()] == ["s"]
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0
