"""Where the ranks' results are joined in a model: behind the embedding, behind attention's output
projection, behind the MLP, and behind the head.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.llama import Layer, Llama
from engine.model.share.matrix import Join, Joined
from engine.model.share.table import SharedTable


def joined(model: Llama, add: Join, beside: Join) -> Llama:
    """Return a rank's share of a model, of the same memory, whose products are joined. add: the sum
    over ranks; beside: the ranks' last dimensions side by side.
    """
    share, embed, head = model.config.share, model.embed, model.lm_head
    assert share is not None and not isinstance(embed, SharedTable)
    assert not isinstance(head, Joined)
    return replace(
        model,
        embed=SharedTable(embed, share.vocab, add),
        layers=[_joined(layer, add) for layer in model.layers],
        lm_head=Joined(head, beside),
    )


def _joined(layer: Layer, add: Join) -> Layer:
    """A layer that joins what attention and its MLP bring."""
    o, down = layer.o, layer.down
    assert not isinstance(o, Joined) and not isinstance(down, Joined)
    return replace(
        layer,
        o=Joined(o, add),
        down=None if down is None else Joined(down, add),
        mixture=layer.mixture and replace(layer.mixture, join=add),
    )
