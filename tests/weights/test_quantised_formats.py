"""Checkpoints that come quantised compute what their tensors mean, the plan counts what is held,
and what contradicts itself ends in one line.
"""

import json

import pytest
import torch

from engine.base.errors import BadCheckpoint, EngineError, SettingError
from engine.chat import main
from engine.llm import LLM
from engine.methods.full import Full
from tests.builders import tiny_llm
from tests.no_compiler import no_compiler
from tests.tiny_model import tokenizer
from tests.weights.quantised_files import FORMATS, words, write

IDS = list(range(3, 50))
CPU = dict(device="cpu", method=Full(), max_context=128)
UP = "model.layers.0.mlp.up_proj"


def opened(folder, **settings):
    return LLM(str(folder), **{**dict(dtype="float32", backend="reference"), **CPU, **settings})


def logits(llm):
    with llm.session() as session:
        first = session.prefill(IDS).flatten().clone()
        return torch.stack([first, session.decode(7).flatten().clone()])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_computes_what_its_tensors_mean(tmp_path, name):
    config, weights = write(tmp_path / "m", name)
    expected = logits(tiny_llm(Full(), config, weights))
    llm = opened(tmp_path / "m")
    assert llm.plan().bytes_of("weights") == llm.model.nbytes
    assert relative(logits(llm), expected) < 3e-6
    assert llm.model.layers[0].down.stored is not None  # in few bits, not dequantised
    # as this machine multiplies them
    fast = opened(tmp_path / "m", backend="auto", dtype="bfloat16")
    whole = opened(tmp_path / "m", backend="auto", dtype="bfloat16", weights="float")
    assert fast.plan().bytes_of("weights") == fast.model.nbytes
    if fast.model.layers[0].down.form != "digits":  # which pads 128 columns to 512
        assert fast.model.nbytes < whole.model.nbytes
    error = relative(logits(whole), expected)
    assert relative(logits(fast), expected) < max(3 * error, 0.04)
    note = next(note for part, _, note in fast.plan().items if part == "weights")
    assert "products" in note
    with no_compiler():
        alone = opened(tmp_path / "m", backend="auto", dtype="bfloat16")
        assert alone.plan().bytes_of("weights") == alone.model.nbytes
        assert alone.model.layers[0].down.form != "native"
        assert relative(logits(alone), expected) < max(3 * error, 0.04)
    with pytest.raises(SettingError, match="int4.*quantised already"):
        opened(tmp_path / "m", weights="int4", load=False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_chats(tmp_path, name, capsys):
    config, _ = write(tmp_path / "m", name)
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(tokenizer(config.vocab_size)))
    chat = ["--model", str(tmp_path / "m"), "--device", "cpu", "-p", "abc", "-n", "3"]
    assert main([*chat, "--ignore-eos"]) == 0
    assert capsys.readouterr().out.strip()
    assert main([*chat, "--plan"]) == 0
    assert "products" in capsys.readouterr().out


