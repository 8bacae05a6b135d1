"""The copy of a model's weights in int8 by which exact mode may draft: its form, and its bytes."""

from __future__ import annotations

from engine.model.config.config import ModelConfig
from engine.model.low_bits import GROUP, MATRICES, Held, kinds_of

COPY = Held("int8", GROUP)


def copied(columns: int) -> bool:
    """Whether a matrix of so many columns has a copy; others are read as they are."""
    return columns % GROUP == 0


def copy_bytes(config: ModelConfig) -> int:
    """Bytes of the copy of all matrices, without biases, which are the model's."""
    counts = kinds_of(config)
    if config.tied_embeddings:
        (embed,) = (shape for name, shape in counts if name == "embed")
        counts = {**counts, ("lm_head", embed): 1}
    return sum(
        count * COPY.bytes((shape[0], shape[1]), "native")
        for (name, shape), count in counts.items()
        if name.split(".")[-1] in MATRICES and len(shape) == 2 and copied(shape[1])
    )
