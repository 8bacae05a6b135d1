"""What a query weighs rows by, whose logits get Gumbel noise and a temperature before their
softmax: the score of Keyformer (Adnan et al., MLSys 2024, section 3.2), by one call of C++.

Noise is drawn from counters, 24 bits a number. Where there is no C++ kernel, callers add it with
torch's operators, some 25 of them a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.launch.dispatch import NATIVE
from kernels.native.library import Binding, Case, loaded


class _Noisy(ctypes.Structure):
    """`Noisy` of noisy.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "positions")),
        ("position_head", ctypes.c_long),
        ("sinks", ctypes.c_void_p),
        ("drawn", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("heads", "group", "rows", "noise", "threads")),
        ("tau", ctypes.c_float),
    ]


_BINDING = Binding("weights with noise", omnikv_sizeof_noisy=_Noisy)


class Draw(NamedTuple):
    """What noise depends on beside heads and keys. base: of seed and layer, below 2^61; query: the
    position of the one that attends.
    """

    base: int
    query: int

    @property
    def number(self) -> int:
        """Both as one, below 2^64."""
        return (self.base + self.query * 0x1000003) % (1 << 64)


def weighs_noisy(backend: str, device: torch.device) -> bool:
    """Whether `weigh_noisy` runs under a backend. The first call compiles it and runs its
    self-test.
    """
    return backend in NATIVE and device.type == "cpu" and _BINDING.usable()


def weigh_noisy(
    logits: torch.Tensor,
    positions: torch.Tensor,
    draw: Draw | None,
    tau: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax((logits + noise) / tau) of one query, in place.

    logits float32 [h, G, 1, n], contiguous, scaled and capped; positions int32 [h, >= n] of their
    keys, last dim contiguous; draw: of the noise, None: without; sinks float32 [h * G],
    contiguous, of the model, which tau divides too. Returns float32 [h, G, n], the logits' memory.
    """
    call = _call(logits, positions, draw)
    call.tau, call.threads = tau, torch.get_num_threads()
    if sinks is not None:
        call.sinks = sinks.data_ptr()
    loaded().omnikv_weigh_noisy(ctypes.byref(call))
    return logits.squeeze(2)


def weigh_noisy_ref(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    tau: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`weigh_noisy` in plain torch, with the noise [h, G, 1, n] itself, in the dtype of the logits,
    which stay.
    """
    logits = (logits if noise is None else logits + noise) / tau
    if sinks is None:
        return logits.softmax(-1).squeeze(2)
    sinks = sinks.to(logits.dtype).view(*logits.shape[:2], 1, 1) / tau
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].squeeze(2)


def noise_bits(shape: tuple[int, ...], positions: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The 24 random bits of each number that `weigh_noisy` draws for logits of this shape: int32
    [h, G, 1, n].
    """
    found = torch.empty(shape, dtype=torch.int32)
    call = _call(found, positions, draw)
    loaded().omnikv_noise_bits(ctypes.byref(call), ctypes.c_void_p(found.data_ptr()))
    return found


def _call(logits: torch.Tensor, positions: torch.Tensor, draw: Draw | None) -> _Noisy:
    heads, group, _, rows = logits.shape
    call = _Noisy(logits.data_ptr(), positions.data_ptr(), positions.stride(0))
    call.heads, call.group, call.rows = heads, group, rows
    if draw is not None:
        call.drawn, call.noise = draw.number, True
    return call


def noise_bits_ref(shape: tuple[int, ...], positions: torch.Tensor, draw: Draw) -> torch.Tensor:
    """As `noise_bits`, number by number: the finalizer of MurmurHash3 over query and head, and once
    more with the key.
    """
    heads, group, _, rows = shape
    found = []
    for r in range(heads * group):
        start = _mixed(draw.number + r * 0x5BD1E995)
        keys = positions[r // group, :rows].tolist()
        found += [_mixed(start ^ key * 0x9E3779B1) >> 20 & 0xFFFFFF for key in keys]
    return torch.tensor(found, dtype=torch.int32).view(*shape)


def _mixed(x: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x %= 1 << 64
        x = (x ^ x >> 33) * factor
    x %= 1 << 64
    return x ^ x >> 33


def noise_of(bits: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gumbel noise of these bits: of numbers in the middle of 2^24 equal parts of 0 .. 1."""
    return -(-((bits.double() + 0.5) * 2.0**-24).log()).log().to(dtype)


@_BINDING.self_test
def _weighed() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 1, 101, generator=generator)
    sinks = torch.randn(6, generator=generator)
    positions = torch.randint(0, 1 << 20, (2, 104), generator=generator).int()
    draw = Draw(1 << 60, 1 << 20)
    bits = noise_bits_ref(logits.shape, positions, draw)
    yield "random bits", noise_bits(logits.shape, positions, draw), bits, torch.int32
    for by, noise in ((draw, noise_of(bits)), (None, None)):
        for own in (sinks, None):
            found = weigh_noisy(logits.clone(), positions, by, 1.3, own)
            expected = weigh_noisy_ref(logits, noise, 1.3, own)
            yield "weights with noise", found, expected, torch.float32
