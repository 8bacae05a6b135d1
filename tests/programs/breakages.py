"""Does the suite notice? Breaks one line of the engine at a time and runs the tests that must fail.

    python -m tests.programs.breakages [--only NAME ...] [--root FOLDER]

A breakage is a pattern that matches one place of the source, what stands there instead, and the
tests that notice. The tree is copied to a temporary folder; the named tests must pass there as it
is, and each breakage must make one of its own fail. A pattern that matches nowhere, or more than
once, is an error: the table follows the code, and tests/programs/test_breakages.py holds it to
that.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("engine", "kernels", "weights", "tools", "tests", "pyproject.toml")
PASSED, FAILED = 0, 1  # pytest's exit statuses; others (no such test, no import) prove nothing
BANK, METHODS = "tests/engine/bank", "tests/engine/methods/test_methods.py"


@dataclass(frozen=True)
class Breakage:
    """files: a glob from the root; pattern: a regular expression that matches one place in them."""

    name: str
    files: str
    pattern: str
    instead: str
    tests: tuple[str, ...]


HOST_TIER = (
    Breakage(
        "fetched rows are not waited for",
        "engine/bank/host/working_set.py",
        r"wait\(self\._fetched\.pop\(layer, None\), self\._layout\.device\)",
        "pass",
        (f"{BANK}/test_lanes.py::test_late_fetches_change_nothing[4-False]",),
    ),
    Breakage(
        "every fetched row is read from the slot beside its own",
        "engine/bank/host/working_set.py",
        r"self\._slots\.slot_of\[None, None\],",
        "(self._slots.slot_of + 1)[None, None],",
        (f"{BANK}/test_offload.py::test_every_method_over_an_offloaded_bank[OmniKV0]",),
    ),
    Breakage(
        "the second copy of the ring is written one row early",
        "kernels/layer/store.py",
        r"return at, at \+ count",
        "return at, at + count - 1",
        (f"{BANK}/test_offload.py::test_long_generation_across_many_tail_blocks",),
    ),
    Breakage(
        "the ring is refilled in one copy only",
        "engine/bank/host/working_set.py",
        r"self\.words\[again : again \+ count\] = self\.words\[at : at \+ count\]",
        "pass",
        (f"{BANK}/test_lanes.py::test_late_fetches_change_nothing[4-False]",),
    ),
    Breakage(
        "a write-back ends one row early",
        "engine/bank/host/write_back.py",
        r"stop - self\.host_length$",
        "stop - self.host_length - 1",
        (f"{BANK}/test_offload.py::test_every_method_over_an_offloaded_bank[OmniKV0]",),
    ),
    Breakage(
        "a staging buffer is filled while it is still being copied",
        "engine/bank/host/write_back.py",
        r"wait\(free, self\._layout\.device\)",
        "pass",
        (f"{BANK}/test_lanes.py::test_late_stream_blocks_change_nothing",),
    ),
    Breakage(
        "slots keep what a truncate has dropped",
        "engine/bank/host/tiered.py",
        r"self\._forget\(n\)",
        "pass",
        (f"{BANK}/test_offload.py::test_slots_forget_what_a_truncate_has_dropped",),
    ),
    Breakage(
        "a step does not wait for the block written back 64 steps ago",
        "engine/bank/host/tiered.py",
        r"in the step behind the copy would be seen\.\n\s+wait\([\w., ]+\)",
        "in the step behind the copy would be seen.\n            pass",
        (f"{BANK}/test_lanes.py::test_late_write_backs_change_nothing",),
    ),
    Breakage(
        "a stream block does not wait for rows that are on their way to the host",
        "engine/bank/host/block_stream.py",
        r"self\._stream\.wait_event\(self\._writer\.past_event\(layer\)\)",
        "pass",
        (f"{BANK}/test_lanes.py::test_late_stream_blocks_change_nothing",),
    ),
    Breakage(
        "a host block that a fork shares is written in place",
        "engine/bank/pool/block_table.py",
        r"if self\.blocks\[i\]\.refs > 1\]",
        "if self.blocks[i].refs > 9]",
        (f"{BANK}/test_offload_faults.py::test_forks_share_blocks_until_one_writes",),
    ),
    Breakage(
        "a fork does not count the blocks that it shares",
        "engine/bank/pool/block_table.py",
        r"self\.pool\.retain\(blocks, self\._loose\)",
        "pass",
        (f"{BANK}/test_offload_faults.py::test_forks_share_blocks_until_one_writes",),
    ),
    Breakage(
        "an interrupted step leaves its rows in the bank",
        "engine/runner/rollback.py",
        r"session\.bank\.rewind\(n, broken=True\)",
        "pass",
        (f"{BANK}/test_lanes.py::test_broken_off_between_a_plan_and_its_copy",),
    ),
)

ENGINE = (
    Breakage(
        "the tail moves with every token",
        "engine/plan/layers.py",
        r"start = n // TAIL_BLOCK \* TAIL_BLOCK - tail",
        "start = n - tail",
        ("tests/engine/plan/test_tail.py::test_tail_start",),
    ),
    Breakage(
        "a step's tail starts one row late",
        "engine/bank/base.py",
        r"(self\._tails\[tail\] = tail_start\(self\.visible - .*, tail\))",
        r"\1 + 1",
        (f"{METHODS}::test_u3_exactly_the_declared_rows_are_read[omnikv-0]",),
    ),
    Breakage(
        "a chunk's queries lie one slot off in the query ring",
        "engine/bank/query_ring.py",
        r"torch\.arange\(stop - width, stop, device=newest\.device\)",
        "torch.arange(stop - width + 1, stop + 1, device=newest.device)",
        ("tests/engine/methods/test_selector.py"
         "::test_selections_are_those_of_the_paper_in_float64",),
    ),
    Breakage(
        "one layer too few waits after a filter",
        "engine/plan/layers.py",
        r"if since <= wait_layers:",
        "if since < wait_layers:",
        ("tests/engine/methods/test_settings.py::test_layer_plan_worked_examples",),
    ),
    Breakage(
        "a truncate leaves the bank's rows",
        "engine/runner/state.py",
        r"self\.bank\.rewind\(n\)(\n\s+self\.query_ring)",
        r"pass\1",
        (f"{BANK}/test_offload.py::test_slots_forget_what_a_truncate_has_dropped",),
    ),
    Breakage(
        "the selection may hold rows of the tail",
        "engine/methods/omnikv/*.py",
        r"step\.tail_start\(self\.method\.tail\),(\s+self\.k_device)",
        r"step.visible,\1",
        (f"{METHODS}::test_u3_exactly_the_declared_rows_are_read[omnikv-0]",),
    ),
    Breakage(
        "the oldest query of the window weighs most",
        "engine/methods/omnikv/selector.py",
        r"torch\.arange\(1 - window, 1, device=device, dtype=torch\.float32\)",
        "torch.arange(0, -window, -1, device=device, dtype=torch.float32)",
        ("tests/engine/methods/test_selector.py::test_window_weights",),
    ),
    Breakage(
        "an evicting store drops the newer of equal rows",
        "engine/methods/evict/shared/store.py",
        r"torch\.argsort\(positions, dim=1, descending=True\)",
        "torch.argsort(positions, dim=1)",
        ("tests/engine/methods/test_evicting.py::test_ties_go_to_the_newer_token",),
    ),
    Breakage(
        "pages of keys outlive the rows that they were made of",
        "engine/methods/select/*.py",
        r"\[\[min\((\w+), length\) for \1 in group\] for group in self\._known\]",
        "self._known",
        ("tests/engine/methods/test_quest.py::test_extremes_follow_the_bank_wherever_it_goes",),
    ),
    Breakage(
        "rotation turns the second half of a head the wrong way",
        "engine/model/rope.py",
        r"second \* cos \+ first \* sin",
        "second * cos - first * sin",
        ("tests/engine/model/test_rope.py::test_rotation",),
    ),
    Breakage(
        "dynamic NTK counts one token too few while decoding",
        "engine/model/rope.py",
        r"positions \+ 1 if total is None",
        "positions if total is None",
        ("tests/engine/model/test_rope.py::test_decode_rows_follow_the_growing_sequence",),
    ),
    Breakage(
        "the last query of a prompt does not see its own token",
        "engine/forward/prefill.py",
        r"start \+ tokens\.shape\[1\] - 1",
        "max(0, start + tokens.shape[1] - 2)",
        ("tests/engine/model/test_transformers.py::test_logits_and_greedy_tokens[gqa]",),
    ),
    Breakage(
        "the nucleus leaves out the token that completes it",
        "engine/sampling/sampler.py",
        r"values\.cumsum\(0\) - values",
        "values.cumsum(0)",
        ("tests/engine/sampling/test_sampling.py::test_the_token_that_reaches_top_p_is_kept",),
    ),
    Breakage(
        "the repetition penalty rewards",
        "engine/sampling/penalties.py",
        r"scores \* factor, scores / factor",
        "scores / factor, scores * factor",
        ("tests/engine/sampling/test_sampling.py::test_the_penalty_counts_prompt_and_answer_once_each",),
    ),
    Breakage(
        "a stop string that begins with one character is shown",
        "engine/text/stop.py",
        r"range\(1, len\(stop\)\)",
        "range(2, len(stop))",
        ("tests/engine/text/test_text.py::test_stop_strings_do_not_depend_on_how_a_text_is_cut",),
    ),
    Breakage(
        "an end token is not fed, so that the next turn misses it",
        "engine/session/generate.py",
        r"(\n +)if not ahead and len\(session\) < session\.limit:\n\s+yield \w+\(token\)",
        r"\1pass",
        ("tests/engine/session/test_session.py::test_a_token_that_ends_an_answer_is_in_the_session",),
    ),
    Breakage(
        "a step that was issued before its token was read is committed though that token is NaN",
        "engine/sampling/greedy.py",
        r"require_finite\(float.*\n",
        "pass\n",
        ("tests/engine/sampling/test_runs_ahead.py::test_a_step_that_is_given_up_has_not_run[nan-full]",),
    ),
    Breakage(
        "the plan forgets the query ring",
        "engine/load/memory.py",
        r'\("query ring", ring,',
        '("query ring", 0,',
        ("tests/engine/plan/test_memory_plan.py::test_planned_bytes_are_allocated_bytes",),
    ),
    Breakage(
        "query heads of a group read another group's rows",
        "kernels/attention/cpu.py",
        r"(q\.view\(queries, )kv_heads, group, dim\)(\s+)\.transpose\(0, 1\)",
        r"\1group, kv_heads, dim)\2.permute(2, 0, 1, 3)",
        ("tests/kernels_cpu/test_decode.py::test_dense",),
    ),
    Breakage(
        "tensors of a file may overlap",
        "weights/safetensors_file.py",
        r"if info\.start != end:",
        "if info.start > end:",
        ("tests/weights/test_safetensors_file.py::test_ranges_must_tile_the_data",),
    ),
)  # fmt: skip

TABLE = HOST_TIER + ENGINE


def place(root: Path, breakage: Breakage) -> tuple[Path, str]:
    """(file, its text) of the one place below `root` that a pattern matches. Raises SystemExit
    where it matches nothing, or more than one place.
    """
    expression = re.compile(breakage.pattern, re.MULTILINE)
    found = []
    for path in sorted(root.glob(breakage.files)):
        text = path.read_text(encoding="utf-8")
        found += [(path, text)] * len(expression.findall(text))
    if len(found) != 1:
        raise SystemExit(
            f"{breakage.name}: found {len(found)} places in {breakage.files} for "
            f"{breakage.pattern!r}, expected one"
        )
    return found[0]


def break_tree(root: Path, breakage: Breakage) -> tuple[Path, str]:
    """Apply a breakage below `root`; returns (file, its text before)."""
    path, text = place(root, breakage)
    broken = re.sub(breakage.pattern, breakage.instead, text, flags=re.MULTILINE)
    path.write_text(broken, encoding="utf-8")
    return path, text


def run_tests(root: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the tree, until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
    command += ["-p", "no:cacheprovider", "-rf", *tests]
    environment = environment_of(tests)
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def environment_of(tests: tuple[str, ...]) -> dict[str, str]:
    """The variables that these tests run under."""
    interpreted = str(int(all("tests/kernels/" in test for test in tests)))
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    environment["COLUMNS"] = "240"  # pytest cuts its summary there
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a source that changes within a second
    return environment


def parts(tests: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The interpreted ones, which need a process of their own, and the others."""
    kinds = [tuple(t for t in tests if ("tests/kernels/" in t) is some) for some in (True, False)]
    return [part for part in kinds if part]


