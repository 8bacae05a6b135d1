"""Tasks with exact answers, seeded, of any length in any tokenizer: used to train the shipped model
and by tools/eval/cli.py.
"""

from tools.tasks import facts, lookup, many, mixed, reason
from tools.tasks.draft import Draft, Task
from tools.tasks.sample import Sample, make_sample

TASKS: dict[str, Task] = {
    task.name: task for module in (lookup, reason, many, facts, mixed) for task in module.TASKS
}
# one of each kind that the shipped model was trained for: what the tools run where no --tasks are
# given
MAIN = ("passkey", "kv", "two_stage", "chains", "facts", "needle_multi_key", "frequent")

__all__ = ["MAIN", "TASKS", "Draft", "Sample", "Task", "make_sample"]
