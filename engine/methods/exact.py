"""Exact mode: a selecting method drafts, full attention verifies, and the answer is full
attention's.

`Exact(OmniKV(...))` is a method like any other. Its prompts are read and its tokens are computed by
full attention. A session under it may first draft: sparse steps of the inner method guess the next
tokens, and one step of full attention over up to 8 tokens computes the logits after every one of
them and rewrites their rows (engine/exact/runner.py). A guess that turns out to be the token that
is fed next costs nothing then. The bank, the query ring and the logits are those of a session under
Full(), so nothing that is drafted shows in an answer.

Sources: speculative decoding (Leviathan et al., 2023) with the model's own sparse attention as the
drafter (TriForce, 2024; MagicDec, 2024; SparseSpec, 2025). Checkpoints that were trained to be left
early draft by their first layers and the head instead (LayerSkip, Elhoushi et al., ACL 2024):
`Exact(Full(), early_exit=8)`. Such drafts need no bank of their own: their rows are the first
layers' rows of full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import boolean, is_integer, one_of
from engine.base.device import carried
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.model.low_bits import FewBits
from engine.plan.draft_weights import copy_bytes
from engine.plan.exact_costs import FOUR_IN_FIVE, ExactCosts
from engine.plan.filter_layers import FilterLayers
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs

CHOOSERS = ("auto", "drafter", "verifier")
DRAFT_WEIGHTS = ("model", "int8")
SWITCH = 1.03  # who chooses what drafts read changes where that promises so much more
MOST_DRAFTS = 7  # a step takes up to 8 tokens: the one that is fed, and its drafts


@dataclass(frozen=True)
class Exact(Method):
    """method: the selecting method that drafts. draft: tokens drafted before each verification, 0
    to 7, or "auto": as many as pay, by the acceptance so far and counted bytes. lookup: draft also
    what followed the newest three tokens where they occurred before, where that has paid more.
    early_exit: draft by full attention in so many first layers and the head, with method Full(); 0:
    by the method. chooser: who chooses what drafts read: "drafter", whose first step does;
    "verifier", the cycle before's verification, so that no draft reads a whole layer; "auto":
    whoever is counted to be faster. draft_weights: "model": drafts read the model's weights;
    "int8": a copy of them in int8, on a CPU, made with the first session that asks for it and
    shared by all: half the bytes of a draft in bfloat16, for half as much memory again.

    Raises SettingError for a method that cannot draft: one that evicts, reads prompts its own way,
    or reads everything.
    """

    method: Method
    draft: int | str = "auto"
    lookup: bool = True
    early_exit: int = 0
    chooser: str = "auto"
    draft_weights: str = "model"

    named = False  # made from another method: --exact, /method exact
    full_prompts = True

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(method, Method) or isinstance(method, Exact):
            raise SettingError(f"method: found {method!r}, expected a method such as OmniKV(...)")
        if not is_integer(self.early_exit) or self.early_exit < 0:
            raise SettingError(
                f"early_exit: found {self.early_exit!r}, expected a number of layers, or 0"
            )
        if self.early_exit and method.name != "full":
            raise SettingError(
                f"early_exit: found method {method.name}, expected full: the first layers draft, "
                "and they read everything"
            )
        if method.cannot_draft and not self.early_exit:
            raise SettingError(
                f"method: {method.name} cannot draft for exact mode: {method.cannot_draft}"
            )
        if self.draft != "auto" and not (
            is_integer(self.draft) and 0 <= int(self.draft) <= MOST_DRAFTS
        ):
            raise SettingError(
                f"draft: found {self.draft!r}, expected 'auto' or an int from 0 to {MOST_DRAFTS}"
            )

        boolean("lookup", self.lookup)
        one_of("chooser", self.chooser, CHOOSERS)
        one_of("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        if self.chooser == "verifier" and not method.chooses_verified:
            raise SettingError(
                f"chooser: found 'verifier', but {method.name} with these settings chooses in its "
                "own steps; leave chooser out, or use omnikv with selector='last' and no residual"
            )

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        """With the inner method completed; Full() where that has no sparse layer for this model."""
        if self.early_exit:
            return self
        inner = self.method.completed(filter_layers)
        return inner if inner.cannot_draft else replace(self, method=inner)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """The inner method's roles; every layer is read whole, by verification. Raises SettingError
        where the model has no such layers to leave after.
        """
        if self.early_exit >= config.num_layers:
            raise SettingError(
                f"early_exit: found {self.early_exit}, expected fewer than this model's "
                f"{config.num_layers} layers"
            )
        if self.early_exit and config.recurrent is not None:
            raise SettingError(
                f"early_exit: the recurrent layers of this model ({config.family}) draft together "
                "or not at all; let omnikv draft"
            )
        return replace(self.method.plan(config), whole=True)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """The inner method's, for steps of up to 8 tokens."""
        needs = self.method.needs(plan, config, capacity, itemsize)
        if self.early_exit:  # a step that ends early would break the order of whole layers' copies
            needs = replace(needs, offload=())
        # verification reads every layer whole
        needs = replace(needs, step_rows=capacity, queries=MOST_DRAFTS + 1, ahead=())
        if self.draft_weights == "int8":
            needs = replace(needs, draft_weights=copy_bytes(config))
        return needs

    def dense_below_tokens(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, device_type: str, capacity: int
    ) -> int:
        """Beyond the capacity: what is written comes from full attention at every length."""
        return capacity + 1

    def outlook(
        self,
        plan: LayerPlan,
        config: ModelConfig,
        itemsize: int,
        device_type: str,
        context: int,
        offloaded: Collection[int] = (),
        held: FewBits | None = None,
    ) -> str:
        """The gain to expect from counted bytes, where four drafts in five are accepted."""
        given = config, plan, itemsize, device_type, offloaded, held
        costs = ExactCosts.of(*given, self.early_exit, self.draft_weights == "int8")
        needs = self.needs(plan, config, context, itemsize)
        read = min(context, needs.selected + needs.tail)
        most = MOST_DRAFTS if self.draft == "auto" else int(self.draft)
        fixed = self.draft != "auto"
        verifier = self.verifier_chooses(costs, context, read, most, fixed)
        drafts, gain = costs.predicted(context, read, most, fixed, verifier=verifier)
        line = (
            f"full attention's text; {drafts} drafts a step, of which 4 in 5 are right, write "
            f"{gain:.2f} times as fast as full attention at {context} tokens (counted)"
        )
        if not drafts:
            line = f"full attention's text and speed: drafts do not pay at {context} tokens"
        if costs.offloaded:
            alone = costs.alone(context, read)
            line += f"; {self.method.name} alone {alone:.1f} times, as verification streams the "
            line += "offloaded layers"
        return line

    def verifier_chooses(
        self,
        costs: ExactCosts,
        context: int,
        read: int,
        most: int,
        fixed: bool,
        reached: Sequence[float] = FOUR_IN_FIVE,
        now: bool | None = None,
    ) -> bool:
        """Whether verifications choose what drafts read at `context` tokens. now: whether they do,
        which changes for a gain of SWITCH; None: nobody has chosen yet. The other arguments are
        those of `costs.predicted`. Where layers lie in host memory, the drafter's steps do.
        """
        if self.chooser == "drafter" or not self.method.chooses_verified or costs.offloaded:
            return False
        if self.chooser == "verifier":
            return True
        given = context, read, most, fixed, reached
        stays = 1.0 if now is None else SWITCH if now else 1 / SWITCH
        return stays * costs.predicted(*given, verifier=True)[1] > costs.predicted(*given)[1]

    def validate(self, plan: LayerPlan) -> None:
        """Raise SettingError where the inner method has no sparse layer: nothing could draft."""
        if not plan.sparse_layers and not self.early_exit:
            raise SettingError(
                f"method: {self.method.name} has no sparse layer among this model's "
                f"{plan.num_layers}, so nothing can draft for exact mode; use full attention, or "
                "other filter_layers and wait_layers"
            )
        self.method.validate(plan)

    def validate_prompt(self, start: int, stop: int) -> None:
        self.method.validate_prompt(start, stop)

    def runtime(self, setup: Setup) -> Runtime:
        return ExactRuntime(self, setup)


