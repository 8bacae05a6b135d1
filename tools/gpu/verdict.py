"""`make check-gpu`, its verdicts: a line per goal from the sections' facts, and what to attack
next.

Goals of speed for decode, offload and prefill on a GPU (docs/PERFORMANCE.md). A goal without a
figure says so; nothing is assumed.
"""

import json
from dataclasses import dataclass

from tools.bench import gather as bench_gather
from tools.common.page import table

# Llama-3-8B, {2,8,18}, wait 1, 2048 tokens
BYTE_RATIOS = {131072: 1.65, 262144: 2.07, 450000: 2.47}
# GB/s at which the goals in milliseconds were set; another card has the time that its own measured
# rate gives the same bytes
H200_READ = 4300.0


@dataclass(frozen=True)
class Verdict:
    """One goal: its text, "PASS", "FAIL" or "no figure", and the figure."""

    goal: str
    status: str
    figure: str

    def line(self):
        """As one line of text."""
        return f"{self.status:<9} {self.goal}: {self.figure}"


def cell(section, name, n, test="tg"):
    """The facts of a cell that has a time, or None."""
    for found in (section or {}).get("cells", ()):
        if "ms_median" in found and (name, n, test) == tuple(
            found[k] for k in ("name", "n", "test")
        ):
            return found
    return None


# sections with cells of decode steps, in the order in which a cell is looked for
DECODE = ("step", "depth", "split", "rivals")


def decode_facts(results):
    """Cells, splits and memory of every section that timed decode steps, and the first header."""
    found = {"cells": [], "splits": [], "memory": []}
    for facts in (results.get(name) or {} for name in DECODE):
        for kind in ("cells", "splits", "memory"):
            found[kind] += facts.get(kind, ())
        if "header" in facts:
            found.setdefault("header", facts["header"])
    return found


def verdicts(results):
    """All verdicts of a results dict (section name -> facts)."""
    decode = decode_facts(results)
    return [
        *_correct(results),
        *_forms(results),
        *_decode(decode),
        *_peers(results),
        *_kernels(results, decode),
        *_few_bits(results.get("kernels")),
        *_gather(results.get("kernels")),
        *_offload(decode),
        *_prefill(results),
        *_ranks(results.get("ranks")),
    ]


def _line(goal, ok, figure):
    return Verdict(
        goal,
        "no figure" if ok is None else "PASS" if ok else "FAIL",
        figure if ok is not None else "not measured",
    )


def _times(goal, ratio, least):
    """A line of how many times as fast; None, and 0, where it was not measured."""
    return _line(goal, None if not ratio else ratio >= least, f"{ratio or 0:.2f}x")


def _correct(results):
    found = []
    tests = results.get("tests")
    found.append(_line("CUDA tests", (tests or {}).get("ok"), (tests or {}).get("summary", "")))
    parts = ((results.get(name) or {}).get("checks") or {} for name in ("compile", "kernels"))
    checks = {name: row for part in parts for name, row in part.items()}
    bad = [name for name, row in checks.items() if not row["ok"]]
    figure = ", ".join(bad) or f"{len(checks)} kernels"
    found.append(_line("kernels equal their references", None if not checks else not bad, figure))
    for name in ("full", "omnikv", "omnikv-host"):
        facts = ((results.get("step") or {}).get("tokens") or {}).get(name)
        goal = f"captured step of {name}: reference tokens, no sync, memory flat"
        if not facts:
            found.append(_line(goal, None, ""))
            continue
        ok = (
            facts["equal_to_reference"] + facts["ties"] == facts["compared"]
            and facts.get("sync_free", True)
            and facts.get("same_ahead", True)
            and facts["flat"]
        )
        figure = (
            f"{facts['equal_to_reference']}/{facts['compared']} tokens and {facts['ties']} ties "
        )
        figure += (
            f"within rounding, sync-free {facts.get('sync_free', 'not asked')}, issued ahead the "
        )
        figure += f"same {facts.get('same_ahead', 'not asked')}, {facts['grown_bytes']} B grown in "
        found.append(_line(goal, ok, f"{figure}{facts['steps']} steps"))
    return found


