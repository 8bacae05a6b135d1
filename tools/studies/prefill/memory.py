"""Peak memory of a prompt's deepest chunk, dense and sparse."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from tools.common.resident import forget_peak, resident
from tools.common.synthetic_bank import synthesize
from tools.studies.prefill.setup import make_llm, methods, timed_chunk, whole


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory at several lengths, each in a new process. The peak without weights and bank is
    a chunk's activations.
    """
    records: list[dict[str, Any]] = []
    for length in (8192, 32768, 65536):
        command = [
            sys.executable,
            "-m",
            "tools.studies.prefill.table",
            "--measure-memory",
            str(length),
            "--shape",
            args.shape,
            "--dtype",
            args.dtype,
            "--device",
            args.device,
            "--block",
            str(args.block),
            "--stride",
            str(args.stride[-1]),
        ]
        for name, value in (("--threads", args.threads), ("--chunk", args.chunk)):
            command += [name, str(value)] if value else []
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        records += json.loads(done.stdout.splitlines()[-1])
    return records


def measure_memory(args: argparse.Namespace) -> None:
    """The deepest chunk of a prompt over a synthetic bank, dense then r = 2; in bytes. Prints a
    JSON list.
    """
    length = args.measure_memory
    llm = make_llm(args, length)
    records: list[dict[str, Any]] = []
    for name, method in methods(argparse.Namespace(**{**vars(args), "ratios": [2]})).items():
        with llm.session(method) as session:
            before = _resident(llm)
            synthesize(session, length)
            bank = session.bank.nbytes
            for _ in range(2):
                timed_chunk(session, whole(length - llm.chunk, llm.chunk), llm.chunk)
            records.append(
                {
                    "method": name,
                    "length": length,
                    "bank": bank,
                    "selection": session.stats.selection_bytes,
                    "before": before,
                    "peak": _peak(llm),
                    "activations": _peak(llm) - before - bank,
                }
            )
        _reset(llm)
    print(json.dumps(records))


def _resident(llm: LLM) -> int:
    _reset(llm)
    return torch.cuda.memory_allocated() if llm.device.type == "cuda" else resident("VmRSS")


def _peak(llm: LLM) -> int:
    return torch.cuda.max_memory_allocated() if llm.device.type == "cuda" else resident("VmHWM")


def _reset(llm: LLM) -> None:
    if llm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
