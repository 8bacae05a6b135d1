"""--list-models --fits: what it says to fit does fit, by the plan of the same model."""

import json
import re

import pytest
import torch

from engine import LLM
from engine.base.errors import HubError, SettingError
from engine.chat import main
from engine.cli.fits import fits
from engine.load.memory import largest_context, memory_items
from engine.load.options import Options
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.model.config.config import ModelConfig
from engine.plan import free_memory
from engine.plan.free_memory import HEADROOM
from weights.aliases import ALIASES
from weights.shapes import config_of

GB = 10**9
CPU = torch.device("cpu")


def shown(text):
    """{name: tokens that fit} of the table's rows."""
    lines = text.partition("do not fit so")[0].splitlines()[2:]
    rows = [line.split() for line in lines if line.partition(" ")[0] in ALIASES]
    return {row[0]: int(row[2].replace(",", "")) for row in rows}


@pytest.fixture(autouse=True)
def same_ram(monkeypatch):
    """The free RAM of a shared machine moves while a test runs."""
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: (16 * GB, "free RAM"))


def on_card(size, **settings):
    """The table for an imagined GPU of `size` GB."""
    return fits(Options(imagined_gpu=size * GB, **settings))


def test_more_memory_never_fits_less():
    found = [shown(on_card(size)) for size in (4, 12, 24, 80)]
    assert 0 < len(found[0]) < len(found[2]) < len(found[3])
    for less, more in zip(found, found[1:]):
        assert all(more[name] >= tokens for name, tokens in less.items())
    assert all(tokens <= ALIASES[name].context for name, tokens in found[3].items())
    assert found[3]["qwen2.5-7b-128k"] == 131072


def test_what_fits_is_what_the_plan_says():
    """One token block more than the longest context would not fit."""
    config = ModelConfig.from_dict(config_of(ALIASES["qwen3-4b-2507"]))
    method, free = Full(), 12 * GB
    layers = method.plan(config)
    found = largest_context(config, method, layers, torch.bfloat16, CPU, free, free)
    assert 0 < found.context < 262144 and found.bytes <= free * HEADROOM
    arguments = (config, method, layers, torch.bfloat16, CPU)
    assert found.bytes == sum(b for _, b, _ in memory_items(*arguments, found.context, 512))
    more = sum(b for _, b, _ in memory_items(*arguments, found.context + 1024, 512))
    assert more > free * HEADROOM


def test_windows_are_why_gemma_fits():
    rows = shown(on_card(4))
    assert rows["gemma-3-1b"] == 32768 and "smollm3-3b" not in rows


def test_command_line(capsys):
    assert main(["--list-models", "--fits", "24"]) == 0
    printed = capsys.readouterr().out
    assert "24.00 GB free on an imagined GPU" in printed and "--ctx" in printed
    assert "beside 16.00 GB of this machine's host memory (--fits 24+128" in printed
    assert main(["--fits", "--device", "cpu"]) == 0
    assert "16.00 GB of free RAM" in capsys.readouterr().out


def listed(capsys, *flags):
    """({name: tokens}, heading, what does not fit) of the table that the flags print."""
    assert main(["--list-models", *flags]) == 0
    text = capsys.readouterr().out
    table, _, rest = text.partition("do not fit")
    return shown(table), text.splitlines()[0], rest


def test_the_form_of_weights_and_bank_is_honoured_and_named(capsys):
    """Both were dropped: the table was that of bfloat16, whatever was asked for."""
    plain, heading, rest = listed(capsys, "--fits", "24")
    assert "weights bfloat16, bank bfloat16" in heading and "qwen3-14b" not in plain
    row = next(line for line in rest.splitlines() if line.startswith("qwen3-14b"))
    assert "--weights int8" in row or "--weights int4" in row  # the form that would fit
    few, heading, rest = listed(capsys, "--fits", "24", "--weights", "int4", "--bank", "int8")
    assert "weights int4, bank int8" in heading
    # latent rows are not packed: the table names the form that such a model takes
    latent = plain.keys() - few.keys()
    assert few["qwen3-14b"] >= 32768 and latent == {"minicpm3-4b"}
    row = next(line for line in rest.splitlines() if line.startswith("minicpm3-4b"))
    assert "--bank model" in row
    assert all(few[name] >= plain[name] for name in plain.keys() - latent)


def test_what_the_table_says_in_few_bits_is_what_the_plan_says(offline, capsys):
    settings = {"weights": "int4", "bank": "int8", "imagined_gpu": 12 * GB, "ram_budget": 8 * GB}
    flags = "--fits 12 --weights int4 --bank int8 --ram-budget 8".split()
    rows, _, _ = listed(capsys, *flags)
    for name in ("qwen3-8b-128k", "phi-3.5-mini", "gemma-2-9b"):
        llm = LLM(name, load=False, method=OmniKV(), **settings)
        assert llm.plan().largest_context == rows[name], name


