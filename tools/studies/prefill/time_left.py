"""The predicted time left of a prompt against the truth."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from tools.studies.prefill.setup import make_llm, methods

MARKS = (0.10, 0.25, 0.50)  # of the work, where the predicted time is compared


def time_left(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted against actual seconds of a whole prompt at the marks, dense and r = 2 (or the
    first ratio given).
    """
    ratio = 2 if 2 in args.ratios else args.ratios[0]
    found = methods(
        argparse.Namespace(**{**vars(args), "ratios": [ratio], "stride": args.stride[-1:]})
    )
    llm = make_llm(args, args.eta)
    records: list[dict[str, Any]] = []
    ids = torch.randint(
        llm.config.vocab_size, (args.eta,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    for name, method in found.items():
        seen: list[Any] = []
        with llm.session(method) as session:
            began = time.perf_counter()
            session.prefill(ids, progress=seen.append)
            actual = time.perf_counter() - began
        for mark in MARKS:
            progress = next(p for p in seen if p.work >= mark)
            predicted = progress.seconds + progress.eta
            records.append(
                {
                    "method": name,
                    "length": args.eta,
                    "work": progress.work,
                    "tokens": progress.done / progress.total,
                    "predicted": predicted,
                    "actual": actual,
                    "error": predicted / actual - 1,
                }
            )
    return records
