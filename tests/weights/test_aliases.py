"""The alias table: its figures are those of the models' own shapes, and near names are found."""

import re

import pytest

from engine import LLM
from engine.model.config.config import ModelConfig
from weights.aliases import ALIASES, suggest, table
from weights.published_filters import PUBLISHED
from weights.shapes import config_of

# hidden, intermediate, layers, heads, kv heads, head_dim, vocab, tied: from the models' config.json
# on the hub
SHAPES = {
    "llama-3-8b-262k": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3-8b-1048k": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "yi-6b-200k": (4096, 11008, 32, 32, 4, 128, 64000, False),
    "yi-9b-200k": (4096, 11008, 48, 32, 4, 128, 64000, False),
    "yi-34b-200k": (7168, 20480, 60, 56, 8, 128, 64000, False),
    "mistral-7b": (4096, 14336, 32, 32, 8, 128, 32768, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, True),
}
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


def checked(alias, config):
    """The figures of an alias; its filter layers are layers that attend to everything."""
    assert set(alias.filter_layers or ()) <= set(config.seeing_layers)
    assert alias.params == config.parameters and alias.bytes_bf16 == 2 * config.parameters
    layers = alias.filter_layers or ()
    assert all(a < b for a, b in zip(layers, layers[1:], strict=False)) and all(
        0 <= x < config.num_layers for x in layers
    )


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_follow_from_the_shapes(name):
    alias = ALIASES[name]
    shape = dict(zip(KEYS, SHAPES[name], strict=True))
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": alias.context,
            **shape,
        }
    )
    checked(alias, config)


@pytest.mark.parametrize("name", ALIASES)
def test_the_plan_of_every_alias_follows_from_its_shape(name):
    """The parameters are those of the models' cards; the rope of a long preset reaches its
    context.
    """
    alias = ALIASES[name]
    config = ModelConfig.from_dict(config_of(alias), rope=alias.rope)
    checked(alias, config)
    assert config.context_limit == alias.context
    base = [a for a in ALIASES.values() if a.hub_id == alias.hub_id and a.rope is None]
    if alias.rope is not None:
        short = ModelConfig.from_dict(config_of(base[0]), rope=alias.rope)
        assert short.context_limit == alias.context > base[0].context


def test_published_filter_layers():
    found = {name: alias.filter_layers for name, alias in ALIASES.items() if alias.filter_layers}
    assert found == {
        "llama-3-8b-262k": (2, 8, 18),
        "llama-3-8b-1048k": (2, 8, 18),
        "yi-9b-200k": (6, 11, 30),
        "llama-3.1-70b": (4, 19, 41),
        "llama-3.1-8b": (0, 2, 7, 13, 16, 26),
        "qwen2.5-7b-1m": (0, 2, 4, 11, 16, 22),
        "qwen3-4b-2507": (0, 1, 3, 9, 13, 16, 21, 28),
        "qwen3-8b": (0, 2, 7, 14, 23),
        "qwen3-8b-128k": (0, 2, 7, 14, 23),
        "qwen3.6-27b": (3, 11, 23, 31, 35, 47, 59),
        "smollm2-135m": (0, 3, 5, 7, 14, 17, 20, 24),
    }
    hub_ids = {alias.hub_id for alias in ALIASES.values()}
    assert set(PUBLISHED) <= hub_ids
    for known in PUBLISHED.values():
        assert known.source and "\n" not in known.told
        assert known.found_here or known.told.endswith("not checked here")


def test_notes_say_what_is_gated_and_nothing_that_has_changed():
    """Who publishes with a licence to accept; and that weights in few bits run."""
    for alias in ALIASES.values():
        # Gemma's since 4 are under Apache 2.0
        gated = alias.hub_id.startswith(("meta-llama/", "google/gemma-2", "google/gemma-3"))
        assert alias.note.startswith("gated") == gated, alias
        assert "quantisation" not in alias.note
    assert "--weights int4 in 80 GB" in ALIASES["llama-3.1-70b"].note
    given = dict(weights="int4", device="cuda", imagined_gpu=80 * 10**9, load=False)
    assert LLM("llama-3.1-70b", max_context=32768, **given).plan().fits
    assert all("MXFP4" in ALIASES[f"gpt-oss-{size}"].note for size in ("20b", "120b"))


def test_names_are_lower_case_hub_ids_are_well_formed():
    for name, alias in ALIASES.items():
        assert name == name.lower() and "/" not in name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", alias.hub_id)


def test_table_prints_everything():
    lines = table().splitlines()
    assert len(lines) == len(ALIASES) + 1
    for line, (name, alias) in zip(lines[1:], ALIASES.items(), strict=True):
        assert (
            line.startswith(name)
            and alias.hub_id in line
            and str(alias.context) in line
            and line.endswith(alias.note)
        )
    assert (
        "2,8,18" in lines[1]
        and "16.1 GB" in lines[1]
        and not any(line != line.rstrip() for line in lines)
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama3-8b-262k", "llama-3-8b-262k"),
        ("Llama_3_8B_262K", "llama-3-8b-262k"),
        ("yi9b", "yi-9b-200k"),
        ("yi-9b", "yi-9b-200k"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("llama3.2-1b", "llama-3.2-1b"),
        ("mistral", "mistral-7b"),
        ("01-ai/Yi-9B-200k-x", "01-ai/Yi-9B-200K"),
        ("gradientai/Llama-3-8B-Instruct-262", "gradientai/Llama-3-8B-Instruct-262k"),
    ],
)
def test_near_names(typed, meant):
    found = suggest(typed)
    assert found[0] == meant and len(found) <= 3 and len(set(found)) == len(found)


@pytest.mark.parametrize("typed", ["", "zzzz", "   ", "/", "\0", "x" * 100000])
def test_nothing_near(typed):
    assert suggest(typed) == []
