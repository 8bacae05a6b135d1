"""A GPU that is too old, too small, absent, taken by another process, or refuses a launch: one
clear line, and a session that is whole.

Stops: a traceback of a compiler where a sentence would do, a session that lost its tokens because
another process took the card's memory.
"""

import pytest
import torch

import engine.runner.step_runner
from engine import LLM, Full, OmniKV
from engine.bank.pool.host_pool import HostPool
from engine.base.errors import (
    DeviceFailed,
    EngineError,
    OutOfDeviceMemory,
    OutOfMemoryPlan,
    SettingError,
)
from engine.load.options import Options
from tests.builders import random_ids, session_config, tiny_llm
from tests.fake_gpu import FakeGPU

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
TAKEN = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 3 MiB free.\nSee the manual"


def out_of_memory():
    return torch.OutOfMemoryError(TAKEN)


def launch_fails():
    return RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


class TritonsOwn(Exception):
    """As triton's errors are: no RuntimeError."""

    __module__ = "triton.runtime.errors"


def resources():
    return TritonsOwn("out of resource: shared memory, Required: 300000")


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (out_of_memory, OutOfDeviceMemory, "no memory left on the GPU.*20.00 MiB.*another process"),
        (launch_fails, DeviceFailed, "refused a launch.*kernel image is invalid"),
        (resources, DeviceFailed, "refused a launch.*shared memory"),
    ],
)
@pytest.mark.parametrize("offload", ["device", "host"])
def test_a_failure_in_mid_answer_is_one_line_and_loses_nothing(
    offload, failure, kind, says, monkeypatch
):
    """A chunk and a step, at any layer; the same tokens then give the same bits."""
    settings = dict(max_context=512, chunk=50, backend="reference", offload=offload)
    settings |= dict(host_pool=HostPool(slab_bytes=1 << 20))
    session, other = (tiny_llm(METHOD, **settings).session() for _ in range(2))
    ids = random_ids(150)
    session.prefill(ids[:100]), other.prefill(ids)
    name = type(session.runtime)
    for call, layer, again in (
        ("attend_prompt", 3, lambda: session.prefill(ids[100:])),
        ("attend", 5, lambda: session.decode(7)),
    ):
        real = getattr(name, call)

        def broken(runtime, number, *rest, layer=layer, real=real):
            if number == layer:
                raise failure()
            return real(runtime, number, *rest)

        before = len(session)
        with monkeypatch.context() as patch:
            patch.setattr(name, call, broken)
            with pytest.raises(kind, match="(?is)" + says) as caught:
                again()
        assert "\n" not in str(caught.value) and len(session) == before
        logits = again()
    assert torch.equal(logits, other.decode(7))
    assert session.stats.sparse_steps == 1


def test_a_card_that_is_gone_names_the_first_error(monkeypatch):
    """After an illegal access the card refuses everything, the clean-up too."""
    pool = HostPool(slab_bytes=1 << 20)
    session = tiny_llm(METHOD, max_context=512, offload="host", host_pool=pool).session()
    session.prefill(random_ids(100))

    def gone(*arguments, **named):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.runner.step_runner.StepRunner, "run", gone)
    monkeypatch.setattr(session.bank, "rewind", gone)
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        session.decode(3)


def test_an_error_of_another_kind_is_left_alone(monkeypatch):
    session = tiny_llm(Full(), max_context=512).session()

    def broken(*arguments, **named):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(engine.runner.step_runner.StepRunner, "run", broken)
    session.prefill(random_ids(10))
    with pytest.raises(RuntimeError, match="^shapes do not match$"):
        session.decode(3)


def test_no_memory_while_weights_are_loaded(monkeypatch):
    FakeGPU(monkeypatch)

    def stream(config, dtype, device):
        raise out_of_memory()
        yield

    with pytest.raises(OutOfDeviceMemory, match="no memory left on the GPU"):
        LLM.from_stream(session_config(), stream, device="cuda", offload="device")


def test_a_card_too_old_is_refused_and_auto_takes_the_cpu(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    gpu.capability = (7, 5)
    with pytest.raises(SettingError, match=r"Fake GPU of compute capability 7.5, expected 8.0"):
        Options(device="cuda:1").resolved_device()
    with pytest.warns(UserWarning, match="takes the CPU: Fake GPU of compute capability 7.5"):
        assert Options().resolved_device() == torch.device("cpu")
    gpu.capability = (8, 0)
    assert Options(device="cuda:1").resolved_device() == torch.device("cuda", 1)


def test_a_driver_that_refuses_is_one_line(monkeypatch):
    FakeGPU(monkeypatch)

    def refuse(device=None):
        raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    with pytest.raises(SettingError, match="driver refuses: The NVIDIA driver .* is too old") as e:
        Options(device="cuda").resolved_device()
    assert "\n" not in str(e.value)


def test_a_card_that_is_not_there(monkeypatch):
    FakeGPU(monkeypatch, cards=1)
    with pytest.raises(SettingError, match="'cuda:7', expected an index below 1"):
        Options(device="cuda:7").resolved_device()


def test_a_card_too_small_is_refused_before_anything_is_read(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    gpu.memory = [(1 << 20, 1 << 20)] * 2
    with pytest.raises(OutOfMemoryPlan) as caught:
        LLM.from_stream(session_config(), None, device="cuda", offload="device", max_context=8192)
    assert isinstance(caught.value, EngineError)
