"""The model of random weights and the methods that are timed, and one timed chunk."""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from engine import LLM, Full, OmniKV
from engine.forward.prefill import run_chunk
from engine.methods.base import Method
from engine.model.tensors import random_stream
from engine.session.session import Session
from tools.bench.shapes import shape_config, shape_filters

FAR = 2**40  # a prompt so long that no timed chunk reaches its dense end


def make_llm(args: argparse.Namespace, context: int) -> LLM:
    """An LLM of the shape with random weights."""
    return LLM.from_stream(
        shape_config(args.shape),
        partial(random_stream, seed=0),
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        chunk=args.chunk,
        max_context=context,
        method=Full(),
    )


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """{name: method}, dense first."""
    found: dict[str, Method] = {"dense": Full()}
    for stride in args.stride:
        for ratio in args.ratios:
            found[f"r={ratio}" + (f", 1/{stride} scoring" if stride > 1 else "")] = OmniKV(
                filter_layers=shape_filters(args.shape),
                tokens=2048,
                dense_below=0,
                prefill_ratio=ratio,
                prefill_block=args.block,
                prefill_stride=stride,
            )
    return found


def timed_chunk(session: Session, first: int, count: int) -> float:
    """Seconds of one chunk of `count` random tokens at position `first` of a session with a filled
    bank.

    On a CPU with one thread these are the thread's seconds, without those that other programs took.
    """
    llm, runtime = session.loaded, session.runtime
    runtime.begin_prompt(first, FAR)
    tokens = torch.randint(llm.config.vocab_size, (1, count), device=llm.model.device)
    _wait(llm)
    clock = (
        time.thread_time
        if llm.device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    began = clock()
    with torch.inference_mode():
        where = (llm.rotary, runtime, session.bank, tokens, first, FAR)
        run_chunk(llm.model, *where, pieces=session.runner.prompt_pieces)
    _wait(llm)
    return clock() - began


def _wait(llm: LLM) -> None:
    if llm.device.type == "cuda":
        torch.cuda.synchronize()


def whole(position: int, chunk: int) -> int:
    """The beginning of the chunk that holds a position."""
    return int(position) // chunk * chunk
