"""Score methods on benchmarks that others know, made here or read from local files; and
lm-evaluation-harness in one process with the engine (harness.py, a program of its own).

registry.py    the tasks that a command line names
ruler/, made/  suites made at any length: RULER; GraphWalks and InfiniteBench's synthetic tasks
local/         suites whose files somebody has: LongBench, LongBench v2, L-Eval, InfiniteBench
prompts/       documents with their questions in a model's tokens, fitted to a length or cut
metrics/       how an answer is scored
run.py         documents as tools.compare reads them, and a whole run that can be stopped
pace.py        how long what is left takes
report.py      scores with intervals, and differences from full attention
likelihood.py  how likely continuations of a context are, scored by steps or as a prompt
"""
