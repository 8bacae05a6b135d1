"""docs/MACHINES.md: its cells are plans of today's engine."""

from dataclasses import replace

import pytest

from engine import LLM
from engine.cli.fits import Machine
from engine.load.options import Options
from tools.repo.machines import GB, PAGE, cell, machines, table
from weights.aliases import ALIASES

SAMPLE = ("llama-3-8b-1048k", "qwen3-4b-2507", "gemma-2-9b")


def rows(text: str) -> dict[str, str]:
    """{alias: its line} of a table."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def test_the_page_has_every_alias_and_a_sample_is_current():
    whole = PAGE.read_text(encoding="utf-8")
    page = rows(whole.partition("<!-- machines: ")[2].partition("<!-- /machines -->")[0])
    assert list(page) == list(ALIASES)
    assert {name: page[name] for name in SAMPLE} == rows(table(SAMPLE)), (
        "docs/MACHINES.md is old: python -m tools.repo.machines"
    )


@pytest.mark.parametrize("gpu, host", [(11, 24), (23, 48)])
def test_a_cell_is_what_a_plan_of_that_context_says(gpu, host):
    options = Options(imagined_gpu=gpu * GB, imagined_host=host * GB)
    text = cell(Machine.of(options), "llama-3-8b-1048k", options)
    context = int(text.split()[0].replace(",", ""))
    form = {"weights": "int4", "bank": "int4"}
    assert text == f"{context:,} w4 b4*"
    settings = dict(imagined_gpu=gpu * GB, imagined_host=host * GB, load=False, **form)
    plan = LLM("llama-3-8b-1048k", max_context=context, **settings).plan()
    assert plan.fits and plan.placement is not None
    longer = LLM("llama-3-8b-1048k", max_context=min(context * 2, 1048576), **settings).plan()
    assert context == 1048576 or not longer.fits


def test_a_machine_with_nothing_holds_nothing():
    _, machine, options = machines()[0]
    poor = replace(machine, free=machine.free._replace(bytes=GB // 4, host=GB // 4))
    assert cell(poor, "llama-3-8b-262k", options) == "-"
    assert cell(machine, "llama-3-8b-262k", options) != "-"
