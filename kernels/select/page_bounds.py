"""Pages of K by their elementwise extremes, and those whose bound on a query's logit is largest:
the choice of Quest (Tang et al., ICML 2024, section 3), for one sequence by one call of C++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from kernels.launch.dispatch import NATIVE
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.select.drop import RULES
from kernels.select.topk import select_topk_ref

LANES = 16  # a head's dimensions are whole vectors
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = dict(
    zip(RULES, (torch.amax, torch.mean, torch.sum))
)


class _Pages(ctypes.Structure):
    """`Pages` of bounds.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("most", "least", "k")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row")),
        *((name, ctypes.c_void_p) for name in ("low", "high")),
        ("page_head", ctypes.c_long),
        ("bounds", ctypes.c_void_p),
        ("bound_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("pages", "counts")),
        *(
            (name, ctypes.c_int)
            for name in (
                "heads",
                "group",
                "dim",
                "size",
                "known",
                "length",
                "how",
                "wanted",
                "room",
                "threads",
            )
        ),
    ]


_BINDING = Binding("the choice of pages", omnikv_sizeof_pages=_Pages)


def chooses(backend: str, k: torch.Tensor, extremes: torch.dtype) -> bool:
    """Whether `choose_pages` runs under a backend, on rows k [.., D] whose extremes are kept in a
    dtype. The first call compiles it and runs its self-test.
    """
    alike = k.dtype == extremes and k.dtype in FLOATS and not k.shape[-1] % LANES
    return backend in NATIVE and k.device.type == "cpu" and alike and _BINDING.usable()


def choose_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    bounds: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    known: int,
    length: int,
    size: int,
    wanted: int,
    how: str,
) -> None:
    """Bring the extremes of the pages of `length` rows up to date, and choose some of all but the
    newest.

    q [H, D]; k [Hkv, >= length, D]; low, high [Hkv, P, D] of k's dtype, contiguous but between
    heads, right below `known` rows; bounds float32 [Hkv, >= pages]; pages int32 [Hkv, room],
    contiguous, takes the `wanted` pages of the largest bounds, ascending, the lower of equal ones,
    then -1; counts int32 [Hkv]. A bound is `page_bounds`. size: rows of a page; how: over a group's
    heads, one of RULES. Mutates low, high, bounds, pages and counts.
    """
    heads, dim = len(k), k.shape[2]
    wide, item = q.float(), k.element_size()
    most, least = wide.clamp(min=0), wide.clamp(max=0)
    call = _Pages(
        most.data_ptr(), least.data_ptr(), k.data_ptr(), k.stride(0) * item, k.stride(1) * item,
        low.data_ptr(), high.data_ptr(), low.stride(0) * item, bounds.data_ptr(), bounds.stride(0),
        pages.data_ptr(), counts.data_ptr(), heads, len(q) // heads, dim, size, known, length,
        RULES.index(how), wanted, pages.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    code = loaded().omnikv_choose_pages(ctypes.byref(call), FLOATS[k.dtype])
    check(code, f"the choice of pages of {k.dtype}")


def page_bounds(
    q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, reduce: str
) -> torch.Tensor:
    """Upper bounds [Hkv, P] of the unscaled logits of every page: the sum over channels of
    max(q low, q high), reduced over a group's heads.

    q [H, D]; low, high [Hkv, P, D]: elementwise extremes of the pages' K; computed in float32
    (float64 for float64 q).
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32)).view(low.shape[0], -1, q.shape[-1])
    most = q.clamp(min=0) @ high.to(q.dtype).transpose(1, 2)
    least = q.clamp(max=0) @ low.to(q.dtype).transpose(1, 2)
    return REDUCTIONS[reduce](most + least, dim=1)


@_BINDING.self_test
def _chosen() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    wide_q = torch.randn(6, 64, generator=generator)
    wide_k = torch.randn(2, 301, 64, generator=generator)
    for dtype in FLOATS:
        q, k = wide_q.to(dtype), wide_k.to(dtype)
        whole = k[:, :288].unflatten(1, (18, 16))
        for how in RULES:
            low, high = torch.full((2, 2, 19, 64), 99, dtype=dtype)
            bounds, counts = torch.empty(2, 19), torch.empty(2, dtype=torch.int32)
            pages = torch.empty(2, 7, dtype=torch.int32)
            choose_pages(q, k, low, high, bounds, pages, counts, 0, 301, 16, 5, how)
            yield f"lows in {dtype}", low[:, :18].float(), whole.amin(2).float(), torch.float32
            yield f"highs in {dtype}", high[:, :18].float(), whole.amax(2).float(), torch.float32
            expected = page_bounds(q, low[:, :18], high[:, :18], how)
            yield f"bounds by {how} in {dtype}", bounds[:, :18], expected, torch.float32
            right, kept = torch.empty_like(pages), torch.empty_like(counts)
            ends = torch.zeros_like(counts), counts.new_full((2,), 18), counts.new_full((2,), 5)
            select_topk_ref(bounds, *ends, right, kept)
            yield "pages", pages, right, torch.int32
            yield "how many pages", counts, kept, torch.int32
