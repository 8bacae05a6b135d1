"""Kernels that a plan will launch are compiled while its weights are read, by several processes.

recording.py  notes what is launched, and how Triton specialises it
launches.py   runs a plan's first steps on tensors without memory: what it will launch
children.py   the processes: how many, their start and their end
__main__.py   one of them: compiles a part of the launches into Triton's cache
"""