def _forms(results):
    """Which forms of a step live on this card, and what those beside the table's rows take."""
    found = []
    for name, facts in ((results.get("compile") or {}).get("forms") or {}).items():
        fault = facts.get("fault")
        ok = None if "skipped" in facts else not fault
        found.append(_line(f"{name}: agrees with the reference", ok, fault or "yes"))
    for kind, facts in (results.get("sanitize") or {}).items():
        if isinstance(facts, dict) and kind in ("memcheck", "racecheck"):
            fault = facts["fault"]
            goal = f"compute-sanitizer {kind} finds nothing"
            found.append(_line(goal, not fault, fault or "yes"))
    forms, step = results.get("forms"), results.get("step")
    for kind in ("int4", "int8"):
        goal = f"full, {kind} weights >= 75% of its floor at 8192"
        found.append(_bound(goal, cell(forms, f"full, {kind} weights", 8192), 0.75, None))
    for name in ("full", "omnikv w1"):
        wide, packed = cell(step, name, 131072), cell(forms, f"{name}, int8 bank", 131072)
        ratio = wide and packed and wide["ms_median"] / packed["ms_median"]
        found.append(_times(f"{name} at 131072 not slower with an int8 bank", ratio, 1.0))
    one, eight = cell(step, "full", 8192), cell(forms, "full, batch of 8", 8192)
    ratio = one and eight and 8 * one["ms_median"] / eight["ms_median"]
    found.append(_times("a batch of 8 at 8192 writes at least 4 times as many tokens", ratio, 4))
    for place, facts in (
        ("", (forms or {}).get("exact")),
        (" over the host tier", (results.get("whole") or {}).get("exact")),
    ):
        share = facts and facts["same"] / facts["tokens"]
        goal = f"exact mode{place} writes full attention's tokens (ties within rounding apart)"
        figure = "" if not facts else f"{facts['same']}/{facts['tokens']}"
        found.append(_line(goal, None if share is None else share >= 0.9, figure))
    found += [*_mixtures(results.get("mixtures")), *_start(results.get("start"))]
    for tier, facts in ((results.get("whole") or {}).get("saved") or {}).items():
        goal = f"a restored session says the same ({tier})"
        found.append(_line(goal, facts["equal"], str(facts["equal"])))
    return found


def _mixtures(section):
    """Steps of mixtures of experts."""
    found = []
    for name, facts in ((section or {}).get("tokens") or {}).items():
        right = facts["equal_to_reference"] + facts["ties"] == facts["compared"]
        figure = f"{facts['equal_to_reference']}/{facts['compared']} tokens, {facts['ties']} ties"
        found.append(_line(f"{name}: a step says the reference's tokens", right, figure))
        goal = f"{name}: a step is a captured graph"
        found.append(_line(goal, facts["captured"], str(facts["captured"])))
    return found


def _start(section):
    """The first answer of a fresh machine."""
    ahead, late = ((section or {}).get(n) for n in ("ahead", "at the first launch"))
    goal = "no kernel of a first answer is compiled after its weights are there"
    if not ahead or not late or "answer" not in ahead or "answer" not in late:
        return [_line(goal, None, "")]
    figure = f"{ahead['before']} before, {ahead['later']} after"
    times = f"{ahead['answer']:.1f} s, at the first launch {late['answer']:.1f} s"
    whole = ahead["before"] + ahead["later"] > 0
    sooner = "a first answer comes sooner where kernels are compiled ahead"
    return [
        _line(goal, ahead["later"] == 0 if whole else None, figure),
        _line(sooner, ahead["answer"] < late["answer"] if whole else None, times),
    ]


