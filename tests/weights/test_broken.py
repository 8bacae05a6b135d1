"""Every malformed folder gets its one line and its exit code, from the library and from the command
line.
"""

import os
import subprocess
import sys
import warnings

import pytest

from engine import LLM, SamplingParams
from engine.base.errors import EngineError, SettingError
from tests.broken_models import cases
from tests.tiny_model import sound

BROKEN = cases()
pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="symlinks and pipes need rights that Windows users lack"
)


def test_table_is_wide_enough():
    names = [case.name for case in BROKEN]
    assert len(names) == len(set(names)) >= 115
    assert all(case.words for case in BROKEN) and {case.code for case in BROKEN} == {1, 2}


def test_the_sound_model_works(tmp_path):
    """Or every refusal below could have another reason."""
    sound(tmp_path / "m")
    llm = LLM(str(tmp_path / "m"), device="cpu", max_context=64)
    assert len(llm.session().prefill([3, 4, 5])) == 64


def check(case, line, folder):
    """Check that the error is one line, names what it should, and leaks no Python."""
    assert all(word in line for word in case.words), line
    assert "\n" not in line and "Traceback" not in line and len(line) < 800
    assert str(folder) in line or case.name in line


REFUSED = [case for case in BROKEN if case.library]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_library(case, tmp_path):
    folder = tmp_path / case.name
    case.build(folder)
    with pytest.raises(EngineError) as caught:
        LLM(str(folder), device="cpu", max_context=64)
    assert caught.value.exit_code == case.code
    check(case, str(caught.value), folder)


def test_without_a_tokenizer_ids_run_and_text_says_why(tmp_path):
    (case,) = (case for case in BROKEN if not case.library)
    case.build(tmp_path / "m")
    llm = LLM(tmp_path / "m", device="cpu", max_context=64)
    answer = llm.generate([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.token_ids) == 4 and answer.text == ""
    for ask in (lambda: llm.generate("hi"), lambda: llm.chat([{"role": "user", "content": "hi"}])):
        with pytest.raises(SettingError, match="no tokenizer.*m holds none.*pass token ids"):
            ask()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_command_line(case, tmp_path, capsys, monkeypatch):
    chat = pytest.importorskip("engine.chat")
    # main() replaces it: restored afterwards
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    folder = tmp_path / case.name
    case.build(folder)
    assert (
        chat.main(["--model", str(folder), "-p", "hi", "--device", "cpu", "--ctx", "64"])
        == case.code
    )
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if "error" in line.lower()]
    assert printed.out == "" and "Traceback" not in printed.err and len(errors) == 1, printed.err
    assert errors[0] == printed.err.strip().splitlines()[-1]
    check(case, errors[0], folder)


def test_process(tmp_path):
    """The exit code of a real process: 2, which no uncaught exception gives."""
    pytest.importorskip("engine.chat")
    case = next(case for case in BROKEN if case.name == "no-folder")
    case.build(tmp_path / case.name)
    command = [
        sys.executable,
        "-m",
        "engine.chat",
        "--model",
        str(tmp_path / case.name),
        "-p",
        "hi",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == case.code and done.stdout == "" and "Traceback" not in done.stderr
    check(case, done.stderr.strip().splitlines()[-1], tmp_path / case.name)
