"""Tasks with exact answers, seeded, of any length in any tokenizer: used to train the shipped model and by
tools/eval.py."""

from tools.tasks import facts, lookup, many, mixed, reason
from tools.tasks.draft import Draft, Task
from tools.tasks.sample import Sample, make_sample

TASKS: dict[str, Task] = {task.name: task for module in (lookup, reason, many, facts, mixed) for task in module.TASKS}

__all__ = ["TASKS", "Draft", "Sample", "Task", "make_sample"]
