"""What `python -m tools.check_gpu` runs.

sections.py  the sections, each a function that returns facts
kernels.py   every kernel against its reference, then against its bytes
published.py a decode step in the form of the published OmniKV code, as a contestant
verdict.py   a line per goal, the largest gaps, the page
"""
