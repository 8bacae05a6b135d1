"""One list of flags for chat and server: each ends in the same settings and the same method.

Stops: a setting that the chat has and the server lacks, or that the server takes and drops.
"""

import os
import subprocess
import sys

import pytest

from engine.base.errors import UsageError
from engine.chat import cli as chat
from engine.chat import flags as chat_flags
from engine.cli.parser import OURS
from engine.load.options import SAVEPOINTS
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.names import NAMES
from engine.methods.registry import methods
from engine.methods.select.quest import Quest
from engine.serve import cli as serve
from engine.terminal.display import Display
from tests.builders import ROOT

SHARED = ("context and placement", "method")  # groups of flags that describe what runs
# flags -> what they must end in: fields of Options, or of the method
ASKED = [
    ("--ctx 4K", {"max_context": 4096}),
    ("--rope linear:2", {"rope": "linear:2"}),
    ("--savepoints 3", {"savepoints": 3}),
    ("--beyond --ctx 64K", {"beyond": True, "max_context": 65536}),
    ("--forever", {"forever": True, "method": None}),
    ("--forever --tokens 64", {"tokens": 64}),
    ("--device cpu", {"device": "cpu"}),
    ("--devices cpu,cpu", {"devices": ("cpu", "cpu")}),
    ("--devices cpu,cpu --split 1:3", {"split": (1, 3)}),
    ("--dtype float32", {"dtype": "float32"}),
    ("--weights int4", {"weights": "int4"}),
    ("--weights int8 --activations int8", {"activations": "int8"}),
    ("--weights-offload 3", {"weights_offload": 3}),
    ("--bank int8", {"bank": "int8"}),
    ("--threads 2", {"threads": 2}),
    ("--chunk 128", {"chunk": 128}),
    ("--compile off", {"compile": False}),
    ("--offload host", {"offload": "host"}),
    ("--vram-budget 3", {"vram_budget": 3 * 10**9}),
    ("--ram-budget 2", {"ram_budget": 2 * 10**9}),
    ("--method full", {"method": Full()}),
    ("--method omnikv --tail 128", {"tail": 128}),
    ("--filter-layers 1,3", {"filter_layers": (1, 3)}),
    ("--wait-layers 1", {"wait_layers": 1}),
    ("--dense-below 0", {"dense_below": 0}),
    ("--prefill-ratio 2", {"prefill_ratio": 2}),
    ("--method quest --set page=32 --set tokens=256", {"method": Quest(page=32, tokens=256)}),
    ("--tokens 64", {"tokens": 64}),
    ("--share 0.25", {"share": 0.25}),
    ("--mem 0.5 --filter-layers 1", {"mem": 0.5}),
    ("--selector uniform --window 8", {"selector": "uniform", "window": 8}),
    ("--tail 64", {"tail": 64}),
    ("--sink 4", {"sink": 4}),
    ("--exact --tokens 64", {"draft": "auto"}),
    ("--exact --draft 3 --dense-below 0", {"draft": 3}),
    ("--exact --draft-weights int8", {"draft_weights": "int8"}),
    ("--no-calibrate", {}),
]


def flags_of(parser, titles=None):
    """All spellings of the flags of these groups; None: of all."""
    groups = [g for g in parser._action_groups if titles is None or g.title in titles]
    return {flag for g in groups for a in g._group_actions for flag in a.option_strings}


def test_every_flag_that_says_what_runs_is_in_both_programs_and_in_this_table():
    shared = flags_of(chat_flags.parser(), SHARED)
    assert len(shared) == 37 and not shared - flags_of(serve.parser())
    tried = {word for flags, _ in ASKED for word in flags.split() if word.startswith("--")}
    assert shared - tried == {"--calibrate"}  # refused: see below
    helps = [
        {a.dest: (a.help, a.choices) for a in parser._actions if set(a.option_strings) & shared}
        for parser in (chat_flags.parser(), serve.parser())
    ]
    assert helps[0] == helps[1]


@pytest.mark.filterwarnings("ignore:.*beyond the")
@pytest.mark.parametrize("flags, fields", ASKED, ids=[flags for flags, _ in ASKED])
def test_a_flag_ends_in_the_same_settings_in_both(flags, fields):
    words = flags.split()
    talking = chat.open_model(chat_flags.parser().parse_args(words), Display(quiet=True))
    serving = serve.open_model(serve.parser().parse_args(words))
    assert talking.options == serving.options
    assert talking.method == serving.method and talking.plan().layers == serving.plan().layers
    for field, value in fields.items():
        options, method = serving.options, serving.options.method
        holder = options if hasattr(options, field) else method
        if isinstance(method, Exact) and not hasattr(holder, field):
            holder = method.method
        assert getattr(holder, field) == value, field
    assert isinstance(serving.method, Exact) == ("--exact" in words)


def test_no_flag_at_all_is_the_same_method_too():
    talking = chat.open_model(chat_flags.parser().parse_args([]), Display(quiet=True))
    assert serve.open_model(serve.parser().parse_args([])).options == talking.options


