"""The command line of the pattern search: a table that MInference takes, and errors in one line.

The search itself is tested beside the method (tests/engine/methods/test_minference.py).
Stops: a table that cannot be pasted or loaded, a traceback where one line would do.
"""

import json

import pytest

from engine.methods.select.minference import MInference
from tools.calibrate.minference import LEAST, main


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text("The key of box 17 is 402. The baker met a quiet teacher.\n" * 150)
    return path


def test_the_table_is_printed_and_written(tiny, document, tmp_path, capsys):
    out = tmp_path / "patterns.json"
    flags = ["--model", str(tiny), "--dtype", "float32", "--device", "cpu", "--length", str(LEAST)]
    assert main([*flags, "--document", str(document), "--json", str(out)]) == 0
    shown, data = capsys.readouterr().out, json.loads(out.read_text())
    method = MInference(patterns=data["patterns"])
    assert f"MInference(patterns={method.patterns})" in shown
    assert len(method.patterns) == 6 and all(len(row) == 4 for row in method.patterns)
    assert data["tokens"] == LEAST and len(data["fingerprint"]) == 64


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--document", "/nowhere.txt"], "expected a readable UTF-8 file"),
        (["--document", "{short}"], f"tokens, expected at least {LEAST}"),
        (["--document", "{short}", "--length", "5"], "--length: found 5"),
        (["--document", "{short}", "--model", "/nowhere/at/all"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(tiny, tmp_path, capsys, flags, said):
    (tmp_path / "short.txt").write_text("too short")
    flags = [flag.format(short=tmp_path / "short.txt") for flag in flags]
    assert main(["--model", str(tiny), *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error
