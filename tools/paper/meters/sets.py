"""The tokens that every layer would choose in every step of an answer, and how much of each layer's
attention falls on the choice of each layer below.

Source: the OmniKV paper, section 3 and Figure 8, as its code computes it: attention of a layer is
the softmax, over the prompt's tokens, of the maximum over heads of the scaled products.
"""

from __future__ import annotations

import torch

from engine.bank.base import Step
from engine.methods.base import Runtime
from tools.calibrate.similarity import logits_rows, top_rows

SCORES = ("logits", "heads")
SINKS = 4  # first tokens, on which heads rest that look for nothing


class SetMeter:
    """Full attention that notes, of the prompt's tokens, the `k` that each layer attends to most.

    scores: "logits", the softmax of head-maximum products, or "heads", the maximum over the heads
    of each one's own softmax, made to sum to one. sets: [steps][layers] int64 positions, ascending.
    mass [L, L] float64: mass[i, j], i <= j, sums over steps the share of layer j's attention on
    layer i's choice; newest [L]: on the newest k of the prompt; edges [L]: on its first SINKS and
    the newest others, as a stream by window keeps them.
    """

    def __init__(self, inner: Runtime, prompt: int, k: int, scores: str = "logits"):
        layers = inner.setup.config.num_layers
        self.inner, self.prompt, self.k, self.scores = inner, prompt, k, scores
        self.sets: list[list[torch.Tensor]] = []
        self.mass = torch.zeros(layers, layers, dtype=torch.float64)
        self.newest, self.edges = (torch.zeros(layers, dtype=torch.float64) for _ in range(2))

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first notes its choice."""
        if layer == 0:
            self.sets.append([])
        ranked, weights = self._weights(layer, q, step)
        self.sets[-1].append(top_rows(ranked, self.prompt, self.k))
        for below, rows in enumerate(self.sets[-1]):
            self.mass[below, layer] += float(weights[rows].sum())
        self.newest[layer] += float(weights[-self.k :].sum())
        first = min(SINKS, self.k)
        self.edges[layer] += float(weights[:first].sum())
        self.edges[layer] += float(weights[max(first, self.prompt - self.k + first) :].sum())
        return self.inner.attend(layer, q, step)

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """No layer has a window (tools.common.arguments.require_plain)."""
        raise AssertionError(f"layer {layer} has a window")

    def _weights(
        self, layer: int, q: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what ranks, weights that sum to one), float32 [prompt] each: weights that are too small
        for a float still have a rank.
        """
        n = int(step.visible[0])
        logits = logits_rows(q[0, -1], step.bank, layer, n, self.inner.scale)
        if self.scores == "logits":
            ranked = logits[:, : self.prompt].amax(0)
            return ranked, torch.softmax(ranked, dim=-1)
        highest = torch.softmax(logits, dim=-1)[:, : self.prompt].amax(0)
        return highest, highest / highest.sum()

    def mean_mass(self) -> torch.Tensor:
        """float64 [L, L]: the mean over steps; 0 where j < i."""
        return self.mass / max(1, len(self.sets))

    def between_layers(self) -> torch.Tensor:
        """float64 [L, L]: share of layer i's choice that layer j makes too, mean over steps."""
        shown = self._shown()
        return torch.einsum("sin,sjn->ij", shown, shown) / (self.k * len(self.sets))

    def between_steps(self, layer: int) -> torch.Tensor:
        """float64 [steps, steps]: share of a step's choice in a layer that another makes too."""
        shown = self._shown()[:, layer]
        return shown @ shown.T / self.k

    def _shown(self) -> torch.Tensor:
        """float64 [steps, L, prompt]: 1 where a token is chosen."""
        out = torch.zeros(len(self.sets), len(self.mass), self.prompt, dtype=torch.float64)
        for number, layers in enumerate(self.sets):
            for layer, rows in enumerate(layers):
                out[number, layer, rows.cpu()] = 1.0
        return out
