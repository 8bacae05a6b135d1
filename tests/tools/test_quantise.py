"""`tools.convert.quantise` writes a folder that this engine and compressed-tensors read as the same
model.

Stops: values packed in another order than they are read; zero points that are off by the stored
offset; a scale that divides by what multiplies another way; a folder half-written.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from engine.base.errors import EngineError
from engine.llm import LLM
from engine.methods.full import Full
from tests.builders import tiny_llm, tiny_weights
from tests.weights.quantised_files import config_of, words
from tools.convert import folder as folders
from tools.convert import quantise as program
from tools.convert.quantise import packed_words, quantised

safetensors = pytest.importorskip("safetensors.torch")
IDS = list(range(3, 40))
ROWS = [("int8", None), ("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)]


def float_folder(folder):
    """A folder of float weights; returns its configuration and weights."""
    config = config_of()
    weights = tiny_weights(config)
    folder.mkdir()
    safetensors.save_file(weights, folder / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return config, weights


def logits(llm):
    with llm.session() as session:
        return session.prefill(IDS).flatten().clone()


def run(folder, out, word, group=None):
    extra = [] if group is None else ["--group", str(group)]
    return program.main([str(folder), str(out), "--weights", word, *extra])


@pytest.mark.parametrize("word,group", ROWS)
def test_the_engine_reads_what_was_meant(tmp_path, word, group, capsys):
    config, weights = float_folder(tmp_path / "m")
    assert run(tmp_path / "m", tmp_path / "out", word, group) == 0
    printed = capsys.readouterr().out
    meant, worst = dict(weights), 0.0
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            meant[name] = quantised(weight, word, group)[1]
            error = float((meant[name] - weight).norm() / weight.norm())
            assert f"{100 * error:.2f}%" in printed
            worst = max(worst, error)
    limit = 0.015 if word == "int8" else 0.12 if group < 128 else 0.14
    assert 0 < worst < limit
    settings = dict(device="cpu", dtype="float32", max_context=128, backend="reference")
    llm = LLM(str(tmp_path / "out"), method=Full(), **settings)
    expected = logits(tiny_llm(Full(), config, meant))
    assert float((logits(llm) - expected).norm() / expected.norm()) < 3e-6
    assert llm.plan().bytes_of("weights") == llm.model.nbytes
    assert run(tmp_path / "m", tmp_path / "out", word, group) == 2  # not written over
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("word,group", ROWS)
def test_compressed_tensors_unpacks_the_same(word, group):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(2)) / 8
    stored, meant = quantised(weight, word, group)
    bits = 8 if word == "int8" else 4
    shape = torch.Size(stored["weight_shape"].tolist())
    values = helpers.unpack_from_int32(stored["weight_packed"], bits, shape).float()
    scales, zeros = stored["weight_scale"].float(), torch.zeros(stored["weight_scale"].shape)
    if word == "int4":
        size = torch.Size(zeros.shape)
        zeros = helpers.unpack_from_int32(stored["weight_zero_point"], bits, size, packed_dim=0)
    times = 128 // scales.shape[1]
    wide = values - zeros.float().repeat_interleave(times, 1)
    assert torch.equal(wide * scales.repeat_interleave(times, 1), meant)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_packed_low_bits_first(bits):
    values = torch.randint(0, 1 << bits, (5, 19), generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed_words(values.to(torch.uint8), bits), words(values, bits))


def test_hostile_rows_stay_finite():
    weight = torch.randn(16, 128) / 8
    weight[0], weight[1], weight[2, 5], weight[3] = 0, 0.25, 1e4, 1e-39
    weight[4] = weight[4].abs() + 3  # far from zero: its zero point does not reach it
    for word, group in ROWS:
        stored, meant = quantised(weight, word, group)
        assert bool(torch.isfinite(meant).all()) and bool((stored["weight_scale"] > 0).all())
        assert bool((meant[0] == 0).all())
        for row in (1, 4):
            assert float((meant[row] - weight[row]).norm() / weight[row].norm()) < 0.04


def test_bad_groups_and_a_full_disk_leave_nothing_behind(tmp_path, capsys, monkeypatch):
    float_folder(tmp_path / "m")
    for group, words_ in ((48, "have 128 columns"), (7, "an even number"), (0, "an even number")):
        assert run(tmp_path / "m", tmp_path / "out", "int4", group) == 2
        err = capsys.readouterr().err
        assert words_ in err and err.count("\n") == 1
    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert run(tmp_path / "m", tmp_path / "out", "int8") == 1
        assert "are free" in capsys.readouterr().err

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    with pytest.raises(EngineError, match="out: cannot be written: No space left on device"):
        program.quantise(tmp_path / "m", tmp_path / "out", "int8", None)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_in_few_bits_is_refused(tmp_path, capsys):
    float_folder(tmp_path / "m")
    assert run(tmp_path / "m", tmp_path / "out", "int8") == 0
    capsys.readouterr()
    assert run(tmp_path / "out", tmp_path / "again", "int4") == 1
    assert "quantised formats not supported yet: compressed-tensors" in capsys.readouterr().err
