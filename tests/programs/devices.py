"""Every method and every family over several devices beside one: `python -m tests.programs.devices
[--devices N] [--offload host] [--only NAME ...]`.

The devices are CPUs. A line for each method, at its own cut and at uneven ones, and for each
variant of each family: whether logits (float32; a prompt of 300 tokens and 8 steps, 150 and 6 for
families), selections and rows read are one device's to the bit, or why it is refused. Exit code 1
where one that runs differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from engine import LLM, Full
from engine.base.errors import EngineError
from engine.methods.split.allowed import EVICT
from tests.engine.methods.method_table import ROWS
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tools.families.models import VARIANTS, make

HERE = {name: value for name, value in SETTINGS.items() if name != "device"}


def answer(llm, prompt, steps):
    """Logits of a prompt, of steps and of one after going back, the selections, and the rows."""
    with llm.session() as session:
        logits, chosen = [session.prefill(ids_of(prompt))], []
        for token in ids_of(steps, seed=6):
            logits.append(session.decode(token))
            chosen.append({layer: rows.clone() for layer, rows in session.selections.items()})
        session.truncate(prompt)
        logits.append(session.decode(5))
        stats = session.stats
        return torch.stack(logits), chosen, (stats.sparse_steps, stats.rows_read_sparse)


def compared(place, method, devices, split, prompt, steps, offload="auto") -> str:
    """A line about one request: whether it is equal, or why it is refused."""
    given = dict(HERE, method=method, offload=offload)
    try:
        several = LLM(place, devices=("cpu",) * devices, split=split, **given)
    except EngineError as error:
        return f"refused: {error}"
    want = answer(LLM(place, device="cpu", **given), prompt, steps)
    found = answer(several, prompt, steps)
    same = torch.equal(found[0], want[0]) and found[2] == want[2]
    for mine, theirs in zip(found[1], want[1]):
        same = same and mine.keys() == theirs.keys()
        same = same and all(torch.equal(mine[layer], theirs[layer]) for layer in theirs)
    starts = ", ".join(map(str, several.planner.cut.starts[1:-1]))
    return f"{want[2][0]} sparse steps, cut at {starts}: {'equal' if same else 'DIFFERS'}"


def cuts(devices: int) -> tuple[tuple[int, ...] | None, ...]:
    """The planner's cut, and two uneven ones."""
    return None, (1, *(3,) * (devices - 1)), (3, *(1,) * (devices - 1))


def methods(folder: Path, devices: int, offload: str, only: list[str]) -> Iterator[tuple[str, str]]:
    """(name, line) of every method of the table, at three cuts."""
    place = model_folder(folder / "methods")
    for row in ROWS:
        for method in row.sparse or (row.neutral,):
            # what evicts, as it is and with a bank of all rows beside its stores
            ways = (True, False) if method.name in EVICT else (getattr(method, "forget", None),)
            for forget, split in product(ways, cuts(devices)):
                own = method if forget is None else replace(method, forget=forget)
                if not only or row.name in only:
                    yield row.name, compared(place, own, devices, split, 300, 8, offload)


def families(
    folder: Path, devices: int, offload: str, only: list[str]
) -> Iterator[tuple[str, str]]:
    """(name, line) of every variant of every family."""
    for name in VARIANTS:
        if not only or name in only:
            place = folder / name
            make(place, name)
            yield name, compared(place, Full(), devices, None, 150, 6, offload)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.devices", description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="devices (default 2)")
    parser.add_argument("--offload", default="auto", choices=("auto", "host"), help="the tier")
    parser.add_argument("--only", nargs="+", default=[], help="these methods and variants")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = {"equal": 0, "refused": 0, "DIFFERS": 0}
    with tempfile.TemporaryDirectory() as folder:
        for part in (methods, families):
            for name, line in part(Path(folder), args.devices, args.offload, args.only):
                kind = "refused" if line.startswith("refused") else line.split()[-1]
                counts[kind] += 1
                print(f"{name:24} {line[:150]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["DIFFERS"] > 0)


if __name__ == "__main__":
    sys.exit(main())
