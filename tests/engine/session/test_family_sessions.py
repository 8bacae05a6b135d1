"""Sessions over small random models of some families: prompts of every residue, what is sparse,
both tiers, going back, copies, files, batches and plans.

The families here have more beside Llama than a block: a router of their own, rows of two widths,
layers that share rows. Stops: a row written twice or by a layer that only reads it, a ring of the
wrong width, a plan that counts what nobody allocates.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, Full, OmniKV
from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from engine.base.errors import BadCheckpoint, SettingError, UnsupportedCheckpoint
from engine.methods.registry import methods
from engine.model.config.config import ModelConfig
from tools.families.models import ids_of, make

pytest.importorskip("transformers")
NAMES = ["minimax-m2", "gemma4", "gemma4-shared", "gemma4-moe", "gemma3n"]
# every residue modulo 8, whole chunks and blocks and one beside them
LENGTHS = [1, 2, 3, 10, 36, 61, 62, 63, 64, 65, 127, 128, 129, 195, 333, 511, 513, 700]
STEPS = 20
CONTEXT = 1024
every_family = pytest.mark.parametrize("name", NAMES)


@functools.cache
def made(name):
    """(folder, transformers' logits [vocab] of every position of ids_of) of a variant."""
    folder = Path(tempfile.mkdtemp())
    theirs = make(folder, name)
    with torch.inference_mode():
        ids = torch.tensor([ids_of(max(LENGTHS) + STEPS)])
        plain = theirs(ids).logits[0]
        theirs.set_experts_implementation("eager")  # the other knows no float64
        return folder, plain, theirs.double()(ids).logits[0]


def llm_of(name, method=None, **settings):
    given = dict(device="cpu", chunk=128, max_context=CONTEXT) | settings
    return LLM(made(name)[0], method=method or Full(), **given)


def omni(name, **settings):
    """OmniKV whose filter is the first layer that sees everything."""
    seeing = ModelConfig.from_folder(made(name)[0]).seeing_layers
    return OmniKV(filter_layers=seeing[:1], **dict(tail=64, dense_below=0) | settings)


def apart(found, wanted):
    """The largest difference of logits, of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def run(session, ids, steps):
    """Logits [1 + len(steps), vocab] after a prompt and after each step."""
    return torch.stack([session.prefill(ids), *(session.decode(token) for token in steps)])


@every_family
def test_prompts_of_every_residue_and_20_steps_are_transformers(name):
    _, plain, wanted = made(name)
    llm, ids = llm_of(name), ids_of(max(LENGTHS) + STEPS)
    for n in LENGTHS:
        with llm.session() as session:
            rows = run(session, ids[:n], ids[n : n + STEPS])
        for at, row in enumerate(rows, n - 1):
            # in float64, as near as transformers' own float32 where that is further
            assert apart(row, wanted[at]) < max(2e-5, 2 * apart(plain[at], wanted[at])), (n, at)


@every_family
def test_omnikv_is_sparse_and_with_all_tokens_is_full(name):
    ids = ids_of(700 + STEPS)
    _, _, wanted = made(name)
    found = {}
    for tokens in (CONTEXT, 40):
        for tier in ("device", "host"):
            llm = llm_of(name, omni(name, tokens=tokens), offload=tier)
            with llm.session() as session:
                found[tokens, tier] = run(session, ids[:700], ids[700:])
                assert session.stats.sparse_steps == STEPS
    for tier in ("device", "host"):
        rows = found[CONTEXT, tier]
        assert all(apart(row, wanted[699 + i]) < 1e-4 for i, row in enumerate(rows))
    assert apart(found[40, "device"][1:], wanted[700:720]) > 1e-3  # it read fewer rows
    assert apart(found[40, "device"], found[40, "host"]) < 2e-5


@every_family
def test_both_tiers_are_one_bit_for_bit_on_the_reference(name):
    ids, found = ids_of(333), []
    for tier in ("device", "host"):
        llm = llm_of(name, omni(name, tokens=40), offload=tier, backend="reference")
        with llm.session() as session:
            found.append(run(session, ids[:325], ids[325:]))
            assert session.stats.sparse_steps == 8
    assert torch.equal(*found)


@every_family
@pytest.mark.parametrize("tier", ["device", "host"])
def test_going_back_copies_and_files_end_where_a_fresh_session_does(name, tier, tmp_path):
    ids = ids_of(400)
    llm = llm_of(name, omni(name, tokens=40), offload=tier)
    with llm.session() as session, llm.session() as fresh:
        wanted = run(fresh, ids[:300], ids[300:310])
        run(session, ids[:300], [*ids[300:304], 5, 6, 7])
        session.truncate(304)
        with session.fork() as branch:
            assert apart(branch.decode(ids[304]), wanted[5]) < 1e-5
        session.save(tmp_path / "session")
        assert apart(session.decode(ids[304]), wanted[5]) < 1e-5
        again, _ = llm.restore(tmp_path / "session")
        with again:
            rows = [again.decode(token) for token in ids[304:310]]
            assert apart(torch.stack(rows), wanted[5:]) < 1e-5
            assert again.stats.sparse_steps >= 6
        session.truncate(200)
        assert apart(session.prefill(ids[200:300]), wanted[0]) < 1e-5


@every_family
def test_sessions_of_a_batch_say_what_each_says_alone(name):
    llm, alone = llm_of(name, omni(name, tokens=40)), []
    prompts, steps = [ids_of(n, seed=n) for n in (30, 170, 301)], ids_of(10, seed=3)
    for prompt in prompts:
        with llm.session() as session:
            alone.append(run(session, prompt, steps))
    with llm.batch(slots=3) as batch:
        sessions = [batch.session() for _ in prompts]
        for session, prompt, rows in zip(sessions, prompts, alone):
            assert apart(session.prefill(prompt), rows[0]) < 1e-5
        for number, token in enumerate(steps, 1):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, rows in zip(sessions, alone):
                assert apart(found[session], rows[number]) < 1e-4


@every_family
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_plan_counts_what_is_allocated(name, tier):
    llm = llm_of(name, omni(name, tokens=40), offload=tier)
    with llm.session() as session:
        session.prefill(ids_of(300))
        assert session.bank.nbytes == walked(session.bank)
        items = {key: size for key, size, _ in llm.plan().items}
        if tier == "device":
            rows = items["context bank"] + items.get("sliding windows", 0)
            assert session.bank.nbytes == rows
        assert session.query_ring.nbytes == items["query ring"]
        assert session.runner.model.nbytes == items["weights"]


def walked(bank):
    """Bytes of every tensor that a bank holds on the device; shared memory counts once."""
    seen, found, waiting = set(), {}, [bank]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            memory = one.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif isinstance(one, BlockTable):
            waiting.append(one.addresses)  # its blocks are host memory
        elif isinstance(one, HostPool):
            continue
        elif type(one).__module__.startswith(("engine.bank.", "kernels.tier.")):
            waiting += vars(one).values()
    return sum(found.values())


@every_family
def test_every_method_runs_or_refuses_in_one_line(name):
    llm, ran = llm_of(name), set()
    first = llm.config.seeing_layers[0]
    for kind_name, kind in methods().items():
        settings = {"filter_layers": (first,)} if kind_name.startswith("omnikv") else {}
        try:
            with llm.session(kind(**settings)) as session:
                session.prefill(ids_of(150))
                assert torch.isfinite(session.decode(3)).all()
                ran.add(kind_name)
        except SettingError as error:
            assert "\n" not in str(error)
    assert {"full", "omnikv", "quest"} <= ran


SHARED = "gemma4-shared"


def test_rows_that_layers_share_exist_once():
    """Of 10 layers, 5 of them sliding, the last 5 read the rows of layers 3 and 4."""
    llm = llm_of(SHARED)
    config = llm.config
    assert config.row_layers == (0, 1, 2, 3, 4, 3, 4, 3, 4, 3)
    assert config.keeping_layers == (1, 3) and config.seeing_layers == (1, 3, 5, 7, 9)
    items = {key: size for key, size, _ in llm.plan().items}
    assert items["context bank"] == 2 * CONTEXT * config.kv_bytes(4)
    with llm.session() as session:
        bank = session.bank
        session.prefill(ids_of(200))
        for layer in (5, 7, 9):
            assert bank.kv(layer)[0].data_ptr() == bank.kv(3)[0].data_ptr()
        assert bank.window_ring(8) is bank.window_ring(4) is not bank.window_ring(2)


@pytest.mark.parametrize("filters, kept", [((1,), (3,)), ((1, 5), ()), ((3,), ())])
def test_rows_go_to_the_host_where_all_their_readers_choose_together(filters, kept):
    """Layer 3 is offloaded where it and its readers 5, 7 and 9 are in one group; a reader that
    chooses anew, or layer 3 as a filter, leaves its rows on the device.
    """
    ids, found = ids_of(333), []
    method = OmniKV(filter_layers=filters, tokens=40, tail=64, dense_below=0)
    for tier in ("device", "host"):
        llm = llm_of(SHARED, method, offload=tier)
        with llm.session() as session:
            found.append(run(session, ids[:325], ids[325:]))
            assert session.stats.sparse_steps == 8
            if tier == "host":
                assert tuple(i for i in (1, 3) if session.bank.on_host(i)) == kept
    assert apart(*found) < 2e-5


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
def test_towers_are_never_read(tmp_path, name):
    """Bytes read are those of the language model; its logits are transformers'."""
    folder, _, wanted = made(name)
    stored = load_file(folder / "model.safetensors")
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.items()
    }
    text = sum(tensor.nbytes for tensor in stored.values())
    for tower in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"):
        stored[f"model.{tower}.weight"] = torch.randn(64, 64)
    save_file(stored, tmp_path / "model.safetensors")
    inner = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": [f"{name.capitalize()}ForConditionalGeneration"],
        "text_config": inner,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    read = {}
    llm = LLM(
        tmp_path,
        device="cpu",
        method=Full(),
        max_context=256,
        progress=lambda p: read.update(done=p.bytes_done, total=p.bytes_total),
    )
    with llm.session() as session:
        assert apart(session.prefill(ids_of(90)), wanted[89]) < 2e-5
    assert read["done"] == read["total"] <= text


