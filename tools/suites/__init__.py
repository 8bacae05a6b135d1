"""Score methods on RULER's thirteen tasks, made at any length in any model's tokenizer; and
lm-evaluation-harness in one process with the engine (harness.py, a program of its own).

ruler/         the tasks and their metrics
run.py         one prompt as tools.compare reads documents, and a whole run that can be stopped
report.py      scores with intervals, and differences from full attention
likelihood.py  how likely continuations of a context are, scored by steps or as a prompt
"""
