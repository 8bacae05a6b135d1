"""The model that flags name, in one process or in several."""

from __future__ import annotations

import argparse
from typing import Any

from engine.base.errors import UsageError
from engine.llm import LLM
from engine.ranks.llm import RankedLLM, ranks_asked


def planned_llm(name: str, args: argparse.Namespace, settings: dict[str, Any], **shown: Any) -> LLM:
    """Plan a model with settings, without loading it, over as many ranks as flags or torchrun ask
    for. shown: progress of LLM.
    """
    count = ranks_asked(args.ranks, args.numa, args.gpus)
    if not count and args.split_by == "context":
        raise UsageError("--split-by: found context and one process, expected several (--ranks N)")
    if not count:
        return LLM(name, load=False, **settings, **shown)
    if args.model is None and args.threads is None:
        settings = {**settings, "threads": None}  # a rank's own cores say how many
    numa = args.numa != "off"
    given = dict(numa=numa, selection=args.selection, split_by=args.split_by, load=False)
    ranks = count if args.gpus is None else None
    return RankedLLM(name, ranks, gpus=args.gpus, **given, **settings, **shown)