def test_k_and_v_of_readers_in_a_file_are_left_unread(tmp_path):
    """Released checkpoints store k and v of layers that never use them."""
    folder, _, wanted = made(SHARED)
    stored = load_file(folder / "model.safetensors")
    for part, shape in (("k_proj", (24, 48)), ("v_proj", (24, 48)), ("k_norm", (24,))):
        stored[f"model.layers.7.self_attn.{part}.weight"] = torch.randn(shape)
    shutil.copytree(folder, tmp_path / "model")
    save_file(stored, tmp_path / "model" / "model.safetensors")
    llm = LLM(tmp_path / "model", device="cpu", method=Full(), max_context=256)
    with llm.session() as session:
        assert apart(session.prefill(ids_of(90)), wanted[89]) < 2e-5


GEMMA4 = dict(
    architectures=["Gemma4ForCausalLM"],
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    global_head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
BAD = [
    ({"rope_parameters": None}, "rope_parameters: found nothing, expected an object"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types: found a list of 3"),
    ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "for the last layer"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: found all"),
    ({"global_head_dim": 7}, "global_head_dim: found 7, expected an even number"),
    ({"global_head_dim": 1 << 20}, "global_head_dim: found 1048576"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "a multiple of 3 K/V heads"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: found 4"),
    ({"num_kv_shared_layers": 3}, "no layer before them is of type full_attention"),
    ({"per_layer_config": {"1": {"head_dim": 16}}}, "all alike"),
    ({"per_layer_config": {"1": {"head_dim": 16}, "3": {"hidden_size": 9}}}, "all alike"),
    ({"per_layer_config": {"1": {"head_dim": "a"}, "3": {"head_dim": "a"}}}, "found a, expected"),
    ({"enable_moe_block": True}, "num_experts: found nothing"),
    ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts: found 3"),
    ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: found -1"),
]


GEMMA3N = {key: GEMMA4[key] for key in list(GEMMA4)[1:8] + list(GEMMA4)[9:12]} | dict(
    architectures=["Gemma3nForCausalLM"], num_kv_shared_layers=2
)
BAD3N = [
    ({"num_kv_shared_layers": None}, "num_kv_shared_layers: found nothing"),
    ({"activation_sparsity_pattern": [0.5]}, "expected a list of 4 shares"),
    ({"activation_sparsity_pattern": [0.5, 1, 0, 0]}, "of at least 0 and below 1"),
    ({"altup_num_inputs": 1}, "altup_num_inputs: found 1, expected an integer from 2"),
    ({"altup_active_idx": 1}, "altup_active_idx: found 1, expected 0"),
    ({"altup_correct_scale": False}, "altup_correct_scale: found False, expected true"),
    ({"laurel_rank": 0}, "laurel_rank: found 0"),
    ({"intermediate_size": [64, 64, 64, 32]}, "expected one width, or 4 that are alike"),
    ({"intermediate_size": [64, 64]}, "expected one width, or 4 that are alike"),
    ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input: found 0"),
]


@pytest.mark.parametrize("changes, words", BAD3N)
def test_a_config_of_gemma_3n_without_sense_is_one_line(changes, words):
    config = ModelConfig.from_dict(GEMMA3N | {"intermediate_size": [64] * 4})
    assert config.row_layers == (0, 1, 0, 1) and config.intermediate_size == 64
    with pytest.raises((BadCheckpoint, UnsupportedCheckpoint), match=words) as error:
        ModelConfig.from_dict(GEMMA3N | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes, words", BAD)
def test_a_config_without_sense_is_one_line(changes, words):
    assert ModelConfig.from_dict(GEMMA4).local_heads == (2, 8)
    with pytest.raises((BadCheckpoint, UnsupportedCheckpoint), match=words) as error:
        ModelConfig.from_dict(GEMMA4 | changes)
    assert "\n" not in str(error.value)
