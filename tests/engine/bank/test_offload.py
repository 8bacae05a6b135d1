"""Offloaded = on the device, bit for bit, on the reference launchers: logits, selections, tokens;
and counters that equal the formula.

Stops: a slot that holds another token's row, a fetch too late or too early, a block written
back before it is whole, a ring that wraps wrongly, a truncate that leaves rows of dropped tokens.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import engine.plan.placement as placement
from engine import Full, OmniKV
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.plan.layers import tail_start
from engine.plan.placement import part_bytes
from tests.builders import random_ids, session_config, tiny_llm

CONFIG = session_config()
BASE = dict(dense_below=0)


def pair(method, **settings):
    """The same LLM with everything on the device and with all sparse layers in host memory."""
    settings = dict(max_context=1024, backend="reference") | settings
    slots = settings.pop("slots", 4)
    return tiny_llm(method, offload="device", **settings), tiny_llm(
        method, offload="host", slots=slots, **settings
    )


def play(session, script):
    """Run a script of (operation, number); everything that is answered, as one list."""
    # answered: tokens that a step wrote (a check writes rows anew as a step does)
    seen, forks, answered = [], [], 0
    for what, number in script:
        before = len(session)
        if what == "prefill":
            seen.append(session.prefill(random_ids(number, seed=len(session) + number)))
        elif what == "truncate":
            session.truncate(max(1, len(session) - number))
        elif what == "refresh":
            session.truncate(max(1, len(session) - 1))
            session.refresh_logits()
            seen.append(session.last_logits)
        elif what == "fork":
            forks.append(session)
            session = session.fork()
        elif what == "check":
            report = session.check(min(number, answered)) if answered else None
            seen.append(torch.tensor([s.kl for s in report.steps]) if report else None)
        for _ in range(number if what == "decode" else 0):
            token = (
                int(seen[-1].argmax())
                if seen and seen[-1] is not None and len(seen[-1]) > 90
                else 1
            )
            seen.append(session.decode(token))
            seen.append(session.selections)
        answered = 0 if what == "prefill" else max(0, answered + len(session) - before)
    return seen, [*forks, session]


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    return a is b is None or torch.equal(a, b)


def compare(method, script, **settings):
    """Play on both; assert equality, counters and bytes. Returns the offloaded session's misses."""
    device, host = pair(method, **settings)
    with torch.inference_mode():
        expected, _ = play(device.session(), script)
        got, sessions = play(host.session(), script)
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert equal(a, b), f"answer {i} differs"
    misses = 0
    for session in sessions:
        stats, rows = session.stats, part_bytes(CONFIG, 4)
        groups = {group[0]: len(group) for group in session.bank.placement.offload_groups}
        assert stats.bytes_fetched == sum(
            row["misses"] * rows * groups[first] for first, row in stats.groups.items()
        )
        assert stats.misses == sum(row["misses"] for row in stats.groups.values())
        misses += stats.misses
    assert host.load().host_pool.in_use > 0
    for session in sessions:
        session.close()
    assert host.load().host_pool.in_use == 0
    return misses


SCRIPTS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 150)),
        st.tuples(st.just("decode"), st.integers(1, 40)),
        st.tuples(st.just("truncate"), st.integers(1, 200)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("refresh"), st.just(0)),
        st.tuples(st.just("check"), st.integers(1, 12)),
    ),
    max_size=5,
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.sampled_from([(1,), (0, 3), (1, 4), (2,), (1, 2, 4)]),
    st.integers(0, 2),
    st.integers(1, 90),
    st.integers(1, 100),
    st.sampled_from([64, 100, 192]),
    st.sampled_from([1, 1.5, 2, 4, 8, 0]),
    st.sampled_from(["last", "uniform", "exponential"]),
    st.integers(5, 300),
    SCRIPTS,
)
def test_offloaded_is_on_device_bit_for_bit(
    filters, wait, tokens, chunk, tail, slots, selector, prompt, script
):
    method = OmniKV(
        filter_layers=filters,
        wait_layers=wait,
        tokens=tokens,
        tail=tail,
        selector=selector,
        window=4,
        **BASE,
    )
    if not method.plan(CONFIG).sparse_layers:
        return
    compare(
        method,
        [("prefill", prompt), ("decode", 20), *script, ("decode", 10)],
        chunk=chunk,
        slots=slots,
    )


