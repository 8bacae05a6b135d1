"""Real processes over the shipped model: the tokens of one process, one driver for all of them, and
an end in one line where one dies.
"""

import asyncio
import importlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from engine import LLM, AsyncLLM, Exact, Full, OmniKV, RankedLLM, SamplingParams
from engine.base.errors import ContextTooLong, RankLost, SavedFileError, SettingError
from engine.methods.mass_meter import Watch
from engine.ranks.drive import following
from engine.saved.cache import BlockCache
from engine.saved.container import Writer
from engine.terminal import sigint
from tests.builders import POCKET, ROOT
from tests.cuda.ranks_checks import check_same
from tests.programs.rank_kills import children

METHOD = OmniKV(tokens=64, dense_below=0)
SETTINGS = dict(max_context=1024, chunk=64, dtype="float32", device="cpu", threads=1, method=METHOD)


@pytest.fixture(scope="module")
def one():
    """One process."""
    return LLM(POCKET, **SETTINGS)


@pytest.fixture(scope="module")
def pair():
    """Two processes."""
    llm = RankedLLM(POCKET, 2, timeout=300, **SETTINGS)
    yield llm
    llm.close()


def ids_of(count):
    """Token ids of the shipped model."""
    return torch.randint(5, 5000, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_greedy_tokens_logits_and_selections_are_one_process_s(one, pair):
    prompt = ids_of(300)
    with one.session() as alone, pair.session() as session:
        want, found = alone.prefill(prompt), session.prefill(prompt)
        for _ in range(16):
            assert float((found - want).abs().max()) < 1e-4
            token = int(want.argmax())
            assert token == int(found.argmax())
            want, found = alone.decode(token), session.decode(token)
            chosen = alone.selections
            assert all(torch.equal(session.selections[layer], chosen[layer]) for layer in chosen)
        assert session.stats.sparse_steps == 16


def test_what_two_gpus_must_do_two_processes_do(one, pair):
    """The body of tests/cuda/test_ranks.py."""
    check_same(one, pair, 1e-4)


def test_one_driver_generates_goes_back_and_forks(one, pair):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert (
        pair.generate(ids_of(150), params).token_ids == one.generate(ids_of(150), params).token_ids
    )
    with one.session() as alone, pair.session() as session:
        for each in (alone, session):
            each.prefill(ids_of(120))
            each.decode(7)
            each.truncate(100)
        with alone.fork() as theirs, session.fork() as mine:
            assert float((mine.decode(9) - theirs.decode(9)).abs().max()) < 1e-4
        assert float((session.decode(8) - alone.decode(8)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "draft, sampled, chooser",
    [
        ("auto", False, "auto"),
        (4, False, "verifier"),
        (3, True, "drafter"),
        (7, True, "verifier"),
    ],
)
def test_exact_mode_writes_one_process_s_text(one, pair, draft, sampled, chooser):
    method = Exact(METHOD, draft=draft, chooser=chooser)
    heat = dict(temperature=0.8, seed=3) if sampled else {}
    params = SamplingParams(max_tokens=24, ignore_eos=True, **heat)
    found = []
    for llm, how in ((one, Full()), (one, method), (pair, method)):
        with llm.session(method=how) as session:
            text = [p.token_id for p in session.generate(ids_of(200), params)]
            session.truncate(len(session) - 3)
            more = [p.token_id for p in session.generate([7, 8, 9], params)]
            stats = session.stats
            found.append((text, more, (stats.cycles, stats.drafted, stats.accepted)))
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert found[1][2] == found[2][2]
    _, drafted, accepted = found[2][2]
    assert draft == "auto" or 0 < accepted <= drafted
    assert not sampled or accepted < drafted  # some of which were wrong


def test_a_prompt_is_scored_as_by_one_process(one, pair):
    want, found = (llm.score(ids_of(150), 3) for llm in (one, pair))
    assert found.logprobs[0] is None
    assert found.logprobs[1:] == pytest.approx(want.logprobs[1:], abs=1e-4)
    assert [[t for t, _ in place] for place in found.top_logprobs] == [
        [t for t, _ in place] for place in want.top_logprobs
    ]
    with pair.session() as session, pytest.raises(SettingError, match="every: found"):
        session.prefill(ids_of(5), every=lambda x, start: None)


@pytest.mark.parametrize("below", [None, 0.999])
def test_checks_and_watches_see_the_heads_of_all_ranks(one, pair, below):
    reports, watches = [], []
    for llm in (one, pair):
        watch = Watch(every=3, exact_below=below)
        with llm.session(method=OmniKV(tokens=8, tail=64, dense_below=0)) as session:
            session.watch_with(watch)
            session.prefill(ids_of(280))
            for token in ids_of(8):
                logits = session.decode(token)
            reports.append(session.check(6))
            assert torch.equal(session.last_logits, logits)
            with session.fork() as other:  # goes on with a watch of its own
                other.decode(5)
                assert other.watch.steps == 9
        watches.append(watch)
    want, found = reports
    for a, b in zip(want.steps, found.steps, strict=True):
        assert (a.full_token, a.sparse_token) == (b.full_token, b.sparse_token)
        assert b.kl == pytest.approx(a.kl, abs=1e-5) and b.mass == pytest.approx(a.mass, abs=1e-5)
        assert any(0 < kept < 0.999 for kept in b.mass.values())
    assert watches[1].mass == pytest.approx(watches[0].mass, abs=1e-5)
    assert watches[1].exact_steps == watches[0].exact_steps
    assert (watches[1].exact_steps > 0) == (below is not None)


def names(folder):
    return sorted(re.sub(r"\d+-[0-9a-f]{16}", "N", path.name) for path in folder.iterdir())


WHOLE = ["a", "a.N.rank0", "a.N.rank1"]


def logits_of(llm, path):
    """The logits behind a token more of a session in a file."""
    with llm.restore(path)[0] as session:
        return session.decode(9)


@pytest.mark.parametrize("method", [METHOD, Exact(METHOD, draft=3), Full()], ids=lambda m: m.name)
def test_a_saved_session_goes_on_to_the_bit(pair, tmp_path, method):
    path = tmp_path / "a"
    for length in (1, 255, 257):
        with pair.session(method=method) as session:
            session.prefill(ids_of(length))
            session.decode(5)
            session.save(path, {"made": length})
            want = session.decode(9)
            other, extra = pair.restore(path)
            with other:
                assert (other.ids, extra) == (session.ids[:-1], {"made": length})
                assert other.method == session.method
                assert torch.equal(other.decode(9), want)
            session.truncate(length // 2 + 1)
            want = session.decode(8)
            with pair.restore(path, tokens=length // 2 + 1, offload="host")[0] as other:
                assert torch.allclose(other.decode(8), want, atol=1e-5)
        assert names(tmp_path) == WHOLE  # none is left of the save before


def test_a_session_of_another_split_is_refused_by_both(one, pair, tmp_path):
    with one.session() as alone, pair.session() as session:
        for each, name in ((alone, "one"), (session, "a")):
            each.prefill(ids_of(40))
            each.save(tmp_path / name)
        with pytest.raises(SavedFileError, match="by one process, found 2 ranks by heads; leave"):
            pair.restore(tmp_path / "one")
        with pytest.raises(SavedFileError, match="by 2 ranks by heads, found one p.* --ranks 2,"):
            one.restore(tmp_path / "a")
        (share,) = tmp_path.glob("a.*.rank1")
        for llm in (one, pair):
            with pytest.raises(SavedFileError, match="found one rank's part of a session"):
                llm.restore(share)
        three = dict(version=1, split="heads", ranks=3, save="1-" + "0" * 16, digests=["x"] * 3)
        with Writer(tmp_path / "three", [], three):
            pass
        with pytest.raises(SavedFileError, match="by 3 ranks by heads, found 2 r.* --ranks 3"):
            pair.restore(tmp_path / "three")
        alone.save(tmp_path / "a")  # over the ranks' save: their files go
        assert names(tmp_path) == ["a", "one", "three"]
        session.decode(5)


def test_damaged_files_of_ranks_are_refused_in_a_line(pair, tmp_path):
    path, draw = tmp_path / "a", random.Random(3)
    with pair.session() as session:
        session.prefill(ids_of(300))
        session.save(path)
        earlier = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        for name, data in earlier.items():
            for _ in range(4):
                changed = bytearray(data)
                changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                (tmp_path / name).write_bytes(draw.choice([changed, data[: len(data) // 2], b""]))
                with pytest.raises(SavedFileError) as refused:
                    pair.restore(path)
                assert "\n" not in str(refused.value)
            (tmp_path / name).unlink()
            with pytest.raises(SavedFileError, match="cannot be read"):
                pair.restore(path)
            (tmp_path / name).write_bytes(data)
        assert logits_of(pair, path).equal(session.decode(9))
        session.save(path)  # a rank's file of another save under a name of this one's
        old, new = (
            next(n for n in some if n.endswith("1")) for some in (earlier, names_of(tmp_path))
        )
        (tmp_path / new).write_bytes(earlier[old])
        with pytest.raises(SavedFileError, match="it is of another save than a names"):
            pair.restore(path)
        facts = dict(version=1, split="heads", ranks=2, digests=["x"] * 2)
        for hostile in ("../../etc/passwd", "1-" + "0" * 15, 7, None):
            with Writer(path, [], {**facts, "save": hostile}):
                pass
            with pytest.raises(SavedFileError, match="it names no files of ranks"):
                pair.restore(path)
        session.decode(5)


def names_of(folder):
    return [path.name for path in folder.iterdir()]


def test_a_save_that_one_rank_cannot_write_leaves_the_one_before(pair, tmp_path):
    path = tmp_path / "a"
    process = pair._meeting._followers._processes[0]
    with pair.session() as session:
        session.prefill(ids_of(100))
        session.save(path)
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        session.prefill(ids_of(200))
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
        try:
            with pytest.raises(SavedFileError, match="rank1: cannot be written: File too large"):
                session.save(path)
        finally:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)

        def stop(done, total):
            raise Enough

        with pytest.raises(Enough):
            session.save(path, progress=stop)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        session.save(path)
        assert names(tmp_path) == WHOLE
        assert logits_of(pair, path).equal(session.decode(9))


def test_sessions_of_a_batch_join_and_leave_on_all_ranks(one, pair):
    """Fed by hand: forced tokens, another set of sessions at every step, one that fails alone."""
    found = []
    for llm in (one, pair):
        logits = []
        with llm.batch(slots=3) as batch:
            first = batch.session()
            first.prefill(ids_of(150))
            second = batch.session(method=Full(), offload="host")
            second.prefill(ids_of(70))
            small = batch.session(max_context=42)
            small.prefill(ids_of(40))
            with pytest.raises(SettingError, match="expected a free slot"):
                batch.session()
            for token in (5, 6):
                for session in (first, second, small):
                    batch.feed(session, token)
                logits += batch.step().values()
            with pytest.raises(ContextTooLong):
                batch.feed(small, 7)
            small.close()
            third = batch.session(method=Exact(METHOD, draft=2))
            third.prefill(ids_of(90))
            first.truncate(100)
            for token in (8, None, 9):
                for session in (third, first, second):
                    batch.feed(session, token)
                second.close() if token is None else None
                logits += batch.step().values()
                if second.closed:
                    second = batch.session()
                    second.prefill(ids_of(130))
            assert first.ids[100] == 8 and len(first.ids) == 103
            found.append((torch.stack(logits), first.ids, third.ids))
    assert len(found[0][0]) == 6 + 3 + 2 + 3
    assert float((found[0][0] - found[1][0]).abs().max()) < 1e-4
    assert found[0][1:] == found[1][1:]


def test_many_callers_share_the_steps_of_ranks(one, pair):
    prompts = [ids_of(200) + [20 + n] * 9 for n in range(5)]
    params = [SamplingParams(max_tokens=6 + n, ignore_eos=True, seed=n) for n in range(5)]

    async def asked(llm):
        async with AsyncLLM(llm, slots=2) as many:
            answers = [many.generate(ids, each) for ids, each in zip(prompts, params)]
            return [await answer for answer in answers]

    want, found = (asyncio.run(asked(llm)) for llm in (one, pair))
    assert [one.token_ids for one in found] == [one.token_ids for one in want]
    assert any(answer.stats.cached_tokens >= 200 for answer in found)
    with pair.session() as session:  # and it goes on as before
        session.prefill(ids_of(10))


def test_blocks_of_ranks_serve_their_own_split(one, pair, tmp_path):
    prompt, lines = ids_of(1000)[:700], []
    blocks = {}
    for name, llm in (("one", one), ("pair", pair)):
        cache = BlockCache(tmp_path / name, announce=lines.append)
        with llm.session() as session:
            session.prefill(prompt)
            want = session.decode(9)
            assert cache.store(session) == 2 and cache.store(session) == 0
        with llm.session() as session:
            assert cache.fill(session, prompt) == 512
            session.prefill(prompt[512:])
            assert torch.equal(session.decode(9), want)
        blocks[name] = {path.name: path for path in (tmp_path / name).glob("*/*")}
    assert [len(found) for found in blocks.values()] == [2, 4]
    assert not blocks["one"].keys() & blocks["pair"].keys()

    def stop(done, total):
        raise Enough

    with pair.session() as session:
        session.prefill(prompt[:50])
        with pytest.raises(Enough):
            cache.fill(session, prompt, stop)
        assert len(session) == 50
        for path in blocks["pair"].values():  # a block that any rank lacks is one that all read
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            with session.fork() as other:
                assert cache.fill(other, prompt) in (50, 256)
            path.write_bytes(data)
        assert cache.fill(session, prompt) == 512
        session.prefill(prompt[512:])
        assert torch.allclose(session.decode(9), want, atol=1e-5)
        small = BlockCache(tmp_path / "pair", limit=1)
        assert small.store(session) == 0
        session.truncate(700)  # the row of a sparse step has no name
        session.prefill(ids_of(100))
        assert small.store(session) == 1
        assert not list((tmp_path / "pair").glob("*/*"))


class Enough(Exception):
    """What a progress callback raises."""


def test_a_prompt_stops_on_all_ranks_where_rank_0_stops(one, pair):
    def stop(progress):
        if progress.done >= 128:
            raise Enough

    with one.session() as alone, pair.session() as session:
        for each in (alone, session):
            with pytest.raises(Enough):
                each.prefill(ids_of(300), stop)
            assert len(each) == 128
        assert float((session.decode(8) - alone.decode(8)).abs().max()) < 1e-4


def test_ctrl_c_waits_for_the_end_of_a_call(pair):
    with pair.session() as session:
        session.prefill(ids_of(64))

        def press(progress):
            os.kill(os.getpid(), signal.SIGINT)

        # a shell starts what runs behind it with the signal ignored
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                session.prefill(ids_of(200), press)
        finally:
            signal.signal(signal.SIGINT, before)
        assert len(session) in (128, 192)  # whole chunks
        session.decode(5)


def test_an_error_that_all_ranks_meet_leaves_them_together(pair):
    with pair.session() as session:
        session.prefill(ids_of(20))
        with pytest.raises(SettingError, match="token"):
            session.decode(10**9)
        session.decode(5)
        assert len(session) == 21


def test_what_one_process_alone_can_do_is_refused_in_a_line(pair, tmp_path):
    with pair.session() as session:
        session.prefill(ids_of(40))
        for work in (lambda: pair.model.logits(torch.zeros(1, pair.config.hidden_size)),):
            with pytest.raises(SettingError, match="one process"):
                work()
        assert not list(tmp_path.iterdir())
        session.decode(5)


def test_the_plan_says_what_each_rank_holds(pair):
    from engine.ranks.placement import placement_text, placements

    found = placements(pair)
    assert [one.heads for one in found] == [(0, 2), (2, 4)]
    assert found[0].weights == pair.model.nbytes
    assert "rank 1: weights" in placement_text(pair)


def test_a_rank_that_dies_ends_the_model_with_its_name():
    llm = RankedLLM(POCKET, 2, timeout=300, **SETTINGS)
    session = llm.session()
    session.prefill(ids_of(64))
    process = llm._meeting._followers._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost, match=rf"rank 1 \(process {process.pid}\) was ended by signal 9"):
        while True:
            session.decode(5)
    with pytest.raises(RankLost, match="rank 1"):
        session.prefill(ids_of(64))
    assert time.monotonic() - began < 30
    session.close()
    llm.close()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--ranks", "2", "--numa", "2"], "--ranks: found beside --numa"),
        (["--ranks", "1"], "--ranks: found '1', expected a number from 2 to 64"),
        (["--numa", "some"], "--numa: found 'some'"),
        (["--ranks", "2", "--forever"], "--forever: works on one process"),
        (["--numa", "2", "--forever"], "--forever: works on one process; leave it or --numa"),
    ],
)
def test_wrong_flags_are_said_in_a_line(flags, said):
    command = [sys.executable, "-m", "engine.chat", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_server_answers_over_ranks_and_ends_when_one_does():
    command = [sys.executable, "-m", "engine.serve", "--ranks", "2", "--port", "0"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(server.stderr.readline, "")
        address = next(re.search(r"http://\S+/v1", line) for line in lines if "is ready" in line)
        asked = dict(model="pocket", prompt="a b c d", max_tokens=3, echo=True, logprobs=1)
        request = urllib.request.Request(
            f"{address[0]}/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            (choice,) = json.load(answer)["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) >= 5
        os.kill(children(server.pid)[1], signal.SIGKILL)
        _, said = server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 1
    assert re.search(r"error: rank 1 \(process \d+\) was ended by signal 9; start the server", said)
    assert "Traceback" not in said


def test_sigterm_is_rank_0_s(pair):
    """torchrun and systemd send it to every process; rank 0 says when the others end."""
    (follower,) = pair._meeting._followers._processes
    os.kill(follower.pid, signal.SIGTERM)
    with pair.session() as session:
        session.prefill(ids_of(20))
        session.decode(5)
    assert follower.poll() is None


@pytest.mark.parametrize("start", ["follow_rank_0", "start"])
def test_a_rank_of_torchrun_that_is_not_the_first_follows(monkeypatch, start):
    """It reads no flags. `python -m tests.programs.torchrun_serve` runs torchrun itself."""
    given = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["engine.serve", "--no-such-flag"])
    found = []
    monkeypatch.setattr(following, "follow", lambda place: found.append(place) or 7)
    monkeypatch.setattr(sigint, "leave_quietly", lambda name: None)  # of this process
    serve = importlib.import_module("engine.serve.__main__")
    with pytest.raises(SystemExit) as left:
        getattr(serve, start)()
    assert left.value.code == 7 and [(p.rank, p.size, p.folder) for p in found] == [(1, 2, "")]
