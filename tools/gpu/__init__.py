"""What `python -m tools.check_gpu` runs.

sections.py  the sections, each a function that returns facts
kernels.py   every kernel against its reference, then against its bytes
verdict.py   a line per goal, the largest gaps, the page
"""