def test_the_server_says_where_to_calibrate(capsys):
    args = serve.parser().parse_args(["--calibrate"])
    with pytest.raises(UsageError, match="--calibrate: .* engine.chat --calibrate -f FILE"):
        serve.open_model(args)


def test_flags_of_other_engines_are_no_aliases_and_ours_exist():
    flags = flags_of(chat_flags.parser())
    assert not flags & set(OURS) and set(OURS.values()) <= flags


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--draft 3", "--draft: belongs to --exact"),
        ("--draft-weights int8", "--draft-weights: belongs to --exact"),
        ("--method quest --set colour=blue", "--set colour: quest has no such setting"),
        ("--tokens 64 --share 0.5", "expected at most one of"),
        ("--selector best", "expected one of last, exponential, uniform"),
        ("--bank int2", "expected one of auto, model, int8, int4, fp8"),
        ("--filter-layers one", "expected layer numbers"),
        ("--prefil-ratio 2", "did you mean --prefill-ratio?"),
        ("--wait-layers -1", "--wait-layers: found -1"),
        ("--max-model-len 4096", "--max-model-len: no such flag; use --ctx"),
        ("--temperature 1", "--temperature: no such flag; --help lists the flags"),
    ],
)
def test_a_wrong_value_is_one_line_by_the_flags_name(capsys, flags, words):
    try:
        code = serve.main(["--plan", *flags.split()])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and words in said and said.count("\n") == 1


def test_both_programs_say_first_in_which_form_weights_and_bank_are_held(capsys, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(serve, "listen", lambda *_: [])
    monkeypatch.setattr(serve, "_run", lambda *_: 0)
    flags = ["--ctx", "2K", "--weights", "int8", "--bank", "int8"]
    assert serve.main(flags) == 0
    assert ", weights int8, bank int8, OmniKV(" in capsys.readouterr().err
    assert chat.main(["-p", "hi", "-n", "1", *flags]) == 0
    assert ", weights int8, bank int8, OmniKV(" in capsys.readouterr().err
    assert chat.main(["-p", "hi", "-n", "1", "--ctx", "2K"]) == 0
    assert ", weights bfloat16, bank bfloat16, OmniKV(" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--fits: found no --plan beside it"):
        serve.open_model(serve.parser().parse_args(["--fits", "80"]))


def imported_by(*words, stdout=subprocess.DEVNULL):
    """(exit code, modules that were imported, what else stderr has) of a program."""
    command = [sys.executable, "-X", "importtime", "-m", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = done.stderr.splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return done.returncode, modules, [line for line in lines if not line.startswith("import time:")]


@pytest.mark.parametrize(
    "words, code, said",
    [
        ("engine.chat --help", 0, None),
        ("engine.serve --help", 0, None),
        ("engine.chat --modle x", 2, "did you mean --model?"),
        ("engine.serve --kv-cache-dtype x", 2, "use --bank"),
        ("engine.chat --method qest", 2, "did you mean quest?"),
        ("engine.serve --ctx many", 2, "--ctx: found 'many', expected a number of tokens"),
        ("engine.chat -f - -i", 2, "-i has nothing left to read"),
        ("engine.chat --calibrate -p a", 2, "found no document"),
        ("engine.serve --slots 0", 2, "--slots: expected 1 to 256"),
        ("engine.serve --host 0.0.0.0", 2, "give --api-key-file"),
    ],
)
def test_a_wrong_flag_and_help_need_no_torch(words, code, said):
    """torch takes seconds, tens of them on a machine that is busy. Counted, not timed."""
    found, modules, lines = imported_by(*words.split())
    assert found == code
    heavy = {"torch", "triton", "numpy", "transformers", "starlette", "uvicorn", "engine.llm"}
    assert "argparse" in modules and not modules & heavy
    assert len(modules) < 400, len(modules)  # torch alone brings more than 1,000
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("error: ") and said in line


def test_help_that_nobody_takes_is_no_traceback():
    with open("/dev/full", "w") as full:
        code, _, lines = imported_by("engine.chat", "--help", stdout=full)
    assert code == 1 and lines == [
        "error: standard output: cannot be written: No space left on device"
    ]
    reader, writer = os.pipe()
    os.close(reader)
    code, _, lines = imported_by("engine.serve", "--help", stdout=writer)
    os.close(writer)
    assert (code, lines) == (1, [])


def test_the_command_line_has_all_methods():
    # a test may have imported a method of its own
    ours = [name for name, cls in methods().items() if cls.__module__.startswith("engine.")]
    assert list(NAMES) == ours
    for parser in (chat_flags.parser(), serve.parser()):
        (flag,) = (action for action in parser._actions if action.dest == "method")
        assert flag.choices == NAMES


def test_the_help_says_how_many_savepoints_there_are():
    (flag,) = (a for a in chat_flags.parser()._actions if a.dest == "savepoints")
    assert f"default {SAVEPOINTS};" in flag.help
