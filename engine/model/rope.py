"""Rotary position embedding: frequencies of all kinds, cos and sin, and the rotation itself.

Frequencies use the same float32 operations in the same order as transformers 5.x
(modeling_rope_utils.py). At position 262144 one unit in the last place of a frequency is 0.01 rad,
so a formula that is only mathematically equal would not be close enough.
"""

from __future__ import annotations

import math

import torch

from engine.model.config.config import ModelConfig
from engine.model.config.rope_config import Rope


def inv_freq(rope: Rope, head_dim: int, seq_len: int = 0) -> torch.Tensor:
    """Return the angle per position of each rotated pair: float32 [R / 2] on the CPU, where R is
    the part of head_dim that rotates.

    Only dynamic NTK reads `seq_len` (tokens): it stretches once that passes the original maximum.
    """
    head_dim = rope.width(head_dim)
    if rope.kind == "none":  # cos 1 and sin 0: the rotation gives back what it got, to the bit
        return torch.zeros(head_dim // 2)
    if rope.kind == "dynamic":
        return _dynamic(rope, _exponents(head_dim), torch.tensor([seq_len]))[0]
    power = rope.theta ** _exponents(head_dim)
    if rope.kind == "proportional":  # Gemma 4: further pairs stay as they are
        plain = 1.0 / power / rope.factor
        plain[int(rope.partial * head_dim // 2) :] = 0.0
        return plain
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, power)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.long_factor if rope.long else rope.short_factor) * power)
    plain = 1.0 / power
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _exponents(head_dim: int) -> torch.Tensor:
    """Return 2i / head_dim for every pair i: float32 [head_dim / 2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim


def _dynamic(rope: Rope, exponents: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK: the base grows with the sequence.

    exponents [head_dim / 2], seq_lens int64 [N] -> [N, head_dim / 2]. Up to the original maximum
    the plain base is used exactly: in float32 the formula gives 1.0 only up to rounding.
    """
    original, head_dim = rope.original_max_positions, 2 * len(exponents)
    stretch = (rope.factor * seq_lens.clamp(min=original).to(torch.float32) / original) - (
        rope.factor - 1
    )
    base = rope.theta * stretch ** (head_dim / (head_dim - 2))
    grown = 1.0 / (base[:, None] ** exponents)
    plain = 1.0 / (rope.theta**exponents)
    return torch.where((seq_lens > original)[:, None], grown, plain)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow long waves by `factor`, keep short ones, interpolate between.

    float32 [head_dim / 2].
    """
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    long, short = wavelength > original / low, wavelength < original / high
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(long, plain / rope.factor, torch.where(short, plain, between))


def _yarn(rope: Rope, head_dim: int, power: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs, from kept to slowed by `factor`.

    float32 [head_dim / 2].
    """

    def pair_of(rotations: float) -> float:
        """Return the (fractional) pair that turns `rotations` times over the original context."""
        waves = rope.original_max_positions / (rotations * 2 * math.pi)
        return (head_dim * math.log(waves)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp degenerates to a step: avoid dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * power)) * (1 - kept) + (1.0 / power) * kept


