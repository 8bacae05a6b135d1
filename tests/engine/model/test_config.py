"""engine/model/config/config.py: accepted means what transformers means by it; senseless is refused
in one useful line.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.model.config.config import ModelConfig
from engine.model.config.families import BY_ARCHITECTURE
from engine.model.config.rope_config import Rope
from tests.builders import POCKET

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
GONE = object()
ROOT = Path(__file__).resolve().parents[3]


def config(generation=None, **changes):
    data = {key: value for key, value in {**BASE, **changes}.items() if value is not GONE}
    return ModelConfig.from_dict(data, "folder/config.json", generation)


def test_every_field_of_a_plain_config():
    parsed = config()
    assert parsed == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_positions=256,
        rope=Rope("default", 10000.0),
        tied_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
        model_type="llama",
    )
    assert (parsed.group, parsed.q_size, parsed.kv_size, parsed.kv_bytes(2)) == (2, 64, 32, 128)
    assert hash(parsed) == hash(config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.num_layers = 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_parameter_count_is_that_of_transformers(tied, attention_bias, mlp_bias):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    changes = {
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "head_dim": 24,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, **changes}))
    assert config(**changes).parameters == sum(p.numel() for p in model.parameters())


def test_known_model_sizes():
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    parsed = config(**shape, max_position_embeddings=262144, rope_theta=283461213.0)
    assert parsed.parameters == 8_030_261_248  # the figure of the model's own card
    assert parsed.kv_bytes(2) * 32 == 131072  # 128 KiB of K and V per token


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": GONE}, {"num_kv_heads": 4}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"num_key_value_heads": 1}, {"num_kv_heads": 1}),
        ({"head_dim": None}, {"head_dim": 16}),
        ({"head_dim": 32}, {"head_dim": 32}),
        (
            {"hidden_size": 60, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 8},
            {"head_dim": 8, "hidden_size": 60},
        ),
        (
            {"architectures": ["YiForCausalLM"], "model_type": "Yi"},
            {"architecture": "YiForCausalLM", "model_type": "Yi"},
        ),
        ({"architectures": GONE, "model_type": "Yi"}, {"architecture": "YiForCausalLM"}),
        ({"architectures": GONE}, {"architecture": "LlamaForCausalLM"}),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": None},
            {"architecture": "MistralForCausalLM"},
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": None,
                "attention_bias": True,
            },
            {"attention_bias": False},
        ),
        ({"torch_dtype": GONE}, {"dtype": "float32"}),
        ({"torch_dtype": GONE, "dtype": "float16"}, {"dtype": "float16"}),
        ({"dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"hidden_act": "swish"}, {}),
        ({"quantization_config": None}, {}),
        (
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
            {"tied_embeddings": True, "attention_bias": True, "mlp_bias": True},
        ),
        ({"eos_token_id": [2, 5, 2]}, {"eos_token_ids": (2, 5)}),
        ({"eos_token_id": GONE}, {"eos_token_ids": ()}),
        ({"bos_token_id": None}, {"bos_token_id": None}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"unknown_field": 1}, {}),
    ],
)
def test_accepted_forms(changes, expected):
    parsed = config(**changes)
    assert {key: getattr(parsed, key) for key in expected} == expected


def test_generation_config_comes_first():
    assert config({"eos_token_id": [9, 4]}).eos_token_ids == (9, 4)
    assert config({"eos_token_id": 7}).eos_token_ids == (7,)
    assert config({"eos_token_id": None}).eos_token_ids == (2,)
    assert config({}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        *(
            ({key: value}, key, ["expected an integer"])
            for key in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "max_position_embeddings",
            )
            for value in (GONE, None, 0, -3, 64.0, "64", True, [64], 10**30)
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads", ["found 3", "num_attention_heads = 4"]),
        ({"num_key_value_heads": 8}, "num_key_value_heads", ["found 8", "divisor"]),
        ({"num_key_value_heads": 0}, "num_key_value_heads", ["found 0"]),
        ({"hidden_size": 66}, "num_attention_heads", ["found 4", "hidden_size = 66", "head_dim"]),
        ({"hidden_size": 60}, "head_dim", ["found 15", "even"]),
        ({"head_dim": 7}, "head_dim", ["found 7", "even"]),
        ({"head_dim": 0}, "head_dim", ["found 0"]),
        (
            {"hidden_size": 1 << 20, "num_attention_heads": 1, "num_key_value_heads": 1},
            "hidden_size / num_attention_heads",
            ["1024"],
        ),
        *(
            ({"rms_norm_eps": value}, "rms_norm_eps", ["expected a number"])
            for value in (GONE, 0, -1e-5, math.nan, math.inf, "1e-5", True, 5.0)
        ),
        *(
            ({"rope_theta": value}, "rope_theta", ["expected a number"])
            for value in (math.nan, math.inf, 0, -1.0, 1, "x", 1e30, False)
        ),
        ({"rope_scaling": [1]}, "rope_scaling", ["found [1]"]),
        ({"rope_parameters": "yarn"}, "rope_parameters", ["found yarn"]),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.type", ["found 3"]),
        *(
            (
                {"rope_scaling": {"type": kind}},
                "rope_scaling.factor",
                ["found nothing", "expected a number"],
            )
            for kind in ("linear", "dynamic")
        ),
        *(
            (
                {"rope_scaling": {"type": "linear", "factor": value}},
                "rope_scaling.factor",
                ["expected a number"],
            )
            for value in (0, 0.5, -2.0, math.nan, math.inf, "4", True)
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "rope_scaling.low_freq_factor",
            ["nothing"],
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "rope_scaling.high_freq_factor",
            ["found 4.0", "more than low_freq_factor = 4"],
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 0,
                }
            },
            "rope_scaling.original_max_position_embeddings",
            ["found 0"],
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 1.0,
                    "beta_slow": 32.0,
                }
            },
            "rope_scaling.beta_fast",
            ["32"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}},
            "rope_scaling.truncate",
            ["true or false"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 512}},
            "rope_parameters.original_max_position_embeddings",
            ["found 512", "256"],
        ),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "head_dim",
            ["found 2", "dynamic"],
        ),
        ({"architectures": []}, "architectures", ["found []"]),
        ({"architectures": "LlamaForCausalLM"}, "architectures", ["a list"]),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", ["found 1", "true or false"]),
        ({"attention_bias": "no"}, "attention_bias", ["found no"]),
        ({"mlp_bias": []}, "mlp_bias", ["true or false"]),
        ({"hidden_act": 5}, "hidden_act", ["found 5", "a string"]),
        ({"torch_dtype": 16}, "torch_dtype", ["found 16"]),
        ({"bos_token_id": 128}, "bos_token_id", ["found 128", "127"]),
        ({"eos_token_id": 128}, "eos_token_id", ["found 128", "vocab_size 128"]),
        ({"eos_token_id": [2, -1]}, "eos_token_id", ["found -1"]),
        ({"eos_token_id": 2.0}, "eos_token_id", ["found 2.0"]),
        ({"eos_token_id": "</s>"}, "eos_token_id", ["found </s>"]),
    ],
)
def test_senseless_fields_are_named(changes, key, words):
    with pytest.raises(BadCheckpoint) as caught:
        config(**changes)
    line = str(caught.value)
    assert line.startswith(f"folder/config.json: {key}: ") and "\n" not in line
    assert all(word in line for word in ["found", "expected", *words]), line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ["architectures", "GPT2LMHeadModel", "LlamaForCausalLM"],
        ),
        (
            {"architectures": ["Qwen2MoeForCausalLM"]},
            ["found Qwen2MoeForCausalLM", "the nearest is Qwen3MoeForCausalLM", "docs/MODELS.md"],
        ),
        (
            {"architectures": GONE, "model_type": "granitemoe"},
            ["model_type granitemoe", "the nearest is GraniteForCausalLM"],
        ),
        ({"architectures": GONE, "model_type": "gpt2"}, ["architectures", "gpt2"]),
        ({"architectures": GONE, "model_type": GONE}, ["architectures", "found nothing"]),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ["quantised formats not supported yet: gptq"],
        ),
        (
            {"quantization_config": {"load_in_8bit": True}},
            ["quantised formats not supported yet: unnamed"],
        ),
        ({"quantization_config": "awq"}, ["not supported yet: awq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "found gelu", "expected silu"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096", "null"]),
        ({"architectures": ["MistralForCausalLM"]}, ["sliding_window", "4096 for Mistral"]),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            ["rope_scaling.type", "longrope", "yarn"],
        ),
        ({"rope_parameters": {"rope_type": "su"}}, ["rope_parameters.rope_type", "found su"]),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["rope_parameters.full_attention", "one rope"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ["rope_parameters.partial_rotary_factor"],
        ),
        ({"torch_dtype": "float64"}, ["torch_dtype", "float64", "bfloat16"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
    ],
)
def test_sound_but_unsupported(changes, words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        config(**changes)
    line = str(caught.value)
    assert line.startswith("folder/config.json: ") and "\n" not in line
    assert all(word in line for word in words), line


def test_the_page_that_an_unknown_architecture_is_sent_to_lists_all() -> None:
    page = (ROOT / "docs" / "MODELS.md").read_text()
    missing = [name for name in BY_ARCHITECTURE if f"`{name}`" not in page]
    assert not missing and len(BY_ARCHITECTURE) >= 33


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({}, Rope("default", 10000.0)),
        ({"rope_scaling": None, "rope_theta": 5e6}, Rope("default", 5e6)),
        ({"rope_scaling": {}, "rope_theta": 500000}, Rope("default", 500000.0)),
        ({"rope_scaling": {"type": "default"}}, Rope("default", 10000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, Rope("linear", 10000.0, 4.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, Rope("linear", 10000.0, 4.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4.0}},
            Rope("linear", 10000.0, 4.0),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, Rope("dynamic", 10000.0, 2.0, 256)),
        (
            {
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 99,
                }
            },
            Rope("dynamic", 10000.0, 2.0, 256),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
            Rope("llama3", 5e5, 8.0, 64, 1.0, 4.0),
        ),
        (
            {
                "rope_scaling": {"rope_type": "llama3", **LLAMA3},
                "original_max_position_embeddings": 128,
            },
            Rope("llama3", 10000.0, 8.0, 128, 1.0, 4.0),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "attention_factor": 1.5,
                    "truncate": False,
                }
            },
            Rope("yarn", 10000.0, 4.0, 256, attention_factor=1.5, truncate=False),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},
            Rope("yarn", 10000.0, 4.0, 64, attention_factor=0.1 * math.log(4) + 1),
        ),
    ],
)
def test_old_and_new_rope_forms_agree(old, expected):
    assert config(**old).rope == expected
    theta = {"rope_theta": old["rope_theta"]} if "rope_theta" in old else {}
    outer = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    assert (
        config(**outer, rope_parameters={**theta, **(old.get("rope_scaling") or {})}).rope
        == expected
    )


def test_precedence_of_the_two_forms():
    both = {
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    }
    assert config(**both).rope == Rope("linear", 1e6, 2.0)
    assert config(**both, rope_scaling={"type": "linear", "factor": 3.0}).rope == Rope(
        "linear", 1e4, 3.0
    )


def test_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert ModelConfig.from_folder(str(tmp_path)).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [500]}))
    line = r"generation_config\.json: eos_token_id: found 500, expected an id from 0 to 127"
    with pytest.raises(BadCheckpoint, match=line):
        ModelConfig.from_folder(tmp_path)


def test_the_shipped_model():
    pocket = ModelConfig.from_folder(POCKET)
    assert (pocket.head_dim, pocket.q_size, pocket.hidden_size, pocket.group) == (64, 256, 256, 2)
    assert pocket.rope.theta == 1e9 and pocket.tied_embeddings and 4 in pocket.eos_token_ids


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "missing"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "found a JSON list, expected an object"),
        (b"[" * 200000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 9999 + b"}", "not valid JSON"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "vocab_size is given twice"),
        (b" " * ((16 << 20) + 1), "expected at most 16777216"),
    ],
)
def test_unreadable_config(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint) as caught:
        ModelConfig.from_folder(tmp_path)
    line = str(caught.value)
    assert str(tmp_path / "config.json") in line and words in line and "\n" not in line


def test_values_too_large_to_print():
    deep: list = []
    deep.append(deep)
    for value in (10**5000, [10**5000], [deep] * 3):
        with pytest.raises(BadCheckpoint, match="hidden_size: found "):
            config(hidden_size=value)


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@example({"rope_scaling": {"\n": {}}})
@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [*BASE, "rope_scaling", "rope_theta", "head_dim", "quantization_config", "dtype"]
        ),
        _junk,
    )
)
def test_any_junk_parses_or_raises_one_line(changes):
    """No value of any field escapes as TypeError, ZeroDivisionError, OverflowError or KeyError."""
    try:
        config(**changes)
    except (BadCheckpoint, UnsupportedCheckpoint) as error:
        assert "\n" not in str(error) and len(str(error)) < 800


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(
        st.sampled_from(
            [
                *LLAMA3,
                "rope_theta",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "attention_factor",
                "truncate",
            ]
        ),
        _junk | st.floats(0, 100) | st.integers(0, 4096),
    ),
)
def test_any_rope_junk_parses_or_raises_one_line(kind, values):
    try:
        rope = config(rope_scaling={"type": kind, **values}).rope
    except (BadCheckpoint, UnsupportedCheckpoint) as error:
        assert "\n" not in str(error)
    else:
        assert (
            math.isfinite(rope.attention_factor) and rope.attention_factor > 0 and rope.factor >= 1
        )


def test_olmo3_stretches_the_rope_of_layers_that_see_all_only():
    # the form of released checkpoints: one rope_theta, one rope_scaling, every fourth layer full
    found = config(
        architectures=["Olmo3ForCausalLM"],
        model_type="olmo3",
        num_hidden_layers=8,
        max_position_embeddings=65536,
        sliding_window=4096,
        rope_theta=5e5,
        rope_scaling=dict(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, beta_fast=32
        ),
    )
    assert found.windows == (4096, 4096, 4096, 0) * 2
    kinds = [rope.kind for rope in found.layer_ropes]
    assert kinds == ["default", "default", "default", "yarn"] * 2
    assert {rope.theta for rope in found.layer_ropes} == {5e5}
