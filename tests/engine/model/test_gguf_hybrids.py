"""A GGUF file of a hybrid says what the folder says that it was made from.

The files are written as llama.cpp's converter writes them, under the names and keys of the package
gguf. Stops: a norm without its one, value heads in another order, a row of z taken for one of v, an
expert read from its neighbour's rows.
"""

from dataclasses import replace

import pytest
import torch

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.llm import LLM
from engine.load.gguf.vocabulary import SPLITTINGS
from engine.methods.full import Full
from tests.tools.gguf_files import TOKENS, add_key, blocks_of, keys_of
from tools.families.models import make

gguf = pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
pytest.importorskip("transformers")

KINDS = {"qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe", "qwen3-next": "qwen3next"}
SIZES = dict(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
MIXED = dict(moe_intermediate_size=32, shared_expert_intermediate_size=64)
EXACT = dict(device="cpu", method=Full(), max_context=256, dtype="float32", backend="reference")
IDS = list(range(5, 85))


def made(folder, name, **more):
    """Write a small folder; (config.json's fields, weights by name, the model)."""
    sizes = SIZES if name == "qwen3.5" else {**SIZES, **MIXED}
    if name == "qwen3-next":
        sizes = {**sizes, "mlp_only_layers": []}
    theirs = make(folder, name, **{**sizes, **more})
    weights = {key: value.detach() for key, value in theirs.state_dict().items()}
    return theirs.config.to_dict(), weights, theirs


def tiled(tensor, dim, config):
    """Value heads of every key head together -> the first of every key head, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    group, width = values // keys, tensor.shape[dim] // values
    order = [
        (key * group + r) * width + i
        for r in range(group)
        for key in range(keys)
        for i in range(width)
    ]
    return tensor.index_select(dim, torch.tensor(order))


def as_stored(architecture, config, weights, old=False):
    """{name in the file: tensor}, as the converter makes them of a folder's. old: Qwen3-Next's
    projections in the form of older files.
    """
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    keys, dk, dv = (
        config[f"linear_{n}"] for n in ("num_key_heads", "key_head_dim", "value_head_dim")
    )
    wide, found = config["linear_num_value_heads"] // keys * dv, {}

    def put(name, tensor):
        plain = name if name.endswith(("A_log", "experts")) else name
        stored = names.get_name(plain, (".weight", ".bias"))
        assert stored is not None, name
        found[stored] = tensor

    for name, w in weights.items():
        if name.endswith("A_log"):
            w = -w.exp()
        elif name.endswith("conv1d.weight"):
            w = w.squeeze(1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            w = w + 1
        if architecture != "qwen3next" and "linear_attn" in name:
            if "in_proj_qkv" in name or "conv1d" in name:
                w = torch.cat((w[: 2 * keys * dk], tiled(w[2 * keys * dk :], 0, config)))
            elif "out_proj" in name:
                w = tiled(w, 1, config)
            elif "linear_attn.norm" not in name:
                w = tiled(w, 0, config)
        if name.endswith("dt_bias"):
            put(name.replace("dt_bias", "dt_proj.bias"), w)
        elif name.endswith("in_proj_qkvz.weight") and not old:
            parts = w.view(keys, -1, w.shape[1]).split([dk, dk, wide, wide], 1)
            q, k, v, z = (part.reshape(-1, w.shape[1]) for part in parts)
            layer = name.split(".")[2]
            found[f"blk.{layer}.attn_qkv.weight"] = torch.cat((q, k, v))
            found[f"blk.{layer}.attn_gate.weight"] = z
        elif name.endswith("experts.gate_up_proj"):
            half = w.shape[1] // 2
            put(name.replace("gate_up_proj", "gate_proj.weight"), w[:, :half])
            put(name.replace("gate_up_proj", "up_proj.weight"), w[:, half:])
        elif name.endswith("experts.down_proj"):
            put(f"{name}.weight", w)
        elif name.endswith("in_proj_qkvz.weight"):
            found[f"blk.{name.split('.')[2]}.ssm_in.weight"] = w
        else:
            put(name, w)
    return found


def keys(architecture, config, **more):
    """The keys of a file, named by the package."""
    arch, ssm, llm = architecture, gguf.Keys.SSM, gguf.Keys.LLM
    names = {
        ssm.CONV_KERNEL: config["linear_conv_kernel_dim"],
        ssm.STATE_SIZE: config["linear_key_head_dim"],
        ssm.GROUP_COUNT: config["linear_num_key_heads"],
        ssm.TIME_STEP_RANK: config["linear_num_value_heads"],
        ssm.INNER_SIZE: config["linear_num_value_heads"] * config["linear_value_head_dim"],
        llm.FULL_ATTENTION_INTERVAL: 4,
        llm.CONTEXT_LENGTH: config["max_position_embeddings"],
        llm.EMBEDDING_LENGTH: config["hidden_size"],
        llm.BLOCK_COUNT: config["num_hidden_layers"],
        gguf.Keys.Attention.HEAD_COUNT: config["num_attention_heads"],
        gguf.Keys.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        gguf.Keys.Attention.KEY_LENGTH: config["head_dim"],
        gguf.Keys.Attention.VALUE_LENGTH: config["head_dim"],
        gguf.Keys.Attention.LAYERNORM_RMS_EPS: config["rms_norm_eps"],
        gguf.Keys.Rope.FREQ_BASE: float(config["rope_parameters"]["rope_theta"]),
        gguf.Keys.Rope.DIMENSION_COUNT: config["head_dim"] // 4,
    }
    if config.get("num_experts"):
        names |= {
            llm.EXPERT_COUNT: config["num_experts"],
            llm.EXPERT_USED_COUNT: config["num_experts_per_tok"],
            llm.EXPERT_FEED_FORWARD_LENGTH: config["moe_intermediate_size"],
            llm.EXPERT_SHARED_FEED_FORWARD_LENGTH: config["shared_expert_intermediate_size"],
        }
    if config.get("intermediate_size"):
        names[llm.FEED_FORWARD_LENGTH] = config["intermediate_size"]
    return {name.format(arch=arch): value for name, value in names.items()} | more


def write(path, architecture, config, weights, kind="F32", old=False, extra=None, **more):
    """Write a file; matrices whose rows the kind's blocks divide are of that kind."""
    writer, quant = gguf.GGUFWriter(path, architecture), gguf.GGMLQuantizationType[kind]
    for name, value in keys(architecture, config, **more).items():
        add_key(writer, name, value)
    words = replace_tokenizer()
    for name, value in words.items():
        add_key(writer, name, value)
    stored = as_stored(architecture, config, weights, old)
    for name, tensor in {**stored, **(extra or {})}.items():
        rows = tensor.contiguous().numpy()
        packed = kind != "F32" and tensor.dim() > 1 and "ssm_conv1d" not in name
        packed = packed and "gate_inp" not in name
        if packed:
            flat = blocks_of(rows.reshape(-1, rows.shape[-1]), quant)
            rows = flat.reshape(*rows.shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=quant if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def replace_tokenizer():
    """The tokenizer's keys."""
    from tests.builders import tiny_config

    plain = keys_of(replace(tiny_config(), vocab_size=len(TOKENS)))
    found = {name: value for name, value in plain.items() if name.startswith("tokenizer.")}
    return {**found, "tokenizer.ggml.pre": "qwen35"}


def logits(path, **settings):
    llm = LLM(str(path), **{**EXACT, **settings})
    assert llm.plan().bytes_of("weights") == llm.model.nbytes
    with llm.session() as session:
        found = [session.prefill(IDS).flatten().clone()]
        return llm, torch.stack([*found, *(session.decode(t).flatten().clone() for t in (7, 8, 9))])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name, old", [*((name, False) for name in KINDS), ("qwen3-next", True)])
def test_a_file_says_what_its_folder_says(tmp_path, name, old):
    config, weights, _ = made(tmp_path / "folder", name)
    write(tmp_path / "m.gguf", KINDS[name], config, weights, old=old)
    file, found = logits(tmp_path / "m.gguf")
    folder, expected = logits(tmp_path / "folder")
    assert file.config.recurrent.layers == (0, 1, 2, 4, 5, 6)
    assert relative(found, expected) < 1e-5
    assert file.config.parameters == folder.config.parameters


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", KINDS)
def test_packed_blocks_are_what_they_mean(tmp_path, name, kind):
    config, weights, theirs = made(tmp_path / "folder", name)
    for key, w in weights.items():  # blocks of 32 move as a whole, so they round alike everywhere
        if w.dim() > 1 and not key.endswith(
            ("conv1d.weight", "mlp.gate.weight", "expert_gate.weight")
        ):
            quant = gguf.GGMLQuantizationType[kind]
            blocks = blocks_of(w.reshape(-1, w.shape[-1]).numpy(), quant)
            weights[key] = torch.from_numpy(gguf.quants.dequantize(blocks, quant)).view(w.shape)
    theirs.load_state_dict(weights)
    theirs.save_pretrained(tmp_path / "folder")
    write(tmp_path / "m.gguf", KINDS[name], config, weights, kind)
    folder, expected = logits(tmp_path / "folder")
    llm, packed = logits(tmp_path / "m.gguf")
    assert relative(packed, expected) < 1e-4
    assert relative(logits(tmp_path / "m.gguf", weights="float")[1], expected) < 1e-4
    assert llm.model.nbytes < 0.7 * folder.model.nbytes
    # in the forms that this machine runs
    assert relative(logits(tmp_path / "m.gguf", backend="auto")[1], expected) < 0.05


def test_heads_that_predict_several_tokens_are_left_unread(tmp_path):
    config, weights, _ = made(tmp_path / "folder", "qwen3.5")
    extra = {
        "blk.8.nextn.eh_proj.weight": torch.randn(64, 128),
        "blk.8.attn_norm.weight": torch.ones(64),
    }
    counts = {"qwen35.block_count": 9, "qwen35.nextn_predict_layers": 1}
    write(tmp_path / "m.gguf", "qwen35", config, weights, extra=extra, **counts)
    file, found = logits(tmp_path / "m.gguf")
    assert file.config.num_layers == 8
    assert relative(found, logits(tmp_path / "folder")[1]) < 1e-5


def test_a_file_without_sense_is_one_line(tmp_path):
    config, weights, _ = made(tmp_path / "folder", "qwen3.5")
    path = tmp_path / "m.gguf"
    positive = {"blk.0.ssm_a": torch.ones(6)}
    bad = [
        ({"qwen35.ssm.inner_size": 191}, None, BadCheckpoint, "a multiple of ssm.time_step_rank"),
        ({"qwen35.ssm.group_count": 3}, None, BadCheckpoint, "blk.0.ssm_conv1d.weight"),
        ({"qwen35.expert_count": 4}, None, UnsupportedCheckpoint, "expert_count: found 4"),
        ({"qwen35.nextn_predict_layers": 8}, None, BadCheckpoint, "nextn_predict_layers"),
        ({}, positive, BadCheckpoint, "ssm_a: found NaN or infinity"),
    ]
    for more, extra, kind, words in bad:
        path.unlink(missing_ok=True)
        write(path, "qwen35", config, weights, extra=extra, **more)
        with pytest.raises(kind, match=words) as error:
            LLM(str(path), **EXACT)
        assert "\n" not in str(error.value)


def test_words_split_as_transformers_does():
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert "%s" not in PRETOKENIZE_REGEX
    way = SPLITTINGS["qwen35"]
    assert way.words % way.digits == PRETOKENIZE_REGEX
    marked = "e\u0301cole ca\u0323o \u0915\u093f\u0924\u093e\u092c 12"
    found = [word for word, _ in way.pre_tokenizer().pre_tokenize_str(marked)]
    plain = SPLITTINGS["qwen2"].pre_tokenizer().pre_tokenize_str(marked)
    assert len(found) == 6 < len(plain)
