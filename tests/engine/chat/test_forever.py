"""Conversations without end on the command line: the shipped model, a store of 64 tokens.

Stops: a conversation that ends or grows, forgetting that nobody is told of, a flag that a method
takes and does not keep to.
"""

import io
import json

import pytest

from engine.base.errors import SettingError
from engine.chat.cli import main
from engine.chat.flags import parser
from engine.chat.talk.calibrating import Calibrating
from engine.cli.settings import settings_of
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window

SMALL = ("--forever", "--tokens", "64", "--chunk", "64", "--ignore-eos", "-n", "6")
BLOCKS = ("block=16", "init=8", "local=48", "topk=2", "cached=4", "chunk=32", "blocks=4")
LINE = "from here on the oldest tokens beyond 4 sinks and the newest 60 are forgotten"


def talk(monkeypatch, capsys, *lines, flags=SMALL):
    """(exit code, stdout, stderr) of lines typed into the chat."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return (main(list(flags)), *capsys.readouterr())


def test_a_conversation_goes_on_and_says_once_what_it_forgets(monkeypatch, capsys, tmp_path):
    """The document alone is 25 times as long as what is held."""
    lines = ["What is it?", "And then?", "/stats", "/check", "/method full", "/retry"]
    lines += ["/reset", "Who?"]
    code, out, err = talk(monkeypatch, capsys, *lines, f"/save {tmp_path / 's'}")
    assert code == 0 and out.count("\n") >= 4
    assert err.count(LINE) == 1 and err.index(LINE) < err.index("welcome.txt: 1,586 tokens read")
    assert "a conversation without end, of which 64 tokens are held" in err
    assert "context 1,586, 1,522 of them forgotten" in err
    assert "without end: 1,6" in err  # /stats
    assert "forever: found full, which keeps the rows of every token; use streaming_llm" in err
    assert "read again" not in err and "chooses none; a conversation without --forever" in err
    saved = ("--session", str(tmp_path / "s"))
    code, _, err = talk(monkeypatch, capsys, "Where?", flags=(*SMALL, *saved))
    assert code == 0 and "cached" in err


def test_an_answer_that_begins_to_forget_says_so_too(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text"
    text.write_text("The cat is grey.")
    flags = ("--forever", "--method", "window", "--tokens", "48", "-n", "60", "--ignore-eos")
    more = ("-f", str(text), "-p", "Who?", "--json")
    code, out, err = talk(monkeypatch, capsys, flags=(*flags, *more))
    line = "from here on the oldest tokens beyond the newest 48 are forgotten"
    context = json.loads(out)["context"]
    assert code == 0 and context["forgotten"] == context["used"] - 48 > 0
    assert err.count(line) == 1 and err.index(line) > err.index("text: ")


def test_a_conversation_of_blocks_says_what_is_gone(monkeypatch, capsys, tmp_path):
    """The document alone is nine times as long as what is held."""
    flags = ["--forever", "--method", "infllm", "--chunk", "64", "--ignore-eos", "-n", "6"]
    flags += ["--watch", "1", *(part for one in BLOCKS for part in ("--set", one))]
    lines = ["What is it?", "And then?", "/stats", "/check", "/sources", f"/save {tmp_path / 's'}"]
    code, out, err = talk(monkeypatch, capsys, *lines, "/reset", "Who?", flags=tuple(flags))
    line = "from here on every layer forgets the block of 16 tokens that it read longest ago"
    assert code == 0 and out.count("\n") >= 3
    assert err.count(line) == 1 and "4 blocks are held beside the first 8 tokens and the" in err
    assert "context 1,5" in err and "of them forgotten" in err and "savepoints" in err
    assert "nothing to compare: infllm has freed rows that full attention would read" in err
    assert "the last answer read" in err and "tokens are forgotten, and no layer read them)" in err
    assert "save: found a session of infllm that keeps a number of blocks" in err


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ([], None),
        (["--tokens", "300"], StreamingLLM(tokens=300)),
        (["--method", "window"], Window()),
        (["--sink", "8", "--tokens", "300"], StreamingLLM(tokens=300, sink=8)),
    ],
)
def test_what_runs_for_ever(flags, method):
    settings = settings_of(parser().parse_args(["--forever", *flags]))
    assert settings["forever"] is True and settings["method"] == method


def test_the_plan_says_the_constant_memory(capsys):
    assert main(["--plan", "--forever"]) == 0
    out = capsys.readouterr().out
    assert "StreamingLLM(tokens=2048)" in out
    assert "without end, in constant memory: 2048 tokens of each layer stay" in out
    assert "fits" in out and "largest context" not in out
    assert main(["--plan", "--forever", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"]["token ids"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--forever --ctx 4K", "--ctx: found 4096 beside forever, which has no end"),
        ("--forever --method h2o", "--forever: found h2o, which holds a prompt until its end"),
        ("--forever --method omnikv", "--forever: found omnikv, which keeps the rows of every"),
        ("--forever --method window --share 0.2", "--forever: found window, which has share=0.2"),
        ("--forever --exact", "--forever: found exact"),
    ],
)
def test_what_cannot_go_on_for_ever_is_one_line(capsys, flags, words):
    assert main(["--plan", *flags.split()]) == SettingError.exit_code
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_no_filter_layers_are_looked_for(capsys):
    from types import SimpleNamespace

    said = []
    chat = SimpleNamespace(
        llm=SimpleNamespace(options=SimpleNamespace(forever=True)),
        display=SimpleNamespace(line=said.append),
    )
    assert Calibrating(True).begin(chat, "text") is None
    assert Calibrating(None).begin(chat, "text") is None
    assert said == ["not calibrated: --forever runs methods that need no filter layers"]
