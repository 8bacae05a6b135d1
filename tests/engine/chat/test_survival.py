"""Stops: a chat that ends, with all that was read, because of one line, one command or one Ctrl-C;
and text that is dropped or reaches the terminal as it is.
"""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import engine.chat.evidence
import engine.runner.rewind
from engine.base.device import typed
from engine.base.errors import OutOfHostMemory, UsageError
from engine.chat import commands, repl
from engine.chat.cli import main
from engine.chat.talk.conversation import Conversation
from engine.terminal import documents
from engine.terminal.display import Display
from engine.text.boundary import ERROR_CHARACTERS
from tests.engine.chat.chat_model import chat_model
from tests.engine.chat.typed_chat import chat

ESCAPE = "\x1b]0;TITLE\x07\x1b[31m\x9b2J"


def replace_command(monkeypatch, name, call):
    """Put another function behind a command."""
    changed = tuple(
        commands.Command(c.names, c.arguments, c.text, call) if name in c.names else c
        for c in commands.COMMANDS
    )
    monkeypatch.setattr(commands, "COMMANDS", changed)


@pytest.mark.parametrize(
    "error", [RuntimeError("a\nb"), MemoryError(), RecursionError("deep"), ValueError("x" * 9000)]
)
def test_any_exception_in_a_command_is_one_line_and_the_conversation_goes_on(
    fake, monkeypatch, capsys, error
):
    def fails(chat, rest):
        raise error

    replace_command(monkeypatch, "plan", fails)
    llm = fake("one", "two")
    code, out, err = chat(llm, monkeypatch, capsys, "first", "/plan", "second")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 0 and out == "one\ntwo\n" and len(lines) == 1
    assert type(error).__name__ in lines[0] and len(lines[0]) <= ERROR_CHARACTERS + len("error: ")
    assert not [entry for entry in llm.sessions[0].log if entry[0] == "truncate"]


def test_any_exception_in_an_answer_is_one_line_and_the_exit_code_of_a_pipe(
    fake, monkeypatch, capsys
):
    llm = fake("one", "two")
    prefill, calls = type(llm.session()).prefill, []

    def fails_once(self, ids, progress=None):
        calls.append(ids)
        if len(calls) == 2:
            raise RuntimeError("no memory for a chunk")
        return prefill(self, ids, progress)

    monkeypatch.setattr(type(llm.session()), "prefill", fails_once)
    code, out, err = chat(llm, monkeypatch, capsys, "first", "second", "third")
    assert code == 1 and out == "one\ntwo\n" and err.count("error: RuntimeError") == 1


@pytest.mark.parametrize("number", ["\u00b2", "\u0663", "1" * 5000, "-1", "0x1", "\udcff"])
@pytest.mark.parametrize("command", ["/check", "/sources"])
def test_numbers_that_int_does_not_take_are_refused(fake, monkeypatch, capsys, command, number):
    code, out, err = chat(fake("one"), monkeypatch, capsys, "first", f"{command} {number}", "/plan")
    assert code == 0 and "error: " in err and "ValueError" not in err and "weights" in err


@pytest.mark.parametrize("name", ["plan", "method", "sources", "check", "read", "stats"])
@pytest.mark.parametrize("presses", [1, 2])
def test_one_ctrl_c_stops_a_command_and_two_leave(fake, monkeypatch, capsys, name, presses):
    """The work has no place to stop at: it runs on until an exception ends it."""

    def slow(chat, rest):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**9):
                pass
        finally:
            if presses == 2:
                os.kill(os.getpid(), signal.SIGINT)

    replace_command(monkeypatch, name, slow)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = chat(fake("one", "two"), monkeypatch, capsys, "first", f"/{name} x", "second")
    assert "Traceback" not in err and signal.getsignal(signal.SIGINT) is before
    if presses == 1:
        assert code == 0 and out == "one\ntwo\n" and err.count("stopped; the conversation") == 1
    else:
        assert code == 130 and out == "one\n"


