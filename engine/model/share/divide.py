"""Which heads, which part of an MLP's width and which tokens of the vocabulary each rank holds.

Query heads go with the K/V head that they read, in whole groups, so that three K/V heads over two
ranks are two and one; the MLP's width then evens out what a rank multiplies. Where ranks outnumber
the K/V heads, a K/V head is held by several, which divide its query heads.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.model.config.share import ContextShare, Part, Share
from engine.model.recurrent import Recurrent
from weights.checkpoint import MXFP4
from weights.mxfp4 import COLUMNS

UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # columns that a width is cut into
PIECES = 8  # units that a rank has at least, where the width has them: so fine is the evening out
MOST_RANKS = 64


def share_of(config: ModelConfig, rank: int, ranks: int) -> ModelConfig:
    """Return the configuration of what one rank holds: `config` with fewer heads and narrower MLPs,
    and with its `share`. Raises SettingError where the model cannot be split.
    """
    require_divisible(config, ranks)
    heads, kv_heads = heads_of(config.num_heads, config.num_kv_heads, ranks)[rank]
    latent = config.latent is not None
    local = None
    if config.local_heads is not None:
        local = _kv_of(heads, config.num_heads, config.local_heads[0], ranks)
    experts, shared = _experts(config, rank, ranks)
    values, keys = _recurrent_heads(config.recurrent, rank, ranks)
    share = Share(
        rank,
        ranks,
        heads,
        kv_heads,
        local,
        widths_of(config, ranks)[rank],
        experts,
        shared,
        vocab_of(config.vocab_size, rank, ranks),
        values,
        keys,
        _output(config, rank, ranks),
    )
    mixture = config.experts
    if mixture is not None:
        assert experts is not None
        mixture = replace(mixture, width=experts.size, shared=shared.size if shared else 0)
    own_local = config.local_heads
    if own_local is not None and local is not None:
        own_local = local.size, own_local[1]
    recurrent = config.recurrent
    if recurrent is not None and values is not None and keys is not None:
        recurrent = replace(recurrent, value_heads=values.size, key_heads=keys.size)
    return replace(
        config,
        num_heads=heads.size,
        num_kv_heads=1 if latent else kv_heads.size,
        local_heads=own_local,
        intermediate_size=share.mlp.size,
        experts=mixture,
        recurrent=recurrent,
        share=share,
    )


def context_share_of(config: ModelConfig, rank: int, ranks: int) -> ModelConfig:
    """Return the configuration of a rank that holds all weights, and the rows of its own tokens.
    Raises SettingError for too many ranks.
    """
    if ranks > MOST_RANKS:
        raise SettingError(f"ranks: found {ranks}, expected at most {MOST_RANKS}")
    return replace(config, context=ContextShare(rank, ranks))


def whole_of(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the whole model, of a share's or of itself."""
    share = config.share
    if share is None:
        return config
    mixture = config.experts
    if mixture is not None:
        assert share.experts is not None
        shared = share.shared.of if share.shared is not None else 0
        mixture = replace(mixture, width=share.experts.of, shared=shared)
    local = config.local_heads
    if local is not None and share.local_kv_heads is not None:
        local = share.local_kv_heads.of, local[1]
    recurrent = config.recurrent
    if recurrent is not None and share.values is not None and share.keys is not None:
        recurrent = replace(recurrent, value_heads=share.values.of, key_heads=share.keys.of)
    return replace(
        config,
        num_heads=share.heads.of,
        num_kv_heads=1 if config.latent else share.kv_heads.of,
        local_heads=local,
        intermediate_size=share.mlp.of,
        experts=mixture,
        recurrent=recurrent,
        share=None,
    )


