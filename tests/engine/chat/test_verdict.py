"""The last line of a plan: whether it fits, and if not what does, each by a plan of its own.

Stops: a plan that does not fit and ends with rc 0 and no word about it, a remedy that does not fit
either.
"""

import re

import pytest

from engine import LLM
from engine.chat import main as chat
from engine.chat.cli import open_model
from engine.chat.flags import parser
from engine.methods.full import Full
from engine.plan import free_memory
from engine.serve.cli import main as serve
from engine.terminal.display import Display

GB = 10**9


@pytest.fixture(autouse=True)
def same_ram(monkeypatch):
    """The free RAM of a shared machine moves while a test runs."""
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: (16 * GB, "free RAM"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub: sizes come from the table of aliases."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def said(capsys, main, flags):
    """(exit code, last line) of a plan."""
    code = main(["--plan", *flags.split()])
    return code, capsys.readouterr().out.splitlines()[-1]


def remedies(line):
    """The flags that the line proposes."""
    return re.findall(r"(?:fits with|, or) ((?:--[\w-]+ [\w.:+]+ ?)+)", line)


@pytest.mark.parametrize(
    "flags",
    [
        "--model qwen3-8b --ctx 40K",
        "--model llama-3.1-8b --ctx 128K",
        "--model llama-3.1-8b --ctx 128K --weights int8",
        "--model llama-3-8b-262k --ctx 256K --fits 16",
        "--model llama-3-8b-262k --ctx 256K --fits 24 --offload device",
        "--model llama-3-8b-262k --ctx 256K --fits 48+4",
        "--model phi-4 --dtype float32 --ctx 4K --fits 40+16",
        "--model qwen3-14b --fits 24 --weights-offload off",
        "--model llama-3.1-70b --fits 24+64 --ctx 8K",  # of host memory for weights that stream
        "--model llama-3.1-8b --ctx 100K --ram-budget 14",
        "--model llama-3-8b-262k --ctx 128K --fits 8+32",  # none at 128K: a shorter context
    ],
)
def test_what_is_proposed_fits(capsys, flags):
    code, line = said(capsys, chat, flags)
    assert code == 1 and line.startswith("does not fit: ") and " too much" in line
    found = remedies(line)
    assert found, line
    for remedy in found:
        name = remedy.split()[0]
        kept = re.sub(rf"{name} \S+", "", flags) if name in flags else flags
        code, line = said(capsys, chat, f"{kept} {remedy}")
        assert code == 0 and line.startswith("fits: "), (remedy, line)


def test_a_plan_that_fits_says_so(capsys):
    code, line = said(capsys, chat, "--ctx 2K")
    assert code == 0 and re.match(r"fits: \d+\.\d+ MB of the 15\.20 GB that may be used", line)
    code, line = said(capsys, chat, "--model llama-3-8b-262k --ctx 256K --fits 32+64")
    assert code == 0 and "of the 60.80 GB of host memory" in line


def test_what_no_form_fits_says_what_the_least_needs(capsys):
    code, line = said(capsys, chat, "--model llama-3.1-70b --ctx 128K")
    assert code == 1 and not remedies(line)
    least = re.search(r"--weights (int4\S*) --bank int4 still needs (\d+\.\d+) GB", line)
    assert least and float(least[2]) > 35
    large = "--model llama-3.1-70b --weights int4 --ctx 128K --fits 24"
    code, line = said(capsys, chat, f"{large} --weights-offload off")
    assert code == 1 and "still needs" in line
    code, line = said(capsys, chat, large)  # weights stream, and host memory is too small
    assert code == 1 and "of host memory too much" in line and "still needs" not in line
    code, line = said(capsys, chat, f"{large}+128")
    assert code == 0 and line.startswith("fits: ")


def test_weights_that_stream_of_themselves_come_with_a_form_that_stays(capsys):
    code, line = said(capsys, chat, "--model llama-3.1-8b --ctx 8K --fits 8+64")
    assert code == 0 and (form := re.search(r"nothing streams with (.*) \(", line))
    assert chat(["--plan", *f"--model llama-3.1-8b --ctx 8K --fits 8+64 {form[1]}".split()]) == 0
    assert "stream" not in capsys.readouterr().out


def test_the_server_counts_its_slots(capsys):
    code, line = said(capsys, serve, "--ctx 2K --slots 3")
    assert code == 0 and line.startswith("fits: 3 sessions of 2048 tokens, ")
    few = "--ctx 2K --slots 60 --ram-budget 0.4"
    code, line = said(capsys, serve, few)
    assert code == 1 and line.startswith("does not fit: 60 sessions of 2048 tokens, ")
    found = remedies(line)
    assert "--slots" in line and "--bank int8" in line
    for remedy in found:
        name = remedy.split()[0]
        kept = re.sub(rf"{name} \S+", "", few) if name in few else few
        assert said(capsys, serve, f"{kept} {remedy}")[0] == 0, remedy
    two = "--model llama-3-8b-262k --ctx 256K --slots 2 --fits 80+128"
    code, line = said(capsys, serve, two)  # auto keeps on the device what fits one session
    assert code == 1 and "--offload host" in line
    code, line = said(capsys, serve, f"{two} --offload host")
    assert code == 0 and line.startswith("fits: 2 sessions of 262144 tokens")


def test_a_conversation_with_what_was_proposed_runs():
    """The shipped model in a budget that floats do not fit."""
    flags = ["--ctx", "32K", "--ram-budget", "0.13", "--method", "full"]
    llm = open_model(parser().parse_args(flags), Display(quiet=True))
    assert not llm.plan().fits and llm.plan(bank="int4").fits
    small = LLM(max_context=32768, ram_budget=130_000_000, bank="int4", method=Full(), threads=1)
    assert small.generate([1, 2, 3]).token_ids
