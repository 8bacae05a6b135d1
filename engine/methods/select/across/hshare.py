"""HShare: layers read the list of a layer before them, heads that of a head of their layer, and
steps that of a step before, as calibration found them alike.

Source: Wu et al., HShare, ICLR 2025, and its code (wuhuaijin/HShare, HShare_llama.py): of a step
whose length `steps` divides each layer that is its own source chooses the tokens of most attention
between the first 8 and the newest 32, per head; then its heads read the list of the head that they
share with, layers that share take over the lists of all heads, and the steps until the next such
length read the same lists and what came since. A greedy rule shares the most similar pairs (its
Algorithm 1). Defaults: two steps, half of the layers and of the heads; 8 first, 32 newest and 88
chosen tokens, or 512 in all. Differs: a head is a K/V head, whose query heads' softmax is summed
(their models have no groups); tokens are ranked by all channels of K, not by 16 in 4 bits; what is
shared is found by calibration (`python -m tools.calibrate.sharing`), there by every prompt; the
budget is of the tokens at a prompt's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import (
    ByLogits,
    choice_buffers,
    choosers_stay,
    highest,
    require_room,
)
from engine.methods.select.across.sharing import (
    Sources,
    checked_heads,
    checked_sources,
    read_sharing,
    require_layers,
)
from engine.methods.select.base import Budgeted, Buffer, Selection
from engine.methods.tables.head_table import Facts, checked_facts
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, shared_groups
from engine.plan.needs import MOST_WINDOW, Needs


@dataclass(frozen=True)
class HShare(Budgeted):
    """Budget as Budgeted's, by default 128 tokens, first and newest ones included. layers: for
    each layer the layer whose lists it reads; heads: [layer][K/V head], the K/V head of that layer
    whose list it reads; None: each its own. sharing: a file of both (hshare.json, or a published
    one of layers). steps: lengths that it divides choose. sinks: first tokens, recent: newest ones
    that are always read. made_for: numbers of the model that the file names.
    """

    full_prompts = True

    layers: Sources | None = None
    heads: tuple[Sources, ...] | None = None
    sharing: str | Path | None = None
    steps: int = 2
    sinks: int = 8
    recent: int = 32
    made_for: Facts = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, heads, facts = self.layers, self.heads, self.made_for
        if self.sharing is not None:
            if layers is not None or heads is not None:
                raise SettingError("sharing: a file says what layers and heads share; give either")
            layers, heads, facts = read_sharing(Path(self.sharing))
        found = {
            "layers": None if layers is None else checked_sources("layers", layers),
            "heads": None if heads is None else checked_heads(heads),
            "made_for": checked_facts(facts),
            "sharing": None,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)
        integer("steps", self.steps, 1, MOST_WINDOW)
        integer("sinks", self.sinks, 0)
        integer("recent", self.recent, 0)
        if self.tokens is not None and self.tokens <= self.sinks + self.recent:
            raise SettingError(
                f"tokens: found {self.tokens}, expected more than the {self.sinks} first and "
                f"{self.recent} newest that are always read (sinks, recent)"
            )

    def budget(self, length: int) -> int:
        """Tokens that a K/V head reads in a step that chooses, one chosen at least."""
        asked = 128 if self.tokens is None and self.share is None else super().budget(length)
        return max(asked, self.sinks + self.recent + 1)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Every layer SPARSE, in the group of the layer whose lists it reads. Raises SettingError
        for another model's table.
        """
        require_room(self, config)
        require_layers(self.layers, self.heads, self.made_for, config)
        sources = self.layers or tuple(range(config.num_layers))
        return shared_groups(sources, config.local_layers, config.recurrent_layers)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and K/V head, shared by the layers that choose, and each one's chosen
        tokens.
        """
        return choice_buffers(self, plan, capacity, batch * config.num_kv_heads)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Layers that choose read every K and stay on the device, with the queries since a length
        that `steps` divides; every K/V head's rows come over apart.
        """
        needs = choosers_stay(
            super().needs(plan, config, capacity, itemsize), plan, config.num_kv_heads
        )
        return replace(needs, window=self.steps if plan.sparse_layers and self.steps > 1 else 0)

    def runtime(self, setup: Setup) -> Runtime:
        return HShareRuntime(self, setup)


