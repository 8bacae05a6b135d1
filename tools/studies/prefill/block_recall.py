"""Recall of attention mass against density of the block estimate, on one document.

Per FULL and WAIT layer, head and block of 128 queries: density = key blocks kept / causal blocks,
recall = true mass in them. The oracle chooses by the true mass: nothing can keep more with as few
blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import LLM, Full, OmniKV
from engine.methods.base import Runtime
from engine.plan.layers import Role
from kernels.prefill.block_sparse import BLOCK, block_mass, choose_blocks, exact_mass
from tools.common.arguments import add_flags, command, loaded
from tools.common.page import table
from tools.common.program import entry
from tools.tasks import TASKS, make_sample
from tools.tasks.prompts import token_counter

Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]  # q and k of every layer


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.prefill.block_recall",
        "Recall of attention mass against density of the block estimate.",
    )
    add_flags(parser, "model threads seed")
    parser.add_argument("--task", default="mixed", choices=tuple(TASKS), help="of the document")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the document")
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        default=[0.5, 0.7, 0.8, 0.9, 0.95],
        help="attention mass that the kept blocks should hold",
    )
    return parser.parse_args(argv)


def captured(llm: LLM, ids: Sequence[int]) -> Layers:
    """{layer: (q [1, n, H, D], k [1, Hkv, n, D])} of a prompt, of the layers that
    dense_layers="block_sparse" would touch with a wait layer behind each filter: a calibration may
    leave no other.
    """
    plan, found = llm.resolve_method(OmniKV(wait_layers=1))[1], {}
    with llm.session(Full()) as session:
        attend = Runtime.attend_prompt

        def keep(runtime, layer, q, bank, start):
            if plan.roles[layer] in (Role.FULL, Role.WAIT):
                found[layer] = q.clone(), bank.kv(layer)[0][:, :, : len(ids)].clone()
            return attend(runtime, layer, q, bank, start)

        session.runtime.attend_prompt = keep.__get__(session.runtime)
        session.prefill(ids)
    return found


def rows(
    layers: Layers, thresholds: Sequence[float]
) -> list[tuple[str, float, float, float, float]]:
    """[(estimator, threshold, density, mean recall, 1st percentile of recall)] over all layers,
    heads and blocks past the first 4.
    """
    first, table = 4 * BLOCK, []
    scale = next(iter(layers.values()))[0].shape[-1] ** -0.5
    true = {layer: exact_mass(q[:, first:], k, first, scale) for layer, (q, k) in layers.items()}
    estimators: dict[str, Callable[..., Any]] = {"oracle": lambda layer, q, k: true[layer]}
    for stride in (8, 16):
        estimators[f"pooled S={stride}"] = lambda layer, q, k, stride=stride: block_mass(
            q, k, first, stride, scale
        )
    for name, estimate in estimators.items():
        masses = {layer: estimate(layer, q[:, first:], k) for layer, (q, k) in layers.items()}
        for threshold in thresholds:
            recall, density = [], []
            for layer, mass in masses.items():
                keep = choose_blocks(mass, first, threshold)
                causal = first // BLOCK + 1 + torch.arange(keep.shape[2])
                recall.append((true[layer] * keep).sum(-1).flatten())
                density.append((keep.sum(-1) / causal).flatten())
            recall, density = torch.cat(recall), torch.cat(density)
            table.append(
                (
                    name,
                    threshold,
                    float(density.mean()),
                    float(recall.mean()),
                    float(recall.quantile(0.01)),
                )
            )
    return table


def run(args: argparse.Namespace) -> None:
    """Measure and print the table."""
    llm = loaded(args, device="cpu", dtype="float32", chunk=2**20)
    count = token_counter(llm.tokenizer)
    sample = make_sample(args.task, args.length, count, args.seed, 1)
    ids = llm.tokenizer.encode(sample.document, special=False)
    ids = ids[: len(ids) // BLOCK * BLOCK]
    layers = captured(llm, ids)
    print(f"layers {sorted(layers)}, {len(ids)} tokens of {args.task}\n")
    head = "estimator | mass wanted | density | recall, mean | recall, 1st percentile"
    found = rows(layers, args.thresholds)
    cells = ((n, t, f"{d:.2f}", f"{mean:.3f}", f"{low:.3f}") for n, t, d, mean, low in found)
    print("\n".join(table(head, cells)))


main = entry(arguments, run, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
