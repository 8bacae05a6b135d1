"""The model in the box."""

from __future__ import annotations

from pathlib import Path

import weights
from engine.methods.omnikv.method import OmniKV

POCKET = Path(weights.__file__).parent / "pocket"

# what a person who gives it another text must know
DEMONSTRATION = (
    "the model in the box is a demonstration of 6 million parameters that only knows texts like "
    "its own: expect nonsense about any other; --model NAME runs a real one (python -m engine.chat "
    "--list-models --fits says which fit here)"
)


def is_pocket(folder: Path | str | None) -> bool:
    """Whether the model in this folder is the one in the box."""
    return folder is not None and Path(folder).resolve() == POCKET.resolve()


def pocket_method() -> OmniKV:
    """What the shipped model runs: the share that Mem 30% is on the paper's models; at every
    length, so that there is always something to show of what an answer read.
    """
    return OmniKV(share=0.067, dense_below=0)