# a drafter's selections and their scores, by filter layer
Choice = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]


class ExactRuntime(Runtime):
    """Full attention, and beside it the inner method's runtime, `drafter`, whose state follows.

    A cycle's selection is noted before its drafts are dropped, since the drafter forgets it then.
    """

    method: Exact

    def __init__(self, method: Exact, setup: Setup):
        super().__init__(method, setup)
        self.drafter = self._drafting(method.method, setup)
        self._choice: Choice = {}, {}

    def _drafting(self, method: Method, setup: Setup) -> Runtime:
        """The inner method's runtime."""
        return method.runtime(setup)

    @property
    def nbytes(self) -> int:
        return self.drafter.nbytes

    @property
    def k(self) -> int:
        return self.drafter.k

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.drafter.begin_prompt(start, stop, more)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        self.drafter.end_prompt(length, step)

    def note_choice(self) -> None:
        """Keep the drafter's choice for this cycle."""
        self._choice = self.drafter.selections(), self.drafter.selection_scores()

    def forget_choice(self) -> None:
        """A cycle begins: nothing is chosen yet."""
        self._choice = {}, {}

    def selections(self) -> dict[int, torch.Tensor]:
        return self._choice[0]

    def selection_scores(self) -> dict[int, torch.Tensor]:
        return self._choice[1]

    def choice(self) -> Any:
        return self._choice, self.drafter.choice()

    def load_choice(self, choice: Any) -> None:
        self._choice, inner = choice
        self.drafter.load_choice(inner)

    def state(self) -> Any:
        return self.drafter.state()

    def load(self, state: Any, length: int | None) -> None:
        self.drafter.load(state, length)

    def truncate(self, length: int) -> None:
        self.forget_choice()
        self.drafter.truncate(length)

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        self.drafter.copy_from(getattr(other, "drafter", other), sequence)