def test_ctrl_c_stops_a_check_after_a_step(fake, monkeypatch, capsys):
    """Between two steps, where the session is as it was."""
    llm, done = fake("one", "two"), []

    def check(steps, progress):
        for step in range(1, 17):
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)
            done.append(step)
            progress(step, 16)
        raise AssertionError("was not stopped")

    made = type(llm).session
    monkeypatch.setattr(type(llm), "session", lambda self: _with_check(made(self), check))
    monkeypatch.setattr(engine.chat.evidence, "bank_bytes", lambda llm, tokens: 100)
    code, out, err = chat(llm, monkeypatch, capsys, "first", "/check", "second")
    assert code == 0 and done == [1, 2, 3] and out == "one\ntwo\n" and "stopped; the" in err


def test_ctrl_c_stops_a_switch_that_runs_the_queries_again(tmp_path, monkeypatch, capsys):
    """A real session: after a chunk, with progress; the method and the tokens stay."""
    model = str(chat_model(tmp_path / "model"))
    chunks, run = [], engine.runner.rewind.run_chunk

    def run_chunk(*arguments, **options):
        chunks.append(1)
        if len(chunks) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return run(*arguments, **options)

    monkeypatch.setattr(engine.runner.rewind, "run_chunk", run_chunk)
    (tmp_path / "doc.txt").write_text("The sun was warm. " * 60)
    lines = f"/read {tmp_path / 'doc.txt'}\nWhat?\n/method h2o tokens=64\n/method\nAnd?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    flags = ["--method", "full", "--chunk", "64", "-n", "2", "--ignore-eos", "--threads", "1"]
    assert main(["--model", model, "--device", "cpu", *flags]) == 0
    err = capsys.readouterr().err
    assert len(chunks) == 2 and "stopped; the conversation stays" in err
    assert "\nFull()\n" in err and err.count("2 written at") == 2


def _with_check(session, check):
    session.check = check
    return session


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/dev/null", "folder", "long", "nobody"])
def test_what_is_no_file_of_bounded_size_is_refused_at_once(
    fake, monkeypatch, capsys, tmp_path, kind
):
    path = tmp_path / "given"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "long":
        path.touch()
        os.truncate(path, 3 * 10**9)  # sparse: takes no room
    name = {"nobody": "~nobody-of-this-name/x"}.get(kind, kind if kind[0] == "/" else str(path))
    code, out, err = chat(fake("one"), monkeypatch, capsys, f"/read {name}", "first")
    assert code == 0 and out == "one\n" and err.count("error: ") == 1
    assert main(["--model", "x", "-f", name, "-p", "What?"]) == 2


def test_no_memory_while_a_model_loads_is_one_typed_line(monkeypatch, capsys):
    def load(*arguments, **settings):
        raise MemoryError

    monkeypatch.setattr("engine.cli.ranked.LLM", load)
    assert main(["--model", "x", "-p", "What?"]) == OutOfHostMemory.exit_code
    err = capsys.readouterr().err
    assert err.startswith("error: no memory left") and err.count("\n") == 1
    # the words of torch's library of products
    assert isinstance(typed(RuntimeError("could not create a primitive")), OutOfHostMemory)


def test_a_file_that_would_wait_is_refused(monkeypatch, tmp_path):
    """/proc/kmsg: a regular file that answers a read with "not now"."""
    path = tmp_path / "given"
    path.write_text("x")

    def waiting(*arguments, **options):
        file = open(*arguments, **options)
        file.read = lambda size: None
        return file

    monkeypatch.setattr(documents, "open", waiting, raising=False)
    with pytest.raises(UsageError, match="given: cannot be read: nothing can be read"):
        documents.read_text(str(path))


# ---------------------------------------------------------------- text


