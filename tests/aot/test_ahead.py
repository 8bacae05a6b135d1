"""Kernels that a first answer launches are compiled while weights are read, by other processes.

Stops: a launch that nobody compiled before, a process that outlives its parent or an interrupt,
more processes than a container may run, a load that fails over any of it. Compiled ahead for a card
that is not here, so that a later launch would hit Triton's cache.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs a process without TRITON_INTERPRET=1", allow_module_level=True)

import torch  # noqa: E402

import engine.load.ahead.children as children  # noqa: E402
import engine.load.planner  # noqa: E402
from engine import LLM, Full, OmniKV  # noqa: E402
from engine.bank.device import DeviceBank  # noqa: E402
from engine.forward.self_test import launch_tested  # noqa: E402
from engine.load.ahead.launches import launches  # noqa: E402
from engine.load.ahead.recording import recorded, specialise  # noqa: E402
from engine.load.options import Options  # noqa: E402
from engine.load.planner import Planner  # noqa: E402
from engine.model.tensors import random_stream  # noqa: E402
from kernels.attention.split import sparse_split  # noqa: E402
from kernels.launch.shapes import Card, imagined  # noqa: E402
from kernels.layer.gemv import multiply_rows  # noqa: E402
from tests.builders import session_config  # noqa: E402
from tests.fake_gpu import FakeGPU  # noqa: E402

HOPPER, SMALL = Card((9, 0), 132), Card((8, 7), 8)
METHOD = OmniKV(filter_layers=(1,), tokens=64, tail=64, dense_below=0, wait_layers=0)
SHAPE = dict(layers=4, heads=4, kv_heads=2, hidden=128, head_dim=64, max_positions=16384)


def made(monkeypatch, method=METHOD, **settings):
    """A small model on the CPU whose kernels are Triton's."""
    real = engine.load.planner.full_placement

    def by_layer(*arguments, **named):  # as on a GPU
        placement = real(*arguments, **named)
        return None if placement is None else replace(placement, by_layer=True)

    monkeypatch.setattr(engine.load.planner, "full_placement", by_layer)
    rows = lambda self, plan, layer: plan.gathers(layer)  # noqa: E731  token-major, as on a GPU
    monkeypatch.setattr(DeviceBank, "_wants_token_major", rows)
    monkeypatch.setenv(children.SWITCH, "0")  # a load here starts nothing
    named = dict(device="cpu", dtype="bfloat16", backend="triton", step="fused", chunk=64)
    named |= dict(max_context=4096, method=method, ram_budget=1 << 36) | settings
    return LLM.from_stream(session_config(**SHAPE), random_stream, **named)


def keys(found):
    return {specialise(launch).key for launch in found}


def launched(llm):
    """Keys of what a prompt, the steps behind it and the self-test launch."""
    with recorded() as found, llm.session() as session, torch.inference_mode():
        session.adopt([1] * 300)
        session.bank.before_step(301)
        session.runner.feed(1, 301)
        for own in (True, False):
            session.runner.run(301, own)
        launch_tested(llm.model, llm.rotary)
    return keys(found)


CASES = {
    "device": (METHOD, {}),
    "host": (METHOD, dict(offload="host")),
    "full": (Full(), {}),
    "int4 weights": (METHOD, dict(weights="int4")),
    "int8 bank": (METHOD, dict(bank="int8")),
    "plain": (METHOD, dict(step="plain")),
}


@pytest.mark.parametrize("card", [HOPPER, SMALL], ids=["132 SMs", "8 SMs"])
@pytest.mark.parametrize("name", CASES)
def test_every_launch_of_a_first_step_is_among_those_compiled_ahead(name, card, monkeypatch):
    method, settings = CASES[name]
    with imagined(card):
        llm = made(monkeypatch, method, **settings)
        ahead = keys(launches(llm.planner.first_answer()))
        if settings.get("step") == "plain":
            monkeypatch.setattr(sys.modules[__name__], "launch_tested", lambda *_: None)
        wanted = launched(llm)
    assert len(wanted) >= (3 if name == "plain" else 8)
    assert wanted <= ahead, [key[0] for key in wanted - ahead]


