"""Ada-SnapKV: SnapKV whose layer budget is dealt to the heads by where the layer's highest scores
lie.

Source: Feng et al., Ada-KV (2024), Algorithms 2 and 3, Theorems 2-4; METHODS.md section 5. Outside
the window a layer keeps h (B - W) tokens in all: B*_i of them are head i's share of the layer-wide
highest scores, and head i gets alpha B*_i + (1 - alpha) (B - W), rounded so that the sum is exact.
alpha is the weight of the adaptive part (the code's floor_alpha is that of the uniform part); 0.5
in both. Heads then hold different numbers of tokens: each has Rows of its own, so that bytes are
those of the tokens. With alpha 0 it is SnapKV.
"""

from dataclasses import dataclass

import torch

from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from engine.methods.evict.store import best
from engine.methods.settings import portion


@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """alpha: weight of the adaptive budgets, in [0, 1]."""

    alpha: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        portion("alpha", self.alpha, zero=True)

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "ada_snapkv"

    def runtime(self, setup):
        """Stores of one session, one per head."""
        return AdaRuntime(self, setup)


class AdaRuntime(SnapRuntime):
    """One session's stores, every K/V head with a number of tokens of its own."""

    def choose(self, sequence, layer, parts, step):
        """Each head's window and its highest scores, as many as `deal` gives it."""
        window, found = min(self.method.window, sequence.length), []
        for part in parts:
            keys = self.ranked(sequence, layer, part, step)
            found += [(head_of(part, i), keys[i : i + 1]) for i in range(len(keys))]
        counts = deal(
            [keys[0, :-window] for _, keys in found],
            sequence.budgets[layer] - window,
            self.method.alpha,
        )
        return [
            (part, best(keys, part[3], count + window))
            for (part, keys), count in zip(found, counts)
        ]


def head_of(part, i):
    """The part of one K/V head of a part."""
    heads, k, v, positions, scores = part
    one = slice(i, i + 1)
    return (
        slice(heads.start + i, heads.start + i + 1),
        k[one],
        v[one],
        positions[one],
        None if scores is None else scores[one],
    )


def deal(scores, budget, alpha):
    """Budgets of h heads (ints) from their scores (a list of [T_i]); the sum is h * budget, or all
    there is. Ada-KV, Algorithm 2.
    """
    lengths = [len(s) for s in scores]
    total = min(len(scores) * budget, sum(lengths))
    if total == sum(lengths):
        return lengths
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    order = torch.sort(torch.cat([s.cpu() for s in scores]), descending=True, stable=True).indices[
        :total
    ]
    most = torch.bincount(owner[order], minlength=len(scores)).tolist()
    wanted = [
        min(n, alpha * own + (1 - alpha) * total / len(scores)) for n, own in zip(lengths, most)
    ]
    counts = [int(w) for w in wanted]
    # largest remainders first
    for i in sorted(range(len(counts)), key=lambda i: (counts[i] - wanted[i], i)) * 2:
        if sum(counts) < total and counts[i] < lengths[i]:
            counts[i] += 1
    return counts
