"""Sessions over a model with recurrent layers (Qwen3.5's): going back, both tiers, batches, plans.

A recurrent state cannot be cut at a position. Stops: a state that kept a token which was taken
back, a step that changed the state before the session committed it, a savepoint of other tokens.
"""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, Full, OmniKV
from engine.bank.recurrent.savepoints import SPACING, Savepoints, Snapshot
from engine.bank.recurrent.state import FOLD, KEPT
from engine.base.errors import BadCheckpoint, SavedFileError, SettingError, UnsupportedCheckpoint
from engine.methods.registry import methods
from engine.plan.layers import Role
from tests.builders import hybrid_config, random_ids, tiny_llm
from tests.engine.methods.method_checks import allocated
from tests.programs.hybrid_walks import CHUNK, CONTEXT, METHODS, SPARSE, walks
from tools.families.models import ids_of, make

CONFIG = hybrid_config(max_positions=CONTEXT)
SETTINGS = dict(max_context=CONTEXT, chunk=CHUNK)
# lengths at every residue of the chunk-wise form's 64 tokens modulo 8, and around whole chunks
LENGTHS = [1, 2, 3, 10, 36, 61, 62, 63, 64, 65, 127, 128, 129, 195, 333, 511, 513, 700]
STEPS = 20


def llm_of(method=None, **settings):
    return tiny_llm(method or Full(), CONFIG, **{**SETTINGS, **settings})


