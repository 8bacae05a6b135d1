"""GGUF files become the models that they were made of, or one line.

Stops: rows of q and k left interleaved, a type decoded as another, a head tied that is not, words
split otherwise than the model's own tokenizer does, a length or offset believed that points outside
the file, a folder half-written or written over.
"""

import json
import shutil
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models
from tokenizers import pre_tokenizers as pre

from engine.base.errors import BadCheckpoint, EngineError, UnsupportedCheckpoint, UsageError
from engine.llm import LLM
from engine.load.gguf.vocabulary import SPLITTINGS, read_vocabulary
from engine.methods.full import Full
from engine.text.tokenizer import Tokenizer as EngineTokenizer
from tests.builders import tiny_llm, tiny_weights
from tests.tools.gguf_files import (
    MERGES,
    SPECIAL,
    TOKENS,
    by_hand,
    info,
    llama_config,
    text,
    write_llama,
)
from tools.convert import gguf as convert_gguf
from tools.convert.folder import RECORD, read_record
from tools.convert.to_gguf import convert, describe
from weights.gguf import header
from weights.gguf.header import KINDS, read_header

safetensors = pytest.importorskip("safetensors.torch")
gguf = pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")

WORDS = (
    "The other thing: they'll pay 1234567 for 12 rings.\n\n  Straße, ½ of ⅻ, 漢字!\r\n\tx  =\xa0y "
    "\nI'VE <|im_end|> ' the"
)


def converted(folder, config, weights, kind="F32", dtype="float32", **changes):
    """(what the blocks mean, the tensors of the folder made of them)."""
    meant = write_llama(folder / "m.gguf", config, weights, kind, **changes)
    assert convert(folder / "m.gguf", folder / "out", dtype)
    return meant, safetensors.load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_keeps_its_values_and_its_rows(tmp_path, kind):
    config = llama_config()
    weights = tiny_weights(config)
    meant, found = converted(tmp_path, config, weights, kind)
    assert found.keys() == weights.keys()
    for name, value in meant.items():
        assert np.array_equal(found[name].numpy(), value), name
    if kind.endswith("_K"):
        return
    near = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.02}.get(kind, 0.4)
    for name, weight in weights.items():  # the order of rows, judged by the original
        assert (found[name] - weight).abs().max() <= near * weight.abs().max(), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_answers_as_the_original_weights(tmp_path, tied):
    config = llama_config(tie_word_embeddings=tied)
    weights = tiny_weights(config)
    _, found = converted(tmp_path, config, weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    ids = list(range(5, 60))
    llm = LLM(str(tmp_path / "out"), device="cpu", method=Full(), backend="reference")
    assert llm.config.tied_embeddings is tied and llm.config.rope == config.rope
    with llm.session() as session, tiny_llm(Full(), config, weights).session() as other:
        assert torch.equal(session.prefill(ids), other.prefill(ids))
    assert ("lm_head.weight" in found) is not tied


def test_bfloat16_is_stored_as_bfloat16(tmp_path):
    config = llama_config()
    weights = tiny_weights(config)
    _, found = converted(tmp_path, config, weights, dtype="bfloat16")
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def factors(factor, low, high, original, theta=1e4, head_dim=64):
    """Llama 3's factors as llama.cpp's converter computes them (generate_extra_tensors)."""
    found = []
    for frequency in (1 / theta ** (i / head_dim) for i in range(0, head_dim, 2)):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(found, dtype=np.float32)}


def test_llama3_factors_become_its_rope_and_others_are_refused(tmp_path):
    config = llama_config(
        max_positions=16384,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    weights = tiny_weights(config)
    write_llama(tmp_path / "m.gguf", config, weights, extra=factors(32.0, 1.0, 4.0, 8192))
    assert describe(tmp_path / "m.gguf", "float32").parsed.rope == config.rope
    write_llama(tmp_path / "n.gguf", config, weights, extra=factors(32.0, 1.0, 4.0, 4096))
    with pytest.raises(UnsupportedCheckpoint, match="rope_freqs.weight"):
        describe(tmp_path / "n.gguf", "float32")


def vocabulary(splitting, **changes):
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splitting,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": header.array("i", [3] * 3 + [1] * (len(TOKENS) - 3)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
    }
    return read_vocabulary({**keys, **changes}, "m.gguf", 512)


