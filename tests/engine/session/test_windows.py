"""Sliding-window layers: a ring of the window, under every way of going forth and back.

Stops: a window off by one, a ring that a broken chunk or a truncate has spoilt, a fork or a tier
that reads other rows, bytes that the plan does not count, a filter layer that sees a window only.
"""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import LLM, Full, OmniKV, SamplingParams
from engine.bank.device import DeviceBank
from engine.bank.query_ring import QueryRing
from engine.base.errors import SavedFileError, SettingError
from engine.forward.decode import Decoder
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.evict.shared.settings import Evicting
from engine.methods.exact import Exact
from engine.methods.oracle.random_topk import RandomTopK
from engine.methods.oracle.topk import OracleTopK
from engine.methods.oracle.topp import OracleTopP
from engine.methods.prompts.kascade_tiles import KascadeTiles
from engine.methods.prompts.quoka import QuoKA
from engine.methods.prompts.xattention import XAttention
from engine.methods.registry import methods
from engine.methods.select.across.delta import Delta
from engine.methods.select.across.hshare import HShare
from engine.methods.select.across.kascade import Kascade
from engine.methods.select.across.less_is_more import LessIsMore
from engine.methods.select.across.omnikv_heads import OmniKVHeads
from engine.methods.select.across.omnikv_top_p import OmniKVTopP
from engine.methods.select.events.em_llm import EMLLM
from engine.methods.select.index.clusterkv import ClusterKV
from engine.methods.select.index.double_sparsity import DoubleSparsity
from engine.methods.select.index.pqcache import PQCache
from engine.methods.select.index.sparq import SparQ
from engine.methods.select.minference import MInference
from engine.methods.select.pod import PodUntrained
from engine.methods.select.quest import Quest
from engine.methods.select.rocket.rocketkv import RocketKV
from engine.methods.select.shadow.shadowkv import ShadowKV
from engine.methods.select.taught.a2ats import A2ATS
from engine.methods.select.tidaldecode import TidalDecode
from engine.methods.select.varying.infinigen import InfiniGen
from engine.methods.select.varying.magicpig import MagicPIG
from engine.methods.select.wave.retroinfer import RetroInfer
from engine.model.tensors import random_stream
from engine.plan.layers import Role, layer_plan, spread_over
from engine.session.generate import generate
from kernels.prefill.window import prefill_window, prefill_window_lse
from tests.builders import random_ids, setup_of, tiny_config
from tests.engine.methods.method_table import heavy_channels
from tools.common.synthetic_bank import synthesize
from tools.compare import bytes as compare
from tools.fidelity import columns

