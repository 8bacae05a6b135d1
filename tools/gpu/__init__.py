"""What `python -m tools.check_gpu` runs.

context.py   the device of a section, its one model, the seconds it may take
sections.py  the first command: each section a function that returns facts
depth.py     the second command, and whole sessions of the third
jobs.py      what runs in processes of its own: forms, kernels, CUDA tests, NVIDIA's tools
kernels.py   every kernel against its reference, then against its bytes
published.py a decode step in the form of the published OmniKV code, as a contestant
verdict.py   a line per goal, the largest gaps, the page
"""
