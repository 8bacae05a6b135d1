"""One layer of a runtime outside a session: a bank with random rows, NaN beyond the lengths, and a
step over it.
"""

import torch

from engine.bank.device import DeviceBank
from engine.decode import Step
from engine.methods.base import Setup
from engine.model.rope import Rotary
from engine.query_ring import QueryRing
from kernels.scratch import make_scratch
from tests.engine.tiny import tiny_config

SHAPES = ((4, 4), (8, 2), (8, 1))  # heads, kv heads: groups of 1, 4 and 8
LAYERS = 4


class World:
    """A runtime of `method` and a bank of random rows (float32 unless dtype says else), LAYERS
    layers of head_dim 16.
    """

    def __init__(
        self,
        method,
        shape,
        capacity,
        batch=1,
        backend="reference",
        dtype=torch.float32,
        seed=0,
        layers=LAYERS,
        **config,
    ):
        heads, kv_heads = shape
        self.config = tiny_config(
            layers=layers, heads=heads, kv_heads=kv_heads, hidden=16 * heads, **config
        )
        self.plan, self.capacity, self.batch = method.plan(self.config), capacity, batch
        self.rotary, self.generator = Rotary(self.config), torch.Generator().manual_seed(seed)
        scratch = make_scratch(
            batch,
            1,
            heads,
            kv_heads,
            16,
            capacity,
            method.budget_capacity(self.plan, capacity),
            "cpu",
            True,
            0,
            backend=backend,
            dtype=dtype,
        )
        self.bank = DeviceBank(self.config, self.plan, capacity, dtype, "cpu", batch)
        self.ring = QueryRing(self.config, batch, dtype, "cpu")
        for layer in range(layers):
            for part in self.bank.kv(layer):
                part.fill_(float("nan"))
        self.runtime = method.runtime(
            Setup(
                self.config,
                self.plan,
                capacity,
                torch.device("cpu"),
                dtype,
                batch,
                backend,
                scratch,
            )
        )
        self.dtype = dtype

    def random(self, *shape):
        """Normal values in the bank's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def queries(self, count=1):
        """q [B, count, H, D]."""
        return self.random(self.batch, count, self.config.num_heads, 16)

    def fill(self, layer, start, stop, b=None):
        """Random rows start .. stop-1 of one layer, of one sequence or all."""
        for part in self.bank.kv(layer):
            rows = self.random(self.batch, self.config.num_kv_heads, stop - start, 16)
            part[slice(None) if b is None else slice(b, b + 1), :, start:stop] = (
                rows if b is None else rows[:1]
            )

    def step(self, *lengths):
        """The Step of one token per sequence that makes them this long; its rows must have been
        written.
        """
        visible = torch.tensor(lengths, dtype=torch.int32)
        return Step(
            (visible - 1).long()[:, None], visible, self.bank, self.capacity, self.ring, self.rotary
        )
