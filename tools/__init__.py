"""Programs that a person runs, and what they share.

`python -m tools` lists them, each with `--help`. bench, fidelity, compare, suites, paper,
calibrate, families, real_model, compile_kernels and check_gpu have a name of their own; speed,
convert and repo hold small programs of one kind, calibrate two beside its own; studies are
experiments whose results docs print.

Shared: common (exit codes, errors, files, long contexts that nobody read) and tasks (documents,
questions and exact answers).
"""

from engine.terminal.sigint import leave_quietly

leave_quietly("tools")

import engine.base.cores.openmp  # noqa: E402, F401  before torch: says how many threads, and how they wait
