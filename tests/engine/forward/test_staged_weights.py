"""Weights that stream from host memory give the bits of weights that stay, and cost what the plan
says.

Stops: a layer multiplied by another's weights, a buffer that is filled again while it is read or
read before it is filled, a tensor that was left behind, a plan that counts other bytes than come
over, a machine without memory to lock.
"""

import contextlib
import random
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import engine.forward.staged.ring as ring_module
from engine import LLM, Exact, Full, OmniKV
from engine.bank.pool.pinned_memory import Allocator, ordinary
from engine.base.errors import OutOfHostMemory, OutOfMemoryPlan, SettingError
from engine.forward.layer import TorchLayer
from engine.forward.self_test import _Layer
from engine.forward.staged.host import HostMemory
from engine.forward.staged.lying import lying_in, moved, tensors
from engine.forward.staged.ring import WeightRing
from engine.forward.staged.staging import BUFFERS, spread
from engine.methods.select.varying.infinigen import InfiniGen
from engine.model.tensors import random_stream
from kernels.layer.linear import pack_linear
from kernels.quant.linear import pack_quantised
from kernels.quant.matrix import Quantised
from kernels.quant.rounding import to_int4, to_int8
from tests.builders import hybrid_config, latent_config, random_ids, session_config, tiny_llm
from tests.engine.bank.late_lanes import LateLane, late
from tests.engine.bank.test_offload import equal, play

LAYERS = 8
SPARSE = OmniKV(filter_layers=(1, 4), tokens=40, tail=64, dense_below=0)
STREAM = partial(random_stream, sharpness=2.5)
SCRIPT = [
    ("prefill", 150),
    ("decode", 12),
    ("fork", 0),
    ("prefill", 1),
    ("check", 4),
    ("truncate", 7),
    ("decode", 3),
]


def answers(method, script=SCRIPT, config=None, **settings):
    """(what a script is answered, the LLM, the session's figures before it is closed)."""
    settings = dict(device="cpu", max_context=1024, chunk=64) | settings
    llm = LLM.from_stream(config or session_config(), STREAM, method=method, **settings)
    with torch.inference_mode():
        seen, sessions = play(llm.session(), script)
        stats = sessions[-1].stats
        for session in sessions:
            session.close()
    return seen, llm, stats


def same(one, other):
    return len(one) == len(other) and all(map(equal, one, other))


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(
    "method", [Full(), SPARSE, Exact(SPARSE, draft=3)], ids=lambda method: method.name
)
def test_bits_are_those_of_weights_that_stay(method, backend, offload):
    config = session_config()
    given = dict(config=config, backend=backend, offload=offload)
    wanted, _, before = answers(method, **given)
    assert method == Full() or before.sparse_steps or before.cycles
    for count in (1, 2, 3, LAYERS):
        found, llm, stats = answers(method, **given, weights_offload=count)
        assert len(llm.model.staged.layers) == count
        assert same(found, wanted) and stats.sparse_steps == before.sparse_steps
        assert stats.weight_bytes_streamed


FAMILIES = {
    "groups of 1, biases": session_config(heads=4, kv_heads=4, attention_bias=True, mlp_bias=True),
    "groups of 8, tied": session_config(heads=8, kv_heads=1, tie_word_embeddings=True),
    "mixture": session_config(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "latent": latent_config(),
    **{family: hybrid_config(family=family) for family in ("qwen3.5", "nemotron", "falcon")},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    config, script = FAMILIES[name], [("prefill", 70), ("decode", 3), ("truncate", 2)]
    wanted, *_ = answers(Full(), script, config)
    found, llm, _ = answers(Full(), script, config, weights_offload="all")
    assert same(found, wanted)
    held = sum(m.nbytes for layer in llm.model.layers for m in layer.matrices)
    assert llm.plan().staged_bytes == held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["int8", "int4", "auto"])
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_forms(weights, dtype, backend):
    config, script = session_config(hidden=64), [("prefill", 65), ("decode", 4)]
    given = dict(config=config, weights=weights, dtype=dtype, backend=backend)
    wanted, *_ = answers(SPARSE, script, **given)
    found, llm, stats = answers(SPARSE, script, **given, weights_offload=3)
    plan, passes = llm.plan(), 2 + 4
    assert same(found, wanted) and stats.sparse_steps == 4
    assert stats.weight_bytes_streamed == passes * llm.model.staged.bytes
    # tensors begin on whole blocks of 256 bytes
    matrices = sum(len(llm.model.layers[i].matrices) for i in llm.model.staged.layers)
    assert 0 <= llm.model.staged.bytes - plan.staged_bytes < 3 * 256 * matrices


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 193])
def test_bytes_a_pass(tokens):
    """Each layer crosses once a chunk and once a step, to the byte what the plan says."""
    config = session_config(hidden=64)
    for count in (1, 3, LAYERS):
        _, llm, stats = answers(
            SPARSE, [("prefill", tokens), ("decode", 5)], config, weights_offload=count
        )
        plan = llm.plan(max_context=tokens)
        steps = 5 * plan.staged_bytes
        assert stats.weight_bytes_streamed == plan.prompt_weight_bytes + steps
        held = [m.nbytes for i in spread(count, LAYERS) for m in llm.model.layers[i].matrices]
        assert plan.staged_bytes == sum(held)
        # what is allocated, each byte once
        staged = llm.model.staged
        kept = llm.model.nbytes - sum(held) + staged.nbytes
        planned = plan.bytes_of("weights") + plan.bytes_of("weight buffers")
        assert planned == kept and staged.bytes == plan.bytes_of("host weights")