def require_divisible(config: ModelConfig, ranks: int) -> None:
    """Raise SettingError where a model cannot be split over so many ranks, with the reason."""
    if ranks > MOST_RANKS:
        raise SettingError(f"ranks: found {ranks}, expected at most {MOST_RANKS}")
    heads_of(config.num_heads, config.num_kv_heads, ranks)
    _recurrent_heads(config.recurrent, 0, ranks)
    narrowest = [config.intermediate_size, config.vocab_size]
    if config.experts is not None:
        narrowest.append(config.experts.width)
    for what, width, block in _blocks(config, ranks):
        if width >= ranks > -(-width // block):
            raise SettingError(
                f"ranks: found {ranks}, expected at most {-(-width // block)}: {what}'s width of "
                f"{width} is stored in blocks of {block} columns, which are not cut"
            )
    if min(narrowest) < ranks:
        raise SettingError(
            f"ranks: found {ranks}, expected at most {min(narrowest)}, the width of this model's "
            "narrowest matrix"
        )


def heads_of(
    heads: int, kv_heads: int, ranks: int, names: tuple[str, str] = ("query", "K/V heads")
) -> list[tuple[Part, Part]]:
    """Return (query heads, K/V heads) of each rank. Raises SettingError where a rank would have no
    query head. names: what the two are called there.
    """
    if ranks <= kv_heads:
        group = heads // kv_heads
        parts = [
            Part(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks, kv_heads)
            for rank in range(ranks)
        ]
        return [(part.times(group), part) for part in parts]
    owners = [rank * kv_heads // ranks for rank in range(ranks)]
    group, found = heads // kv_heads, []
    for rank, owner in enumerate(owners):
        sharing = [other for other, kv in enumerate(owners) if kv == owner]
        if len(sharing) > group:
            raise SettingError(
                f"ranks: found {ranks}, expected at most {kv_heads * group} for {heads} {names[0]} "
                f"heads over {kv_heads} {names[1]}: each rank needs a {names[0]} head"
            )
        place, count = sharing.index(rank), len(sharing)
        first = owner * group + place * group // count
        stop = owner * group + (place + 1) * group // count
        found.append((Part(first, stop, heads), Part(owner, owner + 1, kv_heads)))
    return found


def _recurrent_heads(
    sizes: Recurrent | None, rank: int, ranks: int
) -> tuple[Part | None, Part | None]:
    """The heads of values of recurrent layers that a rank holds, and the heads of keys that they
    read.
    """
    if sizes is None:
        return None, None
    names = ("value", "key heads") if sizes.ssd is None else ("recurrent", "groups")
    return heads_of(sizes.value_heads, sizes.key_heads, ranks, names)[rank]


def _kv_of(heads: Part, of: int, kv_heads: int, ranks: int) -> Part:
    """The K/V heads of sliding layers that some query heads read, which are whole groups of them,
    or heads of one.
    """
    group = of // kv_heads
    first, stop = heads.first // group, -(-heads.stop // group)
    whole = heads.first % group == 0 and heads.stop % group == 0
    if not whole and stop - first > 1:
        raise SettingError(
            f"ranks: found {ranks}, but the query heads {heads.first} to {heads.stop - 1} of a "
            f"rank read parts of several K/V heads in sliding layers ({kv_heads} for {of} query "
            "heads); use another number of ranks"
        )
    return Part(first, stop, kv_heads)


def widths_of(config: ModelConfig, ranks: int) -> list[Part]:
    """The part of an MLP's width that each rank holds, so that attention and MLP together are as
    even as whole units allow.
    """
    width = config.intermediate_size
    unit = _unit(width, ranks, _block(config, width, ranks))
    units, gates = -(-width // unit), 2 if config.block.activation == "relu2" else 3
    column = gates * unit * config.hidden_size * (config.num_layers - len(config.bare))
    spent = [weights / column for weights in _mixing_weights(config, ranks)]
    if config.experts is not None and len(config.experts.dense) < config.num_layers:
        spent = [0.0] * ranks  # MLPs are few, or beside wider mixtures
    goal = (units + sum(spent)) / ranks
    stops, at = [0], 0.0
    for rank in range(ranks):
        at += max(0.0, goal - spent[rank])
        most = units - (ranks - rank - 1)
        stops.append(max(stops[-1] + 1, min(most, round(at))))
    stops[-1] = units
    return [
        Part(min(width, first * unit), min(width, stop * unit), width)
        for first, stop in zip(stops, stops[1:])
    ]


def _mixing_weights(config: ModelConfig, ranks: int) -> list[float]:
    """Weights of attention and of recurrence in all layers that each rank holds."""
    heads = [part for part, _ in heads_of(config.num_heads, config.num_kv_heads, ranks)]
    each = 2 + 2 / config.group  # rows of q and columns of o, and of k and v
    layer = each * config.head_dim * config.hidden_size * len(config.attending_layers)
    found = [part.size * layer for part in heads]
    if config.recurrent is None:
        return found
    for rank in range(ranks):
        values, keys = _recurrent_heads(config.recurrent, rank, ranks)
        assert values is not None and keys is not None
        own = replace(config.recurrent, value_heads=values.size, key_heads=keys.size)
        found[rank] += own.parameters(config.hidden_size) * len(own.layers)
    return found


def _unit(width: int, ranks: int, block: int = 1) -> int:
    """The largest unit that divides a width into PIECES for each rank, or its blocks."""
    most = max(block, width // (PIECES * ranks))
    found = (unit for unit in UNITS if unit <= most and width % unit == 0 == unit % block)
    return next(found, block)


def _output(config: ModelConfig, rank: int, ranks: int) -> Part | None:
    """The rows of attention's output projection that a rank holds, as many as it has of the heads,
    where heads' columns cannot be cut out of it; None where they can.
    """
    packed = config.packed
    if packed is None or ranks == 1:
        return None
    heads = [own for own, _ in heads_of(config.num_heads, config.num_kv_heads, ranks)]
    widths = {config.heads_of(layer)[1] for layer in config.attending_layers}
    widths = {config.latent.value} if config.latent is not None else widths
    borders = {own.first * width for own in heads for width in widths}
    divided = next((at for at in sorted(borders) if at % packed.group), None)
    if divided is None and not packed.permuted:
        return None
    if config.beside is not None:
        why = "lie in an order of their own" if divided is None else f"are cut at {divided}"
        raise SettingError(
            f"ranks: found {ranks}, but the columns of o_proj, in groups of {packed.group}, {why}, "
            "and what a mixer beside attention brings is added to its product; use one process"
        )
    return rows_of(heads[rank], config.hidden_size)


def rows_of(heads: Part, hidden: int) -> Part:
    """The rows of attention's output projection of a rank that holds them, by its heads."""
    return Part(hidden * heads.first // heads.of, hidden * heads.stop // heads.of, hidden)


def _blocks(config: ModelConfig, ranks: int) -> list[tuple[str, int, int]]:
    """(what, its width, columns of it that are not cut) of an MLP and of experts."""
    found, packed, experts = [], config.packed, config.experts
    if packed is not None and (experts is None or experts.dense):
        found.append(("an MLP", config.intermediate_size, packed.group))
    if experts is not None:
        least = 1 if packed is None else packed.group
        block = COLUMNS if experts.stored == MXFP4 else least
        found.append(("an expert", experts.width, block))
        if experts.shared:
            found.append(("the expert of all tokens", experts.shared, least))
    return found


def _even(width: int, rank: int, ranks: int, block: int = 1) -> Part:
    unit = _unit(width, ranks, block)
    units = -(-width // unit)
    first, stop = rank * units // ranks * unit, (rank + 1) * units // ranks * unit
    return Part(min(width, first), min(width, stop), width)


def _experts(config: ModelConfig, rank: int, ranks: int) -> tuple[Part | None, Part | None]:
    """The part of an expert's width, and of the one that all tokens take."""
    experts = config.experts
    if experts is None:
        return None, None
    own, shared = experts.width, experts.shared
    block = COLUMNS if experts.stored == MXFP4 else _block(config, own, ranks)
    common = _even(shared, rank, ranks, _block(config, shared, ranks)) if shared else None
    return _even(own, rank, ranks, block), common


def _block(config: ModelConfig, width: int, ranks: int) -> int:
    """Columns of a width that lie together: what is best read so, where that leaves the ranks'
    parts even; else what may not be cut.
    """
    packed = config.packed
    if packed is None:
        return 1
    blocks = width // packed.block
    even = blocks % ranks == 0 or blocks >= PIECES * ranks
    return packed.block if width % packed.block == 0 and even and blocks else packed.group


def vocab_of(vocab: int, rank: int, ranks: int) -> Part:
    """The tokens whose rows of the embedding and of the head a rank holds."""
    return Part(rank * vocab // ranks, (rank + 1) * vocab // ranks, vocab)
