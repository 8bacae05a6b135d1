"""Prompts of latent attention: rows that become keys and values chunk by chunk, beside queries that
meet the rows.

Random weights of a released model's attention with few layers, none of them a mixture, and a small
vocabulary. The two forms take turns over one prompt; figures are medians of thread CPU seconds of
one thread. `engine.model.config.latent.PER_BYTE` chooses: no byte costs anything, or every byte
does without end.

    python -m tools.studies.prefill.latent [--model deepseek-v2-lite] [--prompt 4096] [--chunk 512]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine import LLM, Full
from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from engine.model.config.latent import PER_BYTE
from engine.model.tensors import random_stream
from kernels.launch.isa import isa
from tools.common.arguments import command
from tools.common.program import guarded
from weights.aliases import ALIASES
from weights.shapes import config_of

FORMS = {"queries meet rows": math.inf, "keys and values are made": 0.0}
WORDS = 1000


def small(model: str, layers: int) -> dict[str, Any]:
    """config.json of a model with so many layers, all of them plain, and few words."""
    data = config_of(ALIASES[model]) if model in ALIASES else {}
    if "kv_lora_rank" not in data:
        raise UsageError(f"--model: found {model!r}, expected an alias with latent attention")
    plain = {"first_k_dense_replace": layers, "mlp_layer_types": ["dense"] * layers}
    return {**data, **plain, "num_hidden_layers": layers, "vocab_size": WORDS}


def run(args: argparse.Namespace) -> None:
    """Measure and print a table."""
    torch.set_num_threads(1)
    config = replace(ModelConfig.from_dict(small(args.model, args.layers)), dtype=args.dtype)
    sizes, itemsize = config.latent, getattr(torch, args.dtype).itemsize
    assert sizes is not None
    given = dict(max_context=args.prompt + 64, chunk=args.chunk, method=Full(), threads=1)
    llm = LLM.from_stream(config, random_stream, device="cpu", dtype=args.dtype, **given)
    ids = torch.randint(WORDS, (args.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    starts = range(0, args.prompt, args.chunk)
    chosen = [
        sizes.expands(start, min(args.chunk, args.prompt - start), itemsize, "cpu")
        for start in starts
    ]
    took: dict[str, list[float]] = {form: [] for form in FORMS}
    said = []
    with llm.session() as session:
        for turn in range(args.turns + 1):
            for form, PER_BYTE["cpu"] in FORMS.items():
                session.truncate(0)
                began = time.thread_time()
                said.append(session.prefill(ids))
                if turn:  # the first one compiles and warms
                    took[form].append(time.thread_time() - began)
    print(
        f"{args.model}'s attention, {args.layers} layers, {args.prompt} tokens in chunks of "
        f"{args.chunk}, {args.dtype}, one thread, {args.turns} turns, {isa()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}\n\n"
        "| form | tokens/s | least s | median s |\n|---|---|---|---|"
    )
    for form, times in took.items():
        middle = statistics.median(times)
        print(f"| {form} | {args.prompt / middle:.0f} | {min(times):.2f} | {middle:.2f} |")
    apart = float((said[0] - said[1]).abs().max() / said[0].abs().max())
    print(
        f"\nby counted costs {sum(chosen)} of {len(chosen)} chunks make keys and values; logits "
        f"{apart:.1e} apart"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    parser = command("python -m tools.studies.prefill.latent", __doc__.split("\n\n")[0])
    parser.add_argument("--model", default="deepseek-v2-lite", help="an alias (%(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, default in (("layers", 3), ("prompt", 4096), ("chunk", 512), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
