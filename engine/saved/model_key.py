"""The key that saved rows must match: weights, rope, dtype and row format. Rows saved under another
key cannot be reused.
"""

from __future__ import annotations

import dataclasses
import hashlib

from engine.load.loaded import Loaded

# by kind of bank; a version changes with the layout of its rows or pieces
BANK_FORMATS = {"model": "kv-1", "int8": "kv-2, int8", "int4": "kv-3, int4", "fp8": "kv-2, fp8"}


def model_key(loaded: Loaded) -> dict[str, str]:
    """Return {property: value} for all that the rows of a bank depend on beside its tokens and
    method.
    """
    config = loaded.config
    sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    # end tokens change no row
    kept = dataclasses.replace(config, bos_token_id=None, eos_token_ids=())
    share = config.context
    own = {} if share is None else {"tokens": f"rank {share.rank} of {share.ranks} by context"}
    return {
        **own,
        "bank format": BANK_FORMATS[config.bank],
        "sizes": f"{'x'.join(map(str, sizes))}, vocabulary {config.vocab_size}",
        "rope": repr(config.rope),
        "config": hashlib.sha256(repr(kept).encode()).hexdigest(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weights": loaded.weights_digest,
        "held": loaded.held,
    }
