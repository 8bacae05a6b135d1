"""`make check-gpu`, its second command: depth, rivals and where a step's time goes; and of its
third what needs whole sessions.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine import Exact, Full, SamplingParams
from tools.bench.run import Engine
from tools.bench.shapes import mixture_config
from tools.bench.suite import ROOM
from tools.common.synthetic_bank import synthesize
from tools.gpu.context import Context
from tools.gpu.published import published_peers
from tools.gpu.sections import (
    STEPS,
    join,
    omnikv,
    read_seconds,
    same_tokens,
    step_seconds,
    suite,
)

Facts = dict[str, Any]
# the million first: it needs most of the host's memory
DEPTHS = (1048576, 262144, 450000)
MIXTURES = ("gpt-oss-20b", "qwen3-30b-a3b-2507")
LONG = 450000  # tokens of the longest prompt that is read


def depth(ctx: Context) -> Facts:
    """Deep contexts: full, OmniKV in both tiers with planted reuse, brutal offload; and OmniKV's
    prefill of 262,144 tokens.
    """
    found: Facts = {"cells": []}
    began = time.perf_counter()
    for n in dict.fromkeys(map(ctx.depth, DEPTHS)):
        left = ctx.seconds - (time.perf_counter() - began)
        names = ("omnikv-host", "full", "omnikv", "brutal")
        join(found, suite(ctx, (n,), names, seconds=left, verify=False))
        ctx.note(found)
    tokens = ctx.depth(262144)
    for name, method in (("omnikv r=2", omnikv(ctx, prefill_ratio=2)), ("full", Full())):
        cell = {"name": name, "n": tokens, "test": f"pp{tokens}"}
        cell["ms_median"] = 1e3 * read_seconds(ctx.shared(method, tokens), tokens)
        found["cells"].append(cell)
        ctx.note(found)
    return found


def rivals(ctx: Context) -> Facts:
    """transformers and the published OmniKV code's form of a step beside us in one run."""
    return suite(
        ctx,
        ctx.within((32768, 131072)) or (ctx.depth(131072),),
        ("full", "omnikv", "omnikv-host"),
        reuses=(0.0,),
        others=published_peers(ctx.filters, 2048),
        peers=("transformers",),
        rounds=2,
    )


def split(ctx: Context) -> Facts:
    """Where a step's time goes at 131,072 tokens, by the profiler's kernels."""
    n = ctx.depth(131072)
    names = ("full", "omnikv", "omnikv-host")
    return suite(ctx, (n,), names, reuses=(0.7,), split=True, append=True, verify=False)


def mixtures(ctx: Context) -> Facts:
    """A step of a few layers of named mixtures of experts: whether it is captured, says the
    reference's tokens, and its time.
    """
    found: Facts = {"cells": [], "tokens": {}}
    for alias in MIXTURES:
        config, n = mixture_config(alias, small=ctx.small), ctx.depth(8192)
        llm = ctx.made_of(config, alias, max_context=n + ROOM)
        with llm.session() as session:
            synthesize(session, n)
            steps = [session.decode(token).float().cpu() for token in (1, 2, 3, 4)]
            captured = session.runner.runs_ahead(n + 4)
            session.truncate(n)
            session.set_backend("reference")
            right = [session.decode(token).float().cpu() for token in (1, 2, 3, 4)]
        found["tokens"][alias] = {**same_tokens(steps, right), "captured": captured}
        contestant = Engine(alias, llm, n)
        try:
            seconds = step_seconds(contestant, 2 if ctx.small else STEPS)
        finally:
            contestant.close()
        name = f"{alias}, {config.num_layers} layers"
        found["cells"].append({"name": name, "n": n, "test": "tg", "ms_median": 1e3 * seconds})
        ctx.note(found)
        del llm, contestant
    return found


def whole(ctx: Context) -> Facts:
    """Whole sessions: exact mode over the host tier, one saved and restored, a long prompt."""
    found: Facts = {"exact": _exact_over_host(ctx)}
    ctx.note(found)
    found["saved"] = _saved(ctx)
    ctx.note(found)
    n = ctx.depth(LONG)
    found["prompt"] = {"n": n, "seconds": read_seconds(ctx.shared(omnikv(ctx), n, "host"), n)}
    return found


def _exact_over_host(ctx: Context) -> Facts:
    """How many tokens of an answer in exact mode over the host tier are full attention's."""
    n, answers = ctx.depth(32768), []
    params = SamplingParams(max_tokens=8 if ctx.small else 48, ignore_eos=True)
    for method, offload in ((Full(), "device"), (Exact(omnikv(ctx)), "host")):
        with ctx.shared(method, n + ROOM, offload).session() as session:
            synthesize(session, n)
            answers.append([piece.token_id for piece in session.generate([5], params)])
    same = sum(one == other for one, other in zip(*answers, strict=True))
    return {"n": n, "same": same, "tokens": len(answers[0])}


def _saved(ctx: Context) -> Facts:
    """Whether a session says the same after it was written to disk and restored, in either tier."""
    n, found = ctx.depth(8192), {}
    for offload in ("device", "host"):
        llm = ctx.shared(omnikv(ctx), n + ROOM, offload)
        with tempfile.TemporaryDirectory() as folder, llm.session() as session:
            synthesize(session, n)
            path = Path(folder) / "session"
            start = time.perf_counter()
            session.save(path)
            seconds = time.perf_counter() - start
            wanted = [session.decode(token) for token in (3, 4)]
            restored, _ = llm.restore(path)
            with restored:
                got = [restored.decode(token) for token in (3, 4)]
        worst = max(float((a - b).abs().max()) for a, b in zip(wanted, got, strict=True))
        equal = all(torch.equal(a.argmax(), b.argmax()) for a, b in zip(wanted, got, strict=True))
        found[offload] = {"equal": equal, "difference": worst, "save_seconds": seconds}
    return found
