"""Jobs of check_gpu that run in processes of their own: forms of a step that are tested before
anything relies on them, kernels that compile side by side, the CUDA tests, and NVIDIA's own tools.

    python -m tools.gpu.jobs NAME [--cpu]      one job; its facts are the last line, as JSON

A kernel that breaks its process's context takes nothing else with it. What the jobs compile stays
in Triton's cache for the process that measures.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import LLM, OmniKV
from engine.base.errors import SettingError, UsageError
from engine.forward.self_test import failure
from engine.load.ahead.children import SWITCH
from kernels.launch.pdl import refuse, supported
from kernels.layer.gemv import multiply_rows
from kernels.layer.rotate_store import rotate_store
from tools.bench.shapes import shape_config
from tools.bench.suite import sharp_stream
from tools.common.program import ended, guarded
from tools.gpu import kernels as gpu_kernels
from tools.gpu.context import Context
from tools.gpu.sections import same_tokens

Facts = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
WORKERS = 14  # processes at once: compiling takes most of the time, and a machine lent has 16 cores
GPUS = 2  # that a model's heads are split over
TOKENS = 320  # of the tested prompts: beyond the tested budget


# ---------------------------------------------------------------- the jobs


def _two_layers(ctx: Context, **settings: Any) -> LLM:
    """Two layers of the timed shape, with few words: all kernels of a step at their real sizes."""
    config = replace(shape_config(ctx.shape), num_layers=2, vocab_size=256)
    named = dict(device=ctx.device, dtype=ctx.dtype, max_context=4 * TOKENS)
    return LLM.from_stream(config, sharp_stream, **{**named, **settings})


def _fused(in_turn: bool, ctx: Context) -> Facts:
    """What a step's self-test finds, with dependent launch or without it."""
    if ctx.device == "cpu":
        return {"skipped": "needs a GPU"}
    llm = _two_layers(ctx, step="plain")
    assert llm.model is not None
    if in_turn:
        refuse(llm.device)
    before = supported(llm.device)
    fault = failure(llm.model, llm.rotary)
    return {
        "fault": fault,
        "dependent": before,
        "dependent_refused": before != supported(llm.device),
    }


def _answers(settings: dict[str, str], ctx: Context) -> Facts:
    """Whether sparse steps in a form say what the reference says."""
    method = OmniKV(filter_layers=(0,), tokens=64, tail=64, dense_below=0, wait_layers=0)
    try:
        llm = _two_layers(ctx, method=method, **settings)
    except SettingError as error:  # 8-bit floats on a card without them
        return {"skipped": str(error)}
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(256, (TOKENS,), generator=generator).tolist()
    with llm.session() as session:
        session.prefill(ids)
        found = [session.decode(token).float().cpu() for token in ids[:4]]
        session.truncate(TOKENS)
        session.set_backend("reference")
        right = [session.decode(token).float().cpu() for token in ids[:4]]
        assert session.stats.sparse_steps >= 8, "a step was not sparse"
    facts = same_tokens(found, right)
    wrong = facts["equal_to_reference"] + facts["ties"] < facts["compared"]
    return {**facts, "fault": "tokens differ from the reference's" if wrong else ""}


def _checked(group: str, ctx: Context) -> Facts:
    sizes = gpu_kernels.SMALL if ctx.small else gpu_kernels.GPU
    return {"checks": gpu_kernels.check(sizes, ctx.device, (group,))}


def _launches(ctx: Context) -> Facts:
    """Five tiny launches, for a tool that watches each of their accesses."""
    device = torch.device(ctx.device)
    dtype = torch.float32 if ctx.small else torch.bfloat16
    sizes = replace(gpu_kernels.SMALL, dtype=dtype)
    bench = gpu_kernels.Bench(sizes, 8700, device)  # 17 splits: merged in two levels
    bench.dense(scores=bench.keys)
    bench.sparse()
    gpu_kernels.selecting(bench.keys, 64)()
    if device.type == "cuda":
        _rows_and_products(device, dtype)
        torch.cuda.synchronize()
    return {"launched": True}


def _rows_and_products(device: torch.device, dtype: torch.dtype) -> None:
    options: dict[str, Any] = dict(device=device, dtype=dtype)
    qkv, turns = torch.randn(1, 1, 12, 32, **options), torch.ones(1, 1, 16, device=device)
    rows = torch.zeros(2, 1, 2, 64, 32, **options)
    ring = torch.zeros(1, 128, 8, 32, **options)
    at = torch.full((1, 1), 5, device=device)
    rotate_store(qkv, turns, turns, rows[0], rows[1], ring, at, None)
    for count in (1, 8):
        multiply_rows(torch.randn(count, 256, **options), torch.randn(512, 256, **options))


