"""Sessions over models with latent attention (DeepSeek's): parity, OmniKV against a simulation that
expands keys and values in float64, both tiers, going back, saved sessions, batches, bytes.

Stops: a row that keeps more than the latent and the rotated key, a part of a row rotated that must
not be, pairs in the wrong order, a head's matrix applied to another head.
"""

import dataclasses
import math

import pytest
import torch

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.bank.device import DeviceBank
from engine.bank.host.tiered import TieredBank
from engine.base.errors import BadCheckpoint, SettingError, UnsupportedCheckpoint
from engine.methods.base import Setup
from engine.methods.registry import methods
from engine.model.config.config import ModelConfig
from engine.model.config.latent import Latent
from engine.model.heads.latent import LatentHeads
from engine.plan.layers import layer_plan
from tests.latent_simulation import Simulation
from tests.programs.hybrid_walks import LATENT, walks
from tools.families.models import VARIANTS, ids_of, make

pytest.importorskip("transformers")
NAMES = [name for name in VARIANTS if name.startswith(("deepseek", "glm4", "minicpm", "mistral4"))]
LENGTHS = [1, 2, 3, 12, 37, 62, 63, 64, 65, 127, 129, 200, 513, 700]  # every residue modulo 8
STEPS = 20
SPARSE = OmniKV(filter_layers=(0,), tokens=24, tail=64, dense_below=0)
ALL = dataclasses.replace(SPARSE, tokens=1024)
# the language model's shape of DeepSeek-V2-Lite
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "torch_dtype": "bfloat16",
}