class HShareRuntime(ByLogits):
    """Lists per K/V head that layers, heads and steps share. What a step reads follows from its
    length, the bank and the query ring: lists that were not made yet for its last choosing length
    are made from that length's query.
    """

    method: HShare

    def __init__(self, method: HShare, setup: Setup):
        super().__init__(method, setup)
        own = tuple(range(setup.config.num_kv_heads))
        self.heads = {
            layer: torch.tensor(row, device=setup.device)
            for layer, row in enumerate(method.heads or ())
            if row != own
        }
        self.made_at: dict[int, list[int]] = {}  # by group, each sequence's length at the choice
        self._latest = 0  # length of the last step in which something was chosen

    def _choosing(self, n: int) -> int:
        """The length at which a step at n tokens has chosen, n or less."""
        return n - n % self.method.steps

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, visible = self.plan.group_of[layer], step.lengths
        assert group is not None
        lengths = [self._choosing(n) for n in visible]
        if max(lengths) <= self.k:
            self.made_at.pop(group, None)
            return Selection(None, None, step.visible)
        if self.made_at.get(group) == lengths:
            return self.chosen[group]
        scores = self.score(layer, self._asking(layer, q, step, visible), step, lengths)
        tail = self.tail_start(step)
        given = self.k - self.method.recent, tail, self.setup.backend
        found = highest(self.index[group], scores, tail, *given)
        if layer in self.heads:
            assert found.index is not None
            found.index.copy_(found.index.index_select(1, self.heads[layer]))
        self.made_at[group], self._latest = lengths, visible[0]
        return found

    def _asking(self, layer: int, q: torch.Tensor, step: Step, visible: list[int]) -> torch.Tensor:
        """The queries that choose, [B, 1, H, D]: those of each sequence's choosing length."""
        steps = self.method.steps
        if steps == 1:
            return q[:, -1:]
        window = step.window_queries(layer, steps)
        return torch.stack([window[b, steps - 1 - n % steps] for b, n in enumerate(visible)])[
            :, None
        ]

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> torch.Tensor:
        """The sum over a K/V head's query heads of their softmax; of the first tokens infinite."""
        for b, scores in enumerate(self.scores.unflatten(0, (len(q), -1))):
            if not (n := lengths[b]):
                continue
            weights = self.logs(layer, q, step, b, n).weights(len(scores))
            torch.sum(weights, 1, out=scores[:, :n])
            scores[:, : self.method.sinks] = float("inf")
        return self.scores

    # ---------------------------------------------------------------- what a step read

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest tokens of the step that chose, and all since."""
        lengths = step.visible - step.visible % self.method.steps
        return (lengths - self.method.recent).clamp(min=0)

    def tokens_read(self, n: int) -> int:
        """Everything where the choosing step read everything, else the budget and what came
        since.
        """
        chosen = self._choosing(n)
        return n if chosen <= self.k else self.k + n - chosen

    def choosing_bytes(self, n: int) -> int:
        """K of every token in the layers that choose, in the steps that do."""
        chosen, config = self._choosing(n), self.setup.config
        if chosen <= self.k or (chosen != n and n != self._latest):
            return 0
        row = config.kv_bytes(self.setup.dtype.itemsize) // config.sides
        return len(self.plan.groups) * chosen * row

    # ---------------------------------------------------------------- going back

    def choice(self) -> Any:
        """And the lengths at which it was made."""
        return super().choice() | {"made_at": dict(self.made_at)}

    def load_choice(self, choice: Any) -> None:
        chosen = dict(choice)
        self.made_at = dict(chosen.pop("made_at"))
        super().load_choice(chosen)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        super().end_prompt(length, step)
        self.made_at = {}  # the budget may be another

    def truncate(self, length: int) -> None:
        """Lists of lengths beyond are of other tokens."""
        super().truncate(length)
        self.made_at = {g: at for g, at in self.made_at.items() if max(at) <= length}

    def load(self, state: Any, length: int | None) -> None:
        super().load(state, length)
        self.made_at = {}
