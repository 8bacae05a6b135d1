"""The host tier on a GPU: pinned rows, streams, one graph; the checks of tests/kernels at real
sizes. Skipped without a GPU.
"""

import functools

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import cuda_driver, registered
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.model.tensors import random_stream
from kernels.tier.gather import move_rows
from tests.builders import random_ids, session_config
from tests.kernels.support.host_checks import STORES, check_moves, check_slots, check_store

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
METHOD = OmniKV(filter_layers=(1, 4), tokens=64, tail=64, dense_below=0)


def llm(method, offload, **settings):
    settings = dict(max_context=4096, chunk=512, dtype="float32") | settings
    return LLM.from_stream(
        session_config(heads=8, kv_heads=2, head_dim=64, hidden=128),
        functools.partial(random_stream, sharpness=2.5),
        device="cuda",
        method=method,
        offload=offload,
        **settings,
    )


@pytest.mark.parametrize(
    "budget, width, capacity",
    [(2048, 8192, 100000), (300, 300, 900), (6400, 25600, 200000), (8, 8, 40)],
)
def test_slots_follow_the_model(budget, width, capacity):
    check_slots("cuda", "triton", budget, budget, width, capacity, steps=30)


@pytest.mark.parametrize(
    "width, layers, count, programs",
    [(4096, 12, 2048, None), (2048, 4, 300, 2), (64, 3, 150, 1), (24576, 1, 40, 32)],
)
def test_rows_land_where_they_should(width, layers, count, programs):
    check_moves(
        "cuda",
        "triton",
        width,
        width,
        layers,
        max(4, -(-count // 64) + 1),
        count,
        programs,
        pin=True,
    )


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(
    "method",
    [
        METHOD,
        BrutalOffload(layers=5, ahead=2),
        OmniKV(filter_layers=(1, 4), tokens=64, official=True),
    ],
    ids=["omnikv", "brutal", "official"],
)
def test_offloaded_is_on_device(method, backend):
    """Bitwise for the reference and, because rows are visited in the same order, for decode on the
    kernels too.
    """
    answers = []
    for offload in ("device", "host"):
        session = llm(method, offload, backend=backend, compile=False).session()
        logits = session.prefill(random_ids(1500))
        answers.append([logits, *(session.decode(7) for _ in range(200))])
    assert session.bank.pool.pinned
    close = (
        torch.equal
        if backend == "reference"
        else functools.partial(torch.allclose, rtol=0, atol=2e-4)
    )
    assert all(close(a, b) for a, b in zip(*answers, strict=True))


def test_a_step_is_one_graph_without_a_sync_or_an_allocation():
    session = llm(METHOD, "host", compile=True).session()
    session.prefill(random_ids(1500))
    eager = [session.decode(5) for _ in range(5)]
    session.truncate(1500)
    assert session.runner._own_step._graphs
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [session.decode(5) for _ in range(5)]
        for _ in range(150):
            session.decode(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(eager, again, strict=True))
    # the logits that this test holds
    assert torch.cuda.memory_allocated() - held <= 16 * 512
    assert session.stats.misses > 0 and session.stats.bytes_fetched > 0


def test_full_attention_streams_an_offloaded_bank(monkeypatch):
    monkeypatch.setattr("engine.plan.placement.STREAM_BLOCK", 512)
    session = llm(METHOD, "host", compile=False).session()
    session.prefill(random_ids(1500))
    session.set_method(Full())
    expected = llm(Full(), "device", compile=False).session()
    expected.prefill(random_ids(1500))
    assert (session.decode(5) - expected.decode(5)).abs().max() < 1e-3


def test_registered_pages_are_read_and_a_refusal_leaves_no_error_behind():
    driver = cuda_driver()
    if driver is None:
        pytest.skip("no library of the driver here")
    memory = registered(driver, 3 * (1 << 20) + 64)
    memory[:512].view(torch.int64).copy_(torch.arange(64))
    assert memory.is_pinned()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_"):
        driver.register(memory.data_ptr(), 4096)  # registered already
    table = torch.tensor([memory.data_ptr()], device="cuda")
    buffer = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    move_rows(
        table, 0, 16, buffer, torch.tensor([3, 1], dtype=torch.int32, device="cuda"), 0, 2, [memory]
    )
    torch.cuda.synchronize()
    assert buffer.cpu().view(torch.int64).tolist() == [[6, 7], [2, 3]]
    assert HostPool().take(64, 1)[0].slab.memory.is_pinned()


@pytest.mark.parametrize("shape", STORES)
def test_a_step_stores_its_rows(shape):
    check_store("cuda", "triton", 3, **shape)
