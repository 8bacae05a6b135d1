"""tools.speed.hybrid times the model that it names, on both sides."""

import json
import math
import sys

import pytest

pytest.importorskip("transformers")

from engine.model.config.config import ModelConfig
from tools.speed import hybrid
from tools.speed.peers.llama_cpp import shapes


def test_both_sides_run_and_what_a_step_reads_is_counted(tmp_path, capsys):
    path = tmp_path / "found.json"
    flags = ["--layers", "4", "--vocabulary", "199", "--prompt", "40", "--turns", "1"]
    assert hybrid.main([*flags, "--dtype", "float32", "--json", str(path)]) == 0
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert "| a step, ms |" in said and "| a prompt, tokens/s |" in said
    assert all(len(both) == 2 and min(both) > 0 for both in found["whole"].values())
    # three layers: qkvz, o, gate and up, down; S of 16 heads; at most 20 rows
    weights = 3 * 4 * 1024 * (8192 + 2048 + 3 * 3584)
    states = 3 * 4 * 16 * 128 * 128
    assert weights + states < found["alone"]["bytes"] < 1.01 * (weights + states)
    assert hybrid.main(["--layers", "2"]) == 2


def test_the_file_for_llama_cpp_has_the_models_weights():
    data = hybrid.fields(8, 199)
    counted = sum(math.prod(shape) for _, shape in shapes(data))
    assert counted == ModelConfig.from_dict(data).parameters


def test_without_llama_cpp_it_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    flags = ["--layers", "4", "--vocabulary", "199", "--prompt", "8", "--turns", "1"]
    assert hybrid.main([*flags, "--llama-cpp"]) == 2
    assert "llama-cpp-python is not installed" in capsys.readouterr().err
