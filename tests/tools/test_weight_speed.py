"""The table of steps and prompts with weights in few bits: both models run, ratios to floats."""

import json

from tools.speed.weights import main, table


def test_a_table_of_a_tiny_model(tmp_path, capsys):
    out = tmp_path / "speed.json"
    flags = ["--shape", "tiny", "--dtype", "float32", "--weights", "int8", "--context", "96"]
    assert main([*flags, "--prompt", "40", "--steps", "2", "--json", str(out)]) == 0
    floats, rounded = json.loads(out.read_text())
    assert (floats["weights"], rounded["weights"]) == ("auto", "int8")
    assert 0 < rounded["bytes"] != floats["bytes"] and rounded["step_s"] > 0 < floats["prompt_s"]
    assert "| float32 |" in capsys.readouterr().out


def test_ratios_are_of_the_floats():
    first = dict(
        weights="auto",
        activations="auto",
        dtype="bfloat16",
        bytes=4e6,
        step_s=0.2,
        prompt=100,
        prompt_s=2.0,
    )
    other = {**first, "weights": "int8", "bytes": 2e6, "step_s": 0.1, "prompt_s": 4.0}
    assert table([first, other]).splitlines()[-1] == "| int8 | 2 | 100.0 ms | 2.00 | 25 | 0.50 |"


def test_counts_that_time_nothing_are_refused(capsys):
    assert main(["--shape", "tiny", "--steps", "0"]) == 2
    assert "--steps: found 0, expected 1 to 255" in capsys.readouterr().err