class Rotary:
    """cos and sin of any positions, computed on demand.

    There is no table, so nothing here grows with the context. Layers may have ropes of their own
    (ModelConfig.layer_ropes). far: angles are products in float64 of the same frequencies, so that
    two tokens are turned by their distance wherever they stand: float32 is off by 0.03 rad at
    position 1,000,000, and by a whole turn at 100 million. parts: of each part of the model.
    """

    parts: tuple[Rotary, ...] = ()

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu", far: bool = False):
        ropes = config.layer_ropes or (config.rope,) * config.num_layers
        # ropes of heads of two widths are two
        of_layers = [(rope, config.heads_of(i)[1]) for i, rope in enumerate(ropes)]
        known = list(dict.fromkeys(of_layers))
        self.ropes = tuple(rope for rope, _ in known)
        self._of_layer = tuple(map(known.index, of_layers))
        self._turns = [_Turns(rope, head_dim, device, far) for rope, head_dim in known]
        self._stretch = config.latent.stretch if config.latent else None

    def at(
        self, positions: torch.Tensor, total: int | None = None, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's (cos, sin) at positions [...] int64: float32 [..., R / 2] each, R being
        the part of head_dim that rotates.

        The attention factor is included. Only dynamic NTK reads `total`, the length in tokens of
        the whole prompt with everything before it (prefill): it gives all positions of a prompt
        the frequencies of that length, so that chunking does not change the answer. Without
        `total` (decode), position p uses the frequencies of a sequence of p + 1 tokens.
        """
        return self._turns[self._of_layer[layer]].at(positions, total)

    def of_layers(
        self, positions: torch.Tensor, total: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return `at` of every layer, computed once per rope, as `pre_attention` takes it: where
        queries grow with their position, cos has that factor behind it.
        """
        found = [turns.at(positions, total) for turns in self._turns]
        if self._stretch is not None:
            beta, original = self._stretch
            times = 1 + beta * torch.log1p(torch.floor(positions.float() / original))
            found = [(torch.cat((cos, times[..., None]), -1), sin) for cos, sin in found]
        return [found[number] for number in self._of_layer]

    def rope_of(self, layer: int) -> int:
        """Return which of `ropes` a layer has."""
        return self._of_layer[layer]

    def frequencies(self) -> torch.Tensor:
        """Return the angles float64 [R / 2] by which `rotate_by` turns one position."""
        return self._only().frequencies

    def turns_by(self, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (cos, sin) float32 [..., R / 2] with which `rotate_by` turns `by` [...]."""
        return self._only().turns_by(by)

    def rotate_by(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Shift rotated x [..., S, heads, D] by `by` [..., S] int64 positions: R(p) x -> R(p+by) x.

        `by` may be negative. Rotations of one frequency add up, so this is exact for every kind
        but dynamic NTK, where frequencies depend on the length, and where all layers have one rope
        (else ValueError). x already contains the attention factor; it is not applied again.
        """
        return apply_rope(x, *self._only().turns_by(by))

    def _only(self) -> _Turns:
        if len(self.ropes) > 1:
            raise ValueError("rotate_by: the model's layers have different ropes")
        return self._turns[0]


class _Turns:
    """cos and sin of one rope."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device | str, far: bool):
        self.rope, self._far = rope, far
        self._freq = inv_freq(rope, head_dim).to(device)
        # made here because a copy to the device inside a step would sync
        self._exponents = _exponents(rope.width(head_dim)).to(device)
        self._scale = rope.attention_factor

    def at(
        self, positions: torch.Tensor, total: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Rotary.at."""
        freq = self._freq
        if self.rope.kind == "dynamic":
            lengths = positions + 1 if total is None else positions.new_full((), total)
            freq = _dynamic(self.rope, self._exponents, lengths.reshape(-1)).view(
                *lengths.shape, -1
            )
        if self._far:
            cos, sin = _far_turns(positions, freq)
        else:
            angle = positions.unsqueeze(-1).float() * freq
            cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self._scale == 1.0 else (cos * self._scale, sin * self._scale)

    @property
    def frequencies(self) -> torch.Tensor:
        """As Rotary.frequencies; of dynamic NTK those below its original length."""
        return self._freq.double()

    def turns_by(self, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As Rotary.turns_by."""
        if self.rope.kind == "dynamic":
            raise ValueError(
                "rotate_by: dynamic rope changes its frequencies with the length, so rotated rows "
                "cannot be shifted"
            )
        return _far_turns(by, self._freq)


def _far_turns(positions: torch.Tensor, freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) float32 of positions [...] at frequencies [R / 2], by way of float64."""
    angle = positions.unsqueeze(-1).double() * freq.double()
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of every head, R = 2 * the width of cos; dimensions from R on
    stay.

    x [..., S, heads, D]; cos, sin float32 [(..., )S, R/2]. Computed in float32; returns a new
    tensor in x.dtype.
    """
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    parts = (first * cos - second * sin, second * cos + first * sin)
    if rotated == x.shape[-1]:
        return torch.cat(parts, dim=-1).to(x.dtype)
    return torch.cat((*parts, x[..., rotated:].float()), dim=-1).to(x.dtype)
