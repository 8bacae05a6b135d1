"""Prefill attention over a list per K/V head, against float64, a query and a head at a time."""

import torch
from hypothesis import strategies as st

from kernels.launch.softmax import Softmax
from kernels.prefill.by_head import by_head_ref, prefill_by_head
from tests.builders import GROUPS
from tests.kernels.support.kernel_checks import assert_close, worst

BY_HEAD = dict(
    shape=st.sampled_from(GROUPS),
    dim=st.sampled_from((16, 48, 64)),
    kept=st.sampled_from((1, 16, 37)),
    band=st.sampled_from((0, 1, 13)),
    softmax=st.sampled_from(("", "cap", "sinks")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 9),
)


def by_rule(q, k, v, lists, local, first, softmax):
    """One block, a query head at a time: products in q's dtype, softmax in at least float32."""
    out, group, last = torch.empty_like(q), q.shape[1] // len(k), first + len(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    kept = lists.shape[1]
    hidden = torch.arange(kept + last - local) >= torch.arange(len(q))[:, None] + kept + first - (
        local - 1
    )
    for head in range(q.shape[1]):
        own = head // group
        seen = torch.tensor([*lists[own].tolist(), *range(local, last)])
        logits = (q[:, head] @ k[own, seen].mT).to(wide) * q.shape[2] ** -0.5
        if softmax.cap:
            logits = softmax.cap * torch.tanh(logits / softmax.cap)
        weights = logits.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if softmax.sinks is not None:
            total = total + softmax.sinks[head].exp()
        out[:, head] = (weights / total).to(v.dtype) @ v[own, seen]
    return out


def check_by_head(backend, shape, dim, kept, band, softmax, dtype, seed):
    """Two blocks of a chunk; rows that nobody names are NaN."""
    (heads, kv_heads), start, count = shape, 80, 40
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(1, count, heads, dim, generator=draw).to(dtype)
    k, v = (torch.randn(1, kv_heads, 128, dim, generator=draw).to(dtype) for _ in range(2))
    blocks = [(80, 100, 80 - band, kept), (100, 120, 100 - band, kept)]
    index = torch.full((1, 2, kv_heads, kept + 2), -1, dtype=torch.int32)
    for n, (_, _, local, _) in enumerate(blocks):
        for head in range(kv_heads):
            index[0, n, head, :kept] = torch.randperm(local, generator=draw)[:kept].sort().values
    how = Softmax(cap=4.0 if softmax == "cap" else 0.0)
    if softmax == "sinks":
        how = Softmax(sinks=torch.randn(heads, generator=draw))
    spoiled_k, spoiled_v = k.clone(), v.clone()
    for head in range(kv_heads):
        read = {*index[0, :, head, :kept].flatten().tolist(), *range(80 - band, 120)}
        for row in set(range(128)) - read:
            spoiled_k[0, head, row] = spoiled_v[0, head, row] = float("nan")
    given = index, blocks, start, dim**-0.5, backend, how
    found = prefill_by_head(q, spoiled_k, spoiled_v, *given)
    wide = Softmax(how.cap, None if how.sinks is None else how.sinks.double())
    for n, (first, last, local, _) in enumerate(blocks):
        one = q[0, first - start : last - start]
        lists = index[0, n, :, :kept]
        at = lists, local, first
        exact = by_rule(one.double(), k[0].double(), v[0].double(), *at, wide)
        plain = [
            by_rule(one.roll(shift, -1), k[0].roll(shift, -1), v[0], *at, how)
            for shift in (0, 3, 8, 13)
        ]
        rough = worst(exact, [*plain, by_head_ref(one, k[0], v[0], *at, dim**-0.5, how)])
        place = found[0, first - start : last - start]
        assert_close(place, exact, rough, dtype, f"{backend} block {n}")