def apart(found, wanted):
    """The largest difference of logits, of the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-tied"])
def test_prompts_of_every_residue_and_20_steps_are_transformers(tmp_path, name):
    """transformers computes the delta rule in float32 too: no token may be further from it in
    float64 than 2e-5, or than twice its own float32 is.
    """
    theirs, ids = make(tmp_path, name), ids_of(max(LENGTHS) + STEPS)
    with torch.inference_mode():
        plain = theirs(torch.tensor([ids])).logits[0]
        wanted = theirs.double()(torch.tensor([ids])).logits[0]
    llm = LLM(tmp_path, device="cpu", method=Full(), chunk=128, max_context=1024)
    for n in LENGTHS:
        with llm.session() as session:
            rows = [session.prefill(ids[:n])]
            rows += [session.decode(token) for token in ids[n : n + STEPS]]
        for at, row in enumerate(rows, n - 1):
            assert apart(row, wanted[at]) < max(2e-5, 2 * apart(plain[at], wanted[at])), (n, at)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_random_walks_end_where_a_fresh_session_does(method, tier):
    """Some of the walks of tests/programs/hybrid_walks.py, which takes 2,000 of each."""
    found = walks(6, 1, method, tier)
    assert found.pairs and found.ties == 0
    assert found.sparse > 5 or (method == "full" and not found.sparse)


def test_without_savepoints_going_back_reads_again_from_the_beginning():
    llm = llm_of(savepoints=0)
    ids = random_ids(300)
    with llm.session() as session, llm.session() as fresh:
        session.prefill(ids)
        assert session.tokens_again(299) == 0  # the newest KEPT tokens stay apart
        assert session.tokens_again(300 - KEPT) == 300 - KEPT
        session.truncate(250)
        assert session.stats.tokens_again == 250 and session.stats.savepoint_bytes == 0
        wanted = fresh.prefill(ids[:250])
        session.refresh_logits()
        assert apart(session.last_logits, wanted) < 1e-4
    assert "none: going back reads again from the beginning" in str(llm.plan())


def test_the_newest_tokens_come_back_without_reading():
    llm = llm_of()
    with llm.session() as session:
        session.prefill(random_ids(200))
        for token in random_ids(90, seed=1):
            session.decode(token)
            length = len(session)
            assert session.tokens_again(length - KEPT + 1) == 0
            assert session.bank.recurrent.length - session.bank.recurrent.base < KEPT + FOLD


def test_what_is_read_again_is_a_share_of_what_is_taken_back():
    """Over 20,000 tokens, 12 savepoints, and a truncate to any length."""
    points = Savepoints(12)
    worst = 0.0
    for length in range(SPACING, 20_001, SPACING):
        if points.due(length, False):
            points.add(Snapshot(length - KEPT, length, ()))
        for n in range(0, length - 2 * SPACING, 37):
            worst = max(worst, (n - points.reach(n)) / (length - n))
    assert len(points.points) == 12
    assert worst < 1.5, worst


def test_a_conversation_whose_last_answer_is_edited_reads_little_again():
    """20 turns of the whole history with the last answer edited, as a client sends it: what the
    recurrent layers run again per turn, with savepoints and without.
    """
    draw = random.Random(0)

    def run(savepoints, turns):
        llm = llm_of(savepoints=savepoints)
        kept: list[int] = []
        with llm.session() as session:
            for _ in range(turns):
                common = next(
                    (i for i, (a, b) in enumerate(zip(session.ids, kept)) if a != b),
                    min(len(session), len(kept)),
                )
                session.truncate(common)
                session.prefill(kept[common:] + random_ids(12, seed=draw.randrange(999)))
                kept = list(session.ids)
                for token in random_ids(24, seed=draw.randrange(999)):
                    session.decode(token)
                # the answer comes back edited from its third token on
                kept += session.ids[len(kept) : len(kept) + 3] + random_ids(15, seed=7)
            return session.stats.tokens_again

    assert run(12, 20) <= 3 * 20  # every turn goes back to its prompt's end
    assert run(0, 5) > 100


def test_a_step_changes_nothing_before_the_commit():
    """A step that is interrupted before its commit leaves the state as it was."""
    llm = llm_of()
    with llm.session() as session:
        session.prefill(random_ids(100))
        state = session.bank.recurrent
        base, length, held = state.aside()
        session.runner.feed(5, 101)
        session.bank.before_step(101)
        session.runner.run(101, False)
        assert (state.base, state.length) == (base, length)
        assert torch.equal(state.aside()[2][0], held[0])
        wanted = session.fork().decode(7)
        assert torch.equal(session.decode(7), wanted)


def test_sessions_of_a_batch_say_what_each_says_alone():
    llm, alone = llm_of(SPARSE), []
    prompts = [random_ids(n, seed=n) for n in (30, 170, 301)]
    for prompt in prompts:
        with llm.session() as session:
            rows = [session.prefill(prompt)]
            rows += [session.decode(token) for token in random_ids(30, seed=3)]
            alone.append(rows)
    with llm.batch(slots=3) as batch:
        sessions = [batch.session() for _ in prompts]
        for session, prompt, rows in zip(sessions, prompts, alone):
            assert apart(session.prefill(prompt), rows[0]) < 1e-5
        for number, token in enumerate(random_ids(30, seed=3), 1):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, rows in zip(sessions, alone):
                assert apart(found[session], rows[number]) < 1e-4


@pytest.mark.parametrize("method", ["omnikv", "windowed"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_plan_counts_what_is_allocated(method, tier):
    llm = llm_of(METHODS[method], offload=tier)
    plan = llm.plan()
    items = {name: size for name, size, _ in plan.items}
    with llm.session() as session:
        held = items["context bank"] + items["recurrent state"]
        assert allocated(session.bank.recurrent) == items["recurrent state"]
        if tier == "host":
            assert session.bank.tiered
            held += items["working sets"] + items["streaming"]
        assert session.bank.nbytes == held
        if tier == "device":
            assert allocated(session.bank) == held
        assert session.stats.state_bytes == items["recurrent state"]
        assert session.query_ring.nbytes == items["query ring"]
        session.prefill(random_ids(CONTEXT - 30))
        for token in random_ids(29):
            session.decode(token)
        kept = session.history.states
        assert len(kept.points) == 12
        assert session.stats.savepoint_bytes == kept.nbytes == allocated(kept)
        most = items["state savepoints"]
        # the tails of most are shorter than the longest
        assert 0.5 * most < kept.nbytes <= most
        if tier == "host":
            assert session.stats.host_bytes <= items["host tier"] == plan.host_bytes
    roles = plan.layers.roles
    assert roles.count(Role.RECURRENT) == 6 and roles.count(Role.SPARSE) == 1


def test_a_gpus_plan_counts_savepoints_in_host_memory():
    """Where the device's memory is another they take no byte of it, and the host's must have
    room.
    """

    def plan(savepoints, host=1 << 40):
        given = dict(imagined_gpu=80 << 30, imagined_host=host, device="cuda", load=False)
        return LLM(
            "qwen3.6-27b",
            method=Full(),
            weights="int4",
            max_context=65536,
            savepoints=savepoints,
            **given,
        ).plan()

    none, some = plan(0), plan(12)
    assert none.host_bytes == 0 and none.fits and some.fits
    # 48 layers of 48 heads, 128 x 128 in float32, and up to 20 rows
    assert 12 * 48 * 48 * 128 * 128 * 4 < some.host_bytes < 1.4 * 12 * 48 * 48 * 128 * 128 * 4
    assert some.total == none.total and some.bytes_of("state savepoints") == 0
    assert not plan(12, host=some.host_bytes).fits


def test_every_method_runs_or_refuses_in_one_line():
    llm, refused = llm_of(), []
    for name, kind in methods().items():
        settings = {"filter_layers": (3,)} if name.startswith("omnikv") else {}
        try:
            with llm.session(kind(**settings)) as session:
                session.prefill(random_ids(150))
                assert torch.isfinite(session.decode(3)).all()
        except SettingError as error:
            refused.append(name)
            assert "\n" not in str(error)
    assert {"h2o", "snapkv", "infllm", "minference"} <= set(refused)
    assert not {"full", "omnikv", "quest"} & set(refused)


def test_filter_layers_are_attention_layers():
    with pytest.raises(SettingError, match="found 2, a recurrent layer, expected layers that see"):
        llm_of().session(OmniKV(filter_layers=(2,)))


def test_states_of_another_model_are_refused(tmp_path):
    llm, other = llm_of(), tiny_llm(Full(), hybrid_config(12, max_positions=CONTEXT), **SETTINGS)
    with llm.session() as session:
        session.prefill(random_ids(100))
        session.save(tmp_path / "session")
    with pytest.raises(SavedFileError, match="made by another model"):
        other.restore(tmp_path / "session")


BAD = [
    ({"layer_types": ["linear_attention"] * 3}, BadCheckpoint, "a list of 8 names"),
    ({"layer_types": ["mamba"] * 8}, UnsupportedCheckpoint, "layer_types: found mamba"),
    ({"layer_types": ["linear_attention"] * 8}, UnsupportedCheckpoint, "full_attention for one"),
    ({"linear_num_value_heads": 3}, BadCheckpoint, "a multiple of linear_num_key_heads 2"),
    ({"linear_conv_kernel_dim": 9}, BadCheckpoint, "linear_conv_kernel_dim"),
]


@pytest.mark.parametrize("changes, kind, words", BAD)
def test_a_config_without_sense_is_one_line(changes, kind, words):
    with pytest.raises(kind, match=words) as error:
        hybrid_config(**changes)
    assert "\n" not in str(error.value)


def test_the_language_model_of_a_vision_checkpoint_is_its_text_config():
    plain = hybrid_config()
    inner = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    tower = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": 1152},
    }
    found = type(plain).from_dict(tower)
    assert found.prefix == "model.language_model."
    names = dict(prefix="model.", architecture=plain.architecture, model_type=plain.model_type)
    assert dataclasses.replace(found, **names) == plain
    with pytest.raises(BadCheckpoint, match="text_config.hidden_size: found 0"):
        type(plain).from_dict({**tower, "text_config": {**inner, "hidden_size": 0}})


def test_a_vision_tower_and_further_heads_are_never_read(tmp_path):
    """Bytes read are those of the language model; its logits are transformers'."""
    theirs, ids = make(tmp_path, "qwen3.5"), ids_of(90)
    stored = load_file(tmp_path / "model.safetensors")
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.items()
    }
    text = sum(tensor.nbytes for tensor in stored.values())
    stored["model.visual.patch_embed.weight"] = torch.randn(64, 64)
    stored["mtp.fc.weight"] = torch.randn(64, 64)
    save_file(stored, tmp_path / "model.safetensors")
    inner = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    read = {}
    for weights, tolerance in (("auto", 2e-5), ("int8", 0.5)):
        llm = LLM(
            tmp_path,
            device="cpu",
            method=Full(),
            max_context=256,
            weights=weights,
            progress=lambda p: read.update(done=p.bytes_done, total=p.bytes_total),
        )
        with llm.session() as session, torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0, -1]
            assert apart(session.prefill(ids), wanted) < tolerance
    gated = (
        2 * 2 * 4 * 16 * 48 * 4
    )  # q_proj of both attention layers, of which q and gate take half
    assert read["done"] == read["total"] <= text + gated


