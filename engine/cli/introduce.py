"""The first lines of a program: the model, where it runs, how it is held."""

from __future__ import annotations

from engine.base.figures import brief, human
from engine.cli.figures import forms_of, model_name, start_note
from engine.load.planner import Planner
from engine.terminal.display import Display


def introduce(planner: Planner, display: Display) -> None:
    """Print model, dtype, device, method and memory before the weights are read."""
    plan, found = planner.plan(), planner.resolved
    assert found is not None  # the command line always names a model
    revision = f" at {found.revision[:12]}" if found.revision else ""
    display.note(f"model {model_name(planner)}, from {found.folder}{revision}")
    context = f"context {plan.max_context:,} tokens"
    if plan.forever:
        context = f"a conversation without end, of which {plan.budget:,} tokens are held"
    display.note(
        f"{plan.dtype} on {plan.device}, {forms_of(planner)}, {brief(planner.method)}, "
        f"{context}; needs {human(plan.total)} at the peak, "
        f"of {plan.free_name}"
    )
    for line in plan.lines:
        display.note(line)
    if note := start_note(planner):
        display.note(note)
    if plan.streaming:
        display.note(plan.streaming)
    if plan.covered:
        display.note(plan.covered)
