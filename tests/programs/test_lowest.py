"""The program that tests the oldest packages asks for those, and for no CUDA.

Stops: a requirement without a lower bound, 5 GB of CUDA on a machine without a GPU, a bound that
is no longer what is tested.
"""

from __future__ import annotations

import pytest

from tests.programs import lowest
from tests.programs.lowest import ROOT, numbers, torch_build

LISTED = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.1+cpu, 2.13.0+cpu, 2.13.0, 2.9.0"


def test_every_requirement_of_the_engine_has_a_bound_to_test():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = lowest.tomllib.loads(text)["project"]
    found = lowest.lowest(project)
    assert len(found) == len(set(found)) >= 10
    assert any(pin.startswith("torch==") for pin in found)
    for extra, wanted in project["optional-dependencies"].items():
        # beside what is tested; fleets are run by hand (tests/programs/ray_replicas.py)
        if extra not in ("benchmarks", "dev", "dynamo", "peers", "plots", "ray"):
            assert extra in lowest.EXTRAS, wanted
    with pytest.raises(ValueError, match="expected name>=version"):
        lowest.lowest({"dependencies": ["torch==2"]}, ())


def test_the_torch_that_is_taken_brings_no_cuda():
    assert torch_build("2.11", LISTED, "linux") == "2.13.0+cpu"
    assert torch_build("2.14", LISTED, "linux") == "2.14.1+cpu"
    assert torch_build("2.15", LISTED, "linux") is None
    assert torch_build("2.9", LISTED, "darwin") == "2.9.0"
    assert torch_build("2.11", "", "linux") is None
    assert numbers("2.13.0+cpu") == (2, 13, 0) > numbers("2.9")


def test_the_files_that_it_runs_are_there():
    assert all((ROOT / name).is_file() for name in lowest.FILES)
