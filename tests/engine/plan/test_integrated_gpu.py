"""GPUs whose memory is the host's (Jetson, DGX Spark): a plan counts every byte once and places
nothing in host memory by itself.

Stops: a context that moves to the host tier where that frees nothing, the same memory counted for
the device and again for the host, the page cache taken for used.
"""

import pytest

import engine.plan.free_memory as freemem
from engine import OmniKV
from engine.load.options import Options
from engine.load.planner import Planner
from engine.methods.controls.brutal_offload import BrutalOffload
from tests.builders import session_config
from tests.fake_gpu import FakeGPU

MACHINE = 192 << 20
CONTEXT = 16384
METHOD = OmniKV(filter_layers=(1,), tokens=64, dense_below=0)


@pytest.fixture
def gpu(monkeypatch):
    """A machine of 192 MB, of which CUDA calls 20 MB free: the page cache has the others."""
    fake = FakeGPU(monkeypatch, cards=1)
    fake.memory = [(20 << 20, MACHINE)]
    monkeypatch.setattr(freemem, "_meminfo", lambda: MACHINE)
    monkeypatch.setattr(freemem, "container_memory", lambda: None)
    monkeypatch.setattr(freemem, "address_space_left", lambda: None)
    return fake


def planner(**settings):
    config = session_config(layers=6, heads=4, kv_heads=4, head_dim=32, max_positions=CONTEXT * 4)
    named = dict(method=METHOD, device="cuda", dtype="float32", max_context=CONTEXT)
    return Planner("tiny", config, Options.of({**named, **settings}))


def test_a_card_of_its_own_memory_places_rows_on_the_host(gpu):
    plan = planner().plan()
    assert plan.placement is not None and plan.host_bytes > 0 and plan.free == 20 << 20
    assert "host tier" not in {name for name, _, _ in plan.items} and not plan.shared


def test_a_card_without_one_reads_all_rows_in_place(gpu):
    gpu.integrated = True
    plan = planner().plan()
    assert plan.shared and plan.free == plan.host_free == MACHINE
    assert plan.placement is None and plan.host_bytes == 0 and plan.fits
    assert "everything on the device, whose memory is the host's" in str(plan)
    assert "free, GPU and CPU share" in str(plan)
    made = planner()
    assert made.placement(*made.resolve_method(METHOD), CONTEXT) is None
    # a method that stages whole layers finds them in place too
    brutal = BrutalOffload(layers=4, ahead=1)
    assert made.placement(*made.resolve_method(brutal), CONTEXT) is None


def test_a_context_that_does_not_fit_there_fits_on_no_host_either(gpu, monkeypatch):
    """With a memory of its own a card of as many bytes has room beside the host's."""
    monkeypatch.setattr(freemem, "_meminfo", lambda: MACHINE // 2)
    gpu.memory = [(MACHINE // 2, MACHINE)]
    assert planner().plan().fits and planner().plan().host_bytes > 0
    gpu.integrated = True
    plan = planner().plan()
    assert plan.placement is None and plan.host_bytes == 0 and not plan.fits


def test_what_is_asked_to_be_on_the_host_is_counted_once_with_the_rest(gpu):
    gpu.integrated = True
    made = planner(offload="host")
    plan = made.plan()
    assert plan.placement is not None
    assert plan.bytes_of("host tier") == plan.host_bytes > 0
    assert "it is the device's memory too" in str(plan)
    limit = made.host_tier._limit()
    others = plan.total - plan.host_bytes
    assert limit == int(MACHINE * freemem.HEADROOM) - others
    # a context whose halves fit in either memory, and not in one
    longest = planner().plan().largest_context
    assert made.plan().largest_context <= longest < 4 * CONTEXT


def test_an_imagined_card_has_memory_of_its_own(gpu):
    gpu.integrated = True
    plan = planner(imagined_gpu=20 << 20, imagined_host=64 << 20).plan()
    assert not plan.shared and plan.free == 20 << 20 and plan.host_free == 64 << 20
