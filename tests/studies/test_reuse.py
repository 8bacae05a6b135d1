"""tools/studies/reuse.py: hit rates of known selection streams, warm-up left out."""

import torch

from engine.runner.prompt import WARM
from tools.studies.reuse import hit_rate


def stream(*selections):
    warm = [torch.tensor(selections[0])] * WARM
    return warm + [torch.tensor(s) for s in selections]


def test_rates_of_known_streams():
    same = stream([1, 2, 3, 4], [1, 2, 3, 4])
    assert hit_rate(same, 1) == (8, 8) and hit_rate(same, 1, keep_last=True) == (8, 8)
    # what came back is still there with twice the slots
    back = stream([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4])
    assert (
        hit_rate(back, 1) == (4, 12)
        and hit_rate(back, 2) == (8, 12)
        and hit_rate(back, 2, keep_last=True) == (4, 12)
    )
    assert hit_rate(stream([1, 2], [3]), 1) == (2, 3)
