"""How the threads of torch's OpenMP wait for the others of their team: asleep.

OpenMP reads this once, when torch is loaded, so `engine` and `tools` import this file before torch.
"""

import os

# By default a thread spins for milliseconds. Where other processes use the cores it takes the time
# of the very thread that it waits for: a decode step took two threads 3 to 4 times as long as one,
# and 7 times the processor time; two that sleep took 0.7 to 1.3 times one's (docs/PERFORMANCE.md).
_SAID = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
if not _SAID & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
