"""Synthetic benchmarks that are made here at any length, beside RULER.

graphwalks.py     nodes of a graph so many steps away, or with an edge to one
infinitebench.py  a pass key, a string of digits, a value of a key
"""
