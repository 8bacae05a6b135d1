"""Whole sessions on a GPU: bank and weights in few bits, batches, exact mode, saved sessions, and
families with caps, windows, sinks and experts. Skipped without a GPU;
tests/engine/session/test_cuda_bodies.py runs the bodies on a CPU.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.builders import random_ids
from tests.cuda.session_checks import (
    FAMILIES,
    FORMS,
    check_batch,
    check_exact,
    check_family,
    check_form,
    check_saved,
    form_name,
    made,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("form", [*FORMS, {"bank": "fp8"}], ids=form_name)
def test_forms(form):
    check_form(made("cuda", **form), random_ids(700))


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("settings", [{}, {"step": "plain"}, {"bank": "int8"}], ids=str)
def test_batches(count, settings):
    """Nine rows are more than a product of ours takes, and more shapes than torch.compile does."""
    check_batch("cuda", count, **settings)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_exact_mode(offload):
    check_exact("cuda", offload)


@pytest.mark.parametrize("bank", ["model", "int8", "int4"])
@pytest.mark.parametrize("offload", ["device", "host"])
def test_saved_sessions(offload, bank, tmp_path):
    check_saved("cuda", offload, tmp_path, bank=bank)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    pytest.importorskip("transformers")
    check_family("cuda", name, tmp_path)


def test_a_first_answer_compiles_nothing_after_its_weights_are_there(tmp_path):
    """What was compiled while weights were read is all that a fresh machine launches."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-m", "tools.gpu.jobs", "first answer"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["before"] >= 15 and facts["later"] == 0, facts
