"""One rank's LLM: its share of the weights, of the bank and of every product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.base.checks import one_of
from engine.base.device import current
from engine.base.errors import SettingError
from engine.forward.layer import FusedLayer
from engine.forward.self_test import StepForms
from engine.llm import LLM
from engine.load.loaded import Loaded
from engine.load.options import LLMSettings
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.model.config.config import ModelConfig
from engine.model.config.share import Packed, Share
from engine.model.low_bits import GROUP
from engine.model.share.cut import added_once
from engine.model.share.divide import context_share_of, heads_of, share_of, whole_of
from engine.ranks.group import Ranks
from engine.ranks.joined import joined
from engine.ranks.merge import Merge
from engine.ranks.methods import require_dealt, require_method
from engine.ranks.weights.few_bits import require_whole_groups, require_whole_steps
from engine.session.session import Session
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

SELECTIONS = ("global", "per_rank")
SPLITS = ("heads", "context")


class ShareLLM(LLM):
    """A model of which this process holds the share of `place` = (rank, ranks).

    selection: "global", every rank selects the tokens that one process would, or "per_rank", each
    selects by its own heads and nothing is sent for it. split_by: "heads", or "context": each rank
    holds all weights, and K and V of its own tokens. cards: each rank runs on the GPU of its
    number; else all of them on CPUs. `hold` gives it the other ranks, before it is loaded.
    settings: as of LLM.
    """

    def __init__(
        self,
        model: str | Path | None,
        place: tuple[int, int],
        selection: str = "global",
        split_by: str = "heads",
        cards: bool = False,
        **settings: Unpack[LLMSettings],
    ) -> None:
        one_of("selection", selection, SELECTIONS)
        one_of("split_by", split_by, SPLITS)
        if split_by == "context" and selection != "global":
            raise SettingError(
                f"selection: found {selection!r} with split_by='context', whose ranks have all "
                "heads; expected 'global'"
            )
        if split_by == "context" and cards:
            raise SettingError(
                "split_by: found 'context' with a rank on each GPU, which divide heads; use "
                "split_by='heads', or ranks= on CPUs"
            )
        self.place, self.selection, self.split_by, self.cards = place, selection, split_by, cards
        if cards and settings.get("weights_offload", "auto") == "auto":
            settings["weights_offload"] = "off"
        self._halved = False
        kind, _, group = str(settings.get("weights")).partition(":")
        self._rounded = int(group or GROUP) if kind == "int4" and (group or "1").isdecimal() else 0
        self._ranks: Ranks | None = None
        if (method := settings.get("method")) is not None:
            self._require(method)
        super().__init__(model, load=False, **settings)
        self._require_here()

    def _own(self, config: ModelConfig) -> ModelConfig:
        if self.split_by == "context":
            return context_share_of(config, *self.place)
        self._halved = self.place[1] > config.num_kv_heads
        if config.packed is None and self._rounded:
            config = replace(config, packed=Packed(self._rounded, self._rounded))
        return share_of(config, *self.place)

    def _require_here(self) -> None:
        """Raise SettingError for settings that several processes do not take."""
        options, count = self.options, self.place[1]
        if self.device.type != "cpu" and not self.cards:
            raise SettingError(
                f"device: found {self.device}, but {count} ranks run on CPUs; use device='cpu', or "
                f"gpus={count} (--gpus {count}) for a rank on each GPU"
            )
        if options.devices is not None:
            raise SettingError(
                f"devices: found {', '.join(options.devices)} with {count} ranks; layers or heads "
                "are split, not both"
            )
        if options.compile:
            raise SettingError(f"compile: found True with {count} ranks, expected None or False")
        if options.forever:
            raise SettingError(f"forever: found True with {count} ranks, expected False")
        if self.planner.staging:
            raise SettingError(
                f"weights_offload: found {options.weights_offload!r} with {count} ranks, expected "
                "'off'"
            )
        if self.split_by == "heads":
            given = self.planner.rounding, options.weights, count
            require_whole_groups(self.config, *given)
            if options.activations == "int8":
                require_whole_steps(self.config, count)
        self._require(self.method)

    def hold(self, ranks: Ranks) -> None:
        """Take the other ranks, which `load` and everything after it needs."""
        self._ranks = ranks

    def _load(self, stream: Iterable[tuple[str, Any]], tokenizer: Tokenizer | None) -> Loaded:
        """As LLM, with products that are joined over ranks."""
        ranks = self._ranks
        assert ranks is not None, "hold() comes first"
        if self.split_by == "context":
            self.loaded = replace(super()._load(stream, tokenizer), peers=ranks)
            return self.loaded
        share = self.config.share
        assert share is not None
        loaded = super()._load(_once(stream, share), tokenizer)
        whole = whole_of(self.config)
        split = heads_of(whole.num_heads, whole.num_kv_heads, ranks.size)
        heads = tuple(own for own, _ in split)

        def over_heads(x: torch.Tensor) -> torch.Tensor:
            return ranks.beside(x, heads)

        model = joined(loaded.model, ranks.add, ranks.beside, ranks.gathered)
        step = self._step_form(loaded, ranks)
        self.loaded = replace(
            loaded,
            model=model,
            halves=StepForms(model, loaded.rotary, loaded.pieces, step),
            across=Merge(ranks, self.selection == "per_rank").select,
            over_heads=over_heads,
            peers=ranks,
        )
        return self.loaded

    def _step_form(self, loaded: Loaded, ranks: Ranks) -> str:
        """The form of a step on all ranks. On cards each tests our own kernels over its share
        alone, with no sum over ranks, and all take them or none does: they make the same calls.
        """
        if not self.cards or self.options.step != "auto":
            return self.options.step
        with current(self.device):
            ours = isinstance(loaded.halves(self.backend), FusedLayer)
        return "fused" if ranks.agree(ours) else "plain"

    def _require(self, method: Method) -> None:
        """Raise SettingError for a method that these ranks cannot run."""
        if self.cards and isinstance(method, Exact):
            raise SettingError(
                "method: found exact with a rank on each GPU, whose sums of several rows may round "
                "otherwise than one row's; use full, or one GPU"
            )
        if self.split_by == "context":
            require_dealt(method, self.place[1])
        else:
            require_method(method, self.place[1], self.selection, self._halved)

    def session(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
    ) -> Session:
        """As LLM; SettingError for a method that ranks cannot run."""
        if method is not None:
            self._require(method)
        return super().session(method, max_context, offload)


def card_of(rank: int) -> str:
    """The GPU of a rank."""
    return f"cuda:{rank}"


def _once(stream: Iterable[tuple[str, Any]], share: Share) -> Iterator[tuple[str, Any]]:
    """A stream of weights in which rank 0 alone brings what is added to a sum over ranks."""
    for name, weight in stream:
        if share.rank and added_once(name, share):
            for tensor in weight if isinstance(weight, list) else [weight]:
                tensor.zero_()
        yield name, weight
