"""The page of a comparison: the three findings and their controls, accuracy at equal bytes, then in
both turns by task, agreement, costs and bytes, depths; as Markdown and JSON.
"""

import json

from engine.base.figures import human
from tools.common.page import table
from tools.compare.banks import over_banks
from tools.compare.claims import findings
from tools.compare.distance import distances, nearer_to_the_oracle, shown
from tools.compare.headline import controls, equal_bytes, points_of
from tools.compare.plots import depth_plot, lengths_plot
from tools.compare.plots_bytes import plot_bytes
from tools.compare.resident import at_resident, beside_eviction
from tools.compare.stats import DEPTH_BINS, cells, pooled, reads

NOTES = """## How it was measured

- Greedy answers. In brackets the 95% Wilson interval; several questions rest on one document, so
  true intervals are somewhat wider.
- First questions follow the document; second questions follow another question about it and the
  method's answer to that. Every question is asked in both turns, so the turns differ by nothing
  else. A method that evicts has done so during the first question.
- Agreement is taken on the free-running first answers, at every position where method and full
  attention have the same history: up to and including the first token at which they part.
  KL(full || method) in nats.
- 10% is a tenth of the prompt's tokens: the budget of a method in the layers where it is sparse.
  OmniKV's tail (newest tokens that every layer sees) is outside its budget and inside the bytes.
  Mem 75% is three quarters of full attention's resident bytes.
- "a sparse layer reads": rows per decode step, mean over steps, layers that read less than
  everything and heads: those that the budget chose or kept, the tail or what an answer has added,
  and their sum as a share of the tokens that there were.
- Controls read what OmniKV reads and choose without it: tokens drawn by chance anew in every step,
  the newest before the tail, one. A claim that holds is tested only where every control fails it:
  where its 95% interval excludes the claim. "+dense 0-2": the method leaves these layers to full
  attention, in prompts too; its ms per token count both.
- "above its oracle": KL of a method that chooses less KL of its oracle in nats, with its 95%
  interval over documents, on the same first questions. The oracle reads as many tokens, of the same
  layers and beside the same tail, by lists of the same granularity (one for a layer, a K/V head or
  a query head), and takes those to which the layer's own attention gives most. KL of the oracle is
  what so many tokens lose whoever chooses; the distance is what the choice loses. An oracle is
  greedy, layer by layer, so that a distance may be below 0.
- "resident": keys and values that a session allocated on the device for a prompt of this length,
  and as a share of full attention's. A method is measured in the form in which it saves memory
  (offloaded layers in host memory, one slot per chosen token); metadata: scores, indices,
  positions, maps; buffers: staging of rows on their way; peak: the most on the device at once. An
  evicting method's figure is its store. At a budget of resident bytes it forgets and holds nothing
  else. At a share of the tokens this engine keeps the whole bank beside it, unread, so that a
  session can go back. The bank stands after the + and is in the peak, so such a method holds more
  here than full attention does, and its share says what it would hold by itself.
  Answers of methods marked "shared" come from a bank on the device
  that full attention had read (placement never changes an answer), so their ms per token hold for
  that bank.
- ms per token and bytes read: decode steps of both turns; bytes read are keys and values, over the
  link those from host memory. What a method reads in order to choose is not in them: every key in
  every layer of omnikv_per_layer, Quest's page bounds."""


def rows_of(records, config):
    """Cells of all records, those of an alias (the same method at another name of its budget)
    copied from what they are.
    """
    rows = cells(records)
    for label, lengths in config["variants"].items():
        for length, row in lengths.items():
            if row.get("alias"):
                rows += [
                    {**cell, "variant": label, "kind": row["kind"], "budget": row["budget"]}
                    for cell in rows
                    if cell["variant"] == row["alias"] and cell["length"] == int(length)
                ]
    return rows


