"""The command line and the chat, on a fake model: what goes where, exit codes, one-line errors,
commands, Ctrl-C.
"""

import io
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest

import engine.chat.cli
from engine.base.errors import ModelNotFound, UnsupportedCheckpoint
from engine.base.figures import brief, clock, first_line, human
from engine.chat.cli import main
from engine.chat.flags import parser
from engine.cli.model_flags import gigabytes, scaled
from engine.cli.settings import flag_named, method_of
from engine.methods.evict.h2o import H2O
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.registry import methods
from engine.methods.select.quest import Quest
from engine.terminal.display import Display
from engine.text.boundary import printable
from tests.clocks import HeldClock, set_clock
from tests.engine.chat.typed_chat import chat

# ---------------------------------------------------------------- once


def test_one_shot_writes_the_text_to_stdout_and_all_else_to_stderr(fake, capsys):
    fake("It is warm.")
    assert main(["--model", "x", "-p", "Is it warm?"]) == 0
    out, err = capsys.readouterr()
    assert out == "It is warm.\n"
    assert "context" in err and "cached" in err and "tok/s" in err and "\033" not in err


def test_quiet_leaves_stderr_empty(fake, capsys):
    fake()
    assert main(["--model", "x", "-p", "Is it warm?", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_json_is_one_object_with_ids_and_figures(fake, capsys):
    llm = fake("It is warm.")
    assert main(["--model", "x", "-p", "Is it?", "--json", "--stats"]) == 0
    out = capsys.readouterr().out
    data = json.loads(out)
    assert (
        out.count("\n") == 1 and data["text"] == "It is warm." and data["finish_reason"] == "stop"
    )
    assert llm.tokenizer.decode(data["token_ids"]) == "It is warm."
    assert (
        data["stats"]["new_tokens"] == len(data["token_ids"]) - 1
        and data["context"]["limit"] == 100_000
    )
    assert data["session"]["bank_bytes"] == 640


def test_a_document_and_a_question(fake, capsys, tmp_path):
    llm = fake("Lily.")
    path = tmp_path / "story.txt"
    path.write_bytes("\ufeffOnce there was Lily.\n".encode())
    assert main(["--model", "x", "-f", str(path), "-p", "Who?"]) == 0
    talk = llm.sessions[0]
    spelled = llm.tokenizer.backend.decode(talk.ids, skip_special_tokens=False)
    assert "user: Once there was Lily.\n\nWho?<|end|>" in spelled
    assert "story.txt" in capsys.readouterr().err


def test_a_document_from_standard_input_alone_is_the_message(fake, capsys, monkeypatch):
    llm = fake("ok")
    monkeypatch.setattr(
        "sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"Say ok."), isatty=lambda: False)
    )
    assert main(["--model", "x", "-f", "-"]) == 0
    assert "user: Say ok.<|end|>" in llm.tokenizer.backend.decode(
        llm.sessions[0].ids, skip_special_tokens=False
    )
    assert capsys.readouterr().out == "ok\n"


def test_flags_reach_the_model_and_the_sampler(fake, monkeypatch):
    llm = fake()
    seen = {}
    monkeypatch.setattr(
        engine.chat.cli,
        "Chat",
        lambda llm, params, *rest, **more: (
            seen.update(params=params) or SimpleNamespace(ask=lambda text: "stop")
        ),
    )
    assert (
        main(
            "--model x -p hi --ctx 32K --device cpu --dtype float32 --threads 2 --chunk 7 "
            "--compile off --offload device --vram-budget 24 --ram-budget 512M "
            "--method omnikv --filter-layers 2,8,18 --share 0.1 --selector uniform "
            "--window 8 --wait-layers 0 --dense-below 4K "
            "--temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 7 "
            "--repeat-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -1 --stop END "
            "--stop STOP -n 99 --ignore-eos".split()
        )
        == 0
    )
    made = llm.made_with
    assert made["method"] == OmniKV(
        filter_layers=(2, 8, 18),
        share=0.1,
        selector="uniform",
        window=8,
        wait_layers=0,
        dense_below=4096,
    )
    assert {
        k: made[k]
        for k in (
            "model",
            "max_context",
            "device",
            "dtype",
            "threads",
            "chunk",
            "compile",
            "offload",
            "vram_budget",
            "ram_budget",
            "load",
        )
    } == {
        "model": "x",
        "max_context": 32768,
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
        "chunk": 7,
        "compile": False,
        "offload": "device",
        "vram_budget": 24 * 10**9,
        "ram_budget": 512 * 10**6,
        "load": False,
    }
    p = seen["params"]
    assert (
        p.max_tokens,
        p.temperature,
        p.top_p,
        p.top_k,
        p.min_p,
        p.seed,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
        p.stop,
        p.ignore_eos,
    ) == (99, 0.5, 0.9, 40, 0.05, 7, 1.1, 0.5, -1.0, ("END", "STOP"), True)


def test_the_method_follows_the_flags():
    def method(*flags, pocket=False):
        return method_of(parser().parse_args(list(flags)), pocket)

    assert (
        method() is None
        and method("--method", "full") == Full()
        and method("--method", "omnikv") == OmniKV()
        and method("--tokens", "64") == OmniKV(tokens=64)
    )
    assert (
        method(pocket=True) == OmniKV(share=0.067, dense_below=0)
        and method("--method", "full", pocket=True) == Full()
    )
    assert method("--dense-below", "auto", "--mem", "0.3") == OmniKV(mem=0.3, dense_below="auto")
    assert (
        method("--method", "h2o", "--share", "0.3") == H2O(share=0.3)
        and method("--method", "snapkv", pocket=True) == SnapKV()
    )
    assert method("--method", "streaming_llm", "--sink", "8", "--tokens", "99") == StreamingLLM(
        tokens=99, sink=8
    )


def test_any_field_of_any_method_can_be_set():
    def method(*flags):
        return method_of(parser().parse_args(list(flags)), pocket=True)

    assert method("--method", "quest", "--set", "page=32", "--tokens", "512") == Quest(
        tokens=512, page=32
    )
    assert method("--set", "filter_layers=2,8", "--set", "selector=uniform") == OmniKV(
        filter_layers=(2, 8), selector="uniform"
    )


def test_what_needs_no_model(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert "omnikv-engine" in capsys.readouterr().out
    assert main(["--list-models"]) == 0
    out = capsys.readouterr().out
    assert "llama-3-8b-262k" in out and "2,8,18" in out


def test_plan_goes_to_stdout_and_nothing_is_loaded(fake, capsys):
    llm = fake()
    llm.load = None
    assert main(["--model", "x", "--plan"]) == 0 and "weights" in capsys.readouterr().out
    assert main(["--model", "x", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_bytes"] == 1640


# ---------------------------------------------------------------- errors

BAD = [
    (["--tmp", "1"], "--tmp: no such flag; did you mean --temp?"),
    (["--zzzzzz"], "--zzzzzz: no such flag"),
    (["--temperature", "1"], "--temperature: no such flag; use --temp"),
    (["--max-model-len=4096"], "--max-model-len=4096: no such flag; use --ctx"),
    (["--attention", "full"], "--attention: no such flag; use --method"),
    (["--budget", "64"], "--budget: no such flag; use --tokens"),
    (["--dry-run"], "--dry-run: no such flag; use --plan"),
    (["--max-token", "3"], "--max-token: no such flag; did you mean --max-tokens?"),
    (["extra"], "'extra': not expected here"),
    (["--ctx", "lots"], "--ctx"),
    (["--ctx", "0"], "--ctx"),
    (["--ctx", "-5"], "--ctx"),
    (["--ctx", "1.3"], "--ctx"),
    (["--ctx"], "--ctx"),
    (["--temp", "-1"], "--temp: found -1.0"),
    (["--temp", "nan"], "--temp: found nan"),
    (["--temp", "hot"], "--temp: found 'hot', expected a number"),
    (["--top-p", "1.5"], "--top-p: found 1.5"),
    (["--top-k", "-2"], "--top-k: found -2"),
    (["--top-k", "1.5"], "--top-k"),
    (["--min-p", "2"], "--min-p: found 2.0"),
    (["-n", "0"], "-n/--max-tokens: found 0"),
    (["--repeat-penalty", "0"], "--repeat-penalty: found 0.0"),
    (["--seed", "-1"], "--seed: found -1"),
    (["--stop", ""], "--stop: found"),
    (["--filter-layers", "2,x"], "--filter-layers"),
    (["--filter-layers", "8,2"], "--filter-layers: found (8, 2)"),
    (["--filter-layers", "-1,2"], "--filter-layers"),
    (["--tokens", "0"], "--tokens: found 0"),
    (["--share", "1.5"], "--share: found 1.5"),
    (["--mem", "0"], "--mem: found 0"),
    (["--tokens", "5", "--share", "0.1"], "tokens=5 and share=0.1"),
    (["--selector", "best"], "--selector"),
    (["--window", "0"], "--window: found 0"),
    (["--wait-layers", "-1"], "--wait-layers: found -1"),
    (["--dense-below", "x"], "--dense-below"),
    (["--method", "magic"], "--method: found 'magic', expected one of a2ats, a2sf, "),
    (["--method", "quets"], "did you mean quest?"),
    (["--set", "page"], "--set: found 'page', expected KEY=VALUE such as page=32"),
    (["--set", "page=3"], "--set page: omnikv has no such setting; it takes "),
    (["--method", "quest", "--set", "page=0"], "--set page: found 0"),
    (["--offload", "cloud"], "--offload"),
    (["--method", "full", "--tokens", "9"], "--tokens: belongs to --method omnikv"),
    (["--vram-budget", "much"], "--vram-budget"),
    (["--method", "h2o", "--tail", "64"], "--tail: belongs to --method omnikv, but --method h2o"),
    (["--threads", "x"], "--threads"),
    (["-f", "-", "-i"], "-f -"),
    (["-f", "/no/such/file.txt"], "/no/such/file.txt"),
]


@pytest.mark.parametrize("flags, words", BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_flags_get_one_line_that_names_them_and_exit_2(fake, capsys, flags, words):
    fake()
    try:
        code = main(["--model", "x", *flags])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (
        code == 2
        and out == ""
        and len(errors) == 1
        and words in errors[0]
        and "Traceback" not in err
    )


def test_no_model_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(engine.chat.cli, "POCKET", tmp_path)
    assert main([]) == 2
    assert "no model is shipped with this engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code",
    [
        (ModelNotFound("no such model"), 2),
        (UnsupportedCheckpoint("gguf"), 1),
        (RuntimeError("a\nb"), 1),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
    ],
)
def test_failures_are_one_line_and_an_exit_code_and_verbose_shows_where(
    monkeypatch, capsys, error, code
):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("engine.cli.ranked.LLM", fails)
    assert main(["--model", "x", "-p", "hi"]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err and len(err.strip().splitlines()) <= 1
    if code != 130:
        assert main(["--model", "x", "-p", "hi", "--verbose"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_too_long_a_prompt_is_exit_1_with_the_numbers(fake, capsys):
    fake(max_context=20)
    assert main(["--model", "x", "-p", "long " * 50]) == 1
    assert "the limit is 20" in capsys.readouterr().err


def test_a_settings_error_is_named_as_the_flag():
    assert flag_named("max_context: found 9, expected less") == "--ctx: found 9, expected less"
    assert flag_named("wait_layers: found -1") == "--wait-layers: found -1"
    assert flag_named("the plan does not fit: 3 GB") == "the plan does not fit: 3 GB"


def test_numbers_with_units():
    assert [scaled(t) for t in ("131072", "32K", "128k", "1M", "1.5K")] == [
        131072,
        32768,
        131072,
        1048576,
        1536,
    ]
    assert [gigabytes(t) for t in ("24", "24GB", "0.5", "512M", "1t")] == [
        24 * 10**9,
        24 * 10**9,
        5 * 10**8,
        512 * 10**6,
        10**12,
    ]


# ---------------------------------------------------------------- the chat


def test_turns_commands_and_the_end_of_input(fake, monkeypatch, capsys):
    llm = fake("one", "two", "three")
    code, out, err = chat(
        llm,
        monkeypatch,
        capsys,
        "first",
        "",
        "second",
        "/stats all",
        "/memory",
        "/plan",
        "/reset",
        "third",
        "/set",
        "/help",
    )
    assert code == 0 and out == "one\ntwo\nthree\n"
    assert (
        re.search(r"\nbank bytes +640 B\n", err)
        and re.search(r"\n +planned +held now\nweights +1.00 kB\ncontext bank +640 B +640 B\n", err)
        and "model fake" in err
        and "a new conversation" in err
    )
    assert "max_tokens = 1024" in err and "/sources" in err and "Traceback" not in err
    spelled = llm.tokenizer.backend.decode(llm.sessions[0].ids, skip_special_tokens=False)
    assert "third" in spelled and "first" not in spelled


def test_settings_system_retry_and_leaving(fake, monkeypatch, capsys):
    llm = fake("one", "two", "three three three")
    code, out, err = chat(
        llm,
        monkeypatch,
        capsys,
        "/system Be brief.",
        "hello",
        "/retry",
        "/set n 1",
        "/set temp 0.5",
        "/set stop none",
        "more",
        "/system",
        "/exit",
        "never",
    )
    assert (
        code == 0
        and out.splitlines()[:2] == ["one", "two"]
        and len(out.splitlines()) == 3
        and "never" not in err
    )
    assert "temperature = 0.5" in err and "system prompt: Be brief." in err and "cut at -n" in err
    spelled = llm.tokenizer.backend.decode(llm.sessions[0].ids, skip_special_tokens=False)
    assert spelled.startswith("<s><|user|>system: Be brief.<|end|>") and "one" not in spelled


@pytest.mark.parametrize(
    "line, words",
    [
        ("/rest", "/rest: no such command; did you mean /reset?"),
        ("/read", "/read: found nothing"),
        ("/read /no/file", "/no/file"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temp hot", "temperature: found 'hot', expected a number"),
        ("/set n 1.5", "max_tokens: found '1.5', expected a whole number"),
        ("/set ignore_eos maybe", "ignore_eos: found 'maybe', expected on or off"),
        ("/stats most", "/stats: found 'most', expected nothing or all"),
        ("/set top_p 7", "top_p: found 7.0"),
        ("/method magic", "found 'magic'"),
        ("/sources x", "/sources: found 'x'"),
        ("/sources", "no answer yet"),
        ("/retry", "nothing to answer"),
    ],
)
def test_what_a_command_cannot_mean_is_one_line_and_the_chat_goes_on(
    fake, monkeypatch, capsys, line, words
):
    code, out, err = chat(fake("fine"), monkeypatch, capsys, line, "go on")
    assert code == 0 and out == "fine\n" and words in err and "Traceback" not in err


def test_a_pipe_learns_that_a_message_got_no_answer(fake, monkeypatch, capsys):
    code, out, err = chat(fake("fine", max_context=60), monkeypatch, capsys, "long " * 100, "short")
    assert code == 1 and out == "fine\n" and "the limit is 60" in err


def test_documents_are_read_at_once_and_a_slash_can_be_said(fake, monkeypatch, capsys, tmp_path):
    llm = fake("ok")
    (tmp_path / "a b.txt").write_text("The sun was warm. " * 9)
    (tmp_path / "empty.txt").write_text("\n")
    code, out, err = chat(
        llm,
        monkeypatch,
        capsys,
        f"/read {tmp_path / 'a b.txt'}",
        f"/read {tmp_path / 'empty.txt'}",
        "//slash",
        "/sources",
    )
    assert (
        code == 0
        and "a b.txt" in err
        and "read in" in err
        and "empty, nothing to read" in err
        and "full attention" in err
    )
    assert "user: The sun" in llm.tokenizer.backend.decode(
        llm.sessions[0].ids, skip_special_tokens=False
    )
    assert "\n\n/slash<|end|>" in llm.tokenizer.backend.decode(
        llm.sessions[0].ids, skip_special_tokens=False
    )


def test_sources_quotes_the_passage_that_was_chosen(fake, monkeypatch, capsys, tmp_path):
    import torch

    llm = fake("48213")
    (tmp_path / "d.txt").write_text(
        "Nothing of note happened here today.\n" * 20
        + "The key is 48213 for the gate.\n"
        + "Mild weather all day long.\n" * 9
    )
    inner = llm.script

    def script(ids):
        text, at = llm.tokenizer.decode(ids), []
        for i in range(len(ids)):
            before = len(llm.tokenizer.decode(ids[:i]))
            if text.index("The key") <= before < text.index("for the gate"):
                at.append(i)
        llm.sessions[0].selections = {2: torch.tensor(at)}
        llm.sessions[0].selection_scores = {2: torch.full((len(at),), 0.5)}
        return inner(ids)

    llm.script = script
    code, out, err = chat(
        llm, monkeypatch, capsys, f"/read {tmp_path / 'd.txt'}", "Which key?", "/sources"
    )
    assert code == 0 and out == "48213\n"
    assert err.index("d.txt, line 21, tokens") < err.index('"The key is 48213 for the gate."')
    assert "not ranked" not in err

    llm.sessions.clear()
    llm.session = lambda old=llm.session: _with_tail(old())
    code, out, err = chat(
        llm, monkeypatch, capsys, f"/read {tmp_path / 'd.txt'}", "Which key?", "/sources"
    )
    assert (
        '"The key is 48213 for the gate."' in err
        and "read by every layer at every step and not ranked" in err
    )


def test_several_lines_in_one_message(fake, monkeypatch, capsys):
    llm = fake("ok")
    code, out, _ = chat(
        llm, monkeypatch, capsys, "one \\", "two", '"""', "three", "", 'four"""', '"""five"""'
    )
    spelled = llm.tokenizer.backend.decode(llm.sessions[0].ids, skip_special_tokens=False)
    assert code == 0 and out == "ok\nok\nok\n"
    assert all(f"user: {text}<|end|>" in spelled for text in ("one \ntwo", "three\n\nfour", "five"))


def test_a_base_model_says_so_and_completes(fake, monkeypatch, capsys):
    llm = fake(" there was", template=None)
    code, out, err = chat(llm, monkeypatch, capsys, "Once", "/system x", " more")
    assert (
        code == 0
        and out == " there was\n there was\n"
        and "no chat template, so it completes text" in err
        and "no system prompt" in err
    )
    assert llm.tokenizer.decode(llm.sessions[0].ids) == "Once there was more there was"


def test_method_full_states_what_it_costs(fake, monkeypatch, capsys):
    llm = fake("a b c d")
    llm.session = lambda old=llm.session: _with_method(old())
    code, _, err = chat(
        llm,
        monkeypatch,
        capsys,
        "hello",
        "/method full",
        "/method omnikv",
        "/method",
        "again",
        flags=["--tokens", "64"],
    )
    assert (
        code == 0
        and "Full()" in err
        and "a step of full attention reads" in err
        and "per token" in err
    )
    assert "OmniKV(" in err and "tokens=64" in err


def test_method_takes_settings_and_comes_back_as_it_began(fake, monkeypatch, capsys):
    llm = fake("a b c d")
    llm.session = lambda old=llm.session: _with_method(old())
    code, _, err = chat(
        llm,
        monkeypatch,
        capsys,
        "/method h2o share=0.25",
        "/method h2o",
        "/method quest",
        "/method quest page",
        "/method quest pages=3",
        flags=["--method", "quest", "--set", "page=32", "--tokens", "512"],
    )
    assert code == 0 and "H2O(share=0.25): " in err and f"{brief(H2O())}: " in err
    assert "Quest(tokens=512, page=32): " in err
    assert "error: /method: found 'page', expected KEY=VALUE such as page=32" in err
    assert "error: pages: quest has no such setting; it takes dense_layers, gqa_reduce, page" in err


def _with_tail(session):
    session.method = SimpleNamespace(tail=256)
    return session


def _with_method(session):
    session.set_method = lambda method, progress=None: setattr(session, "method", method)
    return session


# ---------------------------------------------------------------- Ctrl-C


def interrupting(llm, at, times=1):
    """Send Ctrl-C to ourselves when the answer's token number `at` is drawn."""
    inner = llm.script

    def script(ids):
        for i, token in enumerate(inner(ids)):
            if i == at:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            yield token

    llm.script = script


def test_ctrl_c_stops_an_answer_and_keeps_it(fake, monkeypatch, capsys):
    llm = fake("a b c d e f g h i j")
    interrupting(llm, 3)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = chat(llm, monkeypatch, capsys, "go", "/stats")
    assert code == 0 and "stopped" in err and 0 < len(out.strip()) < 15 and "context bank" in err
    assert signal.getsignal(signal.SIGINT) is before
    assert main(["--model", "x", "-p", "once"]) == 130


def test_ctrl_c_twice_leaves(fake, monkeypatch, capsys):
    llm = fake("a b c d e f g h i j")
    interrupting(llm, 3, times=2)
    code, out, err = chat(llm, monkeypatch, capsys, "go", "never reached")
    assert code == 130 and "Traceback" not in err and "never" not in err


def test_ctrl_c_in_a_reading_keeps_what_was_read(fake, monkeypatch, capsys, tmp_path):
    llm = fake("ok")
    (tmp_path / "long.txt").write_text("The sun was warm and the day was long. " * 20)
    original = Display.reading

    def reading(self):
        show, calls = original(self), []

        def progress(p):
            calls.append(p)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            show(p)

        return progress

    monkeypatch.setattr(Display, "reading", reading)
    code, out, err = chat(
        llm, monkeypatch, capsys, f"/read {tmp_path / 'long.txt'}", "so?", "/retry"
    )
    assert code == 0 and "stopped: long.txt: 20 of" in err and "stay" in err
    assert "stopped while reading" in err and out == "ok\n"


# ---------------------------------------------------------------- display


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def progress_of(done, total=1000):
    return SimpleNamespace(
        done=done,
        total=total,
        work=(done / total) ** 2,
        seconds=done / 100,
        eta=(total - done) / 50,
    )


def test_a_terminal_gets_one_line_that_is_written_over(monkeypatch):
    now = [100.0]
    set_clock(monkeypatch, "monotonic", lambda: now[0])
    display = Display(Screen())
    show = display.reading()
    for done in (100, 500, 900, 1000):
        now[0] += 1.0
        show(progress_of(done))
    text = display.stream.getvalue()
    assert "\n" not in text and text.count("\r") >= 3
    assert "reading 500 of 1,000 tokens · 25% of the work · 400 tok/s · 10 s left" in text
    assert text.rsplit("\r", 2)[1].strip() == ""  # the last thing written clears it


def test_no_terminal_gets_a_line_every_few_seconds(monkeypatch):
    now = [100.0]
    set_clock(monkeypatch, "monotonic", lambda: now[0])
    display = Display(io.StringIO())
    show = display.reading()
    for done in range(0, 1001, 10):
        now[0] += 0.2
        show(progress_of(done))
    lines = display.stream.getvalue().splitlines()
    assert 3 <= len(lines) <= 4 and "\r" not in display.stream.getvalue()


def test_short_readings_show_nothing_and_loading_tells_shards(monkeypatch):
    display = Display(Screen())
    show = display.reading()
    show(progress_of(500))
    show(progress_of(1000))
    assert display.stream.getvalue() == ""
    now = [0.0]
    set_clock(monkeypatch, "monotonic", lambda: now[0])
    load = display.loading()
    now[0] = 2.0
    load(SimpleNamespace(shard=1, shards=4, bytes_done=4e9, bytes_total=16e9, seconds=2.0))
    load(SimpleNamespace(shard=4, shards=4, bytes_done=16e9, bytes_total=16e9, seconds=8.0))
    text = display.stream.getvalue()
    assert (
        "loading file 1 of 4 · 4.00 GB of 16.00 GB · 2.00 GB/s" in text
        and "loaded 16.00 GB in 8.0 s (2.00 GB/s)" in text
    )


def test_a_terminal_sees_ten_lines_of_progress_a_second_at_most(monkeypatch):
    """70 for a model of 12 MB are a flicker that nobody reads; the same figures are drawn once."""
    clock = HeldClock()
    set_clock(monkeypatch, "monotonic", clock)
    display = Display(Screen())
    load = display.loading()
    for step in range(1, 201):  # two seconds
        clock.now = step / 100
        load(SimpleNamespace(shard=1, shards=1, bytes_done=step, bytes_total=999, seconds=step))
    drawn = display.stream.getvalue().count("\r")
    assert 14 <= drawn <= 17, "a line every 0.1 s, from 0.4 s on"
    for _ in range(10):
        clock.now += 1
        display.progress("the same", 0.0)
    assert display.stream.getvalue().count("\r") == drawn + 1


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bright = Display(Screen())
    bright.dim("x")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Display(Screen())
    plain.dim("x")
    assert bright.stream.getvalue() == "\033[2mx\033[0m\n" and plain.stream.getvalue() == "x\n"


def test_numbers_for_people_and_text_that_cannot_rule_the_screen():
    assert [clock(s) for s in (0.04, 0.4, 9.9, 42, 59.7, 185, 3729)] == [
        "40 ms",
        "0.4 s",
        "9.9 s",
        "42 s",
        "1:00",
        "3:05",
        "1:02:09",
    ]
    assert [human(b) for b in (12, 5300, 2.5e6, 1.618e10)] == [
        "12 B",
        "5.30 kB",
        "2.50 MB",
        "16.18 GB",
    ]
    assert (
        brief(OmniKV(filter_layers=(2, 8), dense_below=0))
        == "OmniKV(filter_layers=(2, 8), wait_layers=0, dense_below=0)"
    )
    assert brief(Full()) == "Full()"
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(ValueError()) == "ValueError"
    assert printable("a\x1b[2J\tb\n\x07é\x9b") == "a\ufffd[2J\tb\n\ufffdé\ufffd"


def test_text_that_is_not_utf8_is_refused_and_never_changed(fake, capsys, tmp_path):
    fake("Lily.")
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    assert main(["--model", "x", "-f", str(path), "-p", "Who?"]) == 2
    assert "found byte 0xe9 at 3, expected UTF-8" in capsys.readouterr().err


def test_a_wrong_method_is_answered_with_every_name(fake, monkeypatch, capsys):
    """A line of bounded length cut the list in its middle."""
    names = [*methods(), "exact"]
    _, _, err = chat(fake(), monkeypatch, capsys, "/method nonsense", "/method quets")
    assert f"the methods are {', '.join(names)}\n" in err
    assert "error: /method: found 'nonsense', expected one of these names\n" in err
    assert "expected one of these names; did you mean quest?\n" in err
