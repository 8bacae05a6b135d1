"""A2ATS: far keys as codes of one codebook per head, without their positions, by the error that
queries would see.

Source: He et al., A2ATS, Findings of ACL 2025, its abstract and as others quote it; its code is not
public. Beyond a window, positions are taken to be one distance apart (windowed rotary position
embedding), so that a key is coded without its rotation and the query is turned by that distance.
Codes are nearest in the error of logits, E (q k - q c)^2 = (k - c) H (k - c) with H = E q q: with H
= L L, k-means runs on k L. The k tokens whose codes say most are read, from host memory where they
lie there, beside the window.

Not published, and so settings: the window, the distance, the size of the codebook. H is learnt of
256 random tokens when a model reads its first prompt under this method. The codebook is of the
first `train` tokens of the text, as PQCache's here, not of a calibration text, and everything is
read until there are so many. What is read is attended to at its true distance. Scores over a group
are the sums of its heads' weights. A K/V head has one H and one codebook. Layer 0 is dense by
default: without their positions its keys are as many as there are different tokens, and codes of
equal keys are chance. Prompts are read densely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.requirements import require_one_rope
from engine.methods.select.base import Buffer
from engine.methods.select.index.pqcache import PQCache, PQCacheRuntime
from engine.methods.select.taught.learnt import Learnt
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan
from kernels.index.indexes import Codes, Ends, Index
from kernels.sketch.codes import Coded, Turns, choose_coded, learn_coded, score_coded

DAMPED = 1e-3  # of H's mean diagonal, added to it: a sample may not span all of a head


@dataclass(frozen=True)
class A2ATS(PQCache):
    """Budget as Budgeted's, the first tokens and the window included. window: newest tokens, always
    read. distance: at which far keys are taken to be. sink, bits, train, rounds, dense_layers,
    gqa_reduce: as PQCache's; parts: 1.
    """

    full_prompts = True

    sink: int = 4
    parts: int = 1
    bits: int = 8
    dense_layers: int = 1
    window: int = 64
    distance: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("parts", self.parts, 1, 1)
        integer("window", self.window, 1)
        integer("distance", self.distance, 0)

    def budget(self, length: int) -> int:
        """The first tokens, the window, and one more at least."""
        return max(self.sink + self.window + 1, super().budget(length))

    def newest(self, budget: int) -> int:
        return self.window

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError where keys cannot be turned back."""
        widths = {config.heads_of(layer)[1] for layer in range(config.num_layers)}
        require_one_rope(self, config)
        if len(widths) > 1:
            raise SettingError(
                f"a2ats: its codes are of heads of one width, found {sorted(widths)} "
                f"({config.family}); use another method"
            )
        return super().plan(config)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """And the factors of H, and what undoes them."""
        shape = len(plan.sparse_layers), config.num_kv_heads, config.head_dim, config.head_dim
        found = super().buffers(plan, config, capacity, batch)
        del found["weights"]  # of every token: here of every code
        return found | {"factors": Buffer(shape, torch.float32)}

    def runtime(self, setup: Setup) -> Runtime:
        return A2ATSRuntime(self, setup)


class A2ATSRuntime(PQCacheRuntime):
    """No CUDA graph: the host knows which rows are new."""

    method: A2ATS
    factors: torch.Tensor
    as_they_are = False

    def __init__(self, method: A2ATS, setup: Setup):
        super().__init__(method, setup)
        self.rotary = Rotary(setup.config, setup.device)
        # no method of this object: a session that is dropped is freed at once
        found = partial(factor, self.rotary, method.distance)
        name = f"a2ats at {method.distance}"
        self.learnt = Learnt(setup, self.plan, self.factors, name, found)
        self._turned: dict[int, Turns] = {}

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        super().begin_prompt(start, stop, more)
        self.learnt.ready()

    def copy_from(self, other: A2ATSRuntime, sequence: int = 0) -> None:
        super().copy_from(other, sequence)
        self.learnt.take(other.learnt)

    def coded(self, group: int, keys: torch.Tensor, first: int) -> torch.Tensor:
        """Keys without their rotation, by the factor of H."""
        self.learnt.ready()
        places = torch.arange(first, first + keys.shape[1], device=keys.device)
        return (
            self.rotary.rotate_by(keys.transpose(0, 1), -places).transpose(0, 1)
            @ (self.factors[group])
        )

    def by(self, group: int) -> Codes | None:
        """None: PQCache's call knows neither a factor nor turns."""
        return None

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """A step's token by one call, where its centroids are there."""
        self.learnt.ready()
        if first >= self.method.ready and k.shape[1] == 1:
            given = k, self._turns(-first), self.setup.backend
            if learn_coded(self._coded[group], b, first, *given):
                return
        super().absorb(group, b, first, k, v)

    @cached_property
    def _coded(self) -> list[Coded]:
        """What each group chooses by."""
        shape, method = (self.setup.batch, self.codes.shape[2], -1), self.method
        return [
            Coded(
                factors,
                centroids[:, :, 0],
                codes.view(shape),
                self.scores,
                chosen,
                self.scale,
                method.gqa_reduce,
                method.sink,
            )
            for factors, centroids, codes, chosen in zip(
                self.factors, self.centroids, self.codes, self.index
            )
        ]

    def _turns(self, by: int) -> Turns:
        """cos and sin of one turn, made once for all layers of a step."""
        if by not in self._turned:
            if len(self._turned) > 2 * self.setup.batch:  # those of steps before
                self._turned.clear()
            positions = torch.tensor([by], device=self.setup.device)
            cos, sin = self.rotary.turns_by(positions)
            self._turned[by] = cos[0], sin[0]
        return self._turned[by]

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        """By what a token's code weighs among those of all tokens between the first and the window:
        to the bit the same for one code, of which the oldest then go first. Queries meet codes as
        if keys were `distance` away.
        """
        method = self.method
        stops = [n - method.window if n >= method.ready else 0 for n in lengths]
        far = [self._turns(method.distance - (n - 1)) for n in lengths]
        by, backend = self._coded[group], self.setup.backend
        if not choose_coded(by, q, far, *ends, backend):
            score_coded(by, q, far, stops)
            Index(self.scores, by.chosen, "none").take(ends, backend)


def factor(
    rotary: Rotary, distance: int, layer: int, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """L of a layer's H, lower triangular, of a sample's q [n, H, D] and k [Hkv, n, D]: float32
    [Hkv, D, D], on the CPU.
    """
    places = torch.arange(len(q), device=q.device)
    far = rotary.rotate_by(q.float(), distance - places)
    rows = far.double().cpu().unflatten(1, (len(k), -1)).transpose(0, 1).flatten(1, 2)
    moments = rows.mT @ rows / rows.shape[1]
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    eye = torch.eye(moments.shape[1], dtype=moments.dtype)
    damped = moments + (DAMPED * mean + 1e-12)[:, None, None] * eye
    return torch.linalg.cholesky(damped).float()
