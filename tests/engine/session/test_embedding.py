"""What an application that embeds the engine relies on: the shipped model by its name, anywhere,
settings that a type checker knows, and a turn for every thread.

Stops: a stranger's repository fetched for weights/pocket, LLM(..., treads=2) that no checker sees,
a thread that waits for ever or out of its turn.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest

from engine import LLM, Full, SamplingParams
from engine.base.errors import Busy, ModelNotFound, SettingError
from engine.base.lock import RequestLock
from engine.load.options import LLMSettings, Options
from tests.builders import POCKET, tiny_llm
from weights.resolve import resolve

ROOT = Path(__file__).resolve().parents[3]


# ---------------------------------------------------------------- the shipped model


@pytest.mark.parametrize("name", [(), ("pocket",), ("Pocket",)])
def test_the_shipped_model_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm = LLM(*name, load=False, max_context=1024)
    assert llm.folder == Path(POCKET) and llm.resolved.source == "folder"
    llm.load()
    assert llm.tokenizer is not None


def test_a_folder_of_that_name_on_the_disk_wins(tmp_path, monkeypatch):
    (tmp_path / "pocket").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("pocket").folder == Path("pocket")
    assert LLM(load=False).folder == Path(POCKET)


@pytest.mark.parametrize(
    "name", ["weights/pocket", "./weights/pocket/", "weights/Pocket", "weights/judge"]
)
def test_the_clones_path_elsewhere_is_no_repository_of_a_stranger(name, tmp_path, monkeypatch):
    """Nothing is asked of the hub, and the message says what to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weights.resolve._hub", lambda: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match=r'no such folder here.*LLM\("(pocket|judge)"\)'):
        LLM(name, load=False)


def test_without_a_shipped_model_the_name_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("weights.resolve.SHIPPED", tmp_path / "pocket")
    monkeypatch.setattr("weights.resolve.JUDGE", tmp_path / "judge")
    for name in ((), ("pocket",), ("judge",)):
        with pytest.raises(ModelNotFound, match="no model is shipped with this engine"):
            LLM(*name, load=False)


# ---------------------------------------------------------------- settings


def test_the_typed_settings_are_the_options():
    assert sorted(LLMSettings.__annotations__) == sorted(field.name for field in fields(Options))
    hints = {name: str(hint) for name, hint in LLMSettings.__annotations__.items()}
    # taken as any sequence, held as a tuple
    wider = {"devices": "Sequence[str | int] | None", "split": "Sequence[int] | None"}
    given = {field.name: wider.get(field.name, field.type) for field in fields(Options)}
    assert all(given[name] in hint for name, hint in hints.items())


def test_a_type_checker_sees_an_unknown_setting_and_a_wrong_type(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "from engine import LLM, Full\n"
        "LLM('pocket', threads=2, method=Full(), bank='int8', load=False)\n"
        "LLM(treads=2)\n"
        "LLM(max_context='long')\n"
        "LLM(load=False).plan(None, 512, weights='int8')\n"
        "LLM(load=False).plan(wieghts='int8')\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent"]
    command += ["--python-version", "3.10", str(program)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in found.stdout.splitlines() if "program.py" in line and "error" in line]
    assert [line.split(":")[1] for line in lines] == ["3", "4", "6"], found.stdout
    assert "treads" in lines[0] and "max_context" in lines[1]


def test_a_plan_with_other_settings_is_that_of_an_llm_made_so():
    llm = LLM(load=False, max_context=4096)
    for settings in ({"weights": "int8", "bank": "int4"}, {"dtype": "float32", "method": Full()}):
        other = LLM(load=False, max_context=4096, **settings)
        found = llm.plan(**settings).to_dict()
        wanted = other.plan().to_dict()
        for moving in ("free_bytes", "largest_context", "placement"):  # free RAM moves
            found.pop(moving), wanted.pop(moving)
        assert found == wanted
    assert llm.plan().to_dict()["items"] != found["items"]
    with pytest.raises(SettingError, match="did you mean weights"):
        llm.plan(wieghts="int8")


# ---------------------------------------------------------------- turns


def test_busy_stays_the_default():
    llm = tiny_llm(Full())
    with llm.busy():
        caught = []
        thread = threading.Thread(target=lambda: caught.append(_error(llm)))
        thread.start()
        thread.join(10)
    assert isinstance(caught[0], Busy) and "wait=True" in str(caught[0])


@pytest.mark.parametrize("which", [(0, 1), (1, 0), (2, 1)])
def test_llms_that_share_a_device_exclude_each_other(which):
    llm = tiny_llm(Full())
    llms = [llm, LLM.sharing(llm, chunk=32), LLM.sharing(llm, wait=True)]
    holder, other = (llms[i] for i in which)
    caught, after = [], []
    with holder.busy():
        thread = threading.Thread(target=lambda: caught.append(_error(other)))
        thread.start()
        thread.join(10)
        patient = threading.Thread(target=lambda: after.append(llms[2].generate([1, 2, 3])))
        patient.start()
        patient.join(0.05)
        assert not after
    patient.join(30)
    assert isinstance(caught[0], Busy) and len(after) == 1


def _error(llm):
    try:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
    except Busy as error:
        return error


def test_waiting_threads_all_answer_in_their_order():
    llm = tiny_llm(Full(), wait=True)
    alone = llm.generate([1, 2, 3], SamplingParams(max_tokens=8)).token_ids
    turns, done, threads = [], [], []

    def ask(number):
        pieces = llm.stream(
            [1, 2, 3], SamplingParams(max_tokens=8), should_stop=lambda: turns.append(number)
        )  # asked within the turn: whoever has ended may be seen later
        done.append([piece.token_id for piece in pieces])

    with llm.busy():
        for number in range(6):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            _until(lambda: len(llm._lock.waiting) == len(threads))
    for thread in threads:
        thread.join(30)
    assert list(dict.fromkeys(turns)) == list(range(6)) and turns == sorted(turns)
    assert len(done) == 6 and all(ids == alone for ids in done)
    assert llm._lock.free and not llm._lock.waiting


def test_an_open_answer_goes_on_past_those_who_wait():
    """Its pieces do not queue behind the threads that wait for its end, nor does its own thread."""
    llm = tiny_llm(Full(), wait=True)
    answer = llm.stream([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    pieces, ids = [next(answer)], []
    other = threading.Thread(
        target=lambda: ids.extend(llm.generate([4, 5], SamplingParams(max_tokens=2)).token_ids)
    )
    other.start()
    _until(lambda: llm._lock.waiting)
    llm.generate([6, 7], SamplingParams(max_tokens=1))  # between two pieces, by their thread
    assert not ids
    elsewhere = threading.Thread(target=lambda: pieces.extend(answer))
    elsewhere.start()
    elsewhere.join(30)
    other.join(30)
    assert len(pieces) >= 4 and len(ids) == 2


def test_waiting_can_be_interrupted_and_leaves_the_queue():
    lock = RequestLock(wait=True)
    begun, over = threading.Event(), threading.Event()

    def hold():
        with lock.held():
            begun.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(10)
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt), lock.held():
            pytest.fail("held by two")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not lock.waiting
    over.set()
    thread.join(10)
    with lock.held():
        pass
    assert lock.free


def test_many_threads_never_run_at_once():
    lock, inside, most = RequestLock(wait=True), [], []

    def work():
        for _ in range(20):
            with lock.held(), lock.held():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 160 and max(most) == 1 and lock.free


def _interrupt(*_):
    raise KeyboardInterrupt


def _until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        with contextlib.suppress(IndexError):
            time.sleep(0.002)
