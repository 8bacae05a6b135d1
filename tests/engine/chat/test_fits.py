"""--list-models --fits: what it says to fit does fit, by the plan of the same model."""

import json

import pytest
import torch

from engine import LLM
from engine.chat import main
from engine.chat.fits import fits
from engine.errors import HubError, SettingError
from engine.methods.full import Full
from engine.model.config import ModelConfig
from engine.plan.free_memory import HEADROOM
from engine.plan.memory import largest_context, memory_items
from weights.aliases import ALIASES
from weights.shapes import config_of

GB = 10**9
CPU = torch.device("cpu")


def shown(text):
    """{name: tokens that fit} of the table's rows."""
    rows = [line.split() for line in text.splitlines()[2:] if line.split()[0] in ALIASES]
    return {row[0]: int(row[2].replace(",", "")) for row in rows}


@pytest.fixture(autouse=True)
def same_ram(monkeypatch):
    """The free RAM of a shared machine moves while a test runs."""
    monkeypatch.setattr("engine.chat.fits.available_bytes", lambda device: (16 * GB, "free RAM"))


def test_more_memory_never_fits_less():
    found = [shown(fits(size * GB)) for size in (4, 12, 24, 80)]
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
    rows = shown(fits(4 * GB))
    assert rows["gemma-3-1b"] == 32768 and "smollm3-3b" not in rows


def test_command_line(capsys):
    assert main(["--list-models", "--fits", "24"]) == 0
    printed = capsys.readouterr().out
    assert "24.00 GB free on an imagined GPU" in printed and "--ctx" in printed
    assert main(["--fits", "--device", "cpu"]) == 0
    assert "free on this machine's RAM" in capsys.readouterr().out


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
    assert plan["max_context"] == 131072 and plan["host_bytes"] == 70 * 131072 * 2 * 8 * 132
    assert "the sizes in the table of aliases" in printed.err and "HF_HUB_OFFLINE" in printed.err
    assert main([*asked[:-6], "--fits", "24", "--ram-budget", "64", "--plan", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["fits"]


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
