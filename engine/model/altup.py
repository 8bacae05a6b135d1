"""Several streams of a token in place of one, as Gemma 3n has them: a layer computes one stream and
predicts the others (AltUp, arXiv 2301.13310); and its low-rank map beside attention (LAUREL, arXiv
2411.07501).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SMALLEST = 1e-5  # of a mean square that a stream is divided by


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x [..., N] by its root mean square and multiply by weight [N], in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


@dataclass
class Laurel:
    """The map of a layer's normed input that joins what attention leaves."""

    left: torch.Tensor  # [rank, hidden]
    right: torch.Tensor  # [hidden, rank]
    norm: torch.Tensor  # [hidden]
    eps: float

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights."""
        return [self.left, self.right, self.norm]

    def joined(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Join x [B, S, hidden] with the map of the layer's normed input `given`."""
        mapped = F.linear(F.linear(given, self.left), self.right)
        return (x + given + normed(mapped, self.norm, self.eps)) * 2.0**-0.5


@dataclass
class AltUp:
    """The weights of A streams in L layers; the first stream is the one that layers compute."""

    spreads: list[torch.Tensor]  # A - 1 of [hidden, hidden]: streams of an embedding
    folds: list[torch.Tensor]  # A - 1 of [hidden, hidden]: what streams become after the last layer
    # of each layer
    routers: list[torch.Tensor]  # [A, hidden]
    norms: list[torch.Tensor]  # [hidden], of the router's input
    predictors: list[torch.Tensor]  # [A * A, A]
    correctors: list[torch.Tensor]  # [A, A]
    scales: list[torch.Tensor]  # [hidden], of the first stream where a layer's embeddings read it
    eps: float

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights."""
        each = self.routers, self.norms, self.predictors, self.correctors, self.scales
        return [*self.spreads, *self.folds, *(tensor for held in each for tensor in held)]

    def of_part(self, first: int, stop: int) -> AltUp:
        """Return the weights of the layers first .. stop-1: with what makes streams where they are
        the first, and with what joins them where they are the last.
        """
        last = stop == len(self.routers)
        return AltUp(
            self.spreads if first == 0 else [],
            self.folds if last else [],
            self.routers[first:stop],
            self.norms[first:stop],
            self.predictors[first:stop],
            self.correctors[first:stop],
            self.scales[first:stop],
            self.eps,
        )

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Make the streams [B, S, A, hidden] of embeddings x [B, S, hidden], all as large."""
        size = x.square().mean(-1, keepdim=True).sqrt()
        return torch.stack([x, *(_sized(F.linear(x, w), size) for w in self.spreads)], dim=2)

    def folded(self, x: torch.Tensor) -> torch.Tensor:
        """Take the mean of streams [..., A, hidden] after the last layer, each made as large as the
        first: [..., hidden].
        """
        first, *others = x.unbind(-2)
        size = first.square().mean(-1, keepdim=True).sqrt()
        made = [_sized(F.linear(one, w), size) for one, w in zip(others, self.folds)]
        return torch.stack([first, *made]).mean(0)

    def predicted(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Predict a layer's streams from those before it, x [B, S, A, hidden]: the same shape."""
        count = x.shape[2]
        maps = F.linear(self._weights(number, x[:, :, 0]), self.predictors[number])
        return torch.matmul(maps.unflatten(-1, (count, count)), x) + x

    def corrected(self, number: int, predicted: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Correct the predicted streams [B, S, A, hidden] by the layer's output x [B, S, hidden]:
        the same shape.
        """
        shares = F.linear(self._weights(number, x), self.correctors[number]) + 1.0
        new = (x - predicted[:, :, 0])[:, :, None]
        return new * shares[..., None] + predicted

    def _weights(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The streams' weights [B, S, A], by x [B, S, hidden]."""
        given = normed(x, self.norms[number], self.eps) * (1.0 / x.shape[-1])
        return torch.tanh(F.linear(given, self.routers[number]).float()).to(x.dtype)


def _sized(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Give x [..., hidden] the root mean square `size` [..., 1]."""
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=SMALLEST).sqrt()
