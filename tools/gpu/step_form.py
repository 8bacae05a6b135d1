"""`make check-gpu`, part of its probe: whether a decode step's own kernels are right on this card,
and what they and their dependent launch save.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import linear

from engine import LLM, Full
from engine.forward.self_test import failure
from kernels.layer.gemv import multiply_rows
from tools.bench.shapes import shape_config
from tools.bench.suite import sharp_stream
from tools.common.synthetic_bank import synthesize
from tools.gpu.context import Context
from tools.gpu.kernels import median_time

STEPS = 20


def _without_dependent_launch() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("kernels.launch.pdl.supported", lambda device: False)


def _step_ms(llm: LLM, n: int, ahead: bool = False) -> float:
    """Median milliseconds of a decode step at n tokens whose token is read before the next one is
    issued, or (ahead) after, as in a greedy answer on a GPU.
    """
    with llm.session() as session:
        synthesize(session, n)
        int(session.decode(5).argmax())
        steps = []
        for _ in range(STEPS):
            start = time.perf_counter()
            if ahead:
                session.step(None)
            else:
                int(session.decode(5).argmax())
            steps.append(1e3 * (time.perf_counter() - start))
    return statistics.median(steps)


def _products(llm: LLM, device: str) -> dict[str, dict[str, float]]:
    """Microseconds of each product of a layer: the library's and ours, all layers in turn, so that
    no weight is in a cache.
    """
    assert llm.model is not None
    found = {}
    for name in ("qkv", "o", "gate_up", "down"):
        weights = [getattr(layer, name).weight for layer in llm.model.layers]
        x = torch.randn(1, weights[0].shape[1], device=device, dtype=weights[0].dtype)
        forms = {
            "library": lambda x=x, weights=weights: [linear(x, w) for w in weights],
            "ours": lambda x=x, weights=weights: [multiply_rows(x, w) for w in weights],
        }
        found[name] = {
            form: 1e6 * median_time(run, device) / len(weights) for form, run in forms.items()
        }
    return found


def step_form(ctx: Context) -> dict[str, Any]:
    """What the self-test finds with and without dependent launch ("": nothing), and a step's time
    in each form. On a CPU the plain form alone.
    """
    n = 8192
    settings = dict(device=ctx.device, dtype=ctx.dtype, max_context=n + 64, method=Full())
    llm = LLM.from_stream(shape_config(ctx.shape), sharp_stream, **settings, step="plain")
    steps = {"plain": _step_ms(llm, n), "plain, issued ahead": _step_ms(llm, n, ahead=True)}
    found: dict[str, Any] = {"step_ms": steps}
    if ctx.small:
        return {**found, "fused": "needs a GPU"}
    assert llm.model is not None
    ways = {"fused": contextlib.nullcontext(), "fused, launched in turn": None}
    for name in ways:
        with ways[name] or _without_dependent_launch():
            found[f"fault, {name}"] = why = failure(llm.model, llm.rotary)
            if not why:
                fused = LLM.sharing(llm, step="fused")
                steps[name] = _step_ms(fused, n)
                steps[f"{name}, issued ahead"] = _step_ms(fused, n, ahead=True)
    found["products_us"] = _products(llm, ctx.device)
    return found