def test_batches_and_forked_sessions():
    plain, streamed = (tiny_llm(SPARSE, weights_offload=n) for n in (0, "all"))
    found = []
    for llm in (plain, streamed):
        batch, logits = llm.batch(slots=2), []
        sessions = [batch.session(), batch.session()]
        for session, count in zip(sessions, (70, 131)):
            session.prefill(random_ids(count, seed=count))
        for token in range(3):
            for session in sessions:
                batch.feed(session, token)
            logits += [row.clone() for row in batch.step().values()]
        found.append(logits)
    assert all(map(torch.equal, *found))


def test_queries_a_layer_ahead():
    """InfiniGen multiplies by the next layer's weights in the turn of the layer before."""
    method, script = InfiniGen(tokens=40, columns=4, alpha=1.0), [("prefill", 150), ("decode", 9)]
    for offload in ("device", "host"):
        wanted, *_ = answers(method, script, offload=offload)
        for count in (1, 3, LAYERS):
            assert same(answers(method, script, offload=offload, weights_offload=count)[0], wanted)


# ---------------------------------------------------------------- order


@contextlib.contextmanager
def lanes(monkeypatch, skip=""):
    """Copies that happen when somebody waits for them, and no sooner. skip: a function whose waits
    do nothing.
    """

    def wait(event, device):
        if event is not None and sys._getframe(1).f_code.co_name != skip:
            event.happen()

    with monkeypatch.context() as patched:
        LateLane.made, LateLane.now, LateLane.skip = [], None, skip
        patched.setattr(ring_module, "SideStream", LateLane)
        patched.setattr(ring_module, "wait", wait)
        patched.setattr(ring_module, "bring", late("bring", ring_module.bring))
        yield
        for lane in LateLane.made:
            lane.work, lane.done = [], 0


@pytest.mark.parametrize("count", [1, 2, 3, LAYERS])
def test_late_copies_change_nothing(count, monkeypatch):
    for method in (SPARSE, InfiniGen(tokens=40, columns=4, alpha=1.0)):
        wanted, *_ = answers(method)
        with lanes(monkeypatch):
            assert same(answers(method, weights_offload=count)[0], wanted)


def test_a_wait_that_is_left_out_is_noticed(monkeypatch):
    wanted, *_ = answers(SPARSE)
    with lanes(monkeypatch, skip="arrive"):
        assert not same(answers(SPARSE, weights_offload=5)[0], wanted)


def test_a_copy_that_is_issued_too_early_is_noticed(monkeypatch):
    """Copies run at once here: one issued before its buffer's layer is done overwrites it."""
    wanted, *_ = answers(SPARSE)

    def hasty(self, layers, first=0):
        for number in range(first, len(layers)):
            self._issue(number if number in self._memory else None)
            following = [n for n in self._order if n > number]
            self._issue(following[BUFFERS - 1] if len(following) >= BUFFERS else None)
            yield number, layers[number]

    monkeypatch.setattr(WeightRing, "turns", hasty)
    assert not same(answers(SPARSE, weights_offload="all")[0], wanted)


class Clock:
    """Work of the main stream and of a lane beside it, as happens-before sees it: what a lane's
    copy waits for, and what the main stream has waited for when it reads.
    """

    def __init__(self):
        self.main, self.waited, self.copies, self.done = 0, -1, [], 0
        self.reads, self.faults = [], []

    @contextlib.contextmanager
    def after_main(self):
        self.waited = self.main
        yield
        self.waited = -1

    def record_event(self):
        return len(self.copies)

    def wait(self, event, device):
        self.done = max(self.done, event or 0)

    def bring(self, buffer, memory):
        for at, read in self.reads:
            if read is buffer and at > self.waited:
                self.faults.append("a buffer is written while it is read")
        self.copies.append((buffer, int(memory[0])))

    def read(self, buffer, layer):
        landed = [mine for where, mine in self.copies[: self.done] if where is buffer]
        flying = [mine for where, mine in self.copies[self.done :] if where is buffer]
        if landed[-1:] != [layer] or flying:
            self.faults.append(f"layer {layer} reads {landed[-1:]} with {flying} under way")
        self.main += 1
        self.reads.append((self.main, buffer))


