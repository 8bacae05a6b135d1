"""Options of a benchmark run, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.bench.methods import Spec
from tools.bench.run import Cell


@dataclass
class Options:
    """What a run does; tools/bench/cli.py fills it from the command line."""

    shape: str | None = "160m"
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    contexts: tuple[int, ...] = (4096,)
    specs: tuple[Spec, ...] = ()
    peers: tuple[str, ...] = ()
    prefill: tuple[int, ...] = ()
    rounds: int = 3
    steps: int = 5
    # of the whole run; the report names what is left out
    seconds: float | None = None
    split: bool = True
    verify: bool = True
    append: bool = True  # read tokens onto every depth
    chunk: int | None = None
    rates_bytes: int | None = None
    rates_again: bool = True  # measure them once more at the end
    backend: str = "auto"
    # decode steps by the process's CPU time, not by the wall's: for a machine that others use
    cpu_time: bool = False
    allowed: bool = False  # measure a step's fixed part too, for what each method's bytes allow
    gather: bool = False  # compare the ways of bringing rows from host memory


@dataclass
class Result:
    """Everything that a run measured."""

    cells: list[Cell] = field(default_factory=list)
    # dicts: name, n, stages in seconds, step, timed median
    splits: list = field(default_factory=list)
    # dicts: name, n, what, planned and measured bytes
    memory: list = field(default_factory=list)
    peers: dict = field(default_factory=dict)  # name -> settings, trials, or why it is missing
    model: dict = field(default_factory=dict)
    gather: list = field(default_factory=list)  # rows of bench_gather.compare
    link: str = ""
    rates: Any = None  # tools.bench.floor.Rates, before and after
    rates_after: Any = None
    failed_checks: int = 0
    # own entrants that ended in an error that is none of ours
    crashed: int = 0