def test_another_plan_launches_what_this_one_does_not(monkeypatch):
    """The comparison above can fail."""
    with imagined(HOPPER):
        full = made(monkeypatch, Full()).planner.first_answer()
        wanted = launched(made(monkeypatch))
        assert not wanted <= keys(launches(full))
        assert {"sparse_kernel", "emit_kernel"} <= {key[0] for key in wanted - keys(launches(full))}


def test_a_prompts_kernels_are_among_them(monkeypatch):
    """Of a chunk at the beginning, one behind blocks of the past, and one of an odd length."""
    with imagined(HOPPER):
        llm = made(monkeypatch, max_context=16384)
        found = [launch.function.__name__ for launch in launches(llm.planner.first_answer())]
    assert {"rotate_rows_kernel", "add_norm_kernel", "swiglu_kernel"} <= set(found)
    assert found.count("merge_part_kernel") >= 2  # the chunk itself, then what was merged


LATER = """
import sys, pickle
from triton.runtime.driver import driver
from engine.load.ahead.__main__ import Driver
from engine.bank.device import DeviceBank  # noqa: E402
from engine.load.ahead.launches import launches
answer = pickle.load(sys.stdin.buffer)
driver.set_active(Driver(answer.card))
for launch in launches(answer):
    launch.compile()
"""


def test_a_process_that_launches_later_compiles_nothing(monkeypatch, tmp_path):
    import pickle

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with imagined(HOPPER):
        answer = made(monkeypatch).planner.first_answer()
    monkeypatch.delenv(children.SWITCH)
    monkeypatch.setattr(children, "number", lambda: 2)
    began = []
    real = children.start
    monkeypatch.setattr(children, "start", lambda *part: began.append(real(*part)) or began[-1])
    monkeypatch.setattr(children, "PATIENCE", 300.0)
    with children.compiled_meanwhile(lambda: answer):
        pass
    assert [process.returncode for process in began] == [0, 0]
    compiled = sorted(tmp_path.rglob("*.cubin"))
    assert len(compiled) == len(launches(answer)) >= 15
    subprocess.run(
        [sys.executable, "-c", LATER], input=pickle.dumps(answer), check=True, cwd=children.ROOT
    )
    assert sorted(tmp_path.rglob("*.cubin")) == compiled
    with children.compiled_meanwhile(lambda: answer):  # the cache is warm
        pass
    assert len(began) == 2
    with children.compiled_meanwhile(lambda: replace(answer, chunk=128)):
        assert len(began) == 4


def gone(pid):
    """Whether a process has ended, within ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


@pytest.fixture
def answer(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with imagined(HOPPER):
        found = made(monkeypatch).planner.first_answer()
    monkeypatch.delenv(children.SWITCH)
    monkeypatch.setattr(children, "number", lambda: 2)
    return found


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_or_a_failed_load_ends_the_processes(raised, answer, monkeypatch, tmp_path):
    began = []
    real = children.start
    monkeypatch.setattr(children, "start", lambda *part: began.append(real(*part)) or began[-1])
    with pytest.raises(raised), children.compiled_meanwhile(lambda: answer):
        raise raised
    assert [process.returncode for process in began] == [-signal.SIGKILL] * 2
    assert not list(tmp_path.glob("omnikv-*"))


PARENT = """
import pickle, sys, time
import engine.load.ahead.children as children
answer = pickle.load(sys.stdin.buffer)
children.number = lambda: 2
real = children.start
def start(*part):
    process = real(*part)
    print(process.pid, flush=True)
    return process
children.start = start
with children.compiled_meanwhile(lambda: answer):
    time.sleep(60)
