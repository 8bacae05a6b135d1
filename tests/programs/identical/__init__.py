"""Exact mode's answers beside full attention's, token by token: a long run that may stop and go on.

    python -m tests.programs.identical --model FOLDER --out FILE.jsonl [--cpu-minutes 45]
    python -m tests.programs.identical --out FILE.jsonl --summary

cells.py  what is compared: models, prompts, tiers, budgets and draft lengths
judge.py  one answer, every token of it, and what a difference means
"""
