"""The table of what few bits cost: its figures follow from the distributions that they are of."""

import math

import pytest
import torch

from tools.convert.weight_quality import Tally, table


def test_a_tally_is_the_textbooks_divergence_and_agreement():
    row = Tally("int8", "auto", "float32", 10**6, "")
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    row.add(p.log() + 3, q.log() - 1, 0)  # logits, not normalised
    row.add(p.log(), p.log(), 1)
    found = row.to_dict()
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["kl"] == pytest.approx(expected / 2, rel=1e-6)
    assert found["agreement"] == 0.5 and found["tokens"] == 2
    assert found["perplexity"] == pytest.approx(4.0, rel=1e-6)
    assert found["reference_perplexity"] == pytest.approx(math.sqrt(8), rel=1e-6)
    assert "| int8 | float32 | 1 | 0.08664 |" in table([found])
