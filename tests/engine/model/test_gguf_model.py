"""A GGUF file runs as it is: what its blocks mean is what is multiplied, and the plan counts what
is held.

Stops: rows of q and k left interleaved, or turned where the architecture does not; a kind held as
another; a fused matrix of unlike parts; an embedding looked up in the wrong row; a plan that counts
floats.
"""

import warnings

import pytest
import torch

from engine.base.errors import BadCheckpoint, SettingError
from engine.chat import main
from engine.llm import LLM
from engine.methods.full import Full
from engine.text.tokenizer import Tokenizer
from kernels.native.library import native
from kernels.quant.linear import QuantisedLinear
from kernels.quant.torch_forms.int4_tiles import tile_rows
from tests.builders import tiny_config, tiny_llm, tiny_weights
from tests.no_compiler import no_compiler
from tests.tools.gguf_files import TOKENS, llama_config, write_llama
from tools.convert.to_gguf import convert
from weights.fingerprint import fingerprint, weights_digest
from weights.gguf.header import KINDS, read_header

pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")

IDS = list(range(5, 60))
CPU = dict(device="cpu", method=Full(), max_context=128)
EXACT = dict(dtype="float32", backend="reference", **CPU)


def opened(path, **settings):
    return LLM(str(path), **{**EXACT, **settings})


def logits(llm):
    with llm.session() as session:
        first = session.prefill(IDS).flatten().clone()
        return torch.stack([first, session.decode(7).flatten().clone()])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def expected_logits(config, meant):
    return logits(tiny_llm(Full(), config, {n: torch.from_numpy(v) for n, v in meant.items()}))


def planned(llm):
    assert llm.plan().bytes_of("weights") == llm.model.nbytes
    return llm.model.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_computes_what_its_blocks_mean(tmp_path, kind):
    config = llama_config(tie_word_embeddings=kind in ("Q8_0", "Q4_K"))
    weights = tiny_weights(config)
    if kind.endswith("_K"):  # the blocks are random bytes: one norm, or the logits are all alike
        weights["model.norm.weight"] *= 10
    meant = write_llama(tmp_path / "m.gguf", config, weights, kind)
    llm, expected = opened(tmp_path / "m.gguf"), expected_logits(config, meant)
    assert llm.config.tied_embeddings is config.tied_embeddings
    assert relative(logits(llm), expected) < 3e-6
    planned(llm)
    # in the forms that this machine runs, in bfloat16, as near as bfloat16 weights are
    fast = opened(tmp_path / "m.gguf", dtype="auto", backend="auto")
    whole = opened(tmp_path / "m.gguf", dtype="auto", backend="auto", weights="float")
    assert fast.dtype == torch.bfloat16 and planned(whole) > planned(fast) or kind in KINDS[:3]
    error = relative(logits(whole), expected)
    assert relative(logits(fast), expected) < max(2.5 * error, 0.03)
    layer = fast.model.layers[1].down
    assert isinstance(layer, QuantisedLinear) is (kind not in KINDS[:3])
    if kind not in KINDS[:3] and tile_rows():
        tiled = "int4pack" if kind[:2] == "Q4" else "pair"
        assert layer.form == ("native" if native() is not None else tiled)
        with no_compiler():
            alone = opened(tmp_path / "m.gguf", dtype="auto", backend="auto")
            assert planned(alone) and alone.model.layers[1].down.form == tiled
            assert relative(logits(alone), expected) < max(2.5 * error, 0.03)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_lie_as_they_are(tmp_path, architecture):
    name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
    config = llama_config(architectures=[name], model_type=architecture, head_dim=64)
    weights = tiny_weights(config)
    path = tmp_path / "m.gguf"
    meant = write_llama(path, config, weights, "Q8_0", architecture)
    llm = opened(path)
    assert llm.config.block == config.block and llm.config.attention_bias is config.attention_bias
    assert relative(logits(llm), expected_logits(config, meant)) < 3e-6


