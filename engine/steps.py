"""How a session's decode steps run under one method: buffers, the method's own runtime and full
attention's, eager or as graphs.
"""

import torch

from engine.decode import Decoder, Step
from engine.graph import StepRunner
from engine.methods.base import Setup
from engine.methods.full import Full
from engine.model.llama import post_attention, pre_attention
from kernels.scratch import make_scratch, scratch_bytes


class Steps:
    """Two kinds of step over one bank: the method's own and plain full attention. Made anew when a
    session changes its method.

    runtime, dense_runtime: engine.methods.base.Runtime of each; dense_below: tokens of context
    under which the method's own step is not taken; token int64 [1, 1], length int32 [1]: the
    tensors that a captured graph reads, filled by `feed`.
    """

    def __init__(self, llm, method, plan, capacity, backend, bank, ring):
        config, model = llm.config, llm.model
        self.bank, self._ring, self._rotary = bank, ring, llm.rotary
        windowed = getattr(method, "selector", "last") != "last"
        budget = method.budget_capacity(plan, capacity)
        sizes = dict(
            batch=1,
            queries=1,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            capacity=capacity,
            budget=budget,
            device=model.device,
            scored=budget > 0,
            window=method.window if windowed else 0,
            backend=backend,
            dtype=model.dtype,
        )
        self.scratch_bytes, full = scratch_bytes(**sizes), Full()
        common = capacity, model.device, model.dtype, 1, backend, make_scratch(**sizes)
        self.runtime = method.runtime(Setup(config, plan, *common))
        self.dense_runtime = full.runtime(Setup(config, full.plan(config), *common))
        self.dense_below = method.dense_below_tokens(
            plan, config, model.dtype.itemsize, model.device.type, capacity
        )
        self._partial = bool(plan.partial_layers)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.length = torch.zeros(1, dtype=torch.int32, device=model.device)
        # The reference is the oracle: plain launchers, pieces uncompiled, no graph.
        pieces, graphs = (
            ((pre_attention, post_attention), False)
            if backend == "reference"
            else (llm.pieces, llm.graphs)
        )
        self.runners = {
            runtime is self.runtime: StepRunner(
                Decoder(model, llm.rotary, runtime, ring, pieces),
                self.token,
                self.length,
                bank,
                graphs,
            )
            for runtime in (self.runtime, self.dense_runtime)
        }

    def kind(self, n):
        """(own, sparse) of the step that makes the bank n tokens long: whether the method's own
        runs, and whether it reads a part.
        """
        own = n >= self.dense_below and self.runtime.differs
        return own, own and self._partial

    def feed(self, token_id, n):
        """Put the n-th token where the next step reads it."""
        self.token.fill_(token_id)
        self.length.fill_(n - 1)

    def run(self, n, own):
        """Run a step on what was fed: the method's own or full attention's. Returns float32 logits
        [vocab].
        """
        return self.runners[own](n)[0, -1]

    def at(self, length):
        """The engine.decode.Step of the newest of `length` tokens, as decode would have seen it."""
        device = self.token.device
        positions = torch.full((1, 1), length - 1, device=device)
        visible = torch.full((1,), length, dtype=torch.int32, device=device)
        return Step(positions, visible, self.bank, self.bank.capacity, self._ring, self._rotary)

    def newest(self, length, count):
        """Steps of the newest `count` of `length` tokens whose queries are held, oldest first: what
        they choose is chosen again soon.
        """
        for n in range(max(1, length - count + 1, self._ring.low + 1), length + 1):
            yield self.at(n)
