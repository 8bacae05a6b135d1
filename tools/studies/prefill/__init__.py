"""How sparse prefill is measured: `python -m tools.studies.prefill.table`.

setup.py      the model of random weights and the methods that are timed
speed.py      time and operations of chunks, integrated over a prompt
time_left.py  the predicted time left against the truth
memory.py     peak memory, each length in a new process
report.py     the page
"""
