"""Sessions over the models with Mamba-2's layers: parity with transformers at every residue of a
chunk, going back on both tiers, batches, what the plan counts, and configurations without sense.

Stops: a state that kept a token which was taken back, a factor that a prompt obeys and a step does
not, a mixer beside attention that misses a token.
"""

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.bank.row_origins import READ
from engine.base.errors import BadCheckpoint, SettingError, UnsupportedCheckpoint
from engine.load.memory import memory_items
from engine.plan.layers import Role
from engine.saved.session_file import _origins
from tests.builders import hybrid_config, random_ids, tiny_llm
from tests.engine.session.test_hybrid import LENGTHS, STEPS, apart
from tests.programs.hybrid_walks import CHUNK, CONTEXT, SPARSE, walks
from tools.families.models import ids_of, make

FAMILIES = ("granite", "nemotron", "falcon", "bamba")
VARIANTS = ("granite-hybrid", "nemotron-h", "nemotron-h-moe", "falcon-h1", "bamba")


def llm_of(family, method=None, **settings):
    config = hybrid_config(family=family, max_positions=CONTEXT)
    return tiny_llm(
        method or Full(), config, **{"max_context": CONTEXT, "chunk": CHUNK, **settings}
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_every_residue_and_20_steps_are_transformers(tmp_path, name):
    """transformers computes the recurrence in float32 too: no token may be further from it in
    float64 than 2e-5, or than twice its own float32 is.
    """
    theirs, ids = make(tmp_path, name), ids_of(max(LENGTHS) + STEPS)
    theirs.set_experts_implementation("eager")  # the others know no float64
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "method, tier", [("omnikv", "device"), ("windowed", "host"), ("exact", "host")]
)
def test_random_walks_end_where_a_fresh_session_does(family, method, tier):
    """Some of the walks of tests/programs/hybrid_walks.py."""
    found = walks(3, 1, method, tier, family=family)
    assert found.pairs and found.ties == 0 and found.sparse > 5