def test_a_context_and_a_budget_are_honoured(capsys):
    rows, heading, rest = listed(capsys, "--fits", "24", "--ctx", "100K", "--ram-budget", "1")
    assert "102,400 tokens" in heading and "beside a budget of 1.00 GB of host memory" in heading
    assert rows and set(rows.values()) == {102400}
    assert "shorter than 102,400 tokens: " in rest and "smollm2-135m" in rest
    less, heading, _ = listed(capsys, "--fits", "--device", "cpu", "--ram-budget", "3")
    assert (
        heading.startswith("weights bfloat16, bank bfloat16") and "a budget of 3.00 GB" in heading
    )
    assert less.keys() < listed(capsys, "--fits", "--device", "cpu")[0].keys()


def test_a_card_has_host_memory_of_its_own(offline, capsys):
    """--fits 80 counted with this machine's RAM, so that a 70B did not fit a card it fits."""
    asked = "--model llama-3.1-70b --weights int4 --ctx 128K --plan".split()
    assert main([*asked, "--fits", "80"]) == 1
    alone = capsys.readouterr().out.splitlines()
    assert "16.00 GB free host memory of this machine" in "\n".join(alone)
    assert re.search(r"does not fit: .* of host memory too much.*--fits 80\+21", alone[-1])
    # the device holds what it can, so that no less will do
    assert [main([*asked, "--fits", card]) for card in ("80+20", "80+21")] == [1, 0]
    capsys.readouterr()
    assert main([*asked, "--fits", "80+40"]) == 0
    beside = capsys.readouterr().out.splitlines()
    assert "of 40.00 GB free imagined host memory" in "\n".join(beside)
    assert "of the 38.00 GB of host memory that may be used (of 40.00 GB free im" in beside[-1]
    assert main([*asked, "--fits", "80", "--ram-budget", "40"]) == 0
    budget = capsys.readouterr().out
    assert "GB of a budget of 40.00 GB\nreads " in budget and "42.1" not in budget
    assert "of the 40.00 GB of host memory that may be used (of a budget of 40.00 GB)" in budget
    less, _, _ = listed(capsys, "--fits", "24+1")
    assert less["llama-3-8b-262k"] < listed(capsys, "--fits", "24+128")[0]["llama-3-8b-262k"]


@pytest.mark.parametrize("text", ["80+", "+80", "80+128+1", "80+x", "a"])
def test_a_card_that_is_none_is_one_line(capsys, text):
    with pytest.raises(SystemExit) as end:
        main(["--list-models", "--fits", text])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "expected gigabytes such as 24, or 80+128" in said


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub, and nothing in its cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_an_alias_is_planned_before_anything_of_it_is_here(offline, capsys):
    """On a GPU that is not here either, 70 layers of 8 K/V heads of 128 in host memory in int8."""
    asked = ["--model", "llama-3.1-70b", "--weights", "int4:128", "--bank", "int8"]
    asked += ["--ctx", "131072", "--fits", "48", "--ram-budget", "64", "--plan", "--json"]
    assert main(asked) == 0
    printed = capsys.readouterr()
    plan = json.loads(printed.out)
    assert plan["fits"] and plan["free_bytes"] == 48 * GB and plan["device"] == "cuda:0"
    assert plan["max_context"] == 131072 and plan["host_bytes"] == 70 * 131072 * 2 * 8 * 136
    assert "the sizes in the table of aliases" in printed.err
    assert not re.search("hub|cache|resum|fetch|OFFLINE", printed.err)  # a plan needs none of them
    assert main([*asked, "--verbose"]) == 0
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert main([*asked[:-6], "--fits", "24", "--ram-budget", "16", "--plan", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"] and plan["verdict"].startswith("does not fit: ")


def test_what_was_planned_from_a_table_loads_nothing(offline, capsys):
    assert main(["--model", "llama-3.1-8b", "-p", "hello"]) == 1
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    llm = LLM("smollm2-135m", load=False)
    assert llm.plan().step_weights == 2 * 134515008
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        llm.load()


def test_an_imagined_gpu_loads_nothing():
    llm = LLM("weights/pocket", load=False, imagined_gpu=2 * GB)
    assert llm.plan().fits and llm.device.type == "cuda"
    with pytest.raises(SettingError, match="imagined_gpu: found a GPU to plan for"):
        llm.load()
