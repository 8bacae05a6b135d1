"""`make check-gpu` rehearsed on a CPU: every section of its three commands runs, results are
written as they come, a later call goes on where one stopped, with results of the same sources only.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import LLM, Full
from engine.forward.layer import FusedLayer
from engine.sampling.greedy import DeviceArgmax
from kernels.launch import pdl
from tests.builders import session_config, tiny_llm
from tools import check_gpu
from tools.bench.floor import Rates
from tools.common import program
from tools.gpu import context as gpu_context
from tools.gpu import jobs as gpu_jobs
from tools.gpu import kernels as gpu_kernels
from tools.gpu import probe as gpu_probe
from tools.gpu import sections as gpu_sections
from tools.gpu import verdict as gpu_verdict
from tools.gpu.depth import MIXTURES
from tools.gpu.few_bits import few_bits


def call(tmp_path, *arguments):
    return check_gpu.main(["--cpu-rehearsal", "--out", str(tmp_path), *arguments])


def kept(tmp_path):
    return json.loads((tmp_path / "results.json").read_text())["sections"]


@pytest.fixture
def jobs_here(monkeypatch):
    """Jobs run in this process: their imports alone take longer than they do."""

    def facts(name, ctx, seconds, **environment):
        return {**gpu_jobs.JOBS[name](ctx), "seconds": 0.0}

    monkeypatch.setattr(gpu_jobs, "job_facts", facts)
    monkeypatch.setattr(gpu_jobs, "WORKERS", 1)


def test_the_first_command_runs_on_a_cpu(tmp_path, capsys, jobs_here):
    assert call(tmp_path, "--in-process") == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["failed_sections"] == []
    sections = kept(tmp_path)
    assert list(sections) == list(check_gpu.COMMANDS[1])
    assert all("error" not in found and "unfinished" not in found for found in sections.values())
    forms, checks = sections["compile"]["forms"], sections["compile"]["checks"]
    assert set(forms) == set(gpu_jobs.FORMS) and len(checks) == 9
    assert all(row["ok"] for row in {**checks, **sections["kernels"]["checks"]}.values())
    assert {name: facts.get("fault", "") for name, facts in forms.items()} == dict.fromkeys(
        forms, ""
    )
    assert [name for name, facts in forms.items() if "skipped" in facts] == [
        "fused", "fused, launched in turn",
    ]  # fmt: skip
    text = (tmp_path / "results.md").read_text()
    assert "| gather kernel | 70 x 256 (768) |" in text
    assert (
        "PASS      kernels equal their references" in text
        and "PASS      int4 bank: agrees with the reference" in text
        and "Attack next" in text
        and "| full | tg @ d4096 |" in text
    )
    _at_the_gpus_own_budgets(sections)


def _at_the_gpus_own_budgets(sections):
    """What dies for a budget, a context or a dtype dies in the rehearsal: it had 64 of 512 tokens
    in float32, where the bench of the host tier could not run at more than 64.
    """
    for name in ("step", "crossover"):
        cells = [c for c in sections[name]["cells"] if c["test"] == "tg"]
        assert {c["n"] for c in cells if c["n"] > 2048} and sections[name]["model"]["dtype"] == (
            "bfloat16"
        )
        assert [c["name"] for c in cells if c["why"]] == []
        chosen = [c for c in cells if c["name"].startswith("omnikv")]
        assert chosen and all("tokens=2048" in c["settings"] for c in chosen)
    timed = [(c["name"], c["n"]) for c in sections["step"]["cells"]]
    # the deepest of the host tier comes first of its rows
    assert [n for name, n in timed if "host" in name] == [32768, 4096]
    assert {c["test"] for c in sections["prefill"]["cells"]} == {"pp4096"}
    assert {facts["steps"] for facts in sections["step"]["tokens"].values()} == {100}
    rows = {c["name"] for c in sections["forms"]["cells"]}
    assert {"full, int4 weights", "full, batch of 8", "omnikv w1, int8 bank"} <= rows
    assert sections["forms"]["exact"]["same"] == sections["forms"]["exact"]["tokens"] == 8


def test_the_second_and_third_command_run_on_a_cpu(tmp_path, jobs_here, monkeypatch):
    monkeypatch.setattr(gpu_probe, "STEPS", 3)
    assert call(tmp_path, "--in-process", "--command", "2") == 0
    assert call(tmp_path, "--in-process", "--command", "3") == 0
    sections = kept(tmp_path)
    assert list(sections) == [*check_gpu.COMMANDS[2], *check_gpu.COMMANDS[3]]
    assert [name for name, found in sections.items() if "error" in found] == []
    names = {c["name"] for c in sections["depth"]["cells"]}
    reuses = {f"omnikv-host w1 reuse {reuse}" for reuse in ("0", "0.7", "0.9")}
    assert names >= reuses | {"full", "omnikv w1", "brutal", "omnikv r=2"}
    assert {"transformers", "published", "published, offloaded"} <= {
        c["name"] for c in sections["rivals"]["cells"]
    }
    assert {row["name"] for row in sections["split"]["splits"]} >= {"full", "omnikv w1"}
    assert sections["tests"]["ok"] and "sanitize" in sections
    mixed = sections["mixtures"]
    assert {c["n"] for c in mixed["cells"]} == {4096} and set(mixed["tokens"]) == set(MIXTURES)
    for facts in mixed["tokens"].values():
        assert facts["equal_to_reference"] + facts["ties"] == facts["compared"] == 4
    answers = sections["start"]
    assert answers["ahead"]["answer"] > answers["ahead"]["load"] > 0 == answers["ahead"]["later"]
    whole = sections["whole"]
    assert whole["exact"]["same"] == whole["exact"]["tokens"] and whole["prompt"]["seconds"] > 0
    assert all(facts["equal"] for facts in whole["saved"].values())


# ---------------------------------------------------------------- the plan, kills, going on


def test_every_command_fits_ten_minutes_and_the_most_valuable_comes_first():
    for command in check_gpu.COMMANDS.values():
        assert sum(seconds for _, seconds in command.values()) <= check_gpu.SECONDS < 600
    assert list(check_gpu.COMMANDS[1]) == [
        "facts", "compile", "step", "prefill", "forms", "kernels", "crossover",
    ]  # fmt: skip
    together = sum(len(command) for command in check_gpu.COMMANDS.values())
    assert together == len(check_gpu.SECTIONS), "a section stands in one command"


class Machine:
    """Sections that compute nothing and are killed where they are told to. ran: their names."""

    def __init__(self, monkeypatch, names):
        self.ran, self.kill, self.seen = [], None, {}
        for name in names:
            section = (lambda ctx, name=name: self.section(name, ctx), 30)
            monkeypatch.setitem(check_gpu.SECTIONS, name, section)

    def section(self, name, ctx):
        if name == self.kill:
            raise KeyboardInterrupt
        self.ran.append(name)
        self.seen[name] = list(ctx.results)
        return {"found": name}


@pytest.mark.parametrize("command", [1, 2, 3])
def test_a_call_killed_at_any_boundary_goes_on_there(tmp_path, monkeypatch, command):
    """Nothing that was found before the kill is lost, and nothing of it runs again."""
    names = list(check_gpu.COMMANDS[command])
    machine = Machine(monkeypatch, names)
    for at, name in enumerate(names):
        machine.ran, machine.kill = [], name
        out = tmp_path / name
        assert call(out, "--in-process", "--command", str(command)) == 130
        assert machine.ran == names[:at]
        assert not at or list(kept(out)) == names[:at]
        machine.kill = None
        assert call(out, "--in-process", "--command", str(command)) == 0
        assert machine.ran == names and list(kept(out)) == names
        assert machine.seen[names[-1]] == names[:-1], "a section sees those before it"
        assert call(out, "--in-process", "--command", str(command)) == 0
        assert machine.ran == names


def test_results_of_other_sources_are_run_again(tmp_path, monkeypatch, capsys):
    machine = Machine(monkeypatch, ("facts", "step"))
    monkeypatch.setattr(check_gpu.bench_header, "commit", lambda: "unknown")  # a bare tree
    assert call(tmp_path, "--in-process", "--sections", "facts,step") == 0
    assert call(tmp_path, "--in-process", "--sections", "facts,step") == 0
    assert machine.ran == ["facts", "step"]
    monkeypatch.setattr(check_gpu, "sources", lambda: "another tree")
    assert call(tmp_path, "--in-process", "--sections", "facts") == 0
    assert machine.ran == ["facts", "step", "facts"]
    assert "of other sources, and run again: facts, step" in capsys.readouterr().err
    assert list(kept(tmp_path)) == ["facts"]


def test_results_that_were_carried_here_are_taken(tmp_path, monkeypatch):
    """A borrowed machine empties its output folder before every command."""
    machine = Machine(monkeypatch, ("facts", "step"))
    assert call(tmp_path / "first", "--in-process", "--sections", "facts") == 0
    carried = tmp_path / "first" / "results.json"
    arguments = ("--in-process", "--sections", "facts,step", "--resume", str(carried))
    assert call(tmp_path / "second", *arguments) == 0
    assert machine.ran == ["facts", "step"]
    assert list(kept(tmp_path / "second")) == ["facts", "step"]
    assert call(tmp_path / "third", "--resume", str(tmp_path / "nothing.json")) == 2


def test_the_hash_follows_every_source_and_nothing_else(tmp_path):
    for name, text in {
        "engine/a.py": "1", "kernels/native/b.cpp": "2", "tests/cuda/test_c.py": "3",
        "docs/page.md": "4", "tests/tools/test_d.py": "5",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def found():
        check_gpu.sources.cache_clear()
        return check_gpu.sources(tmp_path)

    try:
        before = found()
        for name, changes in (
            ("engine/a.py", True), ("kernels/native/b.cpp", True), ("tests/cuda/test_c.py", True),
            ("docs/page.md", False), ("tests/tools/test_d.py", False),
        ):  # fmt: skip
            (tmp_path / name).write_text("changed")
            now = found()
            assert (now != before) == changes, name
            before = now
    finally:
        check_gpu.sources.cache_clear()


def test_a_worker_keeps_one_process_and_a_killed_one_has_a_successor(tmp_path, capsys):
    args = check_gpu.parser().parse_args(["--cpu-rehearsal", "--out", str(tmp_path)])
    worker = check_gpu.Worker(args)
    try:
        first = worker.run("facts", 60.0, {})
        process = worker._process
        assert first["rates"]["read"] > 0 and "error" not in first
        assert worker.run("facts", 60.0, {})["rates"] == first["rates"], "measured once"
        assert worker._process is process
        os.kill(process.pid, signal.SIGKILL)
        broken = worker.run("facts", 60.0, {})
        assert "its process ended" in broken["error"]
        assert "error" not in worker.run("facts", 60.0, {}) and worker._process is not process
    finally:
        worker.end()


def test_a_child_that_cannot_be_ended_is_left_behind(monkeypatch):
    """One that is stuck in a driver is not reaped when it is killed."""
    line = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", line])
    began = time.perf_counter()
    assert program.ended(process, 0.5) == "stopped after 0 s"
    assert process.poll() is not None and time.perf_counter() - began < 30

    class Stuck:
        """A process that no signal ends."""

        waits: list = []

        def wait(self, seconds=None):
            assert seconds is not None, "waits without a limit"
            self.waits.append(seconds)
            raise subprocess.TimeoutExpired("stuck", seconds)

        def kill(self):
            self.waits.append("kill")

    assert "still there 10 s after" in program.ended(Stuck(), 3.0)
    assert Stuck.waits == [3.0, "kill", 10.0]


def test_a_late_section_is_ended_and_its_facts_stay(tmp_path, monkeypatch):
    """A part that was noted, from a worker that then says nothing more."""
    args = check_gpu.parser().parse_args(["--cpu-rehearsal", "--out", str(tmp_path)])
    worker = check_gpu.Worker(args)
    monkeypatch.setattr(check_gpu, "AFTER", 0.0)

    def started():
        code = "import sys, time; sys.stdin.readline(); time.sleep(60)"
        worker._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, text=True
        )
        check_gpu.note(tmp_path, "facts", {"half": 1, "unfinished": True})
        return worker._process

    monkeypatch.setattr(worker, "_start", started)
    found = worker.run("facts", 1.0, {})
    assert found["half"] == 1 and "stopped after 1 s" in found["error"]
    assert not check_gpu._done(found) and worker._process is None


def test_a_fault_keeps_what_was_noted(tmp_path, monkeypatch):
    def faulty(ctx):
        ctx.note({"half": 1})
        raise RuntimeError("an illegal memory access was encountered")

    Machine(monkeypatch, ("step",))
    monkeypatch.setitem(check_gpu.SECTIONS, "facts", (faulty, 10))
    assert call(tmp_path, "--in-process", "--sections", "facts,step") == 1
    found = kept(tmp_path)
    assert (
        found["facts"]["half"] == 1
        and "illegal memory access" in found["facts"]["error"]
        and found["step"]["found"] == "step"
    )
    assert "illegal memory access" in (tmp_path / "results.md").read_text()


def test_no_time_to_begin_leaves_a_section_for_another_call(tmp_path, monkeypatch, capsys):
    Machine(monkeypatch, ("facts",))
    assert call(tmp_path, "--in-process", "--sections", "facts", "--seconds", "1") == 1
    assert "left for another call" in capsys.readouterr().err


def test_no_gpu_and_bad_sections_are_usage_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_gpu, "_has_gpu", lambda: False)
    assert check_gpu.main(["--out", str(tmp_path)]) == 2
    assert "--cpu-rehearsal" in capsys.readouterr().err
    assert call(tmp_path, "--sections", "facts,nothing") == 2


def test_a_form_that_a_process_found_broken_is_not_run(monkeypatch):
    """The process that measures would lose its context to it, and with it every later section."""
    made = []
    monkeypatch.setattr(gpu_context.LLM, "from_stream", lambda *a, **named: made.append(named))
    for fault, step in (("query differs by 3", "plain"), ("", "auto")):
        results = {"compile": {"forms": {"fused": {"fault": fault}}}}
        gpu_context.Context("cpu", True, 1.0, results=results).made()
        assert made[-1]["step"] == step


def test_a_form_that_only_breaks_when_launched_early_is_launched_in_turn(monkeypatch):
    """The process that measures gives up dependent launch, not our kernels."""
    monkeypatch.setattr(pdl, "_REFUSED", set())
    monkeypatch.setattr(pdl, "_possible", lambda device: True)
    card, other = torch.device("cuda", 0), torch.device("cuda", 1)
    forms = {"fused": {"fault": "its process ended with status 6"}}
    results = {"compile": {"forms": forms}}
    ctx = gpu_context.Context("cuda", False, 1.0, results=results)
    assert ctx.step == "plain" and pdl.supported(card)
    forms["fused, launched in turn"] = {"fault": ""}
    assert ctx.step == "auto" and not pdl.supported(card) and pdl.supported(other)


def test_a_job_that_dies_is_a_fault_of_its_own(monkeypatch):
    ctx = gpu_context.Context("cpu", True, 30.0)
    broken = [sys.executable, "-c", "print('CUDA error: misaligned address'); raise SystemExit(3)"]
    monkeypatch.setattr(gpu_jobs, "command", lambda name, ctx: broken)
    found = gpu_jobs.job_facts("fused", ctx, 30.0)
    assert found["fault"] == "its process ended with status 3"
    assert found["tail"] == ["CUDA error: misaligned address"]
    forms = {"fused": found, "int8 bank": {"fault": ""}}
    verdicts = {v.goal: v.status for v in gpu_verdict.verdicts({"compile": {"forms": forms}})}
    assert verdicts["fused: agrees with the reference"] == "FAIL"
    assert verdicts["int8 bank: agrees with the reference"] == "PASS"


def test_metrics_are_read_behind_what_the_profiler_says():
    text = (
        '==PROF== Connected to process 5\n"ID","Kernel Name","Metric Name","Metric Unit",'
        '"Metric Value"\n"0","product_kernel","dram__bytes_read.sum","Mbyte","234.9"\n'
        '"0","product_kernel","gpu__time_duration.sum","us","60"\n'
        '"1","dense_kernel","dram__bytes_read.sum","Mbyte","134"\n'
    )
    one, other = gpu_jobs.metric_rows(text)
    assert one == {
        "kernel": "product_kernel", "dram__bytes_read.sum": "234.9 Mbyte",
        "gpu__time_duration.sum": "60 us",
    }  # fmt: skip
    assert other["kernel"] == "dense_kernel" and gpu_jobs.metric_rows("==ERROR== no") == []


def test_a_wrong_kernel_fails_its_check(monkeypatch):
    right = gpu_kernels.decode_sparse

    def wrong(*arguments, backend="auto", **named):
        out = right(*arguments, backend=backend, **named)
        return out if backend == "reference" else out * 1.01

    monkeypatch.setattr(gpu_kernels, "decode_sparse", wrong)
    checks = gpu_kernels.check(gpu_kernels.SMALL, "cpu")
    assert not checks["sparse decode"]["ok"] and checks["dense decode"]["ok"]
    found = gpu_verdict.verdicts({"kernels": {"checks": checks}})
    assert any(v.status == "FAIL" and v.figure == "sparse decode" for v in found)


def cell(name, n, ms, share, **more):
    return {"name": name, "n": n, "test": "tg", "ms_median": ms, "share_of_floor": share, **more}


def test_verdicts_follow_the_figures():
    decode = {
        "cells": [
            cell("full", 131072, 8.7, 0.86),
            cell("omnikv w1", 131072, 5.8, 0.79, vs_full=1.5),
        ],
        "splits": [],
        "header": {"measured": {"read": 4300.0}},
    }
    found = {v.goal: v.status for v in gpu_verdict.verdicts({"step": decode})}
    assert found["full >= 85% of its floor at 131072 and <= 8.8 ms"] == "PASS"
    assert found["omnikv w1 >= 80% of its floor at 131072 and <= 5.7 ms"] == "FAIL"
    assert found["omnikv w1 over full >= 1.48x at 131072 (or >= 85% of its floor)"] == "PASS"
    assert found["full >= 85% of its floor at 450000"] == "no figure"
    assert all(v.status == "no figure" for v in gpu_verdict.verdicts({}))


def test_limits_in_milliseconds_follow_the_cards_rate():
    """An H100 reads 3.0 TB/s where an H200 reads 4.3: 8.8 ms of the one are 12.6 of the other."""
    decode = {
        "cells": [cell("full", 131072, 12.0, 0.9)],
        "splits": [],
        "header": {"measured": {"read": 3000.0}},
    }
    found = {v.goal: v.status for v in gpu_verdict.verdicts({"step": decode})}
    assert found["full >= 85% of its floor at 131072 and <= 12.6 ms"] == "PASS"


def test_captured_tokens_may_tie_within_rounding_and_no_further():
    """A tie lies within twice the difference, and the difference within what rounding does."""
    spread = torch.linspace(-3, 3, 1000)
    right = spread.clone()
    right[10] = 2.99  # nearly the most likely token, 999
    near = right.clone()
    near[10] += 0.02
    swapped = right.flip(0)
    found = gpu_sections.same_tokens([right, near, swapped], [right] * 3)
    assert (found["equal_to_reference"], found["ties"], found["compared"]) == (1, 1, 3)
    facts = {"steps": 20, "grown_bytes": 0, "flat": True}
    for logits, status in (([right, near], "PASS"), ([right, swapped], "FAIL")):
        graph = {"full": facts | gpu_sections.same_tokens(logits, [right] * 2)}
        verdicts = gpu_verdict.verdicts({"step": {"tokens": graph}})
        line = next(v for v in verdicts if v.goal.startswith("captured step of full"))
        assert line.status == status


def test_the_graph_section_measures_after_every_capture(monkeypatch):
    """Decoding over the edge of a bucket captures a second graph, with memory of its own."""
    seen = []

    class Session:
        length = 8150

        def decode(self, token):
            seen.append(self.length)
            self.length += 1
            return torch.arange(4.0)

        def truncate(self, n):
            self.length = n

        def set_backend(self, backend):
            pass

    def held(device):
        seen.append("held")
        return 0

    monkeypatch.setattr(gpu_sections, "held", held)
    monkeypatch.setattr(gpu_sections, "same_ahead", lambda session, token: True)
    context = gpu_context.Context("cpu", True, 10.0)
    gpu_sections._graph_facts(context, Session(), 8150, 100)
    first = seen.index("held")
    measured = seen[first + 1 : seen.index("held", first + 1)]
    assert max(measured) == 8249 and set(measured) <= set(seen[:first])


def test_tokens_that_differ_when_issued_ahead_fail_the_captured_step(monkeypatch):
    """A copy that lands late leaves the token of the step before."""
    with tiny_llm(Full(), session_config(layers=1), max_context=256).session() as session:
        session.prefill([1, 2, 3])
        assert gpu_sections.same_ahead(session, 5) and session.ids == [1, 2, 3]
        monkeypatch.setattr(DeviceArgmax, "read", lambda self: 7)
        assert not gpu_sections.same_ahead(session, 5) and session.ids == [1, 2, 3]
    facts = dict(steps=3, grown_bytes=0, flat=True, equal_to_reference=10, ties=0, compared=10)
    found = gpu_verdict.verdicts({"step": {"tokens": {"full": {**facts, "same_ahead": False}}}})
    (verdict,) = [v for v in found if v.goal.startswith("captured step of full")]
    assert verdict.status == "FAIL" and "ahead the same False" in verdict.figure


def test_cuda_tests_that_are_stopped_are_run_again(monkeypatch):
    monkeypatch.setattr(gpu_jobs, "run", lambda *a, **named: ("stopped after 70 s", "...F"))
    found = gpu_jobs.tests(gpu_context.Context("cuda", False, 70.0))
    assert "stopped after 70 s" in found["error"] and not check_gpu._done(found)
    verdict = next(v for v in gpu_verdict.verdicts({"tests": found}) if v.goal == "CUDA tests")
    assert verdict.status == "no figure"


def test_a_part_of_the_probe_that_fails_leaves_the_others_standing(monkeypatch):
    def broken(ctx):
        raise RuntimeError("no kernel image is available for execution")

    noted = []
    monkeypatch.setattr(gpu_probe, "PARTS", (gpu_probe.products, broken, gpu_probe.nodes))
    found = gpu_probe.probe(gpu_context.Context("cpu", True, 30.0, noted.append))
    assert found["products"]["products"]["down"]["share"] > 0
    assert "no kernel image" in found["broken"]["failed"] and found["error"] == "failed: broken"
    assert found["nodes"]["skipped"] == "needs a GPU" and len(noted) == 3


def test_targets_are_gaps_to_the_bytes():
    c = cell(
        "full",
        1000,
        5.0,
        0.5,
        bytes={"weights": 2_000_000, "dense": 1_000_000, "sparse": 0, "scoring": 0},
    )
    split = {
        "name": "full",
        "n": 1000,
        "step_ms": 5.0,
        "stages_ms": {"linear": 3.0, "dense attention": 1.5, "other": 0.5},
    }
    found = gpu_verdict.next_targets(
        {"split": {"cells": [c], "splits": [split], "header": {"measured": {"read": 1.0}}}}
    )
    assert [text.split(" ms to gain")[0] for text in found] == ["1.000", "0.500", "0.500"]
    assert "linear takes 3.000 ms, its bytes allow 2.000 ms" in found[0]


def test_kernel_speed_rows_have_floors():
    rows = gpu_kernels.speed(gpu_kernels.SMALL, "cpu", Rates(1e9, 1e9))
    dense = next(r for r in rows if r["kernel"] == "dense decode" and r["n"] == 1000)
    assert dense["floor_us"] == pytest.approx(1000 * 2 * 2 * 32 * 4 / 1e9 * 1e6)
    assert {"torch_topk_us", "share"} <= set(next(r for r in rows if r["kernel"] == "top-k"))


def test_gather_goals_follow_the_figures():
    def row(shape, share, times, on="cuda"):
        return {
            "way": "gather kernel",
            "rows": 2048,
            "row_bytes": shape[0],
            "pitch": shape[1],
            "us": 1.0,
            "gb_per_s": 50.0,
            "of_contiguous": share,
            "vs_single": times,
            "on": on,
        }

    kernels = {
        "gather": [
            row((4096, 4096), 0.86, 19.0),
            row((4096, 49152), 0.84, 21.0),
            row((49152, 49152), 0.9, 30.0, on="cpu"),
        ]
    }
    found = {v.goal: v.status for v in gpu_verdict.verdicts({"kernels": kernels})}
    assert found["gather of 2048 rows of 4096 B >= 85% of the contiguous copy"] == "PASS"
    assert found["gather of 2048 rows of 4096 B >= 20x a copy per row"] == "FAIL"
    assert (
        found["gather of 2048 rows of 4096 B out of 49152 >= 85% of the contiguous copy"] == "FAIL"
    )
    assert found["gather of 2048 rows of 4096 B out of 49152 >= 20x a copy per row"] == "PASS"
    # a CPU's figures decide nothing
    assert found["gather of 2048 rows of 49152 B >= 85% of the contiguous copy"] == "no figure"


def test_the_head_to_head_with_the_published_form_follows_the_figures():
    """On the device and offloaded, each within one run."""
    rows = [cell("omnikv w1", 32768, 4.0, 0.9), cell("omnikv w1", 131072, 6.0, 0.9)]
    rows += [cell("published", 32768, 30.0, 0), cell("published", 131072, 5.0, 0)]
    rows += [cell("published, offloaded", 131072, 150.0, 0)]
    rows += [cell("omnikv-host w1 reuse 0", 131072, 7.5, 0.9)]
    results = {"rivals": {"cells": rows}}
    found = {v.goal: v for v in gpu_verdict.verdicts(results) if "published" in v.goal}
    inside, away = "the published form of a step", "the published, offloaded form of a step"
    host = "omnikv-host w1 reuse 0 not slower than"
    assert found[f"omnikv w1 not slower than {inside} at 32768"].figure == "7.50x"
    assert found[f"omnikv w1 not slower than {inside} at 131072"].status == "FAIL"
    assert found[f"{host} {away} at 131072"].status == "PASS"
    assert found[f"{host} {away} at 32768"].status == "no figure"


def test_offload_goals_follow_the_figures():
    def decode(link):
        cells = [
            cell("omnikv w1", 131072, 4.0, 0.9),
            cell("omnikv-host w1 reuse 0.7", 131072, 4.5, 0.9),
            cell("omnikv-host w1 reuse 0", 131072, 5.3, 0.9),
            cell("omnikv w1", 450000, 8.0, 0.9),
            cell("omnikv-host w1 reuse 0.7", 450000, 8.2, 0.9),
            cell("omnikv-host w1 reuse 0.9", 1048576, 14.0, 0.9),
        ]
        memory = [
            {
                "name": "omnikv-host w1 reuse 0",
                "n": 1048576,
                "planned": 1,
                "measured": 33 * 1024 * 1048576,
            }
        ]
        return {
            "cells": cells,
            "memory": memory,
            "splits": [],
            "header": {"measured": {"read": 4300.0, "h2d": link}},
        }

    found = {v.goal: v.status for v in gpu_verdict.verdicts({"step": decode(54.0)})}
    assert found["offload costs <= 1.10x at 131072 (reuse 0.7)"] == "FAIL"
    assert found["offload costs <= 1.05x at 450000 (reuse 0.7)"] == "PASS"
    assert (
        found[
            "offload costs <= 1.35x at 131072 (reuse 0, as without slots; link of at least 45 GB/s)"
        ]
        == "PASS"
    )
    assert found["a million tokens at >= 70 tokens/s (omnikv-host, reuse 0.9)"] == "PASS"
    assert found["a session holds at most 34 KiB of device memory per token at 1048576"] == "PASS"
    slow = {v.goal: v.status for v in gpu_verdict.verdicts({"step": decode(25.0)})}
    assert (
        slow[
            "offload costs <= 1.35x at 131072 (reuse 0, as without slots; link of at least 45 GB/s)"
        ]
        == "no figure"
    )


def test_a_twin_takes_its_own_form(monkeypatch):
    """An LLM with another `step` does not keep the form of the one whose weights it shares."""
    llm = tiny_llm(Full(), session_config(layers=1), max_context=256, backend="reference")
    monkeypatch.setattr("engine.forward.self_test.choose_for", lambda backend, device: "triton")
    assert not isinstance(llm.load().halves("reference"), FusedLayer)
    assert isinstance(LLM.sharing(llm, step="fused").load().halves("reference"), FusedLayer)


def test_products_with_weights_of_few_bits_are_checked_and_judged():
    """Every kind against products with the dequantised weight; a share of the floor and a ratio."""
    noted = []
    checks, speed = few_bits(True, "cpu", torch.float32, 1e10, noted.append)
    assert len(checks) == 2 and all(row["ok"] for row in checks.values())
    assert noted == speed and {row["rows"] for row in speed} == {1, 8, 32, 512}
    judged = gpu_verdict.verdicts({"kernels": {"few_bits": speed}})
    # a CPU's figures decide nothing
    assert all(v.status == "no figure" for v in judged if "weights: products" in v.goal)
    rows = [
        dict(kind=kind, rows=1, us=10.0, floor_us=7.7, library_us=30.0, share=0.77, on="cuda")
        for kind in ("int4", "int8")
    ]
    rows.append({**rows[0], "rows": 512, "us": 31.0})
    judged = gpu_verdict.verdicts({"kernels": {"few_bits": rows}})
    found = {v.goal: v.status for v in judged}
    assert found["int4 weights: products of one row at >= 75% of the byte floor"] == "PASS"
    assert found["int8 weights: products of one row at >= 80% of the byte floor"] == "FAIL"
    assert found["int4 weights: products of 512 rows at least as fast as bfloat16's"] == "FAIL"
    assert found["int8 weights: products of 512 rows at least as fast as bfloat16's"] == "no figure"


def test_a_first_answer_that_compiles_late_fails_its_verdict():
    goal = "no kernel of a first answer is compiled after its weights are there"

    def status(ahead, late):
        results = {"start": {"ahead": ahead, "at the first launch": late}}
        return [
            (v.goal, v.status) for v in gpu_verdict.verdicts(results) if "first answer" in v.goal
        ]

    early = dict(load=4.0, answer=5.0, before=25, later=0)
    late = dict(load=1.0, answer=20.0, before=0, later=25)
    sooner = "a first answer comes sooner where kernels are compiled ahead"
    assert status(early, late) == [(goal, "PASS"), (sooner, "PASS")]
    assert status({**early, "later": 1}, late)[0] == (goal, "FAIL")
    assert status({**early, "answer": 21.0}, late)[1] == (sooner, "FAIL")
    assert status({"fault": "its process ended"}, late) == [(goal, "no figure")]
    # a CPU compiles none
    assert {s for _, s in status({**early, "before": 0}, late)} == {"no figure"}


def test_mixtures_have_verdicts():
    tokens = {"equal_to_reference": 3, "ties": 1, "compared": 4, "captured": False}
    found = gpu_verdict.verdicts(
        {"mixtures": {"tokens": {"a": tokens, "b": {**tokens, "ties": 0}}}}
    )
    said = {v.goal: v.status for v in found if v.goal[:2] in ("a:", "b:")}
    assert list(said.values()) == ["PASS", "FAIL", "FAIL", "FAIL"]


def test_ranks_on_gpus_are_measured_where_there_are_two(monkeypatch):
    ran = []

    def run(line, seconds, **environment):
        ran.append(line)
        if "--json" in line:
            row = {"method": "full", "context": 65536, "seconds": {"one GPU": 0.008, "GPUs": 0.005}}
            Path(line[line.index("--json") + 1]).write_text(json.dumps({"rows": [row]}))
        return "", "1 passed"

    monkeypatch.setattr(gpu_jobs, "run", run)
    for cards in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        found = gpu_jobs.ranks(gpu_context.Context("cuda", False, 60.0))
        assert found == {"skipped": f"not measured: needs 2 GPUs, found {cards}"} and not ran
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = gpu_jobs.ranks(gpu_context.Context("cuda", False, 60.0))
    assert "tests/cuda/test_ranks.py" in ran[0] and ran[1][2:5] == [
        "tools.speed.ranks", "--gpus", "2",
    ]  # fmt: skip
    lines = [v.line() for v in gpu_verdict.verdicts({"ranks": found}) if "--gpus" in v.goal]
    assert any(line.startswith("PASS") and "1.60x" in line for line in lines)
    lines = [
        v.line() for v in gpu_verdict.verdicts({}) if "two GPUs" in v.goal or "one GPU" in v.goal
    ]
    assert len(lines) == 2 and all("not measured" in line or "no figure" in line for line in lines)
