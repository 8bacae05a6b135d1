"""Finds a model's filter layers: `python -m tools.calibrate`.

The search by loss is in engine/calibration. Two more programs find settings of other methods.

by_loss.py        texts, search, held-out figures, table and knee
state.py          measurements of a search, on disk
similarity.py     measures how much of each layer's attention falls on another layer's choice
choose_layers.py  turns that into filter layers, by dynamic programming
texts.py          the texts that are read, and the flags that name them
report.py         the table and the plots of --by reads and --by mass
cli.py            the command line and omnikv.json
minference.py     finds MInference's pattern of every head
pod_groups.py     finds PoD's blocks of layers
"""
