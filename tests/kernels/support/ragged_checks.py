"""Check decode attention to heads that hold different numbers of rows: each against float64
attention to its rows alone, each as often as it counts (kernel_checks.py says the rule). All other
rows of the flat run hold NaN, and heads lie in it in no order.
"""

import math

import torch

from kernels.attention.ragged import decode_ragged
from kernels.attention.scratch import Scratch
from kernels.rows.forms import FORMS, floats, key_floats
from tests.kernels.support.kernel_checks import check_attention


def flat_store(
    counts: list[int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
    gap: int = 5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make k, v [N, D] of normal values where a head has rows, NaN elsewhere, and int64 [h] where
    each head begins and how many rows it has. The heads lie backwards, `gap` rows apart.
    """
    rows = sum(counts) + gap * (len(counts) + 1)
    kv = torch.full((2, rows, head_dim), math.nan)
    starts, at = [], gap
    for count in reversed(counts):
        kv[:, at : at + count] = torch.randn(2, count, head_dim, generator=generator)
        starts.insert(0, at)
        at += count + gap
    k, v = kv.to(dtype).to(device)
    return k, v, *(torch.tensor(t, device=device) for t in (starts, counts))


def check_ragged(
    device: str,
    backend: str,
    counts: list[int],
    group: int = 4,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
    form: torch.dtype | None = None,
    scratch: Scratch | None = None,
    seed: int = 0,
    times: int = 0,
) -> torch.Tensor:
    """Check decode_ragged under heads of these counts. spare: by how much `most` passes them; form:
    dtype of packed rows; times: rows count 1 to so often, as copies of them would; 0: once each,
    without logs. Returns out.
    """
    generator = torch.Generator().manual_seed(seed)
    k, v, starts, lengths = flat_store(counts, head_dim, dtype, device, generator)
    exact = k, v
    if form is not None:
        sides = zip((FORMS[form].keys, FORMS[form].values), (k, v))
        k, v = (side.pack(rows.nan_to_num()) for side, rows in sides)
        exact = key_floats(k), floats(v)
    q = torch.randn(1, 1, len(counts) * group, head_dim, generator=generator).to(dtype).to(device)
    most, scale = max(counts) + spare, head_dim**-0.5
    counted = torch.randint(1, max(times, 1) + 1, (len(k),), generator=generator).to(device)
    logs = counted.float().log() if times else None
    out = decode_ragged(q, k, v, starts, lengths, most, scale, scratch, backend, logs)
    assert out.shape == q.shape and out.dtype == q.dtype
    for head, (first, n) in enumerate(zip(starts.tolist(), counts)):
        mine = slice(head * group, head * group + group)
        often = counted[first : first + n]
        rows = tuple(t[first : first + n].repeat_interleave(often, 0)[None] for t in exact)
        seen, what = [int(often.sum())], f"head {head} of {n}"
        check_attention(out[0, :, mine], q[0, :, mine], rows, seen, scale, what)
    return out