@pytest.mark.parametrize("known", [True, False], ids=["origins", "a file of before"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_session_reads_a_prompt_again_as_a_prompt(family, known, tmp_path, monkeypatch):
    """Steps after the restore had all tokens before them taken for steps: going back into a prompt
    ran its tokens by sparse attention.
    """
    llm, prompts = llm_of(family, SPARSE), [random_ids(289, seed=1), random_ids(59, seed=2)]
    with llm.session() as first:
        for ids in prompts:
            first.prefill(ids)
        if not known:
            monkeypatch.setattr("engine.saved.session_file._origins", without_origins)
        first.save(tmp_path / "file")
        session, _ = llm.restore(tmp_path / "file")
    with session, llm.session() as fresh:
        for token in (3, 4, 5):
            session.decode(token)
        assert session.origins.of(0, 351) == [(348, READ), (351, None)]
        session.truncate(328)
        fresh.prefill(prompts[0])
        fresh.prefill(prompts[1][:39])
        session.refresh_logits()
        assert apart(session.last_logits, fresh.last_logits) < 2e-5
        for token in (7, 8):
            assert apart(session.decode(token), fresh.decode(token)) < 2e-5
        assert session.stats.sparse_steps


def without_origins(saved, points, total):
    return _origins(None, points, total)


@pytest.mark.parametrize("family", FAMILIES)
def test_sessions_of_a_batch_say_what_each_says_alone(family):
    llm, alone = llm_of(family, SPARSE), []
    prompts = [random_ids(n, seed=n) for n in (30, 170, 301)]
    for prompt in prompts:
        with llm.session() as session:
            rows = [session.prefill(prompt)]
            rows += [session.decode(token) for token in random_ids(12, seed=3)]
            alone.append(rows)
    with llm.batch(slots=3) as batch:
        sessions = [batch.session() for _ in prompts]
        for session, prompt, rows in zip(sessions, prompts, alone):
            assert apart(session.prefill(prompt), rows[0]) < 1e-5
        for number, token in enumerate(random_ids(12, seed=3), 1):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, rows in zip(sessions, alone):
                assert apart(found[session], rows[number]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_plan_counts_what_is_allocated(family, tier):
    llm = llm_of(family, SPARSE, offload=tier)
    items = {name: size for name, size, _ in llm.plan().items}
    with llm.session() as session:
        assert session.stats.state_bytes == items["recurrent state"]
        assert session.query_ring.nbytes == items["query ring"]
        if tier == "device":
            assert session.bank.nbytes == items["context bank"] + items["recurrent state"]
        session.prefill(random_ids(CONTEXT - 30))
        for token in random_ids(20):
            session.decode(token)
        assert session.stats.sparse_steps == 20
        assert 0 < session.stats.savepoint_bytes <= items["state savepoints"]
    roles = llm.plan().layers.roles
    beside = family == "falcon"
    assert roles.count(Role.RECURRENT) == (0 if beside else 6)
    assert roles.count(Role.SPARSE) == (4 if beside else 1)
    assert llm.config.recurrent.layers == tuple(i for i in range(8) if beside or i % 4 < 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_conversation_reads_little_again(family):
    """Every turn goes back to its prompt's end, and says what a fresh session says."""
    llm = llm_of(family)
    kept = random_ids(200)
    with llm.session() as session:
        session.prefill(kept)
        for turn in range(4):
            for token in random_ids(24, seed=turn):
                session.decode(token)
            session.truncate(len(kept) + 3)
            kept = [*session.ids, *random_ids(15, seed=turn + 50)]
            found = session.prefill(kept[len(session) :])
        assert session.stats.tokens_again <= 3 * 4
    with llm.session() as fresh:
        assert apart(found, fresh.prefill(kept)) < 2e-4


def test_the_plan_of_a_gpu_says_that_torchs_operators_run_the_recurrence():
    config, method = hybrid_config(family="granite"), Full()
    for device, said in (("cuda", True), ("cpu", False)):
        given = config, method, method.plan(config), torch.float32, torch.device(device)
        notes = [note for _, _, note in memory_items(*given, context=512, chunk=64)]
        assert any("torch's operators" in note for note in notes) == said


def test_filter_layers_are_attention_layers():
    with pytest.raises(SettingError, match="found 2, a recurrent layer, expected layers that see"):
        llm_of("granite").session(OmniKV(filter_layers=(2,)))


@pytest.mark.parametrize("family", FAMILIES)
def test_methods_that_do_not_know_recurrent_layers_refuse(family):
    from engine import H2O

    with pytest.raises(SettingError, match="does not know the recurrent layers"):
        llm_of(family).session(H2O())


INFINITE = {"__float__": "Infinity"}
BAD = [
    ("granite", {"layer_types": ["mamba"] * 3}, BadCheckpoint, "a list of 8 names"),
    ("granite", {"layer_types": ["mlp"] * 8}, UnsupportedCheckpoint, "layer_types: found mlp"),
    ("granite", {"layer_types": [["mamba"]] * 8}, UnsupportedCheckpoint, "layer_types: found"),
    ("granite", {"layer_types": ["mamba"] * 8}, UnsupportedCheckpoint, "full_attention for one"),
    ("granite", {"mamba_n_heads": 7}, BadCheckpoint, "mamba_d_head: found 16, expected 96 / "),
    ("granite", {"mamba_d_head": None, "mamba_n_heads": 7}, BadCheckpoint, "a divisor of the rec"),
    ("granite", {"mamba_n_groups": 4}, BadCheckpoint, "mamba_n_groups: found 4, expected a div"),
    ("granite", {"mamba_d_conv": 9}, BadCheckpoint, "mamba_d_conv: found 9"),
    ("granite", {"mamba_d_state": 0}, BadCheckpoint, "mamba_d_state: found 0"),
    ("granite", {"mamba_proj_bias": True}, UnsupportedCheckpoint, "mamba_proj_bias"),
    ("granite", {"time_step_limit": [0.0, 0.1]}, UnsupportedCheckpoint, "time_step_limit"),
    ("granite", {"time_step_limit": 3}, UnsupportedCheckpoint, "time_step_limit: found 3"),
    ("granite", {"position_embedding_type": "alibi"}, UnsupportedCheckpoint, "rope or nope"),
    ("nemotron", {"hybrid_override_pattern": "MX*-"}, BadCheckpoint, "num_hidden_layers 15"),
    ("nemotron", {"hybrid_override_pattern": 3}, BadCheckpoint, "what each layer is"),
    (
        "nemotron",
        {"hybrid_override_pattern": "-M*-", "num_hidden_layers": 4},
        UnsupportedCheckpoint,
        "mlp in layer 0",
    ),
    (
        "nemotron",
        {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "moe_latent_size": 8},
        UnsupportedCheckpoint,
        "moe_latent_size: found 8, expected null beside experts",
    ),
    (
        "nemotron",
        {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "n_routed_experts": 0},
        BadCheckpoint,
        "n_routed_experts",
    ),
    ("nemotron", {"mamba_hidden_act": "gelu"}, UnsupportedCheckpoint, "mamba_hidden_act"),
    ("falcon", {"ssm_multipliers": [1.0] * 4}, BadCheckpoint, "a list of 5 factors"),
    ("falcon", {"mlp_multipliers": [0.0, 1.0]}, BadCheckpoint, "a list of 2 factors"),
    ("falcon", {"projectors_bias": True}, UnsupportedCheckpoint, "projectors_bias"),
    (
        "falcon",
        {"attention_bias": True, "attention_in_multiplier": 2.0},
        UnsupportedCheckpoint,
        "beside multipliers of attention",
    ),
    ("bamba", {"attn_layer_indices": [8]}, BadCheckpoint, "layer numbers below 8"),
    ("bamba", {"attn_layer_indices": "all"}, BadCheckpoint, "attn_layer_indices: found all"),
]


@pytest.mark.parametrize("family, changes, kind, words", BAD)
def test_a_config_without_sense_is_one_line(family, changes, kind, words):
    with pytest.raises(kind, match=words) as error:
        hybrid_config(family=family, **changes)
    assert "\n" not in str(error.value)


def test_steps_without_a_limit_may_say_so():
    for limit in (None, [0.0, float("inf")], [0, INFINITE]):
        assert hybrid_config(family="granite", time_step_limit=limit).recurrent is not None
