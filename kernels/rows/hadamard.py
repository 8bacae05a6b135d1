"""An orthogonal Hadamard transform of rows of K and of queries, before K is rounded to few bits.

A few channels of K are much larger than the others, and one scale per row rounds the others
coarsely. The transform spreads every channel over many: H k has no such channels, and as H is
orthogonal, (H q) . (H k) = q . k. (QuaRot, Ashkboos et al. 2024, section 4.2: "keys and queries".)

Row elements i and i + D/2 are mixed, and within each half runs of b elements, where b is the
largest power of two that divides D/2: a Hadamard transform of n = 2 b elements, all D of them where
D is a power of two. Of its entries +-1 the factor 1/sqrt(n) is split into two powers of two: rows
are divided by `row_factor`, queries by n / row_factor, so that neither rounds anything.

Rows must come out the same whoever writes them. The sums are taken in float64, where 24 bits of
mantissa and a factor of 2^22 between a row's elements leave them exact: no order of sums, and no
library, changes a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.native.library import Case
from kernels.rows.native import TRANSFORM, takes, transform
from kernels.rows.transform_size import query_factor, row_factor, run_length


@functools.lru_cache(maxsize=32)
def signs(head_dim: int, dtype: torch.dtype, device: torch.device, factor: int = 1) -> torch.Tensor:
    """Return the transform as a symmetric matrix [D, D] of entries 0 and +-1 / factor; its square
    is n / factor^2 times the identity.
    """
    # made on the host: a device's matrix is one copy
    with torch.inference_mode(False):
        one = torch.ones(1, 1, dtype=torch.float64)
        while len(one) < run_length(head_dim):
            one = _doubled(one)
        half = torch.block_diag(*[one] * (head_dim // 2 // len(one)))
        return (_doubled(half) / factor).to(device, dtype)


def _doubled(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])


def transformed_rows(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Transform rows of K [.., D] of any float dtype: float32, the same bits on every device and
    under every backend. Raises ValueError for an unknown backend.
    """
    dim = k.shape[-1]
    if choose(backend, k, lambda: takes(TRANSFORM, k)) == "native":
        return transform(k, run_length(dim), row_factor(dim))
    return _transformed(k, row_factor(dim))


def _transformed(x: torch.Tensor, factor: int) -> torch.Tensor:
    return (x.double() @ signs(x.shape[-1], torch.float64, x.device, factor)).float()


@TRANSFORM.self_test
def _transform() -> Iterator[Case]:
    for dim in (48, 64, 128):
        x = torch.randn(5, dim, generator=torch.Generator().manual_seed(1))
        for factor in (row_factor(dim), query_factor(dim)):
            found = transform(x, run_length(dim), factor)
            yield "the Hadamard transform", found, _transformed(x, factor), x.dtype


def transformed_queries(q: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Transform queries [.., D] for products with transformed rows, in q's dtype. Raises ValueError
    for an unknown backend.
    """
    dim = q.shape[-1]
    taken = q.dtype == torch.float32
    if choose(backend, q, lambda: taken and takes(TRANSFORM, q)) == "native":
        return transform(q, run_length(dim), query_factor(dim))
    return q @ signs(dim, q.dtype, q.device, query_factor(dim))


def wide_queries(q: torch.Tensor) -> torch.Tensor:
    """Transform a step's queries [B, Q, H, D] by one launch of the kernel below: float32, since 16
    bits would round them a second time, and move a selector's scores by half a percent.
    """
    return _turn(q, torch.empty(q.shape, dtype=torch.float32, device=q.device))


def turn_back(out: torch.Tensor) -> torch.Tensor:
    """Transform sums of transformed rows of V, out [B, Q, H, D] contiguous, back in place, by one
    launch of the same kernel, and return them.
    """
    return _turn(out, out)


def _turn(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    batch, queries, heads, dim = q.shape
    query_kernel[(batch * queries, heads)](
        q,
        out,
        queries,
        *q.stride()[:3],
        HALF=dim // 2,
        HP=power_of_two(dim // 2),
        B=run_length(dim),
        FACTOR=query_factor(dim),
        num_warps=1,
        **dependent(q),
    )
    return out


@triton.jit
def query_kernel(
    q,
    out,
    queries,
    sqb,
    sqq,
    sqh,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    B: tl.constexpr,
    FACTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Transform one head of one query: grid (B * Q, H); out [B, Q, H, D] contiguous."""
    wait_for_last_kernel(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    h = tl.arange(0, HP)
    row = q + token // queries * sqb + token % queries * sqq + head * sqh
    first = tl.load(row + h, mask=h < HALF, other=0.0)
    second = tl.load(row + HALF + h, mask=h < HALF, other=0.0)
    low, high = transformed_halves(first, second, B, FACTOR)
    to = out + (token * tl.num_programs(1) + head) * 2 * HALF
    tl.store(to + h, low.to(out.dtype.element_ty), mask=h < HALF)
    tl.store(to + HALF + h, high.to(out.dtype.element_ty), mask=h < HALF)


@triton.jit
def transformed_halves(first, second, B: tl.constexpr, FACTOR: tl.constexpr):
    """Transform one row whose halves are [HP] each, zero beyond D/2, and divide it by FACTOR:
    `transformed_rows`, to the bit, in float32.
    """
    low = first.to(tl.float32).to(tl.float64)
    high = second.to(tl.float32).to(tl.float64)
    low = _mixed(low, B)
    high = _mixed(high, B)
    # a division of 64 bits is a call; the factor is a power of two
    part: tl.constexpr = 1.0 / FACTOR
    return ((low + high) * part).to(tl.float32), ((low - high) * part).to(tl.float32)


@triton.jit
def _mixed(x, B: tl.constexpr):
    """Transform runs of B elements of x [N], without a factor."""
    size: tl.constexpr = x.shape[0]
    # 9 stages: runs of 512 elements
    for stage in tl.static_range(9):
        if (1 << stage) < B:
            pairs = tl.reshape(x, [size // (2 << stage), 2, 1 << stage])
            one, other = tl.split(tl.permute(pairs, [0, 2, 1]))
            joined = tl.permute(tl.join(one + other, one - other), [0, 2, 1])
            x = tl.reshape(joined, [size])
    return x