def test_act_order_that_differs_within_a_fused_matrix_is_undone(tmp_path):
    """q, k and v of other inputs' orders cannot share one permutation."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(4)).to(torch.int32)

    def turn(stored):
        base = "model.layers.0.self_attn.k_proj"
        stored[base + ".qweight"] = words(
            unpacked(stored[base + ".qweight"])[order.long()].t(), 4
        ).t()
        stored[base + ".g_idx"] = stored[base + ".g_idx"][order.long()]
        config_order.append(order)

    config_order = []
    config, weights = write(tmp_path / "m", "gptq, act-order", turn)
    key = "model.layers.0.self_attn.k_proj.weight"
    weights[key] = weights[key][:, config_order[0].long()]
    llm = opened(tmp_path / "m")
    assert llm.model.layers[0].qkv.kind == "int8" and llm.model.layers[0].o.kind == "int4"
    assert relative(logits(llm), logits(tiny_llm(Full(), config, weights))) < 0.03
    assert llm.plan().bytes_of("weights") == llm.model.nbytes


def unpacked(packed):
    """int32 [I / 8, O] -> [I, O]."""
    return torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)


def put(name, value):
    return lambda stored: stored.__setitem__(UP + name, value)


def spoil(name, value):
    def change(stored):
        stored[UP + name].view(-1)[3] = value

    return change


def drop(name):
    return lambda stored: stored.pop(UP + name)


def scheme(**changes):
    weights = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    return {"config_groups": {"group_0": {"weights": weights | changes}}}


def method(name, **more):
    return dict(quant_method=name, **more)


NAN, INF = float("nan"), float("inf")
# (format, change of tensors, change of settings, words of the line)
BROKEN = {
    "exl2": ("gptq", None, method("exl2"), "not supported yet: exl2"),
    "hqq": ("gptq", None, method("hqq"), "not supported yet: hqq"),
    "mxfp4": ("gptq", None, method("mxfp4"), "not supported yet: mxfp4"),
    "aqlm": ("gptq", None, method("aqlm"), "not supported yet: aqlm"),
    "unnamed": ("gptq", None, method(None), "not supported yet: unnamed"),
    "2 bits": ("gptq", None, dict(bits=2), "bits: found 2, expected one of 4, 8"),
    "bits as text": ("gptq", None, dict(bits="4"), "bits: found 4, expected one of 4, 8"),
    "gptq version": ("gptq", None, dict(checkpoint_format="gptq_v9"), "found gptq_v9"),
    "dynamic": ("gptq", None, dict(dynamic={"-:x": {}}), "dynamic: found"),
    "group of 0": ("gptq", None, dict(group_size=0), "group_size: found 0"),
    "group huge": ("awq", None, dict(group_size=1 << 40), "group_size: found 1099511627776"),
    "group does not divide": ("gptq", None, dict(group_size=48), "a multiple of its groups of 48"),
    "group of others": ("awq", None, dict(group_size=64), "qzeros: found I32"),
    "sym that is not": ("gptq", None, dict(sym=True), "qzeros: found zeros from"),
    "order not said": ("gptq, act-order", None, dict(desc_act=False), "desc_act is false"),
    "g_idx outside": (
        "gptq, act-order",
        put(".g_idx", torch.full((128,), 9, dtype=torch.int32)),
        None,
        "g_idx: found other groups",
    ),
    "g_idx negative": ("gptq, act-order", spoil(".g_idx", -1), None, "g_idx: found other groups"),
    "words short": (
        "gptq",
        put(".qweight", torch.zeros(15, 128).int()),
        None,
        "found I32 [15, 128]",
    ),
    "words as bytes": ("awq", put(".qweight", torch.zeros(128, 16).byte()), None, "found U8"),
    "no zeros": ("awq", drop(".qzeros"), None, "up_proj.qzeros: found nothing"),
    "awq gemv": ("awq", None, dict(version="gemv"), "version: found gemv"),
    "awq without zeros": ("awq", None, dict(zero_point=False), "zero_point: found False"),
    "scale NaN": ("awq", spoil(".scales", NAN), None, "NaN or infinity among its"),
    "scale infinite": ("w4a16", spoil(".weight_scale", INF), None, "NaN or infinity among its"),
    "scale 0": ("w8a8", spoil(".weight_scale", 0.0), None, "found a scale of 0"),
    "scale 0 of fp8": ("deepseek", spoil(".weight_scale_inv", 0.0), None, "found a scale of 0"),
    "fp8 NaN": (
        "deepseek",
        put(".weight", torch.full((128, 128), NAN).to(torch.float8_e4m3fn)),
        None,
        "found NaN",
    ),
    "no block size": (
        "deepseek",
        None,
        dict(weight_block_size=None),
        "weight_block_size: found nothing",
    ),
    "block of 0": ("deepseek", None, dict(weight_block_size=[0, 128]), "expected two sizes"),
    "e5m2": ("deepseek", None, dict(fmt="e5m2"), "fmt: found e5m2"),
    "scheme missing": ("w4a16", None, dict(config_groups=None), "config_groups: found nothing"),
    "scheme named": (
        "w4a16",
        None,
        dict(config_groups={"W4A16": ["Linear"]}),
        "expected a scheme in full",
    ),
    "two schemes": (
        "w4a16",
        None,
        {"config_groups": {**scheme()["config_groups"], "b": {"weights": dict(num_bits=8)}}},
        "found 2 schemes",
    ),
    "3 bits": ("w4a16", None, scheme(num_bits=3), "num_bits: found 3"),
    "sparse": ("w4a16", None, dict(format="marlin-24"), "format: found marlin-24"),
    "nvfp4": ("w4a16", None, dict(format="nvfp4-pack-quantized"), "found nvfp4-pack-quantized"),
    "4 bits unpacked": ("w4a16", None, dict(format="int-quantized"), "the one of 4-bit int"),
    "bank in few bits": ("w4a16", None, dict(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "old act-order": ("w4a16", put(".weight_g_idx", torch.zeros(128).int()), None, "weight_g_idx"),
    "shape lies": ("w4a16", put(".weight_shape", torch.tensor([9, 9])), None, "found [9, 9]"),
    "weight beside": ("w4a16", put(".weight", torch.zeros(128, 128)), None, "no such tensor"),
    "table NaN": ("nf4", spoil(".weight.quant_map", NAN), None, "in its table"),
    "state no JSON": (
        "nf4",
        put(".weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte()),
        None,
        "quant_state: found no JSON",
    ),
    "state huge": (
        "nf4",
        put(".weight.quant_state.bitsandbytes__nf4", torch.zeros(5000).byte()),
        None,
        "found U8 [5000]",
    ),
    "state of another block": (
        "nf4",
        put(
            ".weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(json.dumps({"blocksize": 128}).encode())).byte(),
        ),
        None,
        "quant_state.blocksize: found 128",
    ),
    "nested not said": (
        "nf4, nested",
        None,
        dict(bnb_4bit_use_double_quant=False),
        "absmax: found U8",
    ),
    "neither 4 nor 8": ("nf4", None, dict(load_in_4bit=False), "load_in_4bit or load_in_8bit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_contradiction_ends_in_one_line(tmp_path, name):
    kind, change, settings, expected = BROKEN[name]
    write(tmp_path / "m", kind, change, settings)
    with pytest.raises(EngineError) as caught:
        opened(tmp_path / "m")
    line = str(caught.value)
    assert expected in line and "\n" not in line and str(tmp_path) in line and len(line) < 500


def test_blocks_across_rows_are_refused(tmp_path):
    write(tmp_path / "m", "nf4", intermediate_size=96)
    with pytest.raises(EngineError, match="rows of 96, expected a multiple of its blocks of 64"):
        opened(tmp_path / "m")


def test_float_folders_are_read_as_before(tmp_path):
    _, weights = write(tmp_path / "m", "w8a8", settings=None)
    data = json.loads((tmp_path / "m/config.json").read_text())
    del data["quantization_config"]
    (tmp_path / "m/config.json").write_text(json.dumps(data))
    with pytest.raises(EngineError, match="quantised formats not supported yet: found dtype I8"):
        opened(tmp_path / "m")
    assert issubclass(BadCheckpoint, EngineError) and weights


def test_the_formats_own_package_means_the_same():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(values, 4), words(values.int() + 8, 4))