def _profiled(ctx: Context) -> Facts:
    """One launch of each kernel whose bytes and issue slots are counted."""
    if ctx.device == "cpu":
        return {"skipped": "needs a GPU"}
    options: dict[str, Any] = dict(device=ctx.device, dtype=torch.bfloat16)
    weight = torch.randn(28672, 4096, **options)
    for rows in (1, 8):
        multiply_rows(torch.randn(rows, 4096, **options), weight)
    bench = gpu_kernels.Bench(gpu_kernels.GPU, 32768, ctx.device)
    for launch in (bench.dense, bench.sparse, bench.prefill, bench.blocks):
        launch()
    torch.cuda.synchronize()
    return {"launched": True}


def _first_answer(ctx: Context) -> Facts:
    """Seconds to the first token of a model of two layers, and how many kernels were compiled
    before and after its weights were there. Its caller gives it an empty cache.
    """
    from triton import knobs

    def compiled() -> int:
        return len(list(Path(knobs.cache.dir).rglob("*.cubin")))

    method = OmniKV(filter_layers=(0,), tokens=64, tail=64, dense_below=0, wait_layers=0)
    began = time.perf_counter()
    llm = _two_layers(ctx, method=method)
    loaded, before = time.perf_counter() - began, compiled()
    with llm.session() as session:
        session.prefill([i % 256 for i in range(TOKENS)])
        int(session.decode(1).argmax())
    seconds = time.perf_counter() - began
    return {"load": loaded, "answer": seconds, "before": before, "later": compiled() - before}


FORMS: dict[str, Callable[[Context], Facts]] = {
    "fused": partial(_fused, False),
    "fused, launched in turn": partial(_fused, True),
    **{f"{bank} bank": partial(_answers, {"bank": bank}) for bank in ("int8", "int4", "fp8")},
    **{f"{kind} weights": partial(_answers, {"weights": kind}) for kind in ("int4", "int8")},
}
JOBS: dict[str, Callable[[Context], Facts]] = {
    **FORMS,
    **{f"check {group}": partial(_checked, group) for group in gpu_kernels.CHECKS},
    "first answer": _first_answer,
    "launches": _launches,
    "profiled": _profiled,
}


# ---------------------------------------------------------------- running them


def command(name: str, ctx: Context) -> list[str]:
    """The command line of a job."""
    return [sys.executable, "-m", "tools.gpu.jobs", name, *["--cpu"] * (ctx.device == "cpu")]


def run(line: list[str], seconds: float, **environment: str) -> tuple[str, str]:
    """Run a program in a process of its own: (how it ended, "" for well; what it printed)."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            line, cwd=ROOT, stdout=said, stderr=said, env={**os.environ, **environment}
        )
        how = ended(process, seconds)
        said.seek(0)
        return how, said.read()


def job_facts(name: str, ctx: Context, seconds: float, **environment: str) -> Facts:
    """Facts of a job, its seconds among them. One that dies has them as its fault."""
    began = time.perf_counter()
    how, text = run(command(name, ctx), seconds, **environment)
    lines = text.strip().splitlines()
    try:
        found = {} if how else json.loads(lines[-1])
    except (ValueError, IndexError):
        found, how = {}, "its process said nothing"
    if how:
        found = {"fault": how, "tail": lines[-5:]}
    return {**found, "seconds": round(time.perf_counter() - began, 1)}


def in_parallel(names: list[str], ctx: Context) -> Iterator[tuple[str, Facts]]:
    """Yield (name, facts) of jobs as they end, several at a time."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    until = time.perf_counter() + ctx.seconds
    workers = max(1, min(WORKERS, (os.cpu_count() or 1) - 1))
    with ThreadPoolExecutor(workers) as pool:
        left = lambda: max(1.0, until - time.perf_counter())  # noqa: E731
        asked = {pool.submit(lambda n=name: job_facts(n, ctx, left())): name for name in names}
        for done in as_completed(asked):
            yield asked[done], done.result()


def compile_forms(ctx: Context) -> Facts:
    """Which forms of a step live, and whether every launcher agrees with its reference: each asked
    in a process of its own, which compiles its kernels for all that follows.
    """
    found: Facts = {"forms": {}, "checks": {}, "check_jobs": {}}
    for name, facts in in_parallel([n for n in JOBS if n in FORMS or n[:5] == "check"], ctx):
        if name in FORMS:
            found["forms"][name] = facts
        else:
            checks = facts.pop("checks", {name: {"ok": False, **facts}})
            found["checks"] |= checks
            found["check_jobs"][name] = facts
        ctx.note(found)
    return found