WINDOW, CHUNK, CONTEXT = 70, 64, 2048
LAYERS = 6
SLIDES = ["full_attention", "sliding_attention"] * (LAYERS // 2)
CONFIG = tiny_config(
    LAYERS,
    architectures=["MinistralForCausalLM"],
    model_type="ministral",
    sliding_window=WINDOW,
    layer_types=SLIDES,
)
SETTINGS = dict(filter_layers=(0,), tokens=30, tail=64, dense_below=0)
OMNI = OmniKV(**SETTINGS)


def llm_of(method=OMNI, **settings):
    """An LLM on the reference launchers, so that equal means equal to the bit."""
    stream = partial(random_stream, seed=3, sharpness=2.5)
    given = dict(device="cpu", backend="reference", max_context=CONTEXT, chunk=CHUNK)
    return LLM.from_stream(CONFIG, stream, method=method, **given | settings)


def answer(session, tokens):
    return torch.stack([session.decode(token) for token in tokens])


@pytest.fixture(scope="module")
def llm():
    return llm_of()


def test_the_window_is_smaller_than_what_is_read(llm):
    """Or nothing below would show a ring that forgets."""
    with llm.session() as session:
        ring = session.bank.window_ring(1)
        assert ring.window == WINDOW and ring.size < CONTEXT // 2
        session.prefill(random_ids(1500))
        session.decode(5)
        assert ring.low == 1501 - ring.size and session.stats.sparse_steps == 1
        assert session.bank.window_ring(0) is None
        local = [role is Role.LOCAL for role in session.plan.roles]
        assert local == [name == "sliding_attention" for name in SLIDES]
        assert session.plan.groups[0].layers == (2, 4)


def test_going_back_a_little_is_exact(llm):
    """Truncate, the end of a prompt, a fork and the host tier: the bits of never having gone on."""
    ids, more = random_ids(900), random_ids(40, seed=1)
    with llm.session() as plain, llm.session() as session, llm.session(offload="host") as host:
        for one in (plain, session, host):
            one.prefill(ids)
        wanted = answer(plain, more)
        answer(session, random_ids(60, seed=2))
        session.truncate(900)
        assert torch.equal(answer(session, more[:20]), wanted[:20])
        with session.fork() as copy:
            answer(session, random_ids(90, seed=4))
            assert torch.equal(answer(copy, more[20:]), wanted[20:])
            copy.truncate(905)
            assert torch.equal(answer(copy, more[5:]), wanted[5:])
        assert torch.equal(answer(host, more), wanted)


def test_going_back_beyond_the_ring_reads_again(llm):
    ids, more = random_ids(1500), random_ids(5, seed=1)
    with llm.session() as plain, llm.session() as session:
        plain.prefill(ids[:299])
        wanted = answer(plain, [ids[299], *more])
        session.prefill(ids)
        before = session.stats
        assert not session.bank.holds(300)
        session.truncate(300)
        session.truncate(299)
        assert torch.allclose(session.decode(ids[299]), wanted[0], atol=1e-5)
        session.truncate(299)
        assert session.ids == ids[:299]
        found = answer(session, [ids[299], *more])
        assert session.stats.prefill_tokens == before.prefill_tokens  # counted once
        assert torch.allclose(found, wanted, atol=1e-5)
        session.truncate(0)
        session.prefill(ids[:10])
        assert len(session) == 10


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_chunk_that_breaks_off_spoils_nothing(layer):
    llm, chunk = llm_of(chunk=512), 512
    ids, more = random_ids(1500), random_ids(8, seed=1)
    with llm.session() as plain, llm.session() as session:
        for one in (plain, session):
            one.prefill(ids[: chunk * 2])
        before = session.runner.model.layers[layer].down

        def broken(x):
            raise KeyboardInterrupt

        session.runner.model.layers[layer].down = broken
        try:
            with pytest.raises(KeyboardInterrupt):
                session.prefill(ids[chunk * 2 :])
        finally:
            session.runner.model.layers[layer].down = before
        assert len(session) == chunk * 2 and session.bank.holds(len(session))
        assert torch.equal(answer(session, more), answer(plain, more))


def test_several_queries_in_one_step_see_their_own_windows(llm):
    """A step of three tokens: the logits of three steps."""
    with llm.session(Full()) as session:
        session.prefill(random_ids(200))
        tokens = random_ids(3, seed=1)
        runtime = session.dense_runtime
        decoder = Decoder(session.runner.model, llm.rotary, runtime, session.query_ring)
        length = torch.tensor([200], dtype=torch.int32)
        with torch.no_grad():
            session.bank.before_step(203)
            found = decoder.step(torch.tensor([tokens]), length, session.bank)[0]
        session.bank.rewind(200)
        assert torch.allclose(found, answer(session, tokens), atol=1e-5)


def test_two_sequences_in_one_step_are_each_their_own(llm):
    """Of different lengths, one shorter than the window."""
    lengths, token, wanted = (300, 40), 7, []
    setup = setup_of(CONFIG, Full(), CONTEXT, batch=2)
    bank = DeviceBank(CONFIG, setup.plan, CONTEXT, torch.float32, "cpu", 2, chunk=CHUNK)
    ring = QueryRing(CONFIG, 2, torch.float32, "cpu")
    for number, n in enumerate(lengths):
        with llm.session(Full()) as session:
            session.prefill(random_ids(n, seed=number))
            for layer in range(LAYERS):
                mine, theirs = bank.window_ring(layer), session.bank.window_ring(layer)
                if mine is not None:
                    mine.k[number], mine.v[number] = theirs.k[0], theirs.v[0]
                    continue
                for a, b in zip(bank.kv(layer), session.bank.kv(layer)):
                    a[number] = b[0]
            wanted.append(session.decode(token))
    decoder = Decoder(llm.model, llm.rotary, Full().runtime(setup), ring)
    with torch.no_grad():
        tokens = torch.full((2, 1), token)
        found = decoder.step(tokens, torch.tensor(lengths, dtype=torch.int32), bank)[:, 0]
    assert torch.allclose(found, torch.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_the_plan_counts_what_is_allocated(offload):
    llm = llm_of(offload=offload, backend="cpu")
    items = {name: size for name, size, _ in llm.plan().items}
    with llm.session() as session:
        assert items["sliding windows"] == session.bank.ring_bytes > 0
        held = items["context bank"] + items["sliding windows"]
        if offload == "device":
            assert held == session.bank.nbytes
        else:
            assert held == session.bank._resident.nbytes
    assert f"{LAYERS // 2} local" in str(llm.plan())


@pytest.mark.parametrize("method", [Full(), OMNI], ids=["full", "omnikv"])
def test_the_tools_count_rings_as_rings(method):
    """Planned Mem% is what a session holds, and a synthetic bank is as deep as it says."""
    llm, capacity = llm_of(backend="cpu"), 1500
    with compare.offloaded(llm, method, capacity).session() as session:
        synthesize(session, 1400)
        assert len(session) == 1400 and torch.isfinite(session.decode(3)).all()
        ring = session.bank.window_ring(1)
        assert ring.low == 1401 - ring.size and ring.k.abs().sum() > 0
        found = compare.held(session)
        rings = session.bank.ring_bytes
    seeing = LAYERS // 2 * capacity * CONFIG.kv_bytes(4)
    assert found.full == compare.full_bytes(llm, capacity) == seeing + rings
    if method is OMNI:
        assert compare.device_share(llm, method, capacity) == found.resident < 1
    else:
        assert found.resident == 1
    assert not set(columns.published(CONFIG) + columns.even(CONFIG)) & set(CONFIG.local_layers)


def test_check_leaves_the_session_as_it_was(llm):
    with llm.session() as session, llm.session() as plain:
        for one in (session, plain):
            one.prefill(random_ids(400))
            answer(one, random_ids(20, seed=1))
        assert len(session.check(8).steps) == 8
        more = random_ids(5, seed=2)
        assert torch.equal(answer(session, more), answer(plain, more))


OTHERS = {
    "quest": Quest(tokens=64, dense_layers=1),
    "clusterkv": ClusterKV(tokens=40, segment=40, per=4),
    "retroinfer": RetroInfer(tokens=48, segment=40, per=4),
    "double_sparsity": DoubleSparsity(tokens=40, channels=heavy_channels(LAYERS)),
    "pqcache": PQCache(tokens=64, sink=4, train=100, rounds=2),
    "rocketkv": RocketKV(tokens=64, page=8, answer=32),
    "shadowkv": ShadowKV(tokens=64, outliers=4, answer=32),
    "sparq": SparQ(tokens=64),
    "a2ats": A2ATS(tokens=60, bits=4, train=80, rounds=2, window=10),
    "infinigen": InfiniGen(tokens=40, columns=4),
    "magicpig": MagicPIG(tokens=120, bits=4, tables=12, recent=16, train=60, middle=False),
    "em_llm": EMLLM(tokens=60, sink=4, local=64, least=4, most=16, window=32),
    "tidaldecode": TidalDecode(tokens=40, select_layer=0),
    "minference": MInference(),
    "quoka": QuoKA(tokens=24, queries=4, block=32),
    "xattention": XAttention(threshold=0.4, stride=4, block=16),
    "brutal_offload": BrutalOffload(layers=2, ahead=1),
    "omnikv_per_layer": OmniKVPerLayer(**SETTINGS),
    "omnikv_unpacked": OmniKVUnpacked(**SETTINGS),
    "omnikv_one": OmniKVOne(filter_layers=(0,), tail=64, dense_below=0),
    "omnikv_newest": OmniKVNewest(**SETTINGS),
    "omnikv_random": OmniKVRandom(**SETTINGS),
    "omnikv_heads": OmniKVHeads(**SETTINGS),
    "omnikv_top_p": OmniKVTopP(**SETTINGS, least=8),
    "kascade": Kascade(tokens=30, anchors=(0, 4)),
    "kascade_tiles": KascadeTiles(tokens=30, tile=32, anchors=(0, 4)),
    "hshare": HShare(tokens=40, recent=8, sinks=2),
    "less_is_more": LessIsMore(tokens=30, layers=(0,)),
    "delta": Delta(tokens=64, page=8, layers=(0,)),
    "oracle_topk": OracleTopK(tokens=30),
    "oracle_topp": OracleTopP(tokens=30, p=0.5),
    "random_topk": RandomTopK(tokens=30, granularity="kv_head"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_leave_windows_alone(llm, name):
    """Both tiers to the bit; a layer that slides reads its window, and a sparse one a part."""
    ids, more, found = random_ids(400), random_ids(6, seed=1), []
    for offload in ("device", "host"):
        with llm.session(OTHERS[name], offload=offload) as session:
            session.prefill(ids)
            found.append(answer(session, more))
            read = session.runtime.rows_read(400)
            assert [read[i] for i in CONFIG.local_layers] == [WINDOW] * len(CONFIG.local_layers)
            sparse = [i for i, r in enumerate(session.plan.roles) if r is Role.SPARSE]
            assert all(read[i] < 400 for i in sparse)
            dense = "minference", "quoka", "xattention", "brutal_offload"
            assert bool(sparse) == (name not in dense)
    assert torch.equal(*found) and torch.isfinite(found[0]).all()


def test_methods_that_know_no_windows_say_why_not(llm):
    for name, kind in methods().items():
        if name in ("full", "omnikv", *OTHERS) or not kind.__module__.startswith("engine."):
            continue
        if issubclass(kind, Evicting) and name not in (
            "duo",
            "kvzip",
            "pod_snapkv",
            "razor",
        ):  # tests/engine/methods/test_windowed_evicting.py
            with llm.session(kind()) as session:
                assert session.plan.count(Role.LOCAL) == session.plan.count(Role.RETAINED) == 3
            continue
        if name == "window_recompute":  # full attention over a window of its own
            llm.session(kind()).close()
            continue
        with pytest.raises(SettingError, match=r"sliding-window layers of this model \(Mistral\)"):
            llm.session(kind())
    with pytest.raises(SettingError, match="found 1, a sliding-window layer"):
        llm.session(OmniKV(filter_layers=(1,)))


@pytest.mark.parametrize("tiers", [("device", "host"), ("host", "device")])
def test_a_restored_session_is_the_one_that_was_saved(llm, tmp_path, tiers):
    """Whole, into rings of another size, and cut inside its rings and before them."""
    ids, more, other = random_ids(1500), random_ids(30, seed=1), llm_of(chunk=512)
    with llm.session(offload=tiers[0]) as session:
        session.prefill(ids)
        answer(session, more[:10])
        session.save(tmp_path / "s")
        wanted = answer(session, more[10:])
    for holder in (llm, other):
        restored, _ = holder.restore(tmp_path / "s", offload=tiers[1])
        with restored:
            assert torch.equal(answer(restored, more[10:]), wanted)
            assert restored.stats.sparse_steps == 20
    restored, _ = llm.restore(tmp_path / "s", tokens=1503)
    with restored:
        assert torch.allclose(answer(restored, more[3:]), answer_of(llm, ids, more)[3:], atol=1e-5)
    restored, _ = llm.restore(tmp_path / "s", tokens=300)
    with restored:
        wanted = answer_of(llm, ids[:300], more)
        assert torch.allclose(answer(restored, more), wanted, atol=1e-5)


def answer_of(llm, ids, tokens):
    with llm.session() as session:
        session.prefill(ids)
        return answer(session, tokens)


def test_a_file_without_the_windows_is_refused(llm, tmp_path, monkeypatch):
    with llm.session() as session:
        session.prefill(random_ids(100))
        monkeypatch.setattr("engine.saved.session_file.windows", lambda bank, stop: {})
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="its description makes no session"):
        llm.restore(tmp_path / "s")


@pytest.mark.parametrize("offload", ["device", "host"])
def test_exact_mode_writes_the_state_of_full_attention(llm, offload):
    ids, method = random_ids(300), Exact(OMNI, draft=3, lookup=False)
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with llm.session(method, offload=offload) as exact, llm.session(Full()) as full:
        for mine, theirs in zip(generate(exact, ids, greedy), generate(full, ids, greedy)):
            assert mine.token_id == theirs.token_id
            assert torch.equal(exact.last_logits, full.last_logits)
        assert exact.ids == full.ids and exact.counters.drafted > 20
        kept, local = exact.runtime.drafter.kept_rows(300), CONFIG.local_layers
        assert all((rows == WINDOW) == (i in local) for i, rows in enumerate(kept))
    with pytest.raises(SettingError, match="pod_untrained: does not know the sliding-window"):
        llm.session(Exact(PodUntrained()))


@given(st.data())
def test_groups_run_over_the_layers_that_see_everything(data):
    layers = data.draw(st.integers(1, 40))
    local = data.draw(st.sets(st.integers(0, layers - 1)))
    others = [layer for layer in range(layers) if layer not in local]
    filters = tuple(sorted(data.draw(st.sets(st.sampled_from(others))))) if others else ()
    wait = data.draw(st.integers(0, 2))
    plan = layer_plan(layers, filters, wait, sorted(local))
    dense = layer_plan(len(others), tuple(map(others.index, filters)), wait)
    assert [plan.roles[layer] for layer in others] == list(dense.roles)
    assert [plan.group_of[layer] for layer in others] == list(dense.group_of)
    assert all(plan.roles[layer] is Role.LOCAL for layer in local)
    assert not set(spread_over(layers, sorted(local))) & local


@settings(max_examples=60)
@example(past=69, chunk=300, window=70, heads=(4, 2))
@given(
    past=st.integers(0, 300),
    chunk=st.integers(1, 600),
    window=st.integers(1, 300),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
)
def test_windowed_prefill_is_masked_attention(past, chunk, window, heads):
    """Against float64 with the whole mask, on both launchers."""
    generator = torch.Generator().manual_seed(past + chunk)
    q_heads, kv_heads = heads
    q = torch.randn(1, chunk, q_heads, 8, generator=generator) * 3
    k, v = torch.randn(2, 1, kv_heads, past + chunk, 8, generator=generator)
    at, row = torch.arange(past, past + chunk)[:, None], torch.arange(past + chunk)
    hidden = (row > at) | (row <= at - window)
    wide_k, wide_v = (t.double().repeat_interleave(q_heads // kv_heads, 1) for t in (k, v))
    scores = (q.double().transpose(1, 2) @ wide_k.transpose(2, 3)) * 0.3
    scores = scores.masked_fill(hidden, float("-inf"))
    wanted = (scores.softmax(-1) @ wide_v).transpose(1, 2)
    for backend in ("reference", "cpu"):
        found = prefill_window(q, k, v, past, window, 0.3, backend=backend)
        assert torch.allclose(found.double(), wanted, atol=2e-5)
        found, lse = prefill_window_lse(q, k, v, past, window, 0.3, backend=backend)
        assert torch.allclose(found.double(), wanted, atol=2e-5)
        assert torch.allclose(lse.double(), scores.logsumexp(-1).transpose(1, 2), atol=2e-5)
