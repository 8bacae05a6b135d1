"""How a decode step is run: eager, with its pieces compiled by torch.compile, or replayed from a
CUDA graph. All of it is here.

The step itself is one function (engine/decode.py). On a GPU it is captured once per capacity
bucket: kernels read the length on the device, so a graph replays at any length within its bucket.
"""

import torch

from engine.model.llama import post_attention, pre_attention

FIRST_BUCKET = 4096


def bucket_for(n, capacity):
    """Rows that a step at n tokens lets its kernels look at: the next power of two from 4096 on, at
    most the capacity.
    """
    bucket = FIRST_BUCKET
    while bucket < n:
        bucket *= 2
    return min(bucket, capacity)


def compiled_pieces():
    """The two halves of a layer under torch.compile: one small static graph each, shared by all
    layers, whatever the length.

    Attention and selection stay outside: they are kernels of our own, and stream forks must not
    cross a compiled region.
    """
    options = dict(fullgraph=True, dynamic=False)
    return torch.compile(pre_attention, **options), torch.compile(post_attention, **options)


class StepRunner:
    """Calls a decoder's step on a session's static token and length tensors; captures and replays
    CUDA graphs where asked.

    token [1, 1] int64 and length [1] int32 are filled by the session before each call. Returns
    logits [1, 1, vocab] float32: a replayed graph overwrites its own buffer, so the caller gets a
    copy.
    """

    # eager runs before capture: compile, autotune and first allocations happen there
    WARM_UP = 3

    def __init__(self, decoder, token, length, bank, graphs):
        self._decoder, self._token, self._length, self._bank = decoder, token, length, bank
        self._graphs_wanted = (
            graphs and decoder.runtime.capturable and bank.capturable(decoder.runtime)
        )
        self._graphs = {}

    def __call__(self, n):
        """Run the step that makes the bank n tokens long."""
        bank = self._bank
        if not self._graphs_wanted:
            return self._decoder.step(self._token, self._length, bank)
        bucket = bucket_for(n, bank.capacity)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits.clone()

    def _capture(self, bucket):
        side = torch.cuda.Stream()
        # the side stream must see the tokens that were just written
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # idempotent: a step writes its own rows and advances nothing
            for _ in range(self.WARM_UP):
                self._decoder.step(self._token, self._length, self._bank, bucket)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._decoder.step(self._token, self._length, self._bank, bucket)
        return graph, logits
