"""Tasks with exact answers, seeded, of any length in any tokenizer: they train the shipped model
and score every model (tools.compare, tools.suites).

registry.py  all tasks by name
sample.py    one document of an exact length
draft.py     what a task's generator makes
lookup.py, reason.py, many.py, facts.py, mixed.py  the generators
prompts.py   questions as token ids, and whether an answer is right
words.py     word pools; talk.py  questions outside the tasks, and their answers
"""

from tools.tasks.draft import Draft, Task
from tools.tasks.registry import MAIN, TASKS
from tools.tasks.sample import Sample, make_sample

__all__ = ["MAIN", "TASKS", "Draft", "Sample", "Task", "make_sample"]
