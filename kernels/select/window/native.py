"""The scores of all rows by a window of queries, or by a block of a prompt's, by the C++ kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

LANES = 16  # a head's dimensions are whole vectors


class _Call(ctypes.Structure):
    """`Call` of windows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k")),
        *((name, ctypes.c_long) for name in ("query", "query_head", "key_head", "key_row")),
        *((name, ctypes.c_void_p) for name in ("alpha", "sinks", "scores", "lse")),
        *((name, ctypes.c_long) for name in ("lse_query", "lse_head")),
        *(
            (name, ctypes.c_int)
            for name in ("window", "heads", "group", "dim", "rows", "softmax", "threads")
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]


_BINDING = Binding("scores of a window", omnikv_sizeof_window_call=_Call)


def scores_window(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes queries q [B, W, H, D] and keys k [B, Hkv, T, D]
    on a CPU: floats of one dtype, last dims contiguous, D in whole LANES.
    """
    alike = q.dtype == k.dtype and k.dtype in FLOATS and not q.shape[-1] % LANES
    return alike and q.stride(-1) == k.stride(-1) == 1 and _BINDING.usable()


def score_window(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    kind: str,
    scores: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """`window_scores` of kernels/select/window_scores.py for one sequence, of all rows of k [Hkv,
    n, D]. q [W, H, D]; scores float32 [n], contiguous, which it sets. Raises MemoryError where
    queries find no room. Results do not depend on the number of threads.
    """
    sinks = None if softmax.sinks is None else softmax.sinks.contiguous()
    _score(q, k, scale, alpha, sinks, None, kind == "softmax", scores, softmax.cap)


def score_columns(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    scores: torch.Tensor,
    cap: float = 0.0,
) -> None:
    """A block of `column_scores` (kernels/select/column_scores.py) for one sequence: all queries q
    [C, H, D] score all rows of k [Hkv, n, D] under their log-sum-exps lse float32 [C, H]. scores
    float32 [n], contiguous, which it sets. Raises MemoryError where queries find no room. Results
    do not depend on the number of threads.
    """
    _score(q, k, scale, torch.ones(len(q)), None, lse, True, scores, cap)


def _score(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    weights: bool,
    scores: torch.Tensor,
    cap: float,
) -> None:
    size, alpha = k.element_size(), alpha.contiguous()
    call = _Call(
        q.data_ptr(), k.data_ptr(), *q.stride()[:2], *(step * size for step in k.stride()[:2]),
        alpha.data_ptr(), None if sinks is None else sinks.data_ptr(), scores.data_ptr(),
        *((None, 0, 0) if lse is None else (lse.data_ptr(), *lse.stride())),
        q.shape[0], k.shape[0], q.shape[1] // k.shape[0], q.shape[2], k.shape[1],
        weights, torch.get_num_threads(), scale, cap,
    )  # fmt: skip
    code = loaded().omnikv_window_scores(ctypes.byref(call), FLOATS[k.dtype])
    check(code, f"scores of a window of {k.dtype}")


def _expected(
    q: torch.Tensor, k: torch.Tensor, alpha: torch.Tensor, kind: str, softmax: Softmax
) -> torch.Tensor:
    """What `score_window` gives with a scale of .3, in float64."""
    window, heads, _ = q.shape
    keys = k.double().repeat_interleave(heads // len(k), 0)
    logits = softmax.capped(torch.einsum("whd,hnd->whn", q.double(), keys) * 0.3)
    seen = k.shape[1] - window + 1 + torch.arange(window)
    late = torch.arange(k.shape[1]) >= seen.view(-1, 1, 1)
    logits = logits.masked_fill(late, float("-inf"))
    found = softmax.weights(logits) if kind == "softmax" else logits
    best = found.amax(1)
    return (best.masked_fill(late[:, 0], 0.0) * alpha.double()[:, None]).sum(0)


@_BINDING.self_test
def _windows() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(*s, generator=generator) for s in ((5, 6, 32), (2, 1101, 32)))
    alpha = torch.rand(5, generator=generator)
    sinks = torch.randn(6, generator=generator)
    for dtype in FLOATS:
        queries, keys = q.to(dtype), k.to(dtype)
        for kind, softmax in (("softmax", PLAIN), ("raw", PLAIN), ("softmax", Softmax(2.0, sinks))):
            found = torch.empty(1101)
            score_window(queries, keys, 0.3, alpha, kind, found, softmax)
            expected = _expected(queries, keys, alpha, kind, softmax)
            yield f"{kind} scores of a window in {dtype}", found, expected, torch.float32
        known, found = torch.randn(5, 6, generator=generator), torch.empty(1101)
        score_columns(queries, keys, known, 0.3, found, 2.0)
        wide = keys.double().repeat_interleave(3, 0)
        logits = Softmax(2.0).capped(torch.einsum("whd,hnd->whn", queries.double(), wide) * 0.3)
        expected = (logits - known[..., None]).amax(1).exp().sum(0)
        yield f"scores of a prompt's block in {dtype}", found, expected, torch.float32