def markdown(records, rows, found, at_bytes, config):
    """The page. rows: cells; found: Findings; at_bytes: {length: points_of}; config: what ran
    (tools/compare/cli.py).
    """
    lines = [
        "# Comparison",
        "",
        *_about(config),
        "",
        "## The paper's three findings and two more, as they came out",
        "",
    ]
    for finding in found:
        lines += finding.lines()
    for length, points in sorted(at_bytes.items()):
        held = at_resident(points)
        title = f"## {length:,} tokens: accuracy at equal resident bytes"
        lines += ["", title, "", *held] if held else []
        title = f"## {length:,} tokens: accuracy by bytes read"
        lines += ["", title, "", *equal_bytes(points)]
        beside = controls(records, length)
        lines += ["", f"OmniKV and its controls, {length:,} tokens", "", *beside] if beside else []
    labels = [label for label in config["variants"] if any(row["variant"] == label for row in rows)]
    for length in sorted({row["length"] for row in rows}):
        lines += over_banks(records, rows, config, length)
        here = [row for row in rows if row["length"] == length]
        lines += [
            "",
            f"## {length:,} tokens: by task",
            "",
            "First questions",
            "",
            *_accuracy(here, labels, 1),
        ]
        if any(row["turn"] == 2 for row in here):
            lines += [
                "",
                "Second questions about the same document",
                "",
                *_accuracy(here, labels, 2),
            ]
        plain = [row for row in here if not row["bank"]]
        lines += [
            "",
            "Costs",
            "",
            *_costs(plain, labels, config, length, distances(records, length)),
        ]
        why = _out_of_reach(config, str(length))
        lines += ["", "Budgets out of reach at this length", "", *why] if why else []
    return "\n".join([*lines, "", *_depths(rows), "", NOTES]) + "\n"


def _about(config):
    lines = [f"- model: {config['model']}, {config['dtype']} on {config['device']}"]
    for run in config["runs"]:
        packages = ", ".join(
            f"{name} {version}" for name, version in run["packages"].items() if version
        )
        at = f"{run['processes']} process(es)" + (
            f" of {run['threads']} thread(s)" if run["threads"] else ""
        )
        busy = "" if run["load"] is None else f", load average {run['load']} when it began"
        if "seconds" in run:
            done = (
                f"{run['documents'] - run['documents_left']} of {run['documents']} documents in "
                f"{run['seconds'] / 3600:.2f} hours"
            )
        else:
            done = f"killed, of {run['documents']} documents those it had done"
        lines.append(
            f"- {run['hardware']}; {at}{busy}; commit {run['commit']}; {packages}; {done} (all "
            "of them estimated at "
            f"{run['estimated_seconds'] / 3600:.2f})"
        )
    return [
        *lines,
        f"- answers: up to {config['answers']} first questions per method, task and length; "
        f"judged {config['settings']['judge']}",
        "- full settings of every method: config.json; every answer: answers.jsonl",
    ]


def _accuracy(rows, labels, turn):
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by = {(row["variant"], row["task"]): row for row in rows if row["turn"] == turn}
    lines = []
    for label in labels:
        found = [by.get((label, task)) for task in tasks]
        if not any(found):
            continue
        shown = [
            f"{c['accuracy']:.2f} [{c['low']:.2f}, {c['high']:.2f}]" if c else "" for c in found
        ]
        mean = f"**{pooled([c for c in found if c])['accuracy']:.3f}**" if all(found) else ""
        asked = [c["asked"] for c in found if c]
        count = f"{min(asked)}" if min(asked) == max(asked) else f"{min(asked)}-{max(asked)}"
        budget = reads(pooled([c for c in found if c]))
        lines.append((label, budget, count, *shown, mean))
    return table(["method", "a sparse layer reads", "answers", *tasks, "mean"], lines)


