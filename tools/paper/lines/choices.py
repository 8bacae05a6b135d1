"""Figures 1a, 6a, 6b and 8 of the OmniKV paper, from the choices of every layer in every step:
the mass that a layer's choice keeps above it, and its share in the passage with the answer.
"""

from __future__ import annotations

import torch

from engine import LLM
from tools.common.arguments import require_plain
from tools.common.records import Record
from tools.paper.meters.answers import Asked, asked, follow
from tools.paper.meters.sets import SetMeter

TASKS = ("kv", "facts", "chains", "two_stage")
PASSAGES = ("needle", "kv", "facts")
SHARE = 0.0667  # of the prompt: Mem 30%
STEPS = 8
SPANS = (8, 16)  # layers above over which the paper takes the mean
DEPTH = 32  # layers of the paper's model


def watched(llm: LLM, prompt: Asked, steps: int = STEPS, k: int = 0) -> SetMeter:
    """The meter of a greedy answer. k: tokens of a choice (0: SHARE of the prompt)."""
    require_plain(llm)
    with llm.session(max_context=len(prompt.ids) + steps) as session:
        k = k or max(1, int(SHARE * len(prompt.ids)))
        meter = SetMeter(session.dense_runtime, len(prompt.ids) - 1, k)
        follow(session, prompt.ids, steps, meter)
    return meter


def layer(number: int, layers: int) -> str:
    """A layer as tables name it."""
    return f"layer {number} of {layers}"


def similar(llm: LLM, number: int, length: int) -> list[Record]:
    """Figure 1a: the mean mass of the 8 and 16 layers above on each layer's choice; beside it the
    newest tokens and as many by chance.
    """
    meter = watched(llm, asked(llm, TASKS[number % len(TASKS)], length, number))
    mass, steps = meter.mean_mass(), len(meter.sets)
    layers, out = len(mass), list[Record]()
    for span in SPANS[: 1 + (layers > SPANS[0])]:
        column, means = f"mean of the next {span} layers", list[float]()
        for i in range(layers - 1):
            above = mass[i, i + 1 : i + 1 + span]
            means.append(float(above.mean()))
            out.append({"method": layer(i, layers), "column": column, "value": means[-1]})
        own = float(mass.diagonal()[1:].mean())
        beside = {"own choice": own, "newest tokens": float(meter.newest[1:].mean()) / steps}
        beside |= {"first and newest": float(meter.edges[1:].mean()) / steps}
        beside |= {"by chance": meter.k / meter.prompt}
        out += [{"method": m, "column": column, "value": v} for m, v in beside.items()]
    return out


def by_task(llm: LLM, number: int, length: int) -> list[Record]:
    """Figure 6a: `similar` over the next 8 layers, a column for each kind of text."""
    task, first = TASKS[number % len(TASKS)], f"mean of the next {SPANS[0]} layers"
    found = [r for r in similar(llm, number, length) if r["column"] == first]
    return [r | {"column": task} for r in found]


def depths(llm: LLM, number: int, length: int) -> list[Record]:
    """Figure 8: the mass of the layer at 20 of 32 on the choice of the one at 8 of 32."""
    meter = watched(llm, asked(llm, TASKS[number % len(TASKS)], length, number))
    mass, layers = meter.mean_mass(), len(meter.mass)
    low, high = (at * layers // DEPTH for at in (8, 20))
    rows = {
        "choice at 8/32 of the depth": float(mass[low, high]),
        "own choice": float(mass[high, high]),
        "newest tokens": float(meter.newest[high] / len(meter.sets)),
        "first and newest": float(meter.edges[high] / len(meter.sets)),
        "by chance": meter.k / meter.prompt,
    }
    column = "mass at 20/32 of the depth"
    return [{"method": m, "column": column, "value": v} for m, v in rows.items()]


def hits(llm: LLM, number: int, length: int) -> list[Record]:
    """Figure 6b: share of each layer's choice that lies in the evidence, and of the evidence that
    it has; beside it what chance and the newest tokens have.
    """
    prompt = asked(llm, PASSAGES[number % len(PASSAGES)], length, number)
    meter = watched(llm, prompt)
    inside = torch.zeros(meter.prompt, dtype=torch.float64)
    for start, stop in prompt.evidence:
        inside[start:stop] = 1.0
    size, layers = float(inside.sum()), len(meter.mass)
    rows = {
        layer(i, layers): sum(float(inside[s[i].cpu()].sum()) for s in meter.sets) / len(meter.sets)
        for i in range(layers)
    }
    rows |= {"newest tokens": float(inside[-meter.k :].sum())}
    rows |= {"by chance": size * meter.k / meter.prompt}
    out: list[Record] = []
    for column, of in (("of the choice", meter.k), ("of the passage", size)):
        out += [{"method": m, "column": column, "value": v / of} for m, v in rows.items()]
    return out