def apart(found, wanted):
    """The largest difference of logits, of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def said(session, ids, n, steps=STEPS):
    """Logits after a prompt of n tokens and after each of the steps that follow."""
    rows = [session.prefill(ids[:n])]
    return torch.stack([*rows, *(session.decode(token) for token in ids[n : n + steps])])


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lite")
    return folder, make(folder, "deepseek-v2-lite")


@pytest.fixture
def opens(monkeypatch):
    """Decides for every chunk whether its rows become keys and values, and counts the rows that
    did.
    """
    rows, made = [], LatentHeads.opened

    def opened(self, some):
        rows.append(some.shape[2])
        return made(self, some)

    def always(value):
        monkeypatch.setattr(Latent, "expands", lambda *_: value)
        return rows

    monkeypatch.setattr(LatentHeads, "opened", opened)
    return always


@pytest.mark.parametrize("made", [False, True], ids=["rows", "keys and values"])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_every_residue_and_20_steps_are_transformers(tmp_path, opens, name, made):
    rows = opens(made)
    # longrope: one set of frequencies for up to 512 tokens
    most = 512 if "longrope" in name else max(LENGTHS) + STEPS
    theirs, ids = make(tmp_path, name), ids_of(most)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    given = dict(device="cpu", method=Full(), max_context=most)
    chunks = {chunk: LLM(tmp_path, chunk=chunk, **given) for chunk in (7, 256)}
    for number, n in enumerate(n for n in LENGTHS if n + STEPS <= most):
        llm = chunks[7 if number % 3 == 0 and n < 100 else 256]
        with llm.session() as session:
            assert apart(said(session, ids, n), wanted[n - 1 : n + STEPS]) < 2e-5, n
    assert bool(rows) == made


@pytest.mark.parametrize("made", [False, True], ids=["rows", "keys and values"])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "minicpm3", "mistral4"])
def test_omnikv_is_the_simulation_in_float64(tmp_path, opens, name, tier, made):
    """Keys and values of all heads, expanded from latents, and the published selection."""
    rows = opens(made)
    simulation, ids = Simulation(make(tmp_path, name)), ids_of(320)
    llm = LLM(tmp_path, device="cpu", method=SPARSE, chunk=64, offload=tier)
    with llm.session() as session:
        assert isinstance(session.bank, TieredBank) == (tier == "host")
        found = said(session, ids, 300, 8)[1:]
        assert session.stats.sparse_steps == 8
    # chunks of 64 in all layers but the last: 64, 128 .. 300 rows each
    assert sum(rows) == made * 3 * (64 + 128 + 192 + 256 + 300)
    wanted, chosen = simulation.steps(ids, 300, 8, SPARSE)
    assert apart(found, wanted) < 2e-5
    assert all(len(some) == SPARSE.tokens for some in chosen)
    full, _ = simulation.steps(ids, 300, 8, None)
    assert apart(found, full) > 1e-3  # else a choice would say nothing


@pytest.mark.parametrize("tier", ["device", "host"])
def test_everything_chosen_is_full_attention(lite, tier):
    ids, llm = ids_of(420), LLM(lite[0], device="cpu", method=Full(), chunk=64, offload=tier)
    with llm.session() as session:
        wanted = said(session, ids, 400)
    llm = LLM(lite[0], device="cpu", method=ALL, chunk=64, offload=tier)
    with llm.session() as session:
        assert apart(said(session, ids, 400), wanted) < 1e-5
        assert session.stats.sparse_steps == STEPS


@pytest.mark.parametrize("method", [Full(), SPARSE], ids=["full", "omnikv"])
def test_where_rows_lie_changes_no_bit(lite, method):
    """On the reference launchers."""
    found = []
    for tier in ("device", "host"):
        given = dict(offload=tier, backend="reference", chunk=64)
        with LLM(lite[0], device="cpu", method=method, **given).session() as session:
            found.append(said(session, ids_of(200), 190, 10))
    assert torch.equal(*found)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("method", [Full(), SPARSE], ids=["full", "omnikv"])
def test_going_back_forks_and_saved_sessions(lite, tmp_path, method, tier):
    ids = ids_of(420)
    llm = LLM(lite[0], device="cpu", method=method, chunk=64, offload=tier)
    with llm.session() as fresh:
        wanted = said(fresh, ids, 300)
    with llm.session() as session:
        said(session, ids, 400)
        session.truncate(300)
        session.refresh_logits()
        with session.fork() as fork:
            session.save(tmp_path / "latent.kv")
            for one in (session, fork):
                rows = torch.stack([one.decode(token) for token in ids[300:320]])
                assert apart(rows, wanted[1:]) < 1e-5
    restored, _ = llm.restore(tmp_path / "latent.kv")
    with restored:
        rows = torch.stack([restored.decode(token) for token in ids[300:320]])
        assert apart(rows, wanted[1:]) < 1e-5
    # rows are saved once: 32 elements a layer and token, in float32
    assert (tmp_path / "latent.kv").stat().st_size < 1.5 * 300 * 4 * 32 * 4 + 700_000


def test_a_batch_says_what_each_session_says_alone(lite):
    llm, ids = LLM(lite[0], device="cpu", method=SPARSE, chunk=64), ids_of(400)
    prompts = [ids[:90], ids[5:300], ids[7:140]]
    wanted = []
    for prompt in prompts:
        with llm.session() as session:
            session.prefill(prompt)
            wanted.append([session.decode(token) for token in (3, 5, 7)])
    with llm.batch(slots=3) as batch:
        sessions = [batch.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts):
            session.prefill(prompt)
        for at, token in enumerate((3, 5, 7)):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, rows in zip(sessions, wanted):
                assert apart(found[session], rows[at]) < 1e-5


def test_a_greedy_answer_is_transformers_in_exact_mode_too(lite):
    folder, theirs = lite
    prompt = torch.tensor([ids_of(150)])
    seen = torch.ones_like(prompt)
    wanted = theirs.generate(prompt, attention_mask=seen, max_new_tokens=16, do_sample=False)
    for method in (Full(), Exact(SPARSE)):
        answer = LLM(folder, device="cpu", method=method).generate(
            prompt[0].tolist(), SamplingParams(max_tokens=16, ignore_eos=True)
        )
        assert answer.token_ids == wanted[0, 150:].tolist()


# ---------------------------------------------------------------- prompts in two forms

SHAPES = [
    Latent(48, 16, 32, 32),
    Latent(40, 8, 16, 48),
    Latent(33, 6, 15, 10),
    Latent(64, 16, 16, 8),
]


def exact(heads, q, rows, start, scale):
    """Attention of queries q [C, H, head] to keys and values of rows [T, width], in float64."""
    sizes, q, rows = heads.sizes, q.double(), rows.double()
    turned, latent = rows.split([sizes.turned, sizes.rank], -1)
    k = torch.einsum("tr,hpr->htp", latent, heads.key.double())
    k = torch.cat((turned.expand(len(k), -1, -1), k), -1)
    v = torch.einsum("tr,hrv->htv", latent, heads.value.double())
    logits = torch.einsum("chd,htd->hct", q, k) * scale
    seen = torch.arange(len(rows)) <= start + torch.arange(len(q))[:, None]
    return torch.einsum("hct,htv->chv", logits.masked_fill(~seen, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 131])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 257])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_both_forms_of_a_prompt_are_attention_in_float64(monkeypatch, sizes, start, count):
    monkeypatch.setattr("engine.methods.base.OPENED_ROWS", 64)
    generator = torch.Generator().manual_seed(start * 1000 + count)
    n, scale = start + count, sizes.head**-0.5
    key, value, rows, q = (
        torch.randn(*shape, generator=generator)
        for shape in (
            (4, sizes.plain, sizes.rank),
            (4, sizes.value, sizes.rank),
            (n, sizes.width),
            (1, count, 4, sizes.head),
        )
    )
    key, value = (part * sizes.rank**-0.5 for part in (key, value))
    heads = LatentHeads(sizes, key, value.transpose(1, 2), torch.ones(sizes.rank))
    small = dict(kv_lora_rank=sizes.rank, qk_rope_head_dim=sizes.turned)
    small |= dict(qk_nope_head_dim=sizes.plain, v_head_dim=sizes.value, num_attention_heads=4)
    config = ModelConfig.from_dict({**LITE, **small, "num_key_value_heads": 4})
    config = dataclasses.replace(config, num_layers=2)
    bank = DeviceBank(config, layer_plan(2), n, torch.float32, "cpu")
    bank.write_chunk(0, rows[None, :, None], rows[None, :, None], 0)
    runtime = Full().runtime(Setup.of(config, Full(), n))
    runtime.scale, wanted = scale, exact(heads, q[0], rows, start, scale)
    met = heads.values(runtime.attend_prompt(0, heads.absorbed(q), bank, start))[0]
    made = runtime.attend_opened(0, heads.attending(q), bank, start, heads.opened)
    made = made[0, ..., : sizes.value]
    # plain torch in float32
    k, v = heads.opened(rows[None, None])
    mask = torch.arange(n) <= start + torch.arange(count)[:, None]
    plain = torch.nn.functional.scaled_dot_product_attention(
        heads.attending(q).transpose(1, 2), k, v, mask, scale=scale
    )[0].transpose(0, 1)[..., : sizes.value]
    bound = 2 * float((plain - wanted).abs().max()) + 1e-7
    for found in (met, made):
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= max(bound, 2e-6 * float(wanted.abs().max()))


def counted(sizes, start, queries, size, per_byte):
    """Costs of both forms, pair by pair and row by row."""
    made = met = 0.0
    matrices = 2 * sizes.rank * (sizes.plain + sizes.value)
    longest = max(sizes.plain + sizes.turned, sizes.value)
    for _ in range(start + queries):
        made += matrices + per_byte * 2 * 2 * longest * size
    for query in range(queries):
        met += matrices
        pairs = start + query + 1
        made += pairs * 2 * 2 * longest
        met += pairs * 2 * 2 * (sizes.turned + sizes.rank)
    return made, met


@pytest.mark.parametrize("sizes", [Latent(512, 64, 128, 128), Latent(256, 32, 64, 64), *SHAPES])
def test_the_form_of_a_prompt_follows_from_counted_costs(sizes):
    seen = set()
    for start in (0, 1, 500, 4096):
        for queries in (1, 2, 100, 200, 512, 2048):
            for size, kind, per_byte in ((2, "cpu", 30.0), (4, "cpu", 30.0), (2, "cuda", 300.0)):
                made, met = counted(sizes, start, queries, size, per_byte)
                assert sizes.expands(start, queries, size, kind) == (made < met)
                seen.add(made < met)
    assert False in seen
    lite = Latent(512, 64, 128, 128)
    assert lite.expands(4096, 512, 2, "cpu") and not lite.expands(4096, 100, 2, "cpu")
    assert not any(lite.expands(start, 1, 2, "cpu") for start in (0, 1, 100_000))


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("selector", ["uniform", "exponential"])
def test_queries_that_a_selector_looks_at_are_those_of_rows(lite, opens, selector, tier):
    """The query ring keeps queries in the latent's space, whatever the prompt's form."""
    method = dataclasses.replace(SPARSE, selector=selector, window=16)
    ids, found, chosen = ids_of(340), [], []
    for made in (False, True):
        rows = opens(made)
        llm = LLM(lite[0], device="cpu", method=method, chunk=100, offload=tier)
        with llm.session() as session:
            found.append(said(session, ids, 330, 8))
            chosen.append(session.selections)
            assert session.stats.sparse_steps == 8 and bool(rows) == made
    assert apart(*found) < 1e-5
    assert all(torch.equal(chosen[0][layer], chosen[1][layer]) for layer in chosen[0])


def test_a_prompt_whose_rows_are_chosen_keeps_its_form(lite, opens):
    """Methods that attend to a prompt in their own way get queries of rows, and no bit changes."""
    sparse = dataclasses.replace(SPARSE, prefill_ratio=1, prefill_dense_end=64)
    sparse = dataclasses.replace(sparse, prefill_block=64)
    for method in (sparse, methods()["minference"]()):
        found = []
        for made in (False, True):
            rows = opens(made)
            llm = LLM(lite[0], device="cpu", method=method, chunk=128)
            with llm.session() as session:
                found.append(said(session, ids_of(420), 410, 4))
                # so short a prompt MInference reads whole, in its own way
                assert method is not sparse or session.runtime.prefill.rows_read
            assert not rows
        assert torch.equal(*found)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("method", ["omnikv", "exact"])
def test_random_walks_end_where_a_fresh_session_does(monkeypatch, method, tier):
    """Some of the walks of tests/programs/hybrid_walks.py, in whose chunks both forms are found."""
    forms, expands = set(), Latent.expands

    def noted(*given):
        form = expands(*given)
        forms.add(form)
        return form

    monkeypatch.setattr(Latent, "expands", noted)
    found = walks(6, 7, method, tier, family=LATENT)
    assert found.walks == 6 and found.sparse and found.pairs and found.again == 0
    assert forms == {False, True}


# ---------------------------------------------------------------- bytes


def walked(bank):
    """Bytes of the storages that a bank's rows lie in, each counted once."""
    storages = {}
    for layer in range(bank.num_layers):
        for side in bank.kv(layer):
            storage = side.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_a_row_has_1152_bytes_a_layer_and_token_as_allocated_and_as_planned(lite):
    config = ModelConfig.from_dict(LITE)
    assert (config.head_dim, config.num_kv_heads) == (576, 1)
    assert config.kv_bytes(2) == 1152
    # 15.7 B parameters, 2.4 B of them in a step, embeddings aside: as published
    assert round(config.parameters / 1e9, 1) == 15.7
    small = dataclasses.replace(config, num_layers=3)
    bank = DeviceBank(small, layer_plan(3), 1000, torch.bfloat16, "cpu")
    assert walked(bank) == bank.nbytes == 3 * 1000 * 1152
    k, v = bank.kv(1)
    assert k.data_ptr() == v.data_ptr() and k.shape == v.shape == (1, 1, 1000, 576)
    folder = lite[0]
    llm = LLM(folder, device="cpu", method=Full(), max_context=512)
    with llm.session() as session:
        planned = {name: count for name, count, _ in llm.plan().items}["context bank"]
        assert walked(session.bank) == planned == 4 * 512 * 32 * 4