def plain_ids(split, ignore_merges=False):
    """Ids of WORDS by a tokenizer made of `split` alone, specials apart."""
    vocab = {token: number for number, token in enumerate(TOKENS)}
    merges = [tuple(merge.split()) for merge in MERGES]
    peer = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    peer.pre_tokenizer = split
    before, after = WORDS.split("<|im_end|>")
    return [*peer.encode(before).ids, 2, *peer.encode(after).ids]


def byte_level(*expressions):
    splits = [pre.Split(Regex(expression), "isolated") for expression in expressions]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def test_smollm_splits_as_llama_cpp_does():
    """The expressions of llama.cpp's LLAMA_VOCAB_PRE_TYPE_SMOLLM, one after the other."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
    found = vocabulary("smollm").tokenizer.encode(WORDS).ids
    assert found == plain_ids(byte_level(r"\p{N}", words))
    assert found != plain_ids(byte_level(words))  # "12" would be one token


def test_llama_bpe_splits_as_transformers_does_and_begins_with_bos():
    convert_slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    pattern = convert_slow.TikTokenConverter().pattern
    found = vocabulary("llama-bpe").tokenizer.encode(WORDS).ids
    assert found == [1, *plain_ids(byte_level(pattern), ignore_merges=True)]
    without = vocabulary("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert without.tokenizer.encode(WORDS).ids == found[1:]
    assert found[1:] != vocabulary("qwen2").tokenizer.encode(WORDS).ids


def test_qwen2_splits_as_transformers_does():
    transformers = pytest.importorskip("transformers")
    merges = [tuple(merge.split()) for merge in MERGES]
    vocab = {token: number for number, token in enumerate(TOKENS)}
    peer = transformers.Qwen2Tokenizer(vocab, merges, additional_special_tokens=SPECIAL)
    for words in (WORDS, "e\u0301 the ring"):  # composed before it is split
        found = vocabulary("qwen2").tokenizer.encode(words).ids
        assert found == peer(words).input_ids


def test_the_engine_reads_the_tokenizer_and_the_template(tmp_path):
    config = llama_config()
    converted(tmp_path, config, tiny_weights(config), keys={"tokenizer.ggml.add_bos_token": True})
    tokenizer = EngineTokenizer(tmp_path / "out")
    assert tokenizer.prefix_ids == (1,) and tokenizer.special_ids == {0, 1, 2}
    for words in (WORDS.replace("<|im_end|>", ""), "🎉 e\u0301"):
        assert tokenizer.decode(tokenizer.encode(words)) == words
    assert tokenizer.render([{"role": "user", "content": "the"}]) == "<|im_start|>the<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>"


U64 = struct.Struct("<Q").pack
KEY_U32 = text("k") + struct.pack("<II", 4, 1)
HUGE = 1 << 62
F32 = 0
BROKEN = {
    "empty": (b"", "cut or damaged"),
    "four bytes": (b"GGUF", "cut or damaged"),
    "magic": (by_hand(magic=b"GGML"), "not a GGUF file"),
    "version 1": (by_hand(version=struct.pack("<I", 1)), "version 1"),
    "big-endian": (by_hand(version=struct.pack(">I", 3)), "version 50331648"),
    "count of keys": (by_hand(counts=(0, HUGE)), "do not fit"),
    "count of tensors": (by_hand(counts=(HUGE, 0)), "do not fit"),
    "length of a name": (by_hand((U64(2**64 - 1),), counts=(0, 1)), "cut or damaged"),
    "length of a string": (
        by_hand((text("k") + struct.pack("<IQ", 8, 2**64 - 1),)),
        "cut or damaged",
    ),
    "length of an array": (
        by_hand((text("k") + struct.pack("<IIQ", 9, 10, 2**61),)),
        "cut or damaged",
    ),
    "length of an array of strings": (
        by_hand((text("k") + struct.pack("<IIQ", 9, 8, 2**61),)),
        "do not fit",
    ),
    "type of a key": (by_hand((text("k") + struct.pack("<I", 99),)), "unknown type 99"),
    "array of arrays": (
        by_hand((text("k") + struct.pack("<IIQ", 9, 9, 1),)),
        "array of the unknown type 9",
    ),
    "name not UTF-8": (by_hand((text(b"\xff") + struct.pack("<II", 4, 1),)), "not UTF-8"),
    "key twice": (by_hand((KEY_U32, KEY_U32)), "given twice"),
    "no dimension": (by_hand(tensors=(info("t", (), F32, 0),)), "0 dimensions"),
    "five dimensions": (by_hand(tensors=(info("t", (1,) * 5, F32, 0),)), "5 dimensions"),
    "2**32 - 1 dimensions": (
        by_hand(tensors=(info("t", (1,), F32, 0, count=2**32 - 1),)),
        "dimensions",
    ),
    "dimension of 0": (by_hand(tensors=(info("t", (4, 0), F32, 0),)), "dimension of 0"),
    # 2**33 * 2**31 * 4 bytes is 0 in 64 bits
    "product beyond 64 bits": (
        by_hand(tensors=(info("t", (2**33, 2**31), F32, 0),)),
        "would end at byte",
    ),
    "offset outside": (by_hand(tensors=(info("t", (4,), F32, 1024),)), "would end at byte"),
    "offset + size beyond 64 bits": (
        by_hand(tensors=(info("t", (4,), F32, 2**64 - 32),)),
        "would end at byte",
    ),
    "size outside": (by_hand(tensors=(info("t", (17,), F32, 0),)), "would end at byte"),
    "offset between": (by_hand(tensors=(info("t", (4,), F32, 8),)), "no multiple of 32"),
    "type of a tensor": (by_hand(tensors=(info("t", (4,), 99, 0),)), "unknown type 99"),
    "type not supported": (by_hand(tensors=(info("t", (256,), 23, 0),)), "type IQ4_XS"),
    "block": (by_hand(tensors=(info("t", (48,), 8, 0),)), "blocks of 32"),
    "tensor twice": (
        by_hand(tensors=(info("t", (4,), F32, 0), info("t", (4,), F32, 32))),
        "given twice",
    ),
    "overlap": (
        by_hand(tensors=(info("t", (9,), F32, 0), info("u", (4,), F32, 32))),
        "overlap",
    ),
    "alignment": (
        by_hand((text("general.alignment") + struct.pack("<II", 4, 48),)),
        "power of two",
    ),
    "alignment 0": (
        by_hand((text("general.alignment") + struct.pack("<II", 4, 0),)),
        "power of two",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_hostile_header_ends_in_one_line(tmp_path, name, capsys):
    content, expected = BROKEN[name]
    (tmp_path / "m.gguf").write_bytes(content)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert expected in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_sound_header_by_hand_is_read(tmp_path):
    """The broken ones above are broken by what they say, not by the hand that wrote them."""
    (tmp_path / "m.gguf").write_bytes(
        by_hand((KEY_U32,), (info("t", (8, 1), F32, 0), info("u", (32,), 8, 32)), data=66)
    )
    found = read_header(tmp_path / "m.gguf")
    assert found.keys == {"k": 1} and found.tensors["t"].shape == (1, 8)
    assert [(t.kind, t.nbytes, t.start % 32) for t in found.tensors.values()] == [
        ("F32", 32, 0),
        ("Q8_0", 34, 0),
    ]


GGML = "tokenizer.ggml."
WRONG = {
    "architecture": (dict(architecture="qwen2"), "general.architecture: found qwen2"),
    "experts": (dict(keys={"llama.expert_count": 8}), "expert_count"),
    "window": (dict(keys={"llama.attention.sliding_window": 64}), "sliding_window"),
    "scaling": (dict(keys={"llama.rope.scaling.type": "yarn"}), "found yarn"),
    "part of a head turned": (dict(keys={"llama.rope.dimension_count": 32}), "dimension_count"),
    "no context": (dict(keys={"llama.context_length": None}), "context_length"),
    "heads": (dict(keys={"llama.attention.head_count_kv": 3}), "a divisor"),
    "more layers": (dict(keys={"llama.block_count": 3}), "blk.2.attn_norm.weight: found nothing"),
    "fewer layers": (dict(keys={"llama.block_count": 1}), "a plain Llama has none"),
    "narrower": (dict(keys={"llama.feed_forward_length": 128}), "expected [128, 256]"),
    "missing": (dict(without=("blk.1.ffn_up.weight",)), "blk.1.ffn_up.weight: found nothing"),
    "bias": (dict(extra={"blk.0.attn_q.bias": np.zeros(256, np.float32)}), "attn_q.bias"),
    "tokenizer": (dict(keys={GGML + "model": "llama"}), "found llama"),
    "splitting": (dict(keys={GGML + "pre": "deepseek-llm"}), "found deepseek-llm"),
    "token twice": (dict(keys={GGML + "tokens": ["a"] * len(TOKENS)}), "a token twice"),
    "fewer tokens": (
        dict(keys={GGML + "tokens": TOKENS[:-1], GGML + "token_type": [1] * (len(TOKENS) - 1)}),
        "merges",
    ),
    "types": (dict(keys={GGML + "token_type": [1, 1]}), "token_type: found 2 values"),
    "merge": (dict(keys={GGML + "merges": ["q q"]}), "merges: found q q"),
    "merge of one": (dict(keys={GGML + "merges": ["the"]}), "merges: found the"),
    "bos": (dict(keys={GGML + "bos_token_id": len(TOKENS)}), "bos_token_id"),
    "template": (dict(keys={"tokenizer.chat_template": "x" * (1 << 20 | 1)}), "chat_template"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name, capsys):
    changes, expected = WRONG[name]
    config = llama_config()
    write_llama(tmp_path / "m.gguf", config, tiny_weights(config), **changes)
    assert convert_gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    config = llama_config()
    write_llama(path, config, tiny_weights(config), "Q8_0")
    return path


def test_a_cut_file_is_refused_wherever_it_is_cut(sound, tmp_path):
    whole, cut = sound.read_bytes(), tmp_path / "m.gguf"
    end = max(tensor.start + tensor.nbytes for tensor in read_header(sound).tensors.values())
    for size in [*range(0, 2000, 97), end // 2, end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(BadCheckpoint) as error:
            describe(cut, "float32")
        assert "\n" not in str(error.value)


@given(st.data())
@settings(max_examples=150)
def test_changed_bytes_end_in_one_line_or_in_a_description(sound, tmp_path_factory, data):
    content = bytearray(sound.read_bytes())
    end = content.index(b"blk.1.ffn_up.weight") + 60  # the header
    for at in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=3)):
        content[at] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    path = tmp_path_factory.mktemp("changed") / "m.gguf"
    path.write_bytes(content)
    try:
        describe(path, "float32")
    except EngineError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_leave_nothing_behind(tmp_path, value):
    config = llama_config()
    weights = tiny_weights(config)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    write_llama(tmp_path / "m.gguf", config, weights)
    with pytest.raises(BadCheckpoint, match="blk.1.ffn_down.weight: found NaN or infinity"):
        convert(tmp_path / "m.gguf", tmp_path / "out", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_the_same_conversion_is_made_once_and_nothing_else_is_written_over(sound, tmp_path):
    out = tmp_path / "out"
    assert convert(sound, out, "float32")
    record = read_record(out)
    assert record and set(record["files"]) == {p.name for p in out.iterdir()} - {RECORD}
    (out / "omnikv.json").write_text("{}")  # a calibration beside it changes nothing
    assert not convert(sound, out, "float32")
    with pytest.raises(UsageError, match="is not this conversion"):
        convert(sound, out, "bfloat16")
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    with pytest.raises(BadCheckpoint, match="changed since it was converted"):
        convert(sound, out, "float32")
    for other in (tmp_path / "file", tmp_path / "folder"):
        other.touch() if other.name == "file" else other.mkdir()
        with pytest.raises(UsageError, match="is not this conversion"):
            convert(sound, other, "float32")


def test_no_room_and_a_full_disk_leave_nothing_behind(sound, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(EngineError, match="1.00 kB are free"):
            convert(sound, tmp_path / "deep" / "out", "float32")
    assert not list(tmp_path.iterdir())

    def full(done, total):
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match="out: cannot be written: No space left on device"):
        convert(sound, tmp_path / "out", "float32", full)
    assert not list(tmp_path.iterdir())


def test_a_stop_leaves_nothing_behind(sound, tmp_path, monkeypatch, capsys):
    def stop(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_gguf, "conversion_progress", lambda: stop)
    assert convert_gguf.main([str(sound), str(tmp_path / "out")]) == 130
    assert "nothing was written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_package_is_needed_only_by_this_test(sound, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert convert(sound, tmp_path / "out", "float32")


def test_every_splitting_is_compared_above():
    # qwen35 in tests/engine/model/test_gguf_hybrids.py
    assert set(SPLITTINGS) == {"smollm", "llama-bpe", "qwen2", "qwen35"}
