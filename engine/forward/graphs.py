"""The decode step as CUDA graphs, and its compiled pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.bank.base import Bank
from engine.base.device import capture_stream, garbage_kept
from engine.forward.decode import Decoder, SequenceStep
from engine.model.llama import post_attention, pre_attention
from engine.plan.needs import Needs

Captured = tuple[torch.cuda.CUDAGraph, torch.Tensor]
FIRST_BUCKET = 4096
WARM_UP = 3  # eager steps before a capture: compilation, autotuning and first allocations


class GraphedStep:
    """Calls a decoder's step on static tensors; captures and replays CUDA graphs where asked.

    token [1, Q] int64 and length [1] int32 are filled before each call. captures: whether graphs
    are asked for and possible. Returns logits [1, Q, vocab] float32. A replayed graph overwrites
    its own buffer, so the caller gets a copy.
    """

    def __init__(
        self,
        decoder: Decoder,
        needs: Needs,
        token: torch.Tensor,
        length: torch.Tensor,
        bank: Bank,
        graphs: bool,
    ):
        self._decoder, self.token, self._length, self._bank = decoder, token, length, bank
        self.captures = graphs and needs.cuda_graph and bank.capturable(fetches=needs.fetches)
        self._graphs: dict[int, Captured] = {}

    def __call__(self, n: int) -> torch.Tensor:
        """Run the step that makes the bank n tokens long."""
        if not self.captures:
            return self._decoder.step(self.token, self._length, self._bank)
        bucket = bucket_for(n, self._bank.capacity)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits.clone()

    def sequence_step(self, bucket: int | None = None) -> SequenceStep:
        """Return this step of the fed token as one sequence of a batched step."""
        return self._decoder.sequence_step(self.token, self._length, self._bank, bucket)

    def _capture(self, bucket: int) -> Captured:
        return captured(
            self.token.device,
            lambda: self._decoder.step(self.token, self._length, self._bank, bucket),
        )


def captured(device: torch.device, step: Callable[[], torch.Tensor]) -> Captured:
    """Capture a step that reads static tensors: (the graph, the logits that a replay writes)."""
    main, side = torch.cuda.current_stream(device), capture_stream(device)
    # race: the side stream would warm up on tokens that are still being written
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):  # idempotent: a step writes its own rows and advances nothing
            step()
    main.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # thread_local: another thread's CUDA calls do not spoil the capture
    capture = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
    with garbage_kept(), capture:
        logits = step()
    return graph, logits


def bucket_for(n: int, capacity: int) -> int:
    """Rows that kernels may look at in a step at n tokens: the next power of two from 4096 on, at
    most the capacity.
    """
    bucket = FIRST_BUCKET
    while bucket < n:
        bucket *= 2
    return min(bucket, capacity)


def compiled_pieces() -> tuple[Callable, Callable]:
    """The two halves of a layer under torch.compile: one small static graph each, for all layers
    and lengths.

    Attention and selection stay outside: they are our own kernels, and a fork of streams must not
    cross a compiled region.
    """
    return (
        torch.compile(pre_attention, fullgraph=True, dynamic=False),
        torch.compile(post_attention, fullgraph=True, dynamic=False),
    )