def _costs(rows, labels, config, length, far):
    lines = []
    for label in labels:
        facts = config["variants"][label].get(str(length))
        found = [row for row in rows if row["variant"] == label]
        if not found or facts is None:
            continue
        first, every, held = (
            pooled([row for row in found if row["turn"] == 1]),
            pooled(found),
            facts["held"],
        )
        banked = facts["evicts"] and "forget=True" not in facts.get("method", "")
        above, agree = shown(far.get(label)), ("", "", "", "")
        if first["compared"]:
            agree = f"{first['top1']:.3f}", f"{first['kl']:.4f}", above, f"{first['compared']}"
        prompts = "shared" if facts["reads"] == "shared" else "itself"
        line = (
            *agree,
            _number(every["ms"], 2),
            _number(first["prompt_seconds"], 2),
            _size(every["read"]),
            _size(every["link"] or None),
            _size(held["device"]) + (f" + bank {_size(held['full'])}" if banked else ""),
            f"{100 * held['resident']:.1f}",
            *(_size(held[part]) for part in ("metadata", "buffers", "host", "peak")),
        )
        lines.append((label, reads(every), prompts, *line))
    head = (
        "method | a sparse layer reads | reads prompts | top-1 | KL | above its oracle | tokens | "
    )
    head += "ms per token | prompt s | read per step | over the link | resident KV | % of full | "
    return table(head + "metadata | buffers | host | peak", lines)


def _out_of_reach(config, length):
    """Lines: what could not be reached and why, those with the same reason together."""
    reasons = {}
    for label, by in config["variants"].items():
        if by.get(length, {}).get("why"):
            reasons.setdefault(by[length]["why"], []).append(label)
    return [f"- {', '.join(labels)}: {why}" for why, labels in reasons.items()]


def _number(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _size(count: float | None) -> str:
    return "" if count is None else human(count)


def _depths(rows):
    bins = [f"{i / DEPTH_BINS:.1f}-{(i + 1) / DEPTH_BINS:.1f}" for i in range(DEPTH_BINS)]
    groups = {}
    for row in rows:
        if row["turn"] == 1:
            for total, (right, asked) in zip(
                groups.setdefault(
                    (row["variant"], row["length"]), [[0, 0] for _ in range(DEPTH_BINS)]
                ),
                row["depths"],
            ):
                total[0] += right
                total[1] += asked
    lines = [
        (label, f"{length:,}", *(f"{r / n:.2f} ({n})" if n else "" for r, n in found))
        for (label, length), found in groups.items()
    ]
    title = "## First questions by depth of the evidence, all tasks"
    return [title, "", *table(["method", "tokens", *bins], lines)]


def write(records, config, folder):
    """report.md, report.json and, where matplotlib is installed, plots; returns the page."""
    evicting = {
        row["name"]
        for by in config["variants"].values()
        for row in by.values()
        if row["evicts"] and not row["control"]
    }
    rows = rows_of(records, config)
    # what a bank costs is no claim of the paper's, and not in the plots of budgets
    on_floats = [record for record in records if not record.get("bank")]
    plain = [row for row in rows if not row["bank"]]
    found = [*findings(on_floats, evicting), beside_eviction(on_floats, evicting)]
    found.append(nearer_to_the_oracle(on_floats))
    at_bytes = {
        length: points_of(on_floats, plain, config, length)
        for length in sorted({row["length"] for row in rows})
    }
    page = markdown(records, rows, found, at_bytes, config)
    report = {
        "config": config,
        "findings": [finding.to_dict() for finding in found],
        "equal_bytes": {
            length: [
                point | {turn: point[turn] and vars(point[turn]) for turn in ("first", "second")}
                for point in points
            ]
            for length, points in at_bytes.items()
        },
        "cells": rows,
    }
    for name, text in (("report.md", page), ("report.json", json.dumps(report, indent=1) + "\n")):
        part = folder / (name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    plot_bytes(at_bytes, folder)
    depth_plot(plain, folder)
    lengths_plot(plain, folder)
    return page
