"""Every study imports and says how it is run; their own tests are run by `make studies-test`.

Stops: a study that a move or a new name left behind.
"""

import importlib
import pkgutil

import pytest

from tools import studies

MODULES = [module.name for module in pkgutil.walk_packages(studies.__path__, "tools.studies.")]
PROGRAMS = (
    "chats",
    "duo_gates",
    "exact.cli",
    "forgetting",
    "heavy_channels",
    "own_heads",
    "pocket.filters",
    "pocket.train",
    "prefill.block_recall",
    "prefill.latent",
    "prefill.quality",
    "prefill.table",
    "prompts",
    "razor_heads",
    "reuse",
)


@pytest.mark.parametrize("name", MODULES)
def test_every_study_imports(name):
    assert importlib.import_module(name).__doc__


def test_every_program_is_named_here():
    found = {name for name in MODULES if hasattr(importlib.import_module(name), "main")}
    # exact.__main__ hands its own on
    assert found - {"tools.studies.exact.__main__"} == {f"tools.studies.{p}" for p in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_answers_help(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"tools.studies.{name}").main()
    said = f"usage: python -m tools.studies.{name.removesuffix('.cli')}"
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(said)