class Kept:
    """A runtime of draft steps after the first: the first one's choice, and all tokens since.

    tail_start int32 [B]: the first position of its tail, filled by the runner.
    """

    def __init__(self, drafter: Runtime):
        self.drafter = drafter
        self.by_part = tuple(map(Kept, drafter.by_part))
        self.tail_start = torch.zeros(1, dtype=torch.int32, device=drafter.setup.device)

    def carry(self, part: int) -> None:
        """Bring to a part the tail's begin, and what it reads that no layer of it has chosen."""
        carried(self.tail_start, self.by_part[part].tail_start)
        self.drafter.carry_kept(part)

    def received(self, step: Step) -> None:
        """Nothing is fetched: the first draft's step has."""

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [1, 1, H, D] in one layer -> the same shape."""
        return self.drafter.attend_kept(layer, q, step, self.tail_start)

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention in a sliding-window layer, which nobody drafts."""
        return self.drafter.attend_local(layer, q, step)


class Chooses:
    """A runtime of verifications that choose what the next cycle's drafts read, on one device."""

    by_part: tuple[Any, ...] = ()

    def __init__(self, drafter: Runtime):
        self.drafter = drafter

    def carry(self, part: int) -> None:
        """As Attends: there is one part."""

    def received(self, step: Step) -> None:
        """As Attends: nothing is."""

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [1, Q, H, D] to everything -> the same shape."""
        return self.drafter.attend_verified(layer, q, step)

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention in a sliding-window layer, which chooses nothing."""
        return self.drafter.attend_local(layer, q, step)