def _decode(decode):
    found = []
    rate = ((decode or {}).get("header") or {}).get("measured", {}).get("read")
    for name, share, n, limit in (
        ("full", 0.85, 131072, 8.8),
        ("full", 0.85, 262144, None),
        ("full", 0.85, 450000, None),
        ("omnikv w1", 0.80, 131072, 5.7),
        ("omnikv w1", 0.85, 450000, 8.2),
    ):
        goal = f"{name} >= {share:.0%} of its floor at {n}"
        scaled = limit and round(limit * H200_READ / rate, 1) if rate else limit
        found.append(_bound(goal, cell(decode, name, n), share, scaled))
    for n, ratio in BYTE_RATIOS.items():
        c = cell(decode, "omnikv w1", n)
        ok = c and (c.get("vs_full", 0) >= 0.9 * ratio or c["share_of_floor"] >= 0.85)
        goal = f"omnikv w1 over full >= {0.9 * ratio:.2f}x at {n} (or >= 85% of its floor)"
        figure = c and f"{c.get('vs_full', float('nan')):.2f}x, {c['share_of_floor']:.0%}"
        found.append(_line(goal, None if not c else ok, figure))
    return found


def _bound(goal, c, share, limit):
    if c is None:
        return _line(goal, None, "")
    ok = c["share_of_floor"] >= share and (limit is None or c["ms_median"] <= limit)
    goal += f" and <= {limit} ms" if limit else ""
    return _line(goal, ok, f"{c['ms_median']:.2f} ms, {c['share_of_floor']:.0%}")


def _published(results, ours, theirs):
    """Head-to-head with the published OmniKV code's form of a step (tools/gpu/published.py)."""
    found = []
    for n in (32768, 131072):
        mine, other = (cell(results.get("rivals"), name, n) for name in (ours, theirs))
        ratio = mine and other and other["ms_median"] / mine["ms_median"]
        goal = f"{ours} not slower than the {theirs} form of a step at {n}"
        found.append(_times(goal, ratio, 1.0))
    return found


def _peers(results):
    found = []
    for n in (32768, 131072):
        c = cell(results.get("rivals"), "full", n)
        ratio = c and c.get("vs_transformers")
        found.append(_times(f"full not slower than transformers at {n}", ratio, 1.0))
    found += [
        *_published(results, "omnikv w1", "published"),
        *_published(results, "omnikv-host w1 reuse 0", "published, offloaded"),
    ]
    for n in (4096, 16384, 32768):
        c = cell(results.get("crossover"), "omnikv w1", n)
        ratio = c and c.get("vs_full")
        found.append(_times(f"omnikv with dense_below=auto >= 0.98x full at {n}", ratio, 0.98))
    return found


def _kernels(results, decode):
    found, rows = [], (results.get("kernels") or {}).get("speed", ())
    for n, limit in ((131072, 25), (1048576, 60)):
        row = next((r for r in rows if r["kernel"] == "top-k" and r["n"] == n), None)
        figure = row and f"{row['us']:.0f} us, torch.topk {row['torch_topk_us']:.0f} us"
        ok = None if not row else row["us"] <= limit
        found.append(_line(f"exact top-2048 <= {limit} us at {n}", ok, figure))
    for row in decode["splits"]:
        if row["name"] == "omnikv w1" and row["n"] == 131072:
            spent = row["stages_ms"]["scoring"] + row["stages_ms"]["top-k"]
            goal, figure = "scoring and top-k <= 5% of the step at 131072", f"{spent:.3f} of "
            figure += f"{row['step_ms']:.2f} ms"
            found.append(_line(goal, spent <= 0.05 * row["step_ms"], figure))
    return found


def _few_bits(kernels):
    """A layer's products with weights of few bits: one row beside the weights' bytes, 512 rows
    beside the library's products with floats.
    """
    rows = {
        (r["kind"], r["rows"]): r for r in (kernels or {}).get("few_bits", ()) if r["on"] == "cuda"
    }
    found = []
    for kind, share in (("int4", 0.75), ("int8", 0.80)):
        one, many = rows.get((kind, 1)), rows.get((kind, 512))
        goal = f"{kind} weights: products of one row at >= {share:.0%} of the byte floor"
        figure = "" if one is None else f"{one['share']:.0%}, {one['us']:.1f} us a layer"
        found.append(_line(goal, None if one is None else one["share"] >= share, figure))
        ratio = None if many is None else many["library_us"] / many["us"]
        goal = f"{kind} weights: products of 512 rows at least as fast as bfloat16's"
        found.append(_times(goal, ratio, 1))
    return found


