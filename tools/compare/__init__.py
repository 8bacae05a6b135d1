"""Accuracy, bytes and time of methods on one model: `python -m tools.compare`.

cli.py         the command line
methods.py     the table of methods, budgets, and the columns that a command line asks for
build.py       how a method is built at a share of the tokens or of the resident bytes
comparison.py  one run: the answers there are, the documents still to do, config.json
work.py        the model and its columns, how long documents take, worker processes
run.py         one document under every method
turns.py       the prompts of a conversation about a document
bytes.py       what a session of a method holds
kept.py        any method with some layers left dense
stats.py       cells, intervals, paired differences
claims.py      the paper's three findings, each beside its controls
distance.py    how far a choice is from the oracle of its granularity; mass.py the same of attention
headline.py    accuracy by bytes read, and OmniKV beside its controls
resident.py    accuracy at equal resident bytes: the table and its claim
alone.py       peak memory and CPU time of a column in a process of its own
report.py      the page; plots_bytes.py and plots.py (depth by length) its plots
"""
