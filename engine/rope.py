"""Rotary position embedding: frequencies of the five kinds, cos/sin tables, and the rotation itself.

Frequencies are computed with the same float32 operations in the same order as transformers 5.x
(modeling_rope_utils.py): at position 262144 one unit in the last place of a frequency is 0.01 rad, so "mathematically
equal" would not be equal enough.
"""

import math

import torch

from engine.config import ModelConfig, Rope


def inv_freq(rope: Rope, head_dim: int, seq_len: int = 0) -> torch.Tensor:
    """Angle per position of each rotated pair: float32 [head_dim / 2] on the CPU.

    `seq_len` (tokens) matters to dynamic NTK only, which stretches once it passes the original maximum.
    """
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, torch.tensor([seq_len]))[0]
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
    """What cos and sin are multiplied by: 1.0 but for yarn, whose value the config parser has resolved."""
    return rope.attention_factor


def _exponents(head_dim: int) -> torch.Tensor:
    """2i / head_dim for every pair i: float32 [head_dim / 2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim


def _dynamic(rope: Rope, head_dim: int, seq_lens: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK: the base grows with the sequence. seq_lens int64 [N] -> float32 [N, head_dim / 2].

    Up to the original maximum the plain base is used, exactly: the formula's 1.0 is a rounding error away from one in
    float32.
    """
    original, exponents = rope.original_max_positions, _exponents(head_dim)
    stretch = (rope.factor * seq_lens.clamp(min=original).to(torch.float32) / original) - (rope.factor - 1)
    base = rope.theta * stretch ** (head_dim / (head_dim - 2))
    grown = 1.0 / (base[:, None] ** exponents)
    plain = 1.0 / (rope.theta ** exponents)
    return torch.where((seq_lens > original)[:, None], grown, plain)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated. float32 [head_dim /
    2].
    """
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    long, short = wavelength > original / low, wavelength < original / high
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(long, plain / rope.factor, torch.where(short, plain, between))


def _yarn(rope: Rope, head_dim: int, power: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs from kept to slowed by `factor`. float32 [head_dim / 2]."""

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


class RopeTable:
    """cos and sin of every position up to `capacity`, made once: float32 [capacity, head_dim / 2] each, on `device`.

    `cos` and `sin` serve decode: row p is what a sequence of p + 1 tokens uses at its last position (this differs from
    prefill for dynamic NTK only). Both include the attention factor. Costs 8 * capacity * head_dim / 2 bytes.
    """

    def __init__(self, config: ModelConfig, capacity: int, device: torch.device | str = "cpu"):
        self.rope, self.head_dim, self.capacity = config.rope, config.head_dim, capacity
        self.device = torch.device(device)
        self._plain = inv_freq(self.rope, self.head_dim)
        self.cos = torch.empty(capacity, self.head_dim // 2, dtype=torch.float32, device=self.device)
        self.sin = torch.empty_like(self.cos)
        for start in range(0, capacity, 8192):  # in pieces: temporaries of a few MB whatever the capacity
            stop = min(start + 8192, capacity)
            freq = self._plain
            if self.rope.kind == "dynamic":
                freq = _dynamic(self.rope, self.head_dim, torch.arange(start + 1, stop + 1))
            cos, sin = self._turn(start, stop, freq)
            self.cos[start:stop].copy_(cos)
            self.sin[start:stop].copy_(sin)

    def rows(self, start: int, stop: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions start..stop for prefill: float32 [stop - start, head_dim / 2] each, not to be
        written.

        `total` is the length in tokens of the whole prompt, the bank's rows before it included; dynamic NTK turns
        every position of one prompt with the frequencies of that length, so that chunking does not change the answer.
        ValueError out of range.
        """
        if not 0 <= start <= stop <= min(total, self.capacity):
            raise ValueError(f"rope rows {start}..{stop} of a prompt of {total}, table has {self.capacity}")
        if self.rope.kind != "dynamic" or total <= self.rope.original_max_positions:
            return self.cos[start:stop], self.sin[start:stop]
        cos, sin = self._turn(start, stop, inv_freq(self.rope, self.head_dim, total))
        return cos.to(self.device), sin.to(self.device)

    def _turn(self, start: int, stop: int, freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of positions start..stop at `freq` [head_dim / 2] or [stop - start, head_dim / 2], on the CPU."""
        angle = torch.arange(start, stop, dtype=torch.float32)[:, None] * freq
        scale = attention_scaling(self.rope)
        return angle.cos() * scale, angle.sin() * scale


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D/2) of every head: x [..., S, heads, D], cos and sin float32 [(..., )S, D/2].

    Computed in float32, returned as a new tensor in x.dtype; nothing is written in place.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