def require_tests(root: Path, tests: tuple[str, ...]) -> None:
    """Exit where pytest does not find one of these, parameters included."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    for part in parts(tests):
        where = dict(cwd=root, env=environment_of(part), capture_output=True, text=True)
        found = subprocess.run([*command, *part], **where)
        if found.returncode != PASSED:
            raise SystemExit(f"{found.stdout}{found.stderr}")


def copy_tree(root: Path, target: Path) -> None:
    """Copy what the tests need."""
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=skip)
        else:
            shutil.copy(root / name, target / name)


def main(arguments: list[str] | None = None, table: tuple[Breakage, ...] = TABLE) -> int:
    """Print a line per breakage, and what its test said; 1 where one was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.breakages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="names that hold one of these")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to break a copy of")
    parser.add_argument(
        "--match", action="store_true", help="only look whether patterns match and tests exist"
    )
    chosen = parser.parse_args(arguments)
    wanted = [b for b in table if not chosen.only or any(w in b.name for w in chosen.only)]
    for breakage in wanted:  # every pattern first: a table that is out of date costs nothing
        place(chosen.root, breakage)
    tests = tuple(dict.fromkeys(test for b in wanted for test in b.tests))
    if chosen.match:
        require_tests(chosen.root, tests)
        print(f"{len(wanted)} patterns match one place each, and their tests exist")
        return 0
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_tree(chosen.root, root)
        for part in parts(tests):
            sound = run_tests(root, part)
            if sound.returncode != PASSED:
                said = f"{sound.stdout}{sound.stderr}"
                raise SystemExit(f"the tests must pass before anything is broken:\n{said}")
        for breakage in wanted:
            start = time.monotonic()
            path, text = break_tree(root, breakage)
            done = run_tests(root, breakage.tests)
            path.write_text(text, encoding="utf-8")
            seen = re.search(r"^FAILED (.+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
            verdict = f"noticed by {seen[1]}" if seen else f"NOT NOTICED ({done.returncode})"
            if done.returncode != FAILED or not seen:
                missed.append(breakage.name)
            spent = time.monotonic() - start
            print(f"{breakage.name:66} {path.relative_to(root)!s:34} {verdict} {spent:.0f}s")
            print(f"    {seen[2] or ''}" if seen else "", flush=True)
    print(f"{len(wanted) - len(missed)} of {len(wanted)} breakages noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
