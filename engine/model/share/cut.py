"""The rows and columns of each stored tensor that a rank reads: q, k, v and gate, up by rows, o and
down by columns (o by rows where heads' columns cannot be cut out of it), the embedding and the head
by tokens; of a recurrent layer what its heads have. All else is read whole by every rank.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.config import ModelConfig
from engine.model.config.share import Part, Share
from weights.checkpoint import MXFP4, TURNED, Cut, Rows, Target
from weights.mxfp4 import COLUMNS

Ranges = list[tuple[int, int]]


def cut_targets(targets: list[Target], config: ModelConfig, share: Share) -> list[Target]:
    """Return the `targets` of a whole model, of which `config` is the configuration, as a rank
    reads them.
    """
    return [_cut(target, config, share) for target in targets]


def added_once(name: str, share: Share | None = None) -> bool:
    """Whether a target is added to a sum over ranks, so that one rank alone may bring it."""
    if share is not None and share.output is not None and name.endswith(".o.bias"):
        return False
    return name.endswith((".o.bias", ".down.bias"))


def cut_columns(target: Target) -> list[tuple[int, int, int]]:
    """(left, right, of how many) of the columns of a target's matrix that its parts hold, for those
    that do not hold all.
    """
    found = []
    for cut in target.cuts:
        if cut is None:
            continue
        if target.form == TURNED:
            left, right, whole = cut.first, cut.stop, cut.whole[0]
        else:
            block = COLUMNS if target.form == MXFP4 else 1
            right = cut.whole[1] if cut.right is None else cut.right
            left, right, whole = (block * entry for entry in (cut.left, right, cut.whole[1]))
        if right - left < whole:
            found.append((left, right, whole))
    return found


def _cut(target: Target, config: ModelConfig, share: Share) -> Target:
    """One target as a rank reads it."""
    base = target.name.removesuffix(".bias")
    number, _, kind = base.rpartition(".")
    bias = target.name != base
    if kind in ("embed", "lm_head"):
        return _rows(target, [[share.vocab.range]])
    if number.endswith(".mixer") or kind in ("mixer_in", "mixer_out"):
        return _recurrent(target, kind, config, share)
    if kind in ("qkv", "o") and int(number) in config.recurrent_layers:
        return _recurrent(target, kind, config, share)
    if kind in ("q_norm", "k_norm"):
        return _head_norm(target, kind, int(number), config, share)
    if kind in ("qkv", "gate", "o", "sinks", "keys", "values", "queries"):
        return _attention(target, kind, int(number), config, share)
    if kind not in ("gate_up", "down") or (kind == "down" and bias):
        return target
    layer = int(number.split(".")[0])
    if ".experts." in base:
        assert share.experts is not None
        return _expert(target, kind, share.experts, config)
    experts = config.experts_of(layer)
    if experts is not None and not experts.beside:
        assert share.shared is not None
        width = share.shared
    else:
        width = share.mlp.times(config.mlp_of(layer) // config.intermediate_size)
    return _columns(target, width) if kind == "down" else _rows(target, _halves(target, width))


def _recurrent(target: Target, kind: str, config: ModelConfig, share: Share) -> Target:
    """A target of a recurrent layer: what the rank's heads of values have, and the heads of keys
    that they read.
    """
    sizes = config.recurrent
    assert sizes is not None and share.values is not None and share.keys is not None
    heads, q = share.values, share.keys.times(sizes.key_dim)
    v = heads.times(sizes.value_dim)
    if kind in ("o", "mixer_out"):
        return _columns(target, v)
    if kind in ("rates", "decay", "step", "skip"):
        return _rows(target, [[heads.range]] * len(target.parts))
    if kind == "out_norm":
        return target if sizes.ssd is None else _rows(target, [[v.range]])
    # channels: of a gated delta net q, k and v, of Mamba-2 x, B and C
    wide = (q, q, v) if sizes.ssd is None else (v, q, q)
    if len(target.parts) == len(wide) + 1:  # stored head of keys by head of keys
        return _rows(target, [[part.range] for part in (*wide, v)])
    starts = (0, wide[0].of, wide[0].of + wide[1].of)
    channels = [_behind(part, start) for part, start in zip(wide, starts)]
    return _rows(target, [channels, [v.range]][: len(target.parts)])


def _head_norm(target: Target, kind: str, layer: int, config: ModelConfig, share: Share) -> Target:
    """The norm of q or k: of each head, or of all heads at once."""
    if config.block.qk_norm != "width":
        return target
    part = share.heads if kind == "q_norm" else share.kv_heads
    return _rows(target, [[part.times(config.heads_of(layer)[1]).range]])


def _attention(target: Target, kind: str, layer: int, config: ModelConfig, share: Share) -> Target:
    """A target of attention."""
    latent, heads = config.latent, share.heads
    own = share.kv_heads
    if config.local_heads is not None and config.windows[layer] and share.local_kv_heads:
        own = share.local_kv_heads
    dim = config.heads_of(layer)[1]
    if kind == "o" and share.output is not None:
        return _rows(target, [[share.output.range]])
    if kind == "o":
        if target.name.endswith(".bias"):
            return target
        return _columns(target, heads.times(latent.value if latent else dim))
    if kind == "sinks":
        return _rows(target, [[heads.range]])
    if kind == "gate":
        return _rows(target, [[heads.times(dim).range]])
    if latent is not None:
        each = {"keys": latent.plain, "values": latent.value, "queries": latent.head}
        if kind in each:
            return _rows(target, [[heads.times(each[kind]).range]])
        first = [] if latent.query_rank else [heads.times(latent.head).range]
        return _rows(target, [first, [], []])
    q, kv = heads.times(dim), own.times(dim)
    if config.block.fused:
        ranges = [q.range, _behind(kv, q.of), _behind(kv, q.of + kv.of)]
        return _rows(target, [ranges])
    return _rows(target, [[q.range], *[[kv.range]] * (len(target.parts) - 1)])


def _behind(part: Part, start: int) -> tuple[int, int]:
    return start + part.first, start + part.stop


def _halves(target: Target, width: Part) -> list[Ranges]:
    """The rows of each part of gate and up, which may be stored as one."""
    stored = target.parts[0][1][0]
    if stored == width.of:
        return [[width.range]] * len(target.parts)
    assert stored == 2 * width.of and len(target.parts) == 1, f"{target.name}: {target.parts}"
    return [[width.range, _behind(width, width.of)]]


def _expert(target: Target, kind: str, width: Part, config: ModelConfig) -> Target:
    """A matrix or bias of an expert. Gate and up may take turns, and floats be stored by input."""
    assert config.experts is not None
    turns = config.experts.activation.kind == "clamped"
    if kind == "gate_up":
        ranges = [width.times(2).range] if turns else None
        if target.form == TURNED and not target.name.endswith(".bias"):
            assert ranges is not None
            return _columns(target, width.times(2))
        if target.form == MXFP4:
            return _rows(target, [[width.times(2).range]] * len(target.parts))
        return _rows(target, _halves(target, width) if ranges is None else [ranges])
    return _rows(target, [[width.range]]) if target.form == TURNED else _columns(target, width)


def _rows(target: Target, ranges: list[Ranges]) -> Target:
    """A target of some rows of each part; [] for all of them."""
    rows = target.rows or (None,) * len(target.parts)
    parts: list[tuple[str, tuple[int, ...]]] = []
    cuts: list[Cut | None] = []
    kept: list[Rows | None] = []
    for (name, shape), some, mine in zip(target.parts, rows, ranges, strict=True):
        found: list[Cut | None] = [Cut(shape, first, stop) for first, stop in mine] or [None]
        parts += [(name, shape if cut is None else cut.shape) for cut in found]
        cuts, kept = [*cuts, *found], [*kept, *[some] * len(found)]
    own = tuple(kept) if any(some is not None for some in kept) else ()
    return replace(target, parts=tuple(parts), rows=own, cuts=tuple(cuts))


def _columns(target: Target, width: Part) -> Target:
    """A target of some columns of its one part, or of the blocks and scales that hold them."""
    assert not target.rows, target.name
    cuts = []
    for _, shape in target.parts:
        block = width.of // shape[1]
        assert shape[1] * block == width.of, f"{target.name}: {shape}, {width}"
        assert width.first % block == width.stop % block == 0, f"{target.name}: {width}"
        cuts.append(Cut(shape, 0, shape[0], width.first // block, width.stop // block))
    parts = tuple((name, cut.shape) for (name, _), cut in zip(target.parts, cuts))
    return replace(target, parts=parts, cuts=tuple(cuts))
