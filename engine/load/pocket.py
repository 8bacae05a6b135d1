"""The model in the box."""

from __future__ import annotations

from pathlib import Path

import weights
from engine.methods.omnikv.method import OmniKV

POCKET = Path(weights.__file__).parent / "pocket"


def pocket_method() -> OmniKV:
    """What the shipped model runs: the share that Mem 30% is on the paper's models; at every
    length, so that there is always something to show of what an answer read.
    """
    return OmniKV(share=0.067, dense_below=0)
