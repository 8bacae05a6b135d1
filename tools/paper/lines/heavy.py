"""Figure 1c of the OmniKV paper: mass outside the prompt's 25% heavy hitters, step by step."""

from __future__ import annotations

from engine import LLM
from tools.common.arguments import require_plain
from tools.common.records import Record
from tools.paper.meters.answers import asked, follow
from tools.paper.meters.heavy import HeavyMeter, Summed, SummedRuntime

TASKS = ("chains", "facts", "kv", "two_stage")
STEPS = 16
NAMES = ("outside the heavy hitters", "outside a quarter by chance", "outside the step's own best")


def measure(llm: LLM, number: int, length: int) -> list[Record]:
    """Records of one text: the mean over layers and heads of every step, their mean and the largest
    of the steps.
    """
    require_plain(llm)
    prompt = asked(llm, TASKS[number % len(TASKS)], length, number)
    with llm.session(Summed(), max_context=len(prompt.ids) + STEPS) as session:
        runtime = session.runtime
        assert isinstance(runtime, SummedRuntime)
        meter = HeavyMeter(runtime, number)
        follow(session, prompt.ids, STEPS, meter)
    out: list[Record] = []
    for kind, name in enumerate(NAMES):
        steps = [sum(layer[kind] for layer in found) / len(found) for found in meter.outside]
        columns = {"mean of the steps": sum(steps) / len(steps), "largest step": max(steps)}
        columns |= {f"step {n}": value for n, value in enumerate(steps, 1)}
        out += [{"method": name, "column": c, "value": v} for c, v in columns.items()]
    return out