@pytest.mark.parametrize("slots, steps", [(0, 70), (1, 330), (4, 70)])
def test_long_generation_across_many_tail_blocks(slots, steps):
    """330 generated tokens: five blocks are written back during decode and become candidates;
    misses happen whatever the slots.
    """
    method = OmniKV(filter_layers=(1, 4), tokens=48, tail=64, **BASE)
    assert compare(method, [("prefill", 150), ("decode", steps)], slots=slots) > 100


def test_slots_forget_what_a_truncate_has_dropped():
    """Positions 100 .. 279 are dropped and written again; selections hold some of both kinds."""
    script = [("prefill", 200), ("decode", 80), ("truncate", 180), ("prefill", 250), ("decode", 12)]
    compare(OmniKV(filter_layers=(1, 4), tokens=90, tail=64, **BASE), script, slots=4)


@pytest.mark.parametrize(
    "method",
    [
        OmniKV(filter_layers=(1, 4), share=0.2, tail=64, **BASE),
        OmniKV(filter_layers=(1,), tokens=30, tail=64, sink=4, **BASE),
        OmniKV(filter_layers=(1, 4), tokens=40, official=True),
        OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=330),
        OmniKVUnpacked(filter_layers=(1, 4), tokens=40, tail=64, **BASE),
        OmniKVPerLayer(filter_layers=(1,), tokens=40, tail=64, **BASE),
        BrutalOffload(layers=3, ahead=1),
        BrutalOffload(layers=20, ahead=4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_every_method_over_an_offloaded_bank(method):
    script = [("prefill", 180), ("decode", 80), ("truncate", 30), ("decode", 3)]
    if not getattr(method, "official", False):
        script += [("prefill", 70), ("decode", 5)]
    compare(method, script, chunk=64)


def test_brutal_offload_is_full_attention():
    script = [("prefill", 200), ("decode", 80)]
    _, brutal = pair(BrutalOffload(layers=4, ahead=2))
    full, _ = pair(Full())
    expected, _ = play(full.session(), script)
    got, (session,) = play(brutal.session(), script)
    for a, b in zip(expected, got, strict=True):
        assert equal(a, b)
    # every chunk reads the rows so far, the last layer only for the last token
    prompt = 3 * (64 + 128 + 192 + 200) + 200
    # every row that is in host memory; a block is written back at 256
    steps = 4 * (200 * 56 + 256 * 24)
    # and before the first one the rings' tails, from the last block of 64 less 64 on
    steps += 4 * (200 - 128)
    assert session.stats.bytes_streamed == part_bytes(CONFIG, 4) * (prompt + steps)


def test_brutal_offload_starts_copies_ahead(monkeypatch):
    """Layer l + 2 starts when layer l attends; at the first layer everything up to it. Below
    `layers` nothing is copied.
    """
    log = []
    _, llm = pair(BrutalOffload(layers=5, ahead=2))
    session = llm.session()
    session.prefill(random_ids(100))
    stage, attend = session.bank.stage_layer, session.runtime.attend_dense
    monkeypatch.setattr(
        session.bank, "stage_layer", lambda layer: (log.append(("stage", layer)), stage(layer))
    )
    monkeypatch.setattr(
        session.runtime,
        "attend_dense",
        lambda layer, *args: (log.append(("attend", layer)), attend(layer, *args))[1],
    )
    session.decode(1)
    last = CONFIG.num_layers - 1
    expected = [("stage", layer) for layer in (0, 1)]
    for layer in range(last + 1):
        expected += [("stage", layer + 2)] * (layer + 2 <= last) + [("attend", layer)]
    assert log == expected
    # every copy was read
    whole = session.bank._whole
    assert len(whole.buffers) == 3 and not whole.staged


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("block", [64, 100])
def test_many_stream_blocks(monkeypatch, backend, block):
    """Prefill, a second turn and dense steps whose past spans many blocks: bitwise on the
    reference, close where blocks are merged.
    """
    monkeypatch.setattr(placement, "STREAM_BLOCK", block)
    method = OmniKV(filter_layers=(1, 4), tokens=48, tail=64, **BASE)
    script = [("prefill", 300), ("decode", 30), ("prefill", 100), ("refresh", 0), ("decode", 10)]
    device, host = pair(method, backend=backend, chunk=50)
    expected, (a,) = play(device.session(), script)
    got, (b,) = play(host.session(), script)
    if backend == "reference":
        assert all(equal(x, y) for x, y in zip(expected, got, strict=True))
    logits = [(x, y) for x, y in zip(expected, got, strict=True) if torch.is_tensor(x)]
    assert all((x - y).abs().max() < 2e-4 and x.argmax() == y.argmax() for x, y in logits)
    for session in (a, b):
        # dense steps over the offloaded layers, streamed
        session.set_method(Full())
    x, y = a.decode(3), b.decode(3)
    assert (x - y).abs().max() < 2e-4 and a.ids == b.ids and b.bank.on_host(6)


def test_methods_change_over_an_offloaded_bank():
    """Full and back leaves rows where they are; other filter layers group them anew; every answer
    stays the device's.
    """
    first = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, **BASE)
    device, host = pair(first)
    a, b = device.session(), host.session()
    for session in (a, b):
        session.prefill(random_ids(250))
    for method in (
        Full(),
        first,
        OmniKV(filter_layers=(0, 2), tokens=20, tail=128, **BASE),
        Full(),
        OmniKVUnpacked(filter_layers=(1,), tokens=10, tail=64, **BASE),
        BrutalOffload(layers=2, ahead=1),
        first,
    ):
        for session in (a, b):
            session.set_method(method)
        for _ in range(20):
            x, y = a.decode(7), b.decode(7)
            assert torch.equal(x, y) and a.selections.keys() == b.selections.keys()
    b.close()
    assert host.load().host_pool.in_use == 0


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(
    "method",
    [
        OmniKV(filter_layers=(1, 4), tokens=48, **BASE),
        OmniKV(filter_layers=(2,), share=0.1, **BASE),
        OmniKV(filter_layers=(1, 4), tokens=48, official=True),
        BrutalOffload(layers=3, ahead=1),
    ],
    ids=["tokens", "share", "official", "brutal"],
)
def test_device_bytes_are_the_plans(method, slots):
    llm = tiny_llm(method, offload="host", slots=slots)
    plan, session = llm.plan(), llm.session()
    session.prefill(random_ids(300))
    session.decode(1)
    stats = session.stats
    planned = sum(plan.bytes_of(name) for name in ("context bank", "working sets", "streaming"))
    assert stats.bank_bytes == planned
    assert stats.resident == pytest.approx(plan.resident)
    assert stats.host_bytes == plan.placement.host_bytes(CONFIG, 4, 301)
    row, layers = CONFIG.kv_bytes(4), CONFIG.num_layers
    assert plan.resident == pytest.approx(planned / (row * layers * llm.max_context))
    assert "in host memory" in str(plan) and "of the bank is on the device" in str(plan)


def test_mem_is_the_papers_formula():
    method = OmniKV(filter_layers=(1, 4), tokens=50, **BASE)
    session = tiny_llm(method, offload="host").session()
    session.prefill(random_ids(500))
    session.decode(1)
    dense = session.plan.dense_share
    assert session.stats.mem == pytest.approx(dense + 50 / 500 * (1 - dense))


def test_auto_keeps_one_copy_on_a_cpu():
    llm = tiny_llm(OmniKV(filter_layers=(1, 4), tokens=48, **BASE), offload="auto")
    assert llm.plan().placement is None and not llm.session().bank.tiered
    assert "everything on the device" in str(llm.plan())


def test_warm_slots_hold_what_the_first_step_wants():
    """The prompt's last queries choose before the first step: most of its tokens are there."""
    host = tiny_llm(OmniKV(filter_layers=(1,), tokens=48, tail=64, **BASE), offload="host")
    session = host.session()
    session.prefill(random_ids(400))
    before = session.stats
    assert before.misses > 0
    session.decode(int(session.last_logits.argmax()))
    after = session.stats
    assert after.hits - before.hits + after.misses - before.misses == 48
    assert after.hits > before.hits


def test_a_layer_that_chooses_for_itself_comes_over_once():
    """Per sparse layer: all K and V that host memory has, to be scored and chosen from."""
    method = OmniKVPerLayer(filter_layers=(1,), tokens=20, tail=64, dense_below=0)
    llm = tiny_llm(method, offload="host", max_context=512, chunk=50)
    with llm.session() as session:
        session.prefill(random_ids(300))
        before = session.stats.bytes_streamed
        session.decode(3)
        read = session.stats.bytes_streamed - before
        layers, part = len(session.plan.sparse_layers), part_bytes(llm.config, 4)
    # the step's own row is on the device; the ring begins with the tail
    assert layers and read == layers * part * (300 + 300 - tail_start(300, 64))
