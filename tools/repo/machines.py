"""Write docs/MACHINES.md: which model runs on which machine, with how long a context and in which
form. Every cell is a plan, so nothing is fetched and no such machine is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.base.figures import human
from engine.cli.fits import Machine
from engine.load.options import Options
from engine.plan.free_memory import Free
from tools.common.page import line
from tools.common.program import guarded, replace_text
from tools.repo.pages import put
from weights.aliases import ALIASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "MACHINES.md"
GB = 10**9


def _without_gpu(heading: str, ram: int) -> tuple[str, Machine, Options]:
    name = f"{human(ram * GB)} free RAM"
    free = Free(ram * GB, name, ram * GB, name)
    return heading, Machine(torch.device("cpu"), free, heading), Options(device="cpu")


def _with_gpu(heading: str, gpu: int, host: int) -> tuple[str, Machine, Options]:
    options = Options(imagined_gpu=gpu * GB, imagined_host=host * GB)
    return heading, Machine.of(options), options


def machines() -> tuple[tuple[str, Machine, Options], ...]:
    """(heading, machine, settings). Of a card 1 GB is left to the system and the display; of other
    memory a quarter is left to other programs.
    """
    return (
        _without_gpu("16 GB, no GPU", 12),
        _without_gpu("64 GB, no GPU", 48),
        _with_gpu("GPU 8 + 32", 7, 24),
        _with_gpu("GPU 12 + 32", 11, 24),
        _with_gpu("GPU 16 + 64", 15, 48),
        _with_gpu("GPU 24 + 64", 23, 48),
        _with_gpu("GPU 48 + 128", 47, 96),
        _with_gpu("GPU 80 + 256", 79, 192),
    )


SHORT = {"int8": "8", "int4": "4"}


def cell(machine: Machine, name: str, options: Options) -> str:
    """What fits: tokens, then w and the bits of weights, b and those of the bank, and a star where
    layers lie in host memory. "-" where no form holds 4,096 tokens.
    """
    found = machine.best(ALIASES[name], options)
    if found is None:
        return "-"
    form, tokens, settings = found
    bits = "".join(f" {kind[0]}{SHORT[word]}" for kind, word in form.items())
    star = "*" if "in RAM" in settings else ""
    return f"{tokens}{bits}{star}"


def table(names: Sequence[str] = tuple(ALIASES)) -> str:
    """The page's table for these aliases."""
    known = machines()
    lines = [line(["model", "its weights", *(heading for heading, _, _ in known)])]
    lines.append(line(["---", "---:", *["---:"] * len(known)]))
    for name in names:
        size = human(ALIASES[name].bytes_bf16)
        cells = (cell(machine, name, options) for _, machine, options in known)
        lines.append(line([f"`{name}`", size, *cells]))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page's table. Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.repo.machines", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def work() -> None:
        page = args.page.read_text(encoding="utf-8")
        replace_text(args.page, put(page, "machines", table()))

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
