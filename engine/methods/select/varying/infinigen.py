"""InfiniGen: what the layer before takes says, by a few columns of queries and keys, which tokens a
layer will look at; they come from host memory while the layer before computes.

Source: Lee et al., InfiniGen, OSDI 2024, sections 4.2 and 4.3, and snu-comparch/InfiniGen
(kv_selection_controller.py; for Llama accuracy/src/modeling_llama_ours.py). Queries and keys are
turned by an orthogonal matrix per head, from the singular vectors of queries, so that few columns
carry most (published: 30% of them, by the sizes of queries and keys together). The input of layer
i-1 makes queries of layer i; a token is wanted whose logit by those columns is within alpha (4 for
OPT, 5 for Llama) of the head's largest. Every head takes as many as the heads want on average, at
most a share of the text (20%), and its newest token. Layer 0 reads everything.

OPT has no rotary positions, so that the paper folds the turn into W_q and W_k. The published code
for Llama projects, rotates, and turns then; so does this. The turn is learnt when a model reads its
first prompt under this method, of 256 random tokens (there: of a book, and the columns of a few
sentences). A K/V head has one turn and one list: of its query heads a token has the best, or mean,
distance to the head's largest logit. Nothing is evicted from host memory. Prompts are read densely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.bank.base import Step
from engine.base.checks import found, integer, is_number, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer, Selection
from engine.methods.select.index.base import Indexed, grouped, within_head_dim
from engine.methods.select.taught.learnt import Learnt
from engine.methods.select.varying.base import VaryingRuntime
from engine.methods.select.varying.skew import skewed
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.index.indexes import Ends
from kernels.rows.forms import key_floats
from kernels.sketch.guesses import Guessed, choose_guessed, guesses, learn_guessed

SHARE = 0.3  # of the head dimension: columns, by default


@dataclass(frozen=True)
class InfiniGen(Indexed):
    """Budget as Budgeted's: the most that a list takes, the newest token included. columns: of
    which logits are guessed, None for 30% of them. alpha: how far below a head's largest logit a
    token may be; infinite: the budget alone counts. dense_layers: as Indexed's, 1 at least.
    gqa_reduce: "max" | "mean".
    """

    full_prompts = True

    columns: int | None = None
    alpha: float = 5.0
    dense_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            integer("columns", self.columns, 1)
        if not is_number(self.alpha) or not self.alpha > 0:
            raise SettingError(f"alpha: found {found(self.alpha)}, expected a number above 0")
        if self.dense_layers < 1:
            raise SettingError(
                f"dense_layers: found {self.dense_layers}, expected an int >= 1: nothing comes "
                "before the first layer that could say what it will look at"
            )
        one_of("gqa_reduce", self.gqa_reduce, ("max", "mean"))

    def few(self, config: ModelConfig) -> int:
        """columns, or 30% of the head dimension."""
        return max(1, int(SHARE * config.head_dim)) if self.columns is None else self.columns

    def budget(self, length: int) -> int:
        """The newest token and one more at least."""
        return max(2, super().budget(length))

    def newest(self, budget: int) -> int:
        """The token of the step: its K is not there yet when the layer before chooses."""
        return 1

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError where columns are more than a head of the model has."""
        within_head_dim("columns", self.few(config), config)
        return super().plan(config)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """The columns of every token's K, how they are made, and a query head's guesses."""
        layers, heads, few = len(plan.sparse_layers), config.num_kv_heads, self.few(config)
        rows = capacity if layers else 0
        return super().buffers(plan, config, capacity, batch) | {
            "held": Buffer((layers, batch, heads, few, capacity)),
            "skew": Buffer((layers, heads, config.head_dim, few), torch.float32),
            "logits": Buffer((batch * config.num_heads, rows), torch.float32),
            "counts": Buffer((batch,), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Every layer that chooses is told its queries a layer before."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(needs, ahead=plan.sparse_layers)

    def runtime(self, setup: Setup) -> Runtime:
        return InfiniGenRuntime(self, setup)


class InfiniGenRuntime(VaryingRuntime):
    """No CUDA graph: the host knows which rows are new. A step of several tokens, or one that was
    not foreseen, chooses by the layer's own queries.
    """

    method: InfiniGen
    held: torch.Tensor
    skew: torch.Tensor
    logits: torch.Tensor
    counts: torch.Tensor
    settled = True

    def __init__(self, method: InfiniGen, setup: Setup):
        super().__init__(method, setup)
        self.learnt = Learnt(setup, self.plan, self.skew, "skew", skewed)
        self._foreseen: dict[int, tuple[Step, Selection]] = {}  # by group

    # ---------------------------------------------------------------- learning

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        super().begin_prompt(start, stop, more)
        self.learnt.ready()

    def copy_from(self, other: InfiniGenRuntime, sequence: int = 0) -> None:
        super().copy_from(other, sequence)
        self.learnt.take(other.learnt)

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.learnt.ready()
        if learn_guessed(self._by[group], b, first, k, self.setup.backend):
            return
        columns = (key_floats(k) @ self.skew[group]).mT
        self.held[group, b, :, :, first : first + k.shape[1]] = columns

    @cached_property
    def _by(self) -> list[Guessed]:
        """What each group chooses by."""
        method, known = self.method, zip(self.skew, self.held, self.index)
        settings = self.scale, method.alpha, method.gqa_reduce
        return [
            Guessed(skew, held, self.logits, self.scores, index, *settings)
            for skew, held, index in known
        ]

    # ---------------------------------------------------------------- a step

    def foresee(self, layer: int, q: torch.Tensor, step: Step) -> None:
        """Choose, and have the rows of a layer in host memory set out."""
        if q.shape[1] > 1:
            return
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} does not choose"
        chosen = super().select(layer, q, step)
        self._foreseen[group] = step, chosen
        if chosen.index is not None and step.bank.on_host(layer):
            step.bank.bring((layer,), *chosen.rows(), chosen.tail_start)

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} does not choose"
        of, chosen = self._foreseen.pop(group, (None, None))
        if of is step and chosen is not None:
            return chosen
        return super().select(layer, q, step)

    def lengths(self, step: Step) -> list[int]:
        """What was there before the step."""
        return [n - 1 for n in super().lengths(step)]

    def covers(self, lengths: list[int]) -> bool:
        """Only where no logit may leave a token out."""
        return max(lengths) < (self.k if math.isinf(self.method.alpha) else 1)

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        if not choose_guessed(self._by[group], q, lengths, *ends, self.setup.backend):
            super().rank(group, q, lengths, ends)

    def score(self, group: int, q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """How far each token's logit is below its head's largest; leaves in self.counts how many
        are wanted.
        """
        heads, method = self.held.shape[2], self.method
        scores = self.scores.view(len(q), heads, -1)
        logits = self.logits.view(len(q), heads, -1, self.logits.shape[1])
        for b, n in enumerate(lengths):
            few = grouped(q[b], heads) @ self.skew[group] * self.scale
            given = self.held[group, b, :, :, :n], logits[b, :, :, :n], scores[b, :, :n]
            found = guesses(few, *given, method.alpha, method.gqa_reduce)
            self.counts[b] = found.sum() // heads
        return self.scores

    def wanted(self, stop: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """As many as the heads want on average, rounded down, the largest at least."""
        counts = self.counts.clamp(min=1).repeat_interleave(len(stop) // len(self.counts))
        return torch.minimum(counts, room.clamp(min=1))

    # ---------------------------------------------------------------- what a step read

    def choosing_bytes(self, n: int) -> int:
        """The columns of every token, and the weights of queries once more (with those of K and V
        beside them) at the size of a bank's element.
        """
        if self.covers([n - 1]):
            return 0
        config = self.setup.config
        width = config.hidden_size * (config.num_heads + 2 * config.num_kv_heads)
        weights = width * config.head_dim * self.setup.dtype.itemsize
        return len(self.plan.sparse_layers) * (self.index_bytes(n - 1) + weights)

    def index_bytes(self, n: int) -> int:
        """The columns of every token."""
        heads, few = self.held.shape[2:4]
        return heads * few * n * self.held.element_size()
