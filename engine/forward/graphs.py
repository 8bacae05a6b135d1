"""The decode step as CUDA graphs, and its compiled pieces."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from engine.bank.base import Bank
from engine.base.device import capture_stream, crossed, current, garbage_kept
from engine.forward.decode import Decoder, SequenceStep
from engine.model.llama import post_attention, pre_attention
from engine.plan.needs import Needs

T = TypeVar("T")
Captured = tuple[torch.cuda.CUDAGraph, torch.Tensor]
FIRST_BUCKET = 4096
WARM_UP = 3  # eager steps before a capture: compilation, autotuning and first allocations


class GraphedStep:
    """Calls a decoder's step on static tensors; captures and replays CUDA graphs where asked.

    token [1, Q] int64 and length [1] int32 are filled before each call. captures: whether graphs
    are asked for and possible. agree: whether all ranks of a model say yes: a capture runs the step
    several times, so either all of them capture or none does. Returns logits [1, Q, vocab] float32.
    A replayed graph overwrites its own buffer, so the caller gets a copy.
    """

    def __init__(
        self,
        decoder: Decoder,
        needs: Needs,
        token: torch.Tensor,
        length: torch.Tensor,
        bank: Bank,
        graphs: bool,
        agree: Callable[[bool], bool] = bool,
    ):
        self._decoder, self.token, self._length, self._bank = decoder, token, length, bank
        possible = graphs and needs.cuda_graph and bank.capturable(fetches=needs.fetches)
        self.captures = agree(possible)
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
        self._decoder.model.replayed()
        return logits.clone()

    def sequence_step(self, bucket: int | None = None) -> SequenceStep:
        """Return this step of the fed token as one sequence of a batched step."""
        return self._decoder.sequence_step(self.token, self._length, self._bank, bucket)

    def _capture(self, bucket: int) -> Captured:
        return captured(
            self.token.device,
            lambda: self._decoder.step(self.token, self._length, self._bank, bucket),
        )


class _Part(NamedTuple):
    """A part's graph, what it writes, and what it reads of the part before; None: the token."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    x: torch.Tensor | None


class SplitGraphedStep(GraphedStep):
    """As GraphedStep: of each part one graph for each bucket. They are replayed in order; between
    two, in neither, the hidden vector, lists of tokens and the length are copied to where the next
    one reads them.
    It has run on no machine with two GPUs.
    """

    def __init__(
        self,
        decoder: Decoder,
        needs: Needs,
        token: torch.Tensor,
        length: torch.Tensor,
        bank: Bank,
        graphs: bool,
        agree: Callable[[bool], bool] = bool,
    ):
        super().__init__(decoder, needs, token, length, bank, graphs, agree)
        self._parts: dict[int, list[_Part]] = {}
        self._lengths = [length.to(part.device, copy=True) for part in decoder.model.parts]

    def __call__(self, n: int) -> torch.Tensor:
        if not self.captures:
            return super().__call__(n)
        for length in self._lengths:
            length.copy_(self._length, non_blocking=True)
        bucket = bucket_for(n, self._bank.capacity)
        if bucket not in self._parts:
            self._parts[bucket] = self._captured_parts(bucket)
        out = self.token
        for number, (graph, own, x) in enumerate(self._parts[bucket]):
            if x is not None:
                x.copy_(out, non_blocking=True)
            self._decoder.runtime.carry(number)
            with current(own.device):
                graph.replay()
            self._decoder.model.parts[number].replayed()
            out = own
        home = crossed(out, self.token.device)
        return home.clone() if home is out else home

    def _captured_parts(self, bucket: int) -> list[_Part]:
        found: list[_Part] = []
        for number, part in enumerate(self._decoder.model.parts):
            x = crossed(found[-1].out, part.device).clone() if found else None
            self._decoder.runtime.carry(number)
            given = self.token, self._lengths[number], self._bank, bucket, number, x
            with current(part.device):
                graph, out = captured(part.device, partial(self._decoder.part_step, *given))
            found.append(_Part(graph, out, x))
        return found


def captured(device: torch.device, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a step that reads static tensors: (the graph, the results that a replay writes).

    All graphs of a stream share one pool of memory: they run one after the other. So a result is
    good until the next replay of any of them, and is copied before.
    """
    main, side = torch.cuda.current_stream(device), capture_stream(device)
    # race: the side stream would warm up on tokens that are still being written
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):  # idempotent: a step writes its own rows and advances nothing
            step()
    main.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    capture = _capturing(graph, side, _anchor(device, main.cuda_stream).pool())
    with garbage_kept(), capture:
        results = step()
    return graph, results


def _capturing(graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, pool: Any) -> torch.cuda.graph:
    # thread_local: another thread's CUDA calls do not spoil the capture
    return torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")


@functools.cache
def _anchor(device: torch.device, stream: int) -> torch.cuda.CUDAGraph:
    """Return an empty graph that keeps the memory which graphs replayed on a stream of a device
    share: 4 to 24 MB, which each of a batch's 32 graphs would else have for itself. torch refuses
    to capture into a pool whose last graph is gone while a result of one lives.
    """
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), _capturing(graph, capture_stream(device), None):
        warnings.simplefilter("ignore")  # "the CUDA graph is empty"
    return graph


def bucket_for(n: int, capacity: int) -> int:
    """Rows that kernels may look at in a step at n tokens: the next power of two from 4096 on, at
    most the capacity.
    """
    bucket = FIRST_BUCKET
    while bucket < n:
        bucket *= 2
    return min(bucket, capacity)


def compiled_pieces() -> tuple[Callable, Callable]:
    """The two halves of a layer under torch.compile: one small static graph each for one token, and
    one for several, whatever layer, length and number of tokens.

    Attention and selection stay outside: they are our own kernels, and a fork of streams must not
    cross a compiled region.
    """
    return tuple(  # type: ignore[return-value]
        _of_any_width(torch.compile(piece, fullgraph=True, dynamic=False))
        for piece in (pre_attention, post_attention)
    )


def _of_any_width(piece: Callable) -> Callable:
    """Let one compiled graph serve every number of tokens above one in a step, [1, Q, ...].

    A batch has a width for each number of its sessions, and torch.compile gives up after eight
    shapes (recompile_limit).
    """

    def run(*arguments: object) -> object:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 1)
        return piece(*arguments)

    return run