def traced(monkeypatch, clock, rounds):
    """Run random passes, some of them broken off, over rings of random layers."""
    monkeypatch.setattr(ring_module, "SideStream", lambda device: clock)
    monkeypatch.setattr(ring_module, "wait", clock.wait)
    monkeypatch.setattr(ring_module, "bring", clock.bring)
    draw = random.Random(7)
    for _ in range(rounds):
        total, buffers = draw.randint(1, 12), draw.randint(1, 3)
        chosen = draw.sample(range(total), draw.randint(1, total))
        memory = {n: torch.full((1,), n, dtype=torch.uint8) for n in chosen}
        held = [torch.empty(1, dtype=torch.uint8) for _ in range(buffers)]
        ring = WeightRing(memory, held, torch.device("cpu"))
        for _ in range(3):
            first, stop = draw.randrange(total), draw.randint(1, total)
            leaves = draw.choice([None, None, draw.randrange(total)])
            for number, _layer in ring.turns(list(range(stop)), first):
                if number in memory:
                    clock.read(ring.buffer(number), number)
                if number == leaves:
                    break
            assert clock.done == len(clock.copies), "a pass ends with a copy that nobody joined"
    return clock.faults


def test_no_buffer_is_touched_by_two(monkeypatch):
    assert traced(monkeypatch, Clock(), 60) == []


def test_copies_that_do_not_follow_the_main_stream_are_noticed(monkeypatch):
    clock = Clock()
    clock.after_main = contextlib.nullcontext
    assert "a buffer is written while it is read" in traced(monkeypatch, clock, 60)


def test_broken_off_and_gone_on_with(monkeypatch):
    """Ctrl-C between two layers: the next pass begins anew."""
    plain, streamed = (tiny_llm(SPARSE, weights_offload=n) for n in (0, 5))
    with lanes(monkeypatch), plain.session() as expected, streamed.session() as session:
        for one in (expected, session):
            one.prefill(random_ids(70))
        real, left = WeightRing.arrive, [6]

        def interrupted(self, number):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return real(self, number)

        monkeypatch.setattr(WeightRing, "arrive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.decode(1)
        for token in (1, 2, 3):
            assert torch.equal(session.decode(token), expected.decode(token))


def test_self_tests_find_their_layer():
    """Layer by layer outside of a pass, as on a GPU before the first answer."""
    found = []
    for count in (0, "all"):
        llm = tiny_llm(Full(), weights_offload=count)
        form = TorchLayer(llm.model)
        with torch.inference_mode():
            runs = [_Layer(form, llm.model, llm.rotary, number, 2).run() for number in (7, 0, 3, 0)]
        found.append([t for run in runs for t in run])
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------- matrices


def made(form):
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 128, generator=draw)
    if form in ("plain", "left", "narrow", "widened"):
        return pack_linear(weight, torch.randn(48, generator=draw), form=form)
    if form == "words":
        packed = to_int4(weight, 32)
        return pack_quantised(packed, None, torch.bfloat16, form)
    if form == "fp8":
        values = weight.clamp(-4, 4).to(torch.float8_e4m3fn)
        packed = Quantised("fp8", values, torch.ones(48, 1), 128)
        return pack_quantised(packed, torch.ones(48), torch.float32, "blocks")
    if form == "ordered":
        whole = to_int8(weight, 128)
        order = torch.randperm(128, generator=draw)
        packed = Quantised("int8", whole.values, whole.scales, whole.group, permutation=order)
        return pack_quantised(packed, None, torch.float32, "blocks")
    values = torch.randint(0, 256, (48, 64), generator=draw).to(torch.uint8)
    packed = Quantised("int4", values, torch.rand(48, 4), 32, table=torch.rand(16))
    return pack_quantised(packed, None, torch.float32, "blocks")


FORMS = ("plain", "left", "narrow", "widened", "words", "fp8", "ordered", "table")


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_lies_elsewhere(form):
    """The copy has all of it and no byte of the original."""
    matrix, x = made(form), torch.randn(3, 128)
    # words are multiplied by a GPU's kernels
    product = (lambda held: held.weight) if form == "words" else (lambda held: held(x))
    wanted, parts = product(matrix), tensors(matrix)
    assert sum(t.nbytes for t in parts) == matrix.nbytes
    copies = [t.clone() for t in parts]
    twin = lying_in(matrix, copies)
    for tensor in parts:
        tensor.view(torch.uint8).zero_()
    assert torch.equal(product(twin), wanted) and twin.nbytes == matrix.nbytes
    again = moved(twin, torch.clone)
    for tensor in copies:
        tensor.view(torch.uint8).zero_()
    assert torch.equal(product(again), wanted)


