"""Benchmarks that others know: lm-evaluation-harness in one process with the engine.

likelihood.py  how likely continuations of a context are, scored by steps or as a prompt
harness.py     lm-evaluation-harness' interface, a program of its own
"""
