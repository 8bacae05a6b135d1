"""Every transfer as late as it may be: the same bits as on the device, and a wait that is left out
is noticed.

Stops: rows read before they arrive, a buffer that is written again while its last rows are still on
their way, maps and indices that change under a fetch; on a GPU these come true now and then, on a
CPU never.
"""

import functools
import gc
from dataclasses import replace

import pytest
import torch

import engine.load.planner
import engine.plan.placement as placement
from engine import Full, OmniKV
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.evict.h2o import H2O
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.window import Window
from engine.methods.select.infllm import InfLLM
from engine.methods.select.quest import Quest
from engine.methods.select.tidaldecode import TidalDecode
from engine.methods.select.varying.infinigen import InfiniGen
from tests.builders import random_ids, tiny_llm
from tests.engine.bank.late_lanes import LateLane, install
from tests.engine.bank.test_offload import equal, pair, play

METHOD = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
UNPACKED = OmniKVUnpacked(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
# blocks that form and are read within one chunk
INFLLM = InfLLM(block=4, init=8, local=16, topk=4, representatives=2, cached=6, chunk=8)
QUEST = Quest(tokens=80, page=8)
INFINIGEN = InfiniGen(tokens=40, columns=4, alpha=1.0)
BRUTAL = BrutalOffload(layers=5, ahead=2)
SCRIPT = [
    ("prefill", 150),
    ("decode", 45),
    ("prefill", 90),
    ("decode", 5),
    ("truncate", 190),
    ("decode", 5),
]
FORKED = [
    ("prefill", 150),
    ("decode", 45),
    ("prefill", 60),
    ("fork", 0),
    ("decode", 20),
    ("check", 5),
    ("truncate", 70),
    ("decode", 3),
]
STREAM = [("prefill", 300), ("decode", 30), ("prefill", 100), ("refresh", 0), ("decode", 10)]


@functools.lru_cache
def on_the_device(method, script, backend):
    """What a session with everything on the device answers."""
    llm = tiny_llm(method, offload="device", max_context=1024, chunk=50, backend=backend)
    with torch.inference_mode():
        return play(llm.session(), script)[0]


def differs(method, script, monkeypatch, skip="", backend="reference", **settings):
    """Whether an offloaded session on late lanes answers anything but what a session on the device
    does.
    """
    expected = on_the_device(method, tuple(script), backend)
    _, host = pair(method, chunk=50, backend=backend, **settings)
    with torch.inference_mode():
        install(monkeypatch, skip)
        try:
            got, sessions = play(host.session(), script)
            for session in sessions:
                session.close()
            assert (
                skip
                or any(lane.work for lane in LateLane.made)
                and all(lane.done == len(lane.work) for lane in LateLane.made)
            )
        finally:
            # what was not waited for must not run when somebody collects the rubbish
            for lane in LateLane.made:
                lane.work, lane.done = [], 0
    if backend != "reference":
        return not all(
            torch.allclose(a, b, rtol=0, atol=2e-4)
            for a, b in zip(expected, got, strict=True)
            if torch.is_tensor(a)
        )
    return not all(equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("slots, by_layer", [(0, False), (1, True), (4, False), (4, True)])
def test_late_fetches_change_nothing(slots, by_layer, monkeypatch):
    """by_layer: a load per layer, as on a GPU."""
    real = placement.full_placement
    monkeypatch.setattr(
        engine.load.planner,
        "full_placement",
        lambda *args, **named: real(*args, **(named | {"by_layer": by_layer})),
    )
    assert not differs(METHOD, FORKED, monkeypatch, slots=slots)


@pytest.mark.parametrize(
    "method",
    [
        BRUTAL,
        BrutalOffload(layers=20, ahead=1),
        UNPACKED,
        OmniKVPerLayer(filter_layers=(1,), tokens=40, tail=64, dense_below=0),
        OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=190),
        Full(),
        QUEST,
        TidalDecode(tokens=40),
        INFLLM,
        INFINIGEN,
    ],
    ids=[
        "brutal",
        "brutal-all",
        "unpacked",
        "per-layer",
        "dense-below",
        "full",
        "quest",
        "tidaldecode",
        "infllm",
        "infinigen",
    ],
)
def test_late_whole_layers_change_nothing(method, monkeypatch):
    assert not differs(method, SCRIPT, monkeypatch)


def test_late_tails_that_nothing_was_chosen_beside_change_nothing(monkeypatch):
    """The tail holds every token, so no selection is waited for; from 64 tokens on the tail's first
    block is read from the host.
    """
    assert not differs(UNPACKED, [("prefill", 30), ("decode", 60)], monkeypatch)


def test_late_write_backs_change_nothing(monkeypatch):
    """Blocks leave the ring while tokens are generated, and are chosen 64 steps later."""
    assert not differs(METHOD, [("prefill", 30), ("decode", 110)], monkeypatch)


@pytest.mark.parametrize("method", [METHOD, Full()], ids=["omnikv", "full"])
@pytest.mark.parametrize("block", [64, 100, 1000])
def test_late_stream_blocks_change_nothing(block, method, monkeypatch):
    monkeypatch.setattr(placement, "STREAM_BLOCK", block)
    assert not differs(method, STREAM, monkeypatch, backend="cpu")


@pytest.mark.parametrize(
    "method", [H2O(tokens=40), SnapKV(tokens=60, window=8), Window(tokens=40)], ids=lambda m: m.name
)
def test_late_banks_of_evicting_methods_change_nothing(method, monkeypatch):
    """Prompts, the cut at their end, and going back read a bank whose rows are on their way."""
    method = replace(method, forget=False)
    script = [("prefill", 130), ("decode", 70), ("truncate", 30), ("decode", 5), ("fork", 0)]
    script += [("decode", 3)] if method.own_prefill else [("prefill", 40), ("decode", 3)]
    assert not differs(method, script, monkeypatch)


@pytest.mark.parametrize(
    "function, method, script, backend",
    [
        ("ready", METHOD, SCRIPT[:2], "reference"),
        ("rows", METHOD, SCRIPT[:2], "reference"),
        ("_picked", QUEST, SCRIPT, "reference"),
        ("_of_brought", INFINIGEN, SCRIPT, "reference"),
        ("bring", INFINIGEN, [("prefill", 30), ("decode", 110)], "reference"),
        ("block_rows", INFLLM, SCRIPT, "reference"),
        ("drain", METHOD, [*SCRIPT[:3], ("decode", 20), ("fork", 0), ("decode", 8)], "reference"),
        ("_staged_kv", BRUTAL, SCRIPT[:2], "reference"),
        ("stage", BRUTAL, SCRIPT, "reference"),
        ("gather", UNPACKED, SCRIPT, "reference"),
        ("before_step", METHOD, [("prefill", 30), ("decode", 110)], "reference"),
        ("_refill", METHOD, SCRIPT[:2], "cpu"),
        ("_write_piece", METHOD, SCRIPT[:1], "cpu"),
        ("blocks", METHOD, STREAM[:1], "cpu"),
        ("_filling", METHOD, STREAM[:4], "cpu"),
        ("newest", METHOD, [("prefill", 1), ("refresh", 0)], "cpu"),
    ],
)
def test_a_wait_that_is_left_out_is_noticed(function, method, script, backend, monkeypatch):
    """The waits of each function do nothing: other bits come out, or something is written again
    under a transfer.
    """
    if backend == "cpu":
        monkeypatch.setattr(placement, "STREAM_BLOCK", 64)
    try:
        noticed = differs(method, script, monkeypatch, function, backend)
    except AssertionError as error:
        noticed = "was written again before it ran" in str(error)
    assert noticed


@pytest.mark.parametrize("call", [3, 7, 14, 21])
def test_broken_off_between_a_plan_and_its_copy(call, monkeypatch):
    """Ctrl-C when the call-th transfer is issued, everything issued before it still to run: the
    slots promise nothing that never came.
    """
    import engine.bank.host.host_rows as host_rows

    device, host = pair(METHOD, chunk=50, slots=1)
    install(monkeypatch)
    session, expected = host.session(), device.session()
    for s in (session, expected):
        s.prefill(random_ids(200))
    real, left = host_rows.move_rows, [call]

    def interrupted(*arguments, **named):
        left[0] -= named.get("moved") is not None  # fetches of selections only
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(host_rows, "move_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for token in range(40):
            session.decode(token)
    done = len(session) - 200
    for token in range(done):
        expected.decode(token)
    for token in range(done, done + 10):
        assert torch.equal(session.decode(token), expected.decode(token))
    session.close()
    assert host.load().host_pool.in_use == 0


def pending():
    """Whether work is under way on any lane."""
    return any(lane.done < len(lane.work) for lane in LateLane.made)


@pytest.mark.parametrize("close", [True, False])
def test_closed_or_dropped_while_rows_are_on_their_way(close, monkeypatch):
    """Whatever is in flight lands before its memory is anybody else's."""
    _, host = pair(METHOD, chunk=50)
    install(monkeypatch)
    session = host.session()
    session.prefill(random_ids(60))
    for _ in range(4):
        session.decode(1)  # the block that is now complete is written back
    assert pending() and host.load().host_pool.in_use > 0
    if close:
        session.close()
    else:
        del session
        gc.collect()
    assert not pending() and host.load().host_pool.in_use == 0


def test_stalls_of_the_staging_ring_are_counted(monkeypatch):
    """Two staging buffers: the third layer's rows find theirs still in use; without late
    lanes nothing ever waits.
    """
    monkeypatch.setattr(placement, "STREAM_BLOCK", 64)
    stalls = []
    for late in (False, True):
        _, host = pair(METHOD, chunk=50, backend="cpu")
        if late:
            install(monkeypatch)
        with host.session() as session:
            session.prefill(random_ids(50))
            stalls.append(session.stats.staging_stalls)
    assert stalls == [0, len(METHOD.plan(host.config).sparse_layers) - 2]


PROMPT_ROWS = OmniKV(
    filter_layers=(1, 4),
    tokens=40,
    tail=64,
    dense_below=0,
    prefill_ratio=1,
    prefill_block=64,
    prefill_dense_end=20,
)


@pytest.mark.parametrize("block", [64, 49152])
def test_late_listed_rows_change_nothing(block, monkeypatch):
    """A sparse prefill's rows come ahead of the layer that asks for them, or after one another."""
    monkeypatch.setattr(placement, "STREAM_BLOCK", block)
    script = [("prefill", 400), *STREAM[1:]]
    assert not differs(PROMPT_ROWS, script, monkeypatch, backend="cpu")


def test_a_wait_for_listed_rows_that_is_left_out_is_noticed(monkeypatch):
    assert differs(PROMPT_ROWS, [("prefill", 400)], monkeypatch, "gathered", "cpu")
