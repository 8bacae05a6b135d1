"""Where the ranks' results are joined in a model: behind the embedding, behind attention's output
projection, behind the MLP, and behind the head; and inside a layer where a norm takes the heads of
several ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.model.config.config import ModelConfig
from engine.model.config.share import Part, Share
from engine.model.llama import Layer, Llama, Matrix
from engine.model.mamba import Mamba2
from engine.model.recurrent import Mixer
from engine.model.share.divide import heads_of, rows_of, vocab_of, whole_of, widths_of
from engine.model.share.matrix import Join, Joined
from engine.model.share.mean import DividedMean, DividedSpread
from engine.model.share.table import SharedTable

Beside = Callable[[torch.Tensor, tuple[Part, ...]], torch.Tensor]


def joined(model: Llama, add: Join, beside: Beside, gathered: Join) -> Llama:
    """Return a rank's share of a model, of the same memory, whose products are joined. add: the sum
    over ranks; beside: the ranks' last dimensions side by side, by the part that each has of them;
    gathered: a tensor of every rank.
    """
    share, embed, head = model.config.share, model.embed, model.lm_head
    assert share is not None and not isinstance(embed, SharedTable)
    assert not isinstance(head, Joined)
    tokens = tuple(vocab_of(share.vocab.of, rank, share.ranks) for rank in range(share.ranks))
    return replace(
        model,
        embed=SharedTable(embed, share.vocab, add),
        layers=[
            replace(
                _joined(layer, model.config, share, add),
                o=_output(number, layer, model.config, share, add, beside),
                spread=None if layer.cut is None else _spread(model.config, share, gathered),
            )
            for number, layer in enumerate(model.layers)
        ],
        lm_head=Joined(head, lambda x: beside(x, tokens)),
    )


def _joined(layer: Layer, config: ModelConfig, share: Share, add: Join) -> Layer:
    """A layer that joins what attention and its MLP bring. What a mixer beside attention brings is
    added before that sum.
    """
    down = layer.down
    assert not isinstance(down, Joined)
    return replace(
        layer,
        down=None if down is None else Joined(down, add),
        mixture=layer.mixture and replace(layer.mixture, join=add),
        mixer=layer.mixer and _mixer(layer.mixer, share, add),
        means=_means(config, share, add) if config.block.qk_norm == "width" else None,
    )


def _output(
    number: int, layer: Layer, config: ModelConfig, share: Share, add: Join, beside: Beside
) -> Matrix:
    """A layer's output projection: what the ranks' columns bring is added. Where a rank has rows of
    it instead, all heads are gathered before it.
    """
    o = layer.o
    assert not isinstance(o, Joined)
    if share.output is None or number in config.recurrent_layers:
        return Joined(o, add)
    wide = config.latent.value if config.latent is not None else config.heads_of(number)[1]
    whole = whole_of(config)
    heads = [own for own, _ in heads_of(whole.num_heads, whole.num_kv_heads, share.ranks)]
    inputs = tuple(own.times(wide) for own in heads)
    rows = tuple(rows_of(own, config.hidden_size) for own in heads)
    return Joined(o, lambda x: beside(x, rows), lambda x: beside(x, inputs))


def _mixer(mixer: Mixer, share: Share, add: Join) -> Mixer:
    """A mixer whose norm is over a group that ranks divide, or itself."""
    keys, values = share.keys, share.values
    if not isinstance(mixer, Mamba2) or mixer.norm is None or share.ranks == 1:
        return mixer
    assert keys is not None and values is not None
    if share.ranks <= keys.of:  # whole groups
        return mixer
    widths = (values.of // keys.of * mixer.sizes.value_dim,) * keys.of
    return replace(mixer, mean=DividedMean(add, widths, (keys.first,), (True,)))


def _means(config: ModelConfig, share: Share, add: Join) -> DividedMean:
    """The means of squares of q and of k of all heads. Of the ranks that hold one K/V head, the one
    with the first of its query heads adds k.
    """
    heads, kv_heads, dim = share.heads, share.kv_heads, config.head_dim
    first = heads.first % (heads.of // kv_heads.of) == 0
    return DividedMean(add, (heads.of * dim, kv_heads.of * dim), (0, 1), (True, first))


def _spread(config: ModelConfig, share: Share, gathered: Join) -> DividedSpread:
    """The mean and the deviation of an MLP's gate, of which every rank has a part."""
    parts = widths_of(whole_of(config), share.ranks)
    return DividedSpread(gathered, tuple(part.size for part in parts))
