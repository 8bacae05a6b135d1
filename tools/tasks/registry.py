"""All tasks by name."""

from __future__ import annotations

from tools.tasks import facts, lookup, many, mixed, reason
from tools.tasks.draft import Task

TASKS: dict[str, Task] = {
    task.name: task for module in (lookup, reason, many, facts, mixed) for task in module.TASKS
}
# one of each kind that the shipped model was trained for: the tools run these where no --tasks are
# given
MAIN = ("passkey", "kv", "two_stage", "chains", "facts", "needle_multi_key", "frequent")