"""


def test_no_process_outlives_a_parent_that_was_killed(answer):
    import pickle

    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=children.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        parent.stdin.write(pickle.dumps(answer))
        parent.stdin.flush()
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_what_does_not_compile_fails_no_load(answer, monkeypatch):
    """A card that no compiler knows: the self-test will say so."""
    monkeypatch.setattr(children, "PATIENCE", 120.0)
    with children.compiled_meanwhile(lambda: replace(answer, card=Card((1, 1)))):
        pass

    def broken():
        raise ValueError("a plan that cannot be asked")

    with children.compiled_meanwhile(broken):
        pass
    monkeypatch.setattr(children.sys, "executable", "/nowhere/python")
    with children.compiled_meanwhile(lambda: answer):
        pass


def test_it_is_off_where_it_is_switched_off_or_kernels_are_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(children.SWITCH, raising=False)
    assert children.possible()
    monkeypatch.setenv(children.SWITCH, "0")
    assert not children.possible()
    monkeypatch.setenv(children.SWITCH, "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not children.possible()


def test_a_gpus_plan_says_what_its_card_is(monkeypatch):
    """A card that is made up, whose launches depend on its SMs."""
    gpu = FakeGPU(monkeypatch, cards=1)
    gpu.processors, gpu.capability = 48, (12, 1)
    options = Options.of(dict(device="cuda", dtype="bfloat16", max_context=4096, method=METHOD))
    answer = Planner("tiny", session_config(**SHAPE), options).first_answer()
    assert answer.card == Card((12, 1), 48) and answer.fused and answer.placement is None
    (sparse,) = [x for x in launches(answer) if x.function.__name__ == "sparse_kernel"]
    assert sparse.arguments["SPLIT"] == sparse_split(64, 2, 48) != sparse_split(64, 2, 8)
    plain = replace(options, backend="reference")
    assert Planner("tiny", session_config(**SHAPE), plain).first_answer() is None


def test_a_residuals_step_is_compiled_with_its_weights(monkeypatch):
    gpu = FakeGPU(monkeypatch, cards=1)
    gpu.processors, gpu.capability = 48, (12, 1)
    method = replace(METHOD, residual="sample")
    options = Options.of(dict(device="cuda", dtype="bfloat16", max_context=4096, method=method))
    found = launches(Planner("tiny", session_config(**SHAPE), options).first_answer())
    (sparse,) = [x for x in found if x.function.__name__ == "sparse_kernel"]
    assert sparse.arguments["LOGS"]


def test_a_cpu_has_nothing_to_compile(monkeypatch):
    assert made(monkeypatch).planner.first_answer() is None  # no card


@pytest.mark.parametrize(
    "cores, gigabytes, wanted",
    [(1, 100, 0), (2, 100, 1), (16, 100, 12), (8, 100, 7), (16, 6, 3), (16, 1, 0)],
)
def test_there_are_no_more_processes_than_cores_and_memory_hold(
    cores, gigabytes, wanted, monkeypatch
):
    monkeypatch.setattr(children, "free_cores", lambda: cores)
    monkeypatch.setattr(children, "available_bytes", lambda device: (gigabytes << 30, "here"))
    assert children.number() == wanted


def test_launch_shapes_follow_the_cards_size(monkeypatch):
    """Few programs for an SM have more rounds in flight: 4096 outputs are enough of them for 132
    SMs, and not for the 160 of a B300. On 8 and 48 all products have enough.
    """
    stages = {}
    for sms in (8, 48, 132, 160):
        x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (1, 4096))
        with imagined(Card((9, 0), sms)), recorded() as found:
            multiply_rows(x, weight)
            multiply_rows(x, weight[:1536])
        stages[sms] = [launch.arguments["STAGES"] for launch in found]
    assert stages == {8: [4, 4], 48: [4, 4], 132: [4, 6], 160: [6, 6]}
