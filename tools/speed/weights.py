"""Decode steps and prompts with weights in few bits beside the
model's own dtype, in turns.

Random weights of a shape, random rows in the bank (tools/common/synthetic_bank.py), one thread,
full attention. Figures are medians of thread CPU seconds, which other programs on the machine
disturb less than the clock. An instruction set that torch, oneDNN and fbgemm read when they start
is set outside:

  ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2 \\
      python -m tools.speed.weights
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from engine import LLM, Full
from engine.load.options import ACTIVATIONS
from tools.common.program import progress, say
from tools.common.synthetic_bank import synthesize
from tools.speed import harness
from tools.speed.harness import ROOM, SHAPED, Report, flag

WORDS = ("int8", "int4")
PROMPTS = 3  # timed, per model


def measure(args: argparse.Namespace, context: int, prompt: int) -> list[dict[str, Any]]:
    """A row for the floats and one for each form of weights and of activations: seconds of a step
    at `context` tokens and of a prompt of `prompt` tokens. Raises EngineError where a model does
    not fit.
    """
    forms, made = [("auto", "auto"), *product(args.weights, args.activations)], []
    for word, rows in forms:
        progress(f"{args.shape} {args.dtype}, weights {word}, activations {rows}")
        settings = dict(weights=word, activations=rows, method=Full())
        made.append(harness.shape_llm(args, max(context, prompt) + ROOM, **settings))
    sessions = [llm.session() for llm in made]
    for session in sessions:
        synthesize(session, context)
    progress(f"{args.shape} {args.dtype}, {args.steps} steps of each")
    decoded = harness.steps(sessions, args.steps)
    for session in sessions:
        session.close()
    progress(f"{args.shape} {args.dtype}, prompts of {prompt} tokens")
    ids = [3 + number % 97 for number in range(prompt)]
    read = harness.in_turns({n: partial(reading, llm, ids) for n, llm in enumerate(made)}, PROMPTS)
    say("")
    facts = harness.shape_facts(args) | dict(tokens=context, prompt=prompt)
    sizes = [llm.model.nbytes if llm.model is not None else 0 for llm in made]
    read_s = map(statistics.median, read.values())
    return [
        facts | dict(weights=word, activations=rows, bytes=size, step_s=step, prompt_s=whole)
        for (word, rows), size, step, whole in zip(forms, sizes, decoded, read_s)
    ]


def reading(llm: LLM, ids: list[int], turn: int) -> float:
    """Seconds in which a model reads a prompt; the first is short."""
    with llm.session() as session:
        return harness.seconds(session.prefill, ids if turn else ids[:8])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    first, cells = rows[0], []
    for row in rows:
        name = row["dtype"] if row["weights"] == "auto" else row["weights"]
        name = name if row["activations"] == "auto" else f"{name}, activations {row['activations']}"
        step = f"{row['step_s'] * 1e3:.1f} ms", f"{first['step_s'] / row['step_s']:.2f}"
        rate, faster = row["prompt"] / row["prompt_s"], first["prompt_s"] / row["prompt_s"]
        cells.append((name, f"{row['bytes'] / 1e6:.0f}", *step, f"{rate:.0f}", f"{faster:.2f}"))
    return harness.markdown("weights | MB | step | speed | prompt, tokens/s | speed", cells)


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    context, prompt = harness.size(args, "context"), harness.size(args, "prompt")
    harness.require(args, 1, "steps", most=ROOM - 1)
    torch.set_num_threads(1)
    rows = measure(args, context, prompt)
    return Report(harness.one_thread(args), table(rows), rows)


FLAGS = SHAPED | {
    "--weights": dict(nargs="+", choices=WORDS, default=list(WORDS)),
    "--activations": dict(nargs="+", choices=ACTIVATIONS, default=["auto"]),
    "--context": flag("2K", "tokens behind a step"),
    "--prompt": flag("512", "tokens of a prompt"),
    "--steps": flag(9, "timed, per model"),
}
main = harness.program("weights", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