def test_parts_of_unlike_kinds_become_bytes_and_floats_stay(tmp_path):
    config = llama_config()
    kinds = {"attn_v.weight": "Q6_K", "ffn_down.weight": "F16", "token_embd.weight": "Q4_0"}
    meant = write_llama(tmp_path / "m.gguf", config, tiny_weights(config), "Q4_1", kinds=kinds)
    expected = expected_logits(config, meant)
    llm = opened(tmp_path / "m.gguf")
    layer = llm.model.layers[0]
    assert (layer.qkv.kind, layer.o.kind, layer.gate_up.kind) == ("int8", "int4", "int4")
    assert not isinstance(layer.down, QuantisedLinear) and llm.model.embed.kind == "int4"
    assert relative(logits(llm), expected) < 0.04  # int8 in groups of 32 is a rounding
    planned(llm)
    assert relative(logits(opened(tmp_path / "m.gguf", weights="float")), expected) < 3e-6
    planned(opened(tmp_path / "m.gguf", backend="auto", dtype="auto"))


@pytest.mark.parametrize("tied", [False, True])
def test_int8_rounds_again_and_int4_is_refused(tmp_path, tied):
    config = llama_config(tie_word_embeddings=tied)
    meant = write_llama(tmp_path / "m.gguf", config, tiny_weights(config), "Q4_1")
    llm = opened(tmp_path / "m.gguf", weights="int8", backend="auto")
    assert llm.model.layers[0].o.kind == "int8" and llm.model.lm_head.kind == "int8"
    assert relative(logits(llm), expected_logits(config, meant)) < 0.03
    planned(llm)
    with pytest.raises(SettingError, match="int4.*quantised already .GGUF .*auto, float or int8"):
        opened(tmp_path / "m.gguf", weights="int4", load=False)


def test_it_answers_as_the_folder_that_is_converted_from_it(tmp_path):
    config = llama_config()
    path = tmp_path / "m.gguf"
    write_llama(path, config, tiny_weights(config), "Q8_0")
    assert convert(path, tmp_path / "out", "float32")
    file, folder = opened(path), LLM(str(tmp_path / "out"), **EXACT)
    assert file.config == folder.config or file.config.dtype == "bfloat16"
    assert relative(logits(file), logits(folder)) < 3e-6
    words, other = file.tokenizer, folder.tokenizer
    text = "The other thing: 12 rings.\n"
    assert isinstance(words, Tokenizer) and words.encode(text) == other.encode(text)
    dialogue = [{"role": "user", "content": "the <|im_end|>"}]
    assert words.write(dialogue).text == other.write(dialogue).text
    assert words.special_ids == other.special_ids and words.prefix_ids == other.prefix_ids


def test_the_chat_speaks_from_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    config = llama_config()
    path = tmp_path / "m.gguf"
    write_llama(path, config, tiny_weights(config), "Q4_1")
    arguments = ["--model", str(path), "-p", "the ring", "-n", "4", "--device", "cpu"]
    assert main([*arguments, "--ignore-eos"]) == 0
    assert capsys.readouterr().out.strip()
    assert main([*arguments, "--plan"]) == 0
    assert "GGUF" in (found := capsys.readouterr().out) and "Q4_1" in found


def test_fingerprints_are_of_shapes_and_digests_of_weights(tmp_path):
    config = llama_config()
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    write_llama(paths[0], config, tiny_weights(config), "Q8_0")
    write_llama(paths[1], config, tiny_weights(config, seed=1), "Q8_0")
    write_llama(paths[2], config, tiny_weights(config), "Q4_1")
    assert fingerprint(paths[0]) == fingerprint(paths[1]) != fingerprint(paths[2])
    assert len({weights_digest(path) for path in paths}) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(tmp_path, value):
    config = llama_config()
    weights = tiny_weights(config)
    path = tmp_path / "m.gguf"
    write_llama(path, config, weights, "Q8_0")
    raw = bytearray(path.read_bytes())
    at = read_header(path).tensors["blk.1.ffn_up.weight"].start + 34 * 5
    raw[at : at + 2] = torch.tensor([value]).half().numpy().tobytes()
    path.write_bytes(raw)
    with pytest.raises(
        BadCheckpoint, match="tensor blk.1.ffn_up.weight: found NaN or infinity among its scales"
    ):
        opened(path)


def test_a_vocabulary_beyond_the_embedding_is_refused(tmp_path):
    config = tiny_config(
        layers=1, hidden=256, head_dim=64, intermediate_size=256, vocab_size=len(TOKENS) - 1
    )
    path = tmp_path / "m.gguf"
    write_llama(path, config, tiny_weights(config))
    with pytest.raises(BadCheckpoint, match="token_embd.weight"):
        opened(path)
