"""Rotary position embedding: frequencies of the five kinds, cos and sin at any position, and the
rotation itself.

Frequencies are computed with the same float32 operations in the same order as transformers 5.x
(modeling_rope_utils.py): at position 262144 one unit in the last place of a frequency is 0.01 rad,
so "mathematically equal" would not be equal enough.
"""

import math

import torch

from engine.model.config import ModelConfig, Rope


def inv_freq(rope: Rope, head_dim: int, seq_len: int = 0) -> torch.Tensor:
    """Angle per position of each rotated pair: float32 [head_dim / 2] on the CPU.

    `seq_len` (tokens) matters to dynamic NTK only, which stretches once it passes the original
    maximum.
    """
    if rope.kind == "dynamic":
        return _dynamic(rope, _exponents(head_dim), torch.tensor([seq_len]))[0]
    power = rope.theta ** _exponents(head_dim)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, power)
    plain = 1.0 / power
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def attention_scaling(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1.0 but for yarn, whose value the config parser has
    resolved.
    """
    return rope.attention_factor


def _exponents(head_dim: int) -> torch.Tensor:
    """2i / head_dim for every pair i: float32 [head_dim / 2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim


def _dynamic(rope: Rope, exponents: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK: the base grows with the sequence. exponents [head_dim / 2], seq_lens int64 [N]
    -> [N, head_dim / 2].

    Up to the original maximum the plain base is used, exactly: the formula's 1.0 is a rounding
    error away from one in float32.
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
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated.
    float32 [head_dim / 2].
    """
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    long, short = wavelength > original / low, wavelength < original / high
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(long, plain / rope.factor, torch.where(short, plain, between))


def _yarn(rope: Rope, head_dim: int, power: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs from kept to slowed by `factor`.
    float32 [head_dim / 2].
    """

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        waves = rope.original_max_positions / (rotations * 2 * math.pi)
        return (head_dim * math.log(waves)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the step function that the ramp degenerates to, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * power)) * (1 - kept) + (1.0 / power) * kept


class Rotary:
    """cos and sin of any positions, computed where they are needed: no table, so nothing here grows
    with the context.

    `apply` is the rotation itself (apply_rope), kept beside the angles so that callers need one
    object.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu"):
        self.rope, self.head_dim = config.rope, config.head_dim
        self._freq = inv_freq(self.rope, self.head_dim).to(device)
        # here: a copy to the device inside a step would sync
        self._exponents = _exponents(self.head_dim).to(device)
        self._scale = attention_scaling(self.rope)

    def at(
        self, positions: torch.Tensor, total: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) float32 [..., head_dim / 2] of positions [...] int64, the attention factor
        included.

        `total`: length in tokens of the whole prompt, the bank's rows before it included (prefill).
        Dynamic NTK turns every position of one prompt with the frequencies of that length, so that
        chunking does not change the answer; without it (decode) position p is what a sequence of p
        + 1 tokens uses at its last position. No other kind looks at it.
        """
        freq = self._freq
        if self.rope.kind == "dynamic":
            lengths = positions + 1 if total is None else positions.new_full((), total)
            freq = _dynamic(self.rope, self._exponents, lengths.reshape(-1)).view(
                *lengths.shape, -1
            )
        angle = positions.unsqueeze(-1).float() * freq
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self._scale == 1.0 else (cos * self._scale, sin * self._scale)

    def turn(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Moves rotated x [..., S, heads, D] on by `by` [..., S] int64 positions, back where
        negative: R(p) x -> R(p + by) x.

        Rotations of one frequency add up, so this holds for every kind but dynamic NTK, whose
        frequencies depend on the length (ValueError). The attention factor is in x already and is
        not applied again.
        """
        if self.rope.kind == "dynamic":
            raise ValueError("turn: dynamic rope has no frequencies that hold at two lengths")
        angle = by.unsqueeze(-1).float() * self._freq
        return apply_rope(x, angle.cos(), angle.sin())

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """apply_rope."""
        return apply_rope(x, cos, sin)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D/2) of every head: x [..., S, heads, D], cos and sin float32
    [(..., )S, D/2].

    Computed in float32, returned as a new tensor in x.dtype; nothing is written in place.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