def test_bytes_that_are_no_text_are_refused_and_the_next_line_is_answered(
    fake, monkeypatch, capsys
):
    fake("one")
    data = io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff\nWhat?\n"), "utf-8", "strict")
    monkeypatch.setattr("sys.stdin", data)
    assert main(["--model", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == "one\n" and "message: found byte 0xe9 at character 3" in err


@pytest.mark.parametrize("flag", ["-p", "--system", "--stop"])
def test_flags_that_are_no_text_are_refused(fake, capsys, flag):
    fake("one")
    assert main(["--model", "x", flag, "caf\udce9", *([] if flag == "-p" else ["-p", "x"])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "found byte 0xe9 at character 3" in err


@pytest.mark.parametrize(
    "data, answered, code",
    [
        ("What?\\", "What?\\", 0),
        ("a\\\nWhat?\\\n", "a\nWhat?\\", 0),
        ('"""abc\ndef\n', None, 2),
        ('"""', None, 2),
        ('"""abc\ndef"""', "abc\ndef", 0),
    ],
)
def test_the_end_of_input_drops_no_message(fake, monkeypatch, capsys, data, answered, code):
    fake("one")
    asked = []
    original = Conversation.ask
    monkeypatch.setattr(
        Conversation,
        "ask",
        lambda self, text, *rest: asked.append(text) or original(self, text, *rest),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(data))
    assert main(["--model", "x"]) == code
    err = capsys.readouterr().err
    assert asked == ([] if answered is None else [answered])
    assert ("expected a closing" in err) == (answered is None)


def test_a_line_without_end_is_refused(fake, monkeypatch, capsys):
    fake("one")
    monkeypatch.setattr(repl, "LONGEST_LINE", 100)
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 101))
    assert main(["--model", "x"]) == 2 and "found a line of more than" in capsys.readouterr().err


def test_nothing_that_is_shown_holds_control_characters():
    """Lines, notes, progress and errors; a line's end and a tab stay."""
    stream = io.StringIO()
    display = Display(stream)
    display.line("a\tb\n" + ESCAPE)
    display.note(ESCAPE)
    display.dim(ESCAPE)
    display.error(ESCAPE + "\n" + "x" * 5000 + ESCAPE)
    display.progress(ESCAPE, -1e9)
    shown = stream.getvalue()
    assert shown.startswith("a\tb\n") and "TITLE" in shown
    assert not set(shown) & set("\x1b\x07\x9b\r")
    assert max(map(len, shown.splitlines())) <= ERROR_CHARACTERS + len("error: ")


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_full_standard_error_costs_no_answer(fake, monkeypatch, capsys):
    fake("one")
    monkeypatch.setattr("sys.stderr", Full())
    assert main(["--model", "x", "-p", "What?"]) == 0
    assert capsys.readouterr().out == "one\n"


@pytest.mark.parametrize("flags", [["-p", "What?"], ["-p", "What?", "--json"], ["--plan"]])
def test_a_full_or_closed_standard_output_is_one_line(fake, monkeypatch, capsys, flags):
    fake("one")
    for stream, words in ((Full(), "No space left"), (None, "found it closed")):
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("engine.chat.cli.abandon_output", lambda: None)
        assert main(["--model", "x", *flags]) == 1
        err = capsys.readouterr().err
        assert err.count("error: standard output: ") == 1 and words in err


def test_sigterm_and_sighup_end_an_answer_as_ctrl_d_does(fake, capsys):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        llm = fake("a b c d e f")
        inner = llm.script

        def script(ids, inner=inner, number=number):
            for i, token in enumerate(inner(ids)):
                if i == 2:
                    os.kill(os.getpid(), number)
                yield token

        llm.script = script
        # a suite that runs under nohup has SIGHUP ignored, and what is ignored stays so
        outer = signal.signal(number, signal.SIG_DFL)
        try:
            assert main(["--model", "x", "-p", "What?"]) == code
            assert signal.getsignal(number) is signal.SIG_DFL
        finally:
            signal.signal(number, outer)
        assert "Traceback" not in capsys.readouterr().err


def test_passages_on_the_screen_hold_no_escape_sequences(fake, monkeypatch, capsys, tmp_path):
    """A document's, and a file name's."""
    path = tmp_path / f"a{ESCAPE.replace('/', '')}.txt"
    path.write_text(f"Bob's key is 1.{ESCAPE}\n")
    code, out, err = chat(
        fake("one"), monkeypatch, capsys, f"/read {path}", "What?", "/system " + ESCAPE
    )
    assert code == 0 and "TITLE" in err and not set(err) & set("\x1b\x07\x9b")


def test_closed_descriptors_are_taken_and_a_deleted_folder_is_left(tmp_path):
    """Else the next file opened becomes standard output, and torch's libraries do not load."""
    root = Path(__file__).resolve().parents[3]
    code = (
        "import os, sys; from engine.chat import __main__ as program\n"
        f"os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r})\n"
        "os.rmdir(os.getcwd()); os.close(1)\n"
        "program._keep_descriptors(); program._keep_folder()\n"
        "assert os.open(os.devnull, 0) > 2 and os.getcwd() == os.sep\n"
        "assert 'torch' not in sys.modules and 'engine.llm' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
