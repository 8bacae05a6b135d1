"""Find which pattern MInference uses for every query head of a
model, by the dense attention mass that it keeps.

Source: microsoft/MInference, search_pattern (minference_forward.py): its space of patterns, and its
criterion, the mean over queries of the mass kept. There a best A-shape becomes the vertical-slash
of the same numbers, and a best block-sparse ("vertical_slash", 1000, 6096); here a head keeps the
pattern that was best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from engine.bank.device import DeviceBank
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.forward.prefill import run_chunk
from engine.methods.base import Method, Setup
from engine.methods.select.minference import MInference, MInferenceRuntime
from engine.methods.select.minference_patterns import checked
from kernels.prefill.dense import prefill_dense_lse
from tools.calibrate.texts import read_text
from tools.common.arguments import add_flags, command, loaded
from tools.common.page import table
from tools.common.program import entry, progress, replace_json, say
from weights.fingerprint import fingerprint

Pattern = tuple[Any, ...]  # such as ("a_shape", 100, 800)
Table = tuple[tuple[Pattern, ...], ...]  # [layer][query head]

SPACE: tuple[Pattern, ...] = (
    ("a_shape", 100, 800),
    ("vertical_slash", 30, 800),
    ("vertical_slash", 100, 750),
    ("vertical_slash", 500, 700),
    ("vertical_slash", 3500, 100),
    ("block_sparse", 100),
)
LEAST = 1024  # tokens of a document: on a shorter one every pattern keeps everything
FORMAT = 1


class SearchRuntime(MInferenceRuntime):
    """Dense prefill that measures: kept float64 [patterns, layers, query heads], the mass summed
    over queries.
    """

    def __init__(
        self,
        method: Method,
        setup: Setup,
        space: Sequence[Pattern],
        progress: Callable[[int, int], None] | None = None,
    ):
        super().__init__(method, setup)
        self.space, self.progress = space, progress
        self.kept = torch.zeros(
            len(space), setup.config.num_layers, setup.config.num_heads, dtype=torch.float64
        )

    def attend_prompt(
        self, layer: int, q: torch.Tensor, bank: DeviceBank, start: int
    ) -> torch.Tensor:
        """Dense attention; tries every pattern of the space beside it."""
        k, v = bank.kv(layer)
        out, lse = prefill_dense_lse(q, k, v, start, self.scale)
        for i, pattern in enumerate(self.space):
            mine = self.attend_patterns((pattern,) * q.shape[2], q, k, v, start)[1]
            self.kept[i, layer] += torch.exp(mine - lse).sum((0, 1)).cpu()
        if self.progress is not None:
            self.progress(layer + 1, self.setup.config.num_layers)
        return out


def search_patterns(
    llm: LLM,
    token_ids: Sequence[int],
    space: Sequence[Pattern] = SPACE,
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """The table for MInference(patterns=...): per layer and query head the pattern of `space` that
    keeps most of a prompt's dense attention mass.

    token_ids: the prompt, read as one chunk as later prompts will be. The first pattern wins a tie.
    Allocates a device bank for the prompt. progress(done layers, all layers) after each layer.
    """
    config, method = llm.config, MInference()
    plan, total = method.plan(config), len(token_ids)
    setup = Setup.of(config, method, total, device=llm.device, dtype=llm.dtype, backend=llm.backend)
    runtime = SearchRuntime(method, setup, tuple(map(checked, space)), progress)
    bank = DeviceBank(config, plan, total, llm.dtype, llm.device)
    with llm.busy(), torch.inference_mode():
        tokens = torch.tensor([list(token_ids)], dtype=torch.int64, device=llm.device)
        run_chunk(llm.model, llm.rotary, runtime, bank, tokens, 0, total)
    return tuple(tuple(runtime.space[i] for i in row) for row in runtime.kept.argmax(0).tolist())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.calibrate.minference",
        "Find the pattern of every query head for MInference(patterns=...).",
    )
    add_flags(parser, "model dtype device threads")
    parser.add_argument(
        "--document",
        required=True,
        metavar="FILE",
        help="a long text of the kind that will be read (- is stdin)",
    )
    parser.add_argument(
        "--length", type=int, help="read so many tokens of it at most (default: as many as fit)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help='also write the table there, under "patterns"'
    )
    return parser.parse_args(argv)


def document_ids(llm: LLM, file: str, length: int | None) -> list[int]:
    """Token ids of a text file, or of stdin for "-". Raises UsageError."""
    text = read_text(file, "--document")
    ids = llm.encode(text)[: min(length or llm.max_context, llm.max_context)]
    if len(ids) < LEAST:
        raise UsageError(f"--document {file}: found {len(ids)} tokens, expected at least {LEAST}")
    return ids


def run(args: argparse.Namespace) -> None:
    """Search, print the table and write what was asked for."""
    if args.length is not None and args.length < LEAST:
        raise UsageError(f"--length: found {args.length}, expected at least {LEAST}")
    llm = loaded(args, offload="device")
    ids = document_ids(llm, args.document, args.length)
    found = search_patterns(
        llm, ids, progress=lambda done, total: progress(f"{done} of {total} layers")
    )
    say("")
    heads = [f"head {i}" for i in range(llm.config.num_heads)]
    rows = ((n, *(" ".join(map(str, pattern)) for pattern in row)) for n, row in enumerate(found))
    print("\n".join(table(["layer", *heads], rows)))
    print(f"\nMInference(patterns={found})")
    if args.json:
        data = {
            "format": FORMAT,
            "fingerprint": fingerprint(llm.folder),
            "patterns": found,
            "tokens": len(ids),
            "made_by": f"tools.calibrate.minference {VERSION}",
        }
        try:
            replace_json(args.json, data)
        except OSError as error:
            raise UsageError(
                f"--json: found {error}, expected a place that can be written"
            ) from error
        say(f"written: {args.json}")


main = entry(arguments, run)


if __name__ == "__main__":
    sys.exit(main())