@pytest.mark.parametrize("weights, whole", [("auto", 1.16), ("int4", 1.36)])
def test_bytes_per_step_of_the_published_filter_layers_of_27b_at_256k(weights, whole):
    """Of 64 layers 16 attend; 7 of those are filters, 9 read 2,048 tokens and a tail. Of a whole
    step with its weights and states as well.
    """
    given = dict(device="cuda", imagined_gpu=80 * 10**9, load=False, max_context=262144)
    llm = LLM("qwen3.6-27b", weights=weights, **given)
    plan, config, layers = llm.plan(), llm.planner.config, llm.planner.layers
    assert llm.planner.method.filter_layers == (3, 11, 23, 31, 35, 47, 59) and plan.fits
    assert [layers.count(r) for r in (Role.FILTER, Role.SPARSE, Role.RECURRENT)] == [7, 9, 48]
    row, n = config.kv_bytes(2), 262144
    full = sum(config.rows_seen(n)) * row
    sparse = sum(
        2048 + 256 if i in layers.sparse_layers else r for i, r in enumerate(config.rows_seen(n))
    )
    assert full == plan.full_bank == 16 * 2**30 and plan.budget == 2048
    assert round(full / (sparse * row), 2) == 2.26
    others = plan.step_weights + plan.bytes_of("recurrent state")
    assert round((others + full) / (others + sparse * row), 2) == whole