def test_offsets_stay_behind_their_scales():
    weight = to_int4(torch.randn(32, 128), 32)
    matrix = pack_quantised(weight, None, torch.bfloat16, "words")
    if not matrix.words.joined:
        pytest.fail("int4 words of this kind no longer join scales and offsets")
    twin = moved(matrix, torch.clone).words
    assert twin.offsets.data_ptr() - twin.scales.data_ptr() == 2
    assert twin.scales.stride() == matrix.words.scales.stride()


# ---------------------------------------------------------------- the plan


CARD = dict(imagined_gpu=8 * 10**9, imagined_host=64 * 10**9)


def planned(**settings):
    return LLM("llama-3.1-8b", load=False, **(CARD | settings)).plan()


def test_streams_as_few_layers_as_it_needs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned(max_context=8192)
        assert not planned(max_context=8192, weights_offload="off").fits and plan.fits
        count = len(plan.staging.layers)
        fewer = planned(max_context=8192, chunk=plan.chunk, weights_offload=count - 1)
        assert not fewer.fits and plan.staging.layers == spread(count, 32)
        assert planned(imagined_gpu=24 * 10**9, max_context=8192).staging is None
        assert planned(imagined_gpu=24 * 10**9, max_context=8192).streaming == ""
        # nobody says how long: room for some thousand tokens
        assert planned().max_context >= 8192
        text, step = str(plan), plan.staged_bytes
        assert f"at most {25e9 / step:.2g} tokens/s at 25 GB/s (assumed)" in text
        assert plan.to_dict()["staged_weight_bytes"] == step


def test_host_memory_that_is_too_small_is_one_line():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned(max_context=8192, imagined_host=4 * 10**9)
    with pytest.raises(OutOfMemoryPlan, match=r"needs .* GB of host memory \(.* weights") as error:
        plan.require_fit()
    assert "int4" in str(error.value) and "\n" not in str(error.value)


def test_a_cpu_streams_when_it_is_asked_to_alone():
    assert tiny_llm(Full()).model.staged is None
    assert tiny_llm(Full(), weights_offload="off").plan().staging is None
    with pytest.raises(SettingError, match="at most the model's 8 layers"):
        tiny_llm(Full(), weights_offload=9)
    with pytest.raises(SettingError, match="weights_offload"):
        tiny_llm(Full(), weights_offload="some")


def test_a_mixture_on_a_gpu_is_refused():
    with pytest.raises(SettingError, match="mixture of experts on a GPU"):
        LLM("gpt-oss-20b", load=False, weights_offload=4, **CARD)


def test_another_llm_over_streamed_weights():
    llm = tiny_llm(SPARSE, weights_offload=3)
    other = LLM.sharing(llm, method=Full())
    assert other.plan().staging == llm.plan().staging
    with other.session() as session:
        session.prefill(random_ids(20))
    for count in ("off", 2):
        with pytest.raises(SettingError, match="another division"):
            LLM.sharing(llm, weights_offload=count)


# ---------------------------------------------------------------- host memory


CUDA = SimpleNamespace(type="cuda")


def refuses(size):
    raise RuntimeError("locked pages: the limit is reached")


def test_pinning_that_is_refused_falls_back_with_one_line():
    tried = [Allocator("locked", refuses, pinned=True), Allocator("ordinary", ordinary)]
    host = HostMemory(CUDA, tried, lambda: 1 << 30)
    assert len(host.take(1000)) == 1000 and not host.pinned
    with pytest.warns(UserWarning, match="the limit is reached.*ulimit -l unlimited"):
        host.report()
    pinned = HostMemory(CUDA, [Allocator("locked", ordinary, pinned=True)], lambda: 1 << 30)
    pinned.take(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinned.report()
    assert pinned.pinned


def test_no_host_memory_is_one_line():
    host = HostMemory(CUDA, [Allocator("ordinary", ordinary)], lambda: 5_000_000)
    with pytest.raises(OutOfHostMemory, match=r"6\.00 MB: 5\.00 MB are free.*int4"):
        host.take(6_000_000)
    with pytest.raises(OutOfHostMemory, match="the limit is reached"):
        HostMemory(CUDA, [Allocator("locked", refuses)], lambda: 1 << 30).take(100)
