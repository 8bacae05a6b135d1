"""The face of a model that several processes hold: an LLM whose calls all ranks make."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.base.errors import RankLost, SettingError
from engine.load.loaded import Loaded
from engine.load.options import LLMSettings
from engine.methods.base import Method
from engine.ranks.collectives.cards import Asked
from engine.ranks.drive.followers import GONE, Followers
from engine.ranks.drive.lead import Lead
from engine.ranks.drive.meeting import Card, Meeting
from engine.ranks.place import Place, nodes, started
from engine.ranks.share_llm import ShareLLM, card_of
from engine.saved.session_file import Progress as SaveProgress
from engine.session.session import Session
from weights.checkpoint import LoadProgress

if TYPE_CHECKING:
    from typing_extensions import Unpack


def ranks_asked(ranks: int | None, numa: int | str, gpus: int | None = None) -> int:
    """How many processes flags ask for, or torchrun has started; 0: one, as always. numa: "auto",
    "off" or a number.
    """
    here = started(os.environ)
    if here is not None:
        return here.size
    if gpus is not None:
        return gpus
    if ranks is not None:
        return ranks
    if numa == "off":
        return 0
    count = len(nodes()) if numa == "auto" else int(numa)
    return count if count > 1 else 0


class RankedLLM(ShareLLM):
    """An LLM over `ranks` processes of this machine (None: 2), which it starts and ends; under
    torchrun, over torchrun's. Sessions are used as those of an LLM.

    gpus: so many instead, rank r on GPU r; torchrun's are on GPUs where there are any and `device`
    does not say "cpu". numa: one rank a NUMA node, or so many dealt over the nodes; each runs on
    cores of its own either way, but for those on GPUs. selection, split_by: as of ShareLLM.
    timeout: seconds that a rank waits for the others, after which it ends. Raises what LLM does,
    and RankLost where a rank ends; where a rank ends during a call that waits for a GPU and that
    does not leave it, this process ends too, with a line.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        ranks: int | None = None,
        *,
        gpus: int | None = None,
        numa: bool = False,
        selection: str = "global",
        split_by: str = "heads",
        timeout: float = 120.0,
        load: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
        download_progress: Callable[[str], None] | None = None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        here = started(os.environ)
        if here is not None and here.rank:
            raise SettingError(f"ranks: rank {here.rank} follows; rank 0 alone makes a RankedLLM")
        count, cards = _asked(here, ranks, gpus, numa, settings)
        self._meeting = Meeting(here or count, numa, timeout, cards)
        place = self._meeting.place
        place.bind()
        if settings.get("threads") is None and place.threads:
            settings["threads"] = place.threads
        if cards:
            settings["device"] = card_of(0)
        how: tuple[str, str, bool] = selection, split_by, cards
        if cards and settings.get("max_context") is None:
            settings["max_context"] = _context_of_all(model, count, how, settings)
        self._asked = dict(settings)
        super().__init__(model, (0, place.size), *how, **settings)
        self._progress, self._download_progress = progress, download_progress
        self._lead: Lead | None = None
        if load:
            self.load()

    def load(self) -> Loaded:
        """As LLM, on every rank."""
        if self.loaded is not None:
            return self.loaded
        self.planner.options.require_device()
        self.planner.plan().require_fit()
        meeting = self._meeting
        followers = meeting.gather()
        try:
            self._follow(followers)
            card = Card(self.device, self.dtype) if self.cards else None
            self.hold(followers.meanwhile(lambda: meeting.ranks(card)))
            assert self._ranks is not None
            followers.when_lost(self._ranks.refuse)
            super().load()
            followers.wait("ready", 0, meeting.place.timeout)
            meeting.all_have_it()
        except RankLost as error:
            lost = error if GONE in str(error) else followers.why(error)
            followers.close(f"rank 0 has not loaded the model: {lost}")
            raise lost from None
        except BaseException as error:
            followers.close(f"rank 0 has not loaded the model: {error}")
            raise
        assert self.loaded is not None
        self._ranks.follow_calls()
        self._lead = Lead(self._ranks, followers, self._require)
        self.loaded = replace(self.loaded, lead=self._lead)
        return self.loaded

    def _follow(self, followers: Followers) -> None:
        """Tell the others what to load: what was planned here, where each might plan for itself."""
        settings = {
            **self._asked,
            "threads": None,
            "method": self.method,
            "max_context": self.max_context,
            "chunk": self.chunk,
        }
        segment = self._meeting.segment()
        how = self.selection, self.split_by
        followers.tell(("load", self.name, *how, settings, segment, self.cards))

    def session(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
    ) -> Session:
        """As LLM, on every rank."""
        self.load()
        if method is not None:
            self._require(method)
        assert self._lead is not None
        if self._lead.inside:  # a call that opens one, on every rank
            return super().session(method, max_context, offload)

        def make() -> Session:
            return super(RankedLLM, self).session(method, max_context, offload)

        return self._lead.open(make, method=method, max_context=max_context, offload=offload)

    def restore(
        self,
        path: str | Path,
        max_context: int | None = None,
        offload: str | None = None,
        tokens: int | None = None,
        progress: SaveProgress | None = None,
    ) -> tuple[Session, Any]:
        """As LLM, of a session that as many ranks have saved."""
        self.load()
        assert self._lead is not None
        given = dict(max_context=max_context, offload=offload, tokens=tokens)

        def make() -> tuple[Session, Any]:
            return super(RankedLLM, self).restore(path, max_context, offload, tokens, progress)

        where = str(Path(path).absolute())
        found: tuple[Session, Any] = self._lead.open(make, "restore", path=where, **given)
        return found

    @property
    def places(self) -> list[Place]:
        """Where each rank runs, as far as this one knows."""
        return self._meeting.places

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that every rank is made with."""
        return dict(self._asked)

    @property
    def lost(self) -> str:
        """What is known of the first rank that has ended; "" while all run."""
        return "" if self._lead is None else self._lead.lost

    def close(self) -> None:
        """End the other ranks."""
        self._meeting.end()


def _asked(
    here: Place | None, ranks: int | None, gpus: int | None, numa: bool, settings: LLMSettings
) -> tuple[int, bool]:
    """(how many ranks, whether each is on a GPU of its own). here: the place that torchrun gave."""
    for name, given in (("numa", numa), ("devices", settings.get("devices"))):
        if gpus is not None and given:
            raise SettingError(f"{name}: found {given!r} beside gpus={gpus}; leave one of them out")
    torchruns = None if here is None else here.size
    several = settings.get("devices") is not None
    device = "cpu" if several and gpus is None else settings.get("device", "auto")
    imagined = settings.get("imagined_gpu") is not None
    found = Asked.of(ranks, gpus, torchruns, str(device), imagined)
    return found.count, found.cards


def _context_of_all(
    model: str | Path | None, count: int, how: tuple[str, str, bool], settings: LLMSettings
) -> int | None:
    """The tokens that the largest share leaves room for on a card like the first one. None: as
    planned.
    """
    if settings.get("forever"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0's own plan says them
        shares = [ShareLLM(model, (rank, count), *how, **settings) for rank in range(count)]
    return min(share.max_context for share in shares)
