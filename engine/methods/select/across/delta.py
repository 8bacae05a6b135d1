"""DELTA: a few layers attend to everything and choose pages by the attention that they gave; the
layers behind read those pages.

Source: DELTA (Zarch et al., 2025, arXiv 2510.09883), section 3, and hoenza/DELTA (page_score.py,
page_selector_v2.py). A page's score is the sum over its tokens of the largest softmax that any
query head of the choosing layer gives them; the newest pages are always read, inside the budget.
One list of pages serves all heads. Layers below the first that chooses attend to everything.
Differs: choosing layers are by default TidalDecode's, since the authors name theirs per model, and
the code's tiny preference of older pages, which settles ties, is the order of positions itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import (
    bring_received,
    brought,
    checked_layers,
    choosers_stay,
    choosing_layers,
    highest,
    require_room,
)
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, Role, layer_plan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class Delta(Budgeted):
    """Budget as Budgeted's, in whole pages, the newest included. layers: ascending numbers of the
    layers that choose, None for 2 and 13 of 32 at the model's depth. page: tokens of a page.
    newest: newest pages that are always read, the last of which may be begun only.
    """

    full_prompts = True

    layers: tuple[int, ...] | None = None
    page: int = 16
    newest: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            object.__setattr__(self, "layers", checked_layers("layers", self.layers))
        integer("page", self.page, 1)
        integer("newest", self.newest, 1)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below the first choice, FILTER where one is made, SPARSE elsewhere."""
        require_room(self, config)
        layers = choosing_layers("layers", self.layers, config)
        others = config.local_layers, config.recurrent_layers
        return layer_plan(config.num_layers, layers, 0, *others)

    def budget(self, length: int) -> int:
        """Whole pages, the newest ones and another at least."""
        return max(self.newest + 1, super().budget(length) // self.page) * self.page

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and one per page, shared by the choosing layers, and each one's
        chosen pages.
        """
        sparse = plan.chooses
        pages = -(-capacity // self.page)
        most = min(pages, self.budget(capacity) // self.page - self.newest)
        return {
            "scores": Buffer((batch, capacity if sparse else 0), torch.float32),
            "sums": Buffer((batch, pages if sparse else 0), torch.float32),
            "pages": Buffer((len(plan.groups), batch, most if sparse else 0), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """The layers that choose read everything, and stay on the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        return choosers_stay(needs, plan, 1, together=True)

    def runtime(self, setup: Setup) -> Runtime:
        return DeltaRuntime(self, setup)


class DeltaRuntime(Selecting):
    """One list of pages for all heads of a group's layers. No CUDA graph: the host knows how many
    pages there are.
    """

    method: Delta
    scores: torch.Tensor
    sums: torch.Tensor
    pages: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """A layer that chooses attends to everything, which leaves the scores of its tokens."""
        group = self.plan.group_of[layer]
        chooses = group is not None and self.plan.roles[layer] is Role.FILTER
        if group is None or not chooses or not self.plan.groups[group].serves:
            return super().attend(layer, q, step)
        out = self.attend_dense(layer, q, step, self.scores[:, : step.bucket])
        self.chosen[group] = self.select(layer, q, step)
        return out

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, size, tail = self.plan.group_of[layer], self.method.page, self.tail_start(step)
        assert group is not None
        older = max(0, -(-max(step.lengths) // size) - self.method.newest)
        read = self.k // size - self.method.newest
        if older <= read:
            return Selection(None, None, tail)
        tokens = self.scores[:, : older * size].unflatten(1, (older, size))
        torch.sum(tokens, 2, out=self.sums[:, :older])
        stop = (tail // size).int()
        given = stop, read, tail, self.setup.backend, size
        found = highest(self.pages[group], self.sums, *given)
        return brought(found, self.plan.groups[group].layers, step)

    def received(self, step: Step) -> None:
        bring_received(self.chosen, self.plan.groups, step)

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest pages."""
        size = self.method.page
        pages = (step.visible + size - 1) // size - self.method.newest
        return pages.clamp(min=0) * size

    def tokens_read(self, n: int) -> int:
        """Everything while the budget covers it, else whole pages and what the newest holds."""
        size = self.method.page
        return min(n, self.k - (-n) % size)
