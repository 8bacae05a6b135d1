"""Finds a model's filter layers: `python -m tools.calibrate`.

The search and what it measures are in engine/calibration.

by_loss.py        texts, search, held-out figures, table and knee
state.py          what a search has measured, on disk
similarity.py     measures how much of each layer's attention falls on another layer's choice
choose_layers.py  turns that into filter layers, by dynamic programming
texts.py          the texts that are read, and the flags that name them (tools.search.pod_groups
too) report.py         the table and the plots of --by reads and --by mass cli.py            the
command line and omnikv.json
"""
