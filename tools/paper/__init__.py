"""Run the tables and figures of papers by name, the paper's figures beside ours; and pictures of
attention (pictures/, a program of its own).

papers/      declarations: what a table shows, the paper's settings and figures, what measures it
programs.py  the programs of tools as a table's parts, each resumable by itself
lines/       what no other program measures: heavy hitters, passages, depths, needles over the host
meters/      what a step's attention and its choices leave, and who writes the answers
values.py    figures of a run; report.py sets them beside the paper's
"""