def _gather(kernels):
    """The gather kernel beside a contiguous copy and a copy per row, on each shape that a GPU was
    asked for.
    """
    found = []
    rows = {
        (r["row_bytes"], r["pitch"]): r
        for r in (kernels or {}).get("gather", ())
        if (r["way"], r["on"]) == (bench_gather.KERNEL, "cuda")
    }
    for row, pitch in bench_gather.GPU_SHAPES:
        r, what = rows.get((row, pitch)), f"gather of {bench_gather.ROWS} rows of {row} B"
        what += f" out of {pitch}" if pitch != row else ""
        goals = f"{what} >= 85% of the contiguous copy", f"{what} >= 20x a copy per row"
        if r is None:
            found += [_line(goal, None, "") for goal in goals]
            continue
        figure = f"{r['of_contiguous']:.0%}, {r['gb_per_s']:.1f} GB/s"
        found.append(_line(goals[0], r["of_contiguous"] >= 0.85, figure))
        found.append(_line(goals[1], r["vs_single"] >= 20, f"{r['vs_single']:.1f}x"))
    return found


def _offload(decode):
    """The cost of host memory by planted reuse, a million tokens, device memory per token."""
    found, link = [], ((decode or {}).get("header") or {}).get("measured", {}).get("h2d", 0)
    for n, reuse, limit in ((131072, 0.7, 1.10), (450000, 0.7, 1.05), (131072, 0, 1.35)):
        inside = cell(decode, "omnikv w1", n)
        host = cell(decode, f"omnikv-host w1 reuse {reuse:g}", n)
        ratio = inside and host and host["ms_median"] / inside["ms_median"]
        goal = (
            f"offload costs <= {limit:.2f}x at {n} (reuse "
            f"{reuse:g}{'' if reuse else ', as without slots; link of at least 45 GB/s'})"
        )
        counts = ratio and (reuse or link >= 45)
        figure = f"{ratio or 0:.2f}x, link {link} GB/s"
        found.append(_line(goal, None if not counts else ratio <= limit, figure))
    deepest = [row for row in (decode or {}).get("memory", ()) if row["n"] == 1048576]
    sizes = (row["measured"] for row in deepest if row["name"].startswith("omnikv-host w1"))
    held = next(sizes, None)
    goal = "a session holds at most 34 KiB of device memory per token at 1048576"
    ok = None if held is None else held <= 34 * 1024 * 1048576
    found.append(_line(goal, ok, f"{(held or 0) / 1048576 / 1024:.2f} KiB"))
    deep = cell(decode, "omnikv-host w1 reuse 0.9", 1048576)
    goal = "a million tokens at >= 70 tokens/s (omnikv-host, reuse 0.9)"
    ok = None if not deep else deep["ms_median"] <= 1000 / 70
    return [*found, _line(goal, ok, deep and f"{deep['ms_median']:.2f} ms")]


def _prefill(results):
    dense = cell(results.get("prefill"), "full", 131072, "pp131072")
    pair = [cell(results.get("depth"), n, 262144, "pp262144") for n in ("full", "omnikv r=2")]
    ratio = pair[0]["ms_median"] / pair[1]["ms_median"] if all(pair) else None
    ok = None if not dense else dense["ms_median"] <= 12000
    return [
        _line(
            "prompt of 131072 tokens <= 12 s", ok, dense and f"{dense['ms_median'] / 1000:.1f} s"
        ),
        _times("OmniKV-prefill >= 2.3x dense at 262144", ratio, 2.3),
    ]


def _ranks(section):
    """Two GPUs beside one."""
    found = section or {}
    told = found.get("tests")
    lines = [_line("ranks on two GPUs: CUDA tests", told and told == "passed", told or "")]
    for row in found.get("rows", [{"method": "full", "seconds": {}}]):
        one, several = (row["seconds"].get(name) for name in ("one GPU", "GPUs"))
        goal = f"--gpus 2 at 64K, {row['method']}: >= 1.5x one GPU"
        lines.append(_times(goal, one / several if one and several else None, 1.5))
    return lines