def test_host_rows_hold_the_latent_once(lite):
    llm = LLM(lite[0], device="cpu", method=SPARSE, chunk=64, offload="host")
    with llm.session() as session:
        session.prefill(ids_of(256))
        layers = len(session.bank.placement.layers)
        assert session.bank.host_nbytes == 256 * layers * 32 * 4


# ---------------------------------------------------------------- what is refused, what a step asks


def test_methods_that_do_not_know_such_rows_say_so_in_one_line(lite):
    known, refused = [], []
    for name, kind in methods().items():
        try:
            method = kind()
        except SettingError:
            continue
        try:
            LLM(lite[0], device="cpu", method=method).plan()
            known.append(name)
        except SettingError as error:
            assert "latent attention" in str(error) and "\n" not in str(error)
            refused.append(name)
    assert {"full", "omnikv", "quest", "tidaldecode"} <= set(known)
    assert {"h2o", "snapkv", "infllm"} <= set(refused)


@pytest.mark.parametrize("bank", ["int8", "int4", "fp8"])
def test_packed_rows_are_refused_in_one_line(lite, bank):
    with pytest.raises(SettingError, match="latent attention: packed rows"):
        LLM(lite[0], device="cpu", bank=bank)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kv_lora_rank", 0, "kv_lora_rank: found 0"),
        ("kv_lora_rank", 1000, "at most 960 beside qk_rope_head_dim = 64"),
        ("kv_lora_rank", "512", "kv_lora_rank: found 512, expected an integer"),
        ("q_lora_rank", -1, "q_lora_rank: found -1"),
        ("qk_rope_head_dim", 63, "an even number: rope rotates pairs"),
        ("v_head_dim", 1e9, "v_head_dim: found"),
        ("num_key_value_heads", 4, "num_attention_heads = 16"),
        ("num_experts_per_tok", 65, "an integer from 1 to 64"),
        ("topk_method", "noaux_tc", "greedy or group_limited_greedy"),
        ("norm_topk_prob", True, "norm_topk_prob"),
        ("attention_bias", True, "false where q_lora_rank is null"),
        ("rope_scaling", [1], "an object or null"),
        ("n_shared_experts", 1.5, "n_shared_experts: found 1.5"),
    ],
)
def test_a_config_without_sense_gets_one_line(key, value, message):
    with pytest.raises((BadCheckpoint, UnsupportedCheckpoint), match=message) as found:
        ModelConfig.from_dict({**LITE, key: value})
    assert "\n" not in str(found.value)


def test_groups_that_cannot_hold_a_choice_get_one_line():
    limited = {**LITE, "topk_method": "group_limited_greedy", "n_group": 16, "topk_group": 1}
    with pytest.raises(BadCheckpoint, match="enough groups of 4 for 6 experts"):
        ModelConfig.from_dict(limited)
    with pytest.raises(BadCheckpoint, match="a divisor of n_routed_experts = 64"):
        ModelConfig.from_dict({**limited, "n_group": 7})
