"""Scores a model over the tasks, with full attention and OmniKV: `python -m tools.eval`.

cli.py      the command line and the run
prompts.py  questions as token ids, and whether an answer is right
answers.py  the file of answers, with which a stopped run goes on
report.py   tables, intervals and plots
"""