def wrong(results):
    """The verdicts about correctness that failed."""
    return [verdict for verdict in _correct(results) if verdict.status == "FAIL"]


def next_targets(results, count=5):
    """Lines: the largest gaps between a stage of a decode step and the time of its bytes, in ms."""
    decode, found = decode_facts(results), []
    rate = (decode.get("header") or {}).get("measured", {}).get("read")
    for row in decode.get("splits", ()):
        c = cell(decode, row["name"], row["n"])
        if not c or not rate:
            continue
        floors = {
            "linear": c["bytes"]["weights"],
            "dense attention": c["bytes"]["dense"],
            "sparse attention": c["bytes"]["sparse"],
        }
        for stage, spent in row["stages_ms"].items():
            floor = floors.get(stage, 0) / rate / 1e6
            said = f"{row['name']} at {row['n']}: {stage} takes {spent:.3f} ms, its bytes allow "
            found.append((spent - floor, f"{said}{floor:.3f} ms"))
    most = sorted(found, reverse=True)[:count]
    return [f"{gap:.3f} ms to gain: {text}" for gap, text in most if gap > 0]


def markdown(results):
    """results.md: verdicts, targets and the tables so far."""
    lines = ["# check-gpu", ""]
    facts = results.get("facts") or {}
    if facts:
        lines += [
            f"{facts.get('hardware')} | commit {facts.get('commit')} | {facts.get('packages')}",
            f"rates GB/s: {facts.get('rates')}, matrix product "
            f"{facts.get('matmul_tflops', 0):.0f} TFLOP/s",
            "",
        ]
    lines += [
        "## Verdicts",
        "",
        *("- " + v.line() for v in verdicts(results)),
        "",
        "## Attack next",
        "",
    ]
    lines += ["- " + text for text in next_targets(results)] or ["- no figures yet"]
    lines += ["", "## Sections", ""]
    for name, found in results.items():
        state = found.get("error") or ("unfinished" if found.get("unfinished") else "done")
        lines.append(f"- {name}: {state}, {found.get('seconds', '?')} s")
    if results.get("probe"):
        parts = {k: v for k, v in results["probe"].items() if isinstance(v, dict)}
        lines += ["", "## probe", ""]
        lines += [f"- {part}: {json.dumps(_rounded(facts))}" for part, facts in parts.items()]
    for name in ("step", "prefill", "forms", "crossover", "depth", "rivals", "split", "mixtures"):
        rows = [_row(c) for c in (results.get(name) or {}).get("cells", ())]
        if rows:
            head = "method | test | ms | of floor | x full | x transformers"
            lines += ["", f"## {name}", "", *table(head, rows, "---:")]
    speed = (results.get("kernels") or {}).get("speed")
    if speed:
        times = (
            (r["kernel"], r["n"], f"{r['us']:.1f}", f"{r['floor_us']:.1f}", f"{r['share']:.0%}")
            for r in speed
        )
        head = "kernel | rows | us | floor us | of floor"
        lines += ["", "## kernels", "", *table(head, times, "---:")]
    gather = (results.get("kernels") or {}).get("gather")
    if gather:
        found = table(bench_gather.COLUMNS, bench_gather.table_rows(gather), "---:")
        lines += ["", "## gather", "", results["kernels"]["link"], "", *found]
    return "\n".join(lines) + "\n"


def _rounded(facts):
    """Facts with every float at four significant digits, for people."""
    if isinstance(facts, dict):
        return {key: _rounded(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [_rounded(value) for value in facts]
    return float(f"{facts:.4g}") if isinstance(facts, float) else facts


def _row(c):
    test = f"tg @ d{c['n']}" if c["test"] == "tg" else c["test"]
    if "ms_median" not in c:
        return [c["name"], test, c.get("why") or "no figure", "", "", ""]
    share = f"{c['share_of_floor']:.0%}" if "share_of_floor" in c else ""
    ratios = [f"{c[key]:.2f}" if key in c else "" for key in ("vs_full", "vs_transformers")]
    return [c["name"], test, f"{c['ms_median']:.2f}", share, *ratios]
