"""One following rank from its beginning to its end."""

from __future__ import annotations

import sys
from typing import Any

import torch

from engine.base.errors import EngineError, RankLost
from engine.base.figures import first_line
from engine.ranks.drive.follow import Follower
from engine.ranks.drive.meeting import Card, grouped, joining
from engine.ranks.place import Place
from engine.ranks.share_llm import ShareLLM, card_of
from engine.session.session import Session


def follow(place: Place) -> int:
    """Join the ranks, load this one's share and make rank 0's calls; the exit code."""
    try:
        connection, store = joining(place)
        follower = Follower(place.rank, connection)
    except (RankLost, RuntimeError, OSError, EOFError) as error:
        sys.stderr.write(f"rank {place.rank}: {first_line(error)}\n")
        return 1
    kind, *told = follower.next()
    if kind == "end":
        return 0
    name, selection, split_by, settings, segment, cards = told
    try:
        if place.threads:
            settings["threads"] = place.threads
        if cards:
            settings["device"] = card_of(place.rank)
            torch.cuda.set_device(place.rank)  # of this thread, which makes all calls
        llm = ShareLLM(name, (place.rank, place.size), selection, split_by, cards, **settings)
        ranks = grouped(place, store, segment, Card(llm.device, llm.dtype) if cards else None)
        llm.hold(ranks)
        loaded = llm.load()
    except (EngineError, RuntimeError, MemoryError) as error:
        line = f"{type(error).__name__}: {first_line(error)}"
        follower.say("raised", 0, line)
        follower.leave(line)
        return 1
    follower.say("ready", 0, "")

    def restored(**given: Any) -> Session:
        session, _ = llm.restore(**given)
        return session

    return follower.run(ranks, loaded, {"open": llm.session, "restore": restored})
