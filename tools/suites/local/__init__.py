"""Benchmarks whose data somebody has: local files in the official formats, with the official
prompts, cuts and metrics. Nothing is downloaded.

rows.py           a file's rows, each field there and of its kind
longbench.py      LongBench's 21 tasks
longbench_e.py    LongBench-E, 13 of them by class of length
longbench2.py     LongBench v2's multiple choice
leval.py          L-Eval's documents with several questions each
infinitebench.py  InfiniteBench's nine tasks that are not made (made/infinitebench.py)
"""