def start(ctx: Context) -> Facts:
    """The first answer of a fresh machine, whose kernels are compiled by other processes while
    weights are read, or by the first launches.
    """
    found: Facts = {}
    for name, switch in (("ahead", "1"), ("at the first launch", "0")):
        with tempfile.TemporaryDirectory() as folder:
            given = {"TRITON_CACHE_DIR": folder, SWITCH: switch}
            found[name] = job_facts("first answer", ctx, ctx.seconds / 2, **given)
        ctx.note(found)
    return found


def tests(ctx: Context) -> Facts:
    """Run tests/cuda in new processes (in a rehearsal: collect only).

    About 450 kernel variants are compiled on a machine with an empty cache: by WORKERS processes
    where pytest-xdist is there. A run that is stopped is an error, so that a later call runs it
    again; what was compiled by then stays compiled.
    """
    line = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "--color=no", "--maxfail=25"]
    if importlib.util.find_spec("xdist") and not ctx.small:
        line += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    how, text = run(line + ["--collect-only"] * ctx.small, ctx.seconds, TRITON_INTERPRET="0")
    lines = [each for each in text.splitlines() if each.strip()]
    if how.startswith("stopped"):
        return {"summary": how, "error": how, "tail": text[-2000:]}
    ok = not how or how.endswith("status 5")  # no test was collected
    return {"summary": lines[-1] if lines else how, "ok": ok, "tail": "\n".join(lines[-30:])}


def ranks(ctx: Context) -> Facts:
    """A rank on each of two GPUs beside one process on the first at 64K, and the tests of ranks on
    GPUs; where there are fewer, why not.
    """
    found = 0 if ctx.small else torch.cuda.device_count()
    if found < GPUS:
        return {"skipped": f"not measured: needs {GPUS} GPUs, found {found}"}
    test = [sys.executable, "-m", "pytest", "tests/cuda/test_ranks.py", "-q", "--color=no"]
    how, text = run(test, ctx.seconds / 3, TRITON_INTERPRET="0")
    facts: Facts = {"tests": how or "passed", "tail": text.strip().splitlines()[-8:] if how else []}
    ctx.note(facts)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "ranks.json"
        line = [
            sys.executable,
            "-m",
            "tools.speed.ranks",
            "--gpus",
            str(GPUS),
            "--shape",
            ctx.shape,
        ]
        line += ["--context", "64K", "--json", str(kept)]
        how, text = run(line, ctx.seconds * 2 / 3)
        if how:
            return {**facts, "error": how, "tail": text.strip().splitlines()[-8:]}
        return {**facts, "rows": json.loads(kept.read_text())["rows"]}


def sanitize(ctx: Context) -> Facts:
    """compute-sanitizer over five tiny launches: accesses out of bounds, races in shared memory. In
    a rehearsal, or where it is not installed, the launches alone.
    """
    tool, found = shutil.which("compute-sanitizer"), {}
    if tool is None or ctx.small:
        facts = job_facts("launches", ctx, ctx.seconds)
        why = "not run in a rehearsal" if ctx.small else "compute-sanitizer is not installed"
        return {"skipped": why, "launches": facts}
    for kind in ("memcheck", "racecheck"):
        line = [tool, "--tool", kind, "--error-exitcode", "9", *command("launches", ctx)]
        how, text = run(line, ctx.seconds / 2)
        found[kind] = {"fault": how, "tail": text.strip().splitlines()[-8:] if how else []}
        ctx.note(found)
    return found


METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def profiles(ctx: Context) -> Facts:
    """Nsight Compute's bytes, issue slots and occupancy of the heaviest kernels."""
    tool = shutil.which("ncu")
    if tool is None or ctx.small:
        return {"skipped": "not run in a rehearsal" if ctx.small else "ncu is not installed"}
    line = [tool, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS)]
    how, text = run([*line, *command("profiled", ctx)], ctx.seconds)
    return {"rows": metric_rows(text), **({"error": how} if how else {})}


def metric_rows(text: str) -> list[Facts]:
    """[{kernel, metric: value}] of every launch in Nsight Compute's CSV, which follows its other
    lines.
    """
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if at is None:
        return []
    launches: dict[str, Facts] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[at:]))):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        launch[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(launches.values())


def main(argv: list[str] | None = None) -> int:
    """Run one job and print its facts. Exit code 0, or 2 for an unknown name."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.jobs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("name", help="of the job; an unknown one is answered with the list")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.name not in JOBS:
            raise UsageError(f"found job {args.name!r}, expected one of {', '.join(JOBS)}")
        ctx = Context("cpu" if args.cpu else "cuda", args.cpu, 60.0)
        with torch.inference_mode():
            print(json.dumps(JOBS[args.name](ctx)), flush=True)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
