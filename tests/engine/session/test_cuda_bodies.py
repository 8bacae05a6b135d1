"""The bodies of tests/cuda/test_sessions.py on a CPU, so that they are right before a GPU runs
them.
"""

import pytest

from engine.session.session import Session
from tests.builders import random_ids
from tests.cuda.session_checks import (
    FAMILIES,
    FORMS,
    check_batch,
    check_exact,
    check_family,
    check_form,
    check_saved,
    check_streamed,
    form_name,
    made,
)
from tools.bench.verify import Mismatch


@pytest.mark.parametrize("form", [*FORMS, {"bank": "fp8"}], ids=form_name)
def test_forms(form):
    check_form(made("cpu", **form), random_ids(700))


def test_batches():
    check_batch("cpu", 3, bank="int8")


@pytest.mark.parametrize("offload", ["device", "host"])
def test_exact_mode(offload):
    check_exact("cpu", offload)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_saved_sessions(offload, tmp_path):
    check_saved("cpu", offload, tmp_path, bank="int4")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    pytest.importorskip("transformers")
    check_family("cpu", name, tmp_path)


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_weights_that_stream(weights):
    check_streamed("cpu", weights=weights)


def test_a_form_that_is_wrong_is_noticed(monkeypatch):
    """The likeliest logit is off by half of their spread, in the timed path only."""
    llm = made("cpu", bank="int8")
    right = Session.decode

    def wrong(self, token):
        logits = right(self, token)
        if self.backend == "reference":
            return logits
        return logits - 0.5 * logits.std() * (logits == logits.max()).float()

    monkeypatch.setattr(Session, "decode", wrong)
    with pytest.raises(Mismatch, match="step 0 at 700 tokens"):
        check_form(llm, random_ids(700))
