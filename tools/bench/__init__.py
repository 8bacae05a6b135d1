"""Time per token of every method and of other engines, side by side: `python -m tools.bench`.

cli.py      the command line
options.py  what a run does, and what it measured
suite.py    one run: the model, the contexts, decode and prefill
run.py      contestants, the check against the reference, the rounds they run
methods.py  from names to settings; shapes.py: models of random weights
floor.py    the bytes that a step must read, the machine's rates, the floor of a step
split.py    where a step's time goes; gather.py: copies of chosen rows from host memory
memory.py   bytes held, and their peak
peers.py    other engines: hf.py (transformers), llamacpp.py (llama.cpp)
report.py   tables, CSV, JSON; plot.py: plots; header.py: where it was measured
"""
