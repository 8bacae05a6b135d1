"""Whole sessions on a GPU: bank and weights in few bits, batches, exact mode, saved sessions, and
families with caps, windows, sinks and experts. Skipped without a GPU;
tests/engine/session/test_cuda_bodies.py runs the bodies on a CPU.
"""

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
