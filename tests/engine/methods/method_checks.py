"""What the generic tests of methods share: models, ragged batches, planted keys, and the bytes that
are really held.
"""

import contextlib
import functools

import torch

from engine.bank.base import Step
from engine.bank.device import DeviceBank
from engine.bank.query_ring import QueryRing
from engine.methods.full import Full
from engine.model.rope import apply_rope
from tests.builders import random_ids, setup_of, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_table import CAPACITY

SHAPES = ((7, 4, 2), (7, 4, 4), (7, 8, 1))  # layers, heads, kv heads: groups of 2, 1 and 8


@functools.lru_cache
def llm_of(shape=SHAPES[0], chunk=64, backend="reference", seed=3):
    """An LLM whose sessions take the method under test."""
    layers, heads, kv_heads = shape
    config = tiny_config(layers=layers, heads=heads, kv_heads=kv_heads)
    return tiny_llm(
        Full(),
        config,
        tiny_weights(config, seed=seed),
        max_context=CAPACITY,
        chunk=chunk,
        backend=backend,
    )


def allocated(thing, stop=("setup", "method", "plan", "pool", "bank"), seen=None):
    """Bytes of every tensor storage that hangs on an object of ours, each counted once; what `stop`
    names is somebody else's.
    """
    seen = {} if seen is None else seen
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, dict):
        for part in thing.values():
            allocated(part, stop, seen)
    elif isinstance(thing, (list, tuple, set)):
        for part in (*thing, *getattr(thing, "__dict__", {}).values()):
            allocated(part, stop, seen)
    elif type(thing).__module__.startswith("engine."):
        for name, part in vars(thing).items():
            if name not in stop:
                allocated(part, stop, seen)
    return sum(seen.values())


def needs_of(method):
    """The Needs of a method in the sessions of the table."""
    layers, heads, kv_heads = SHAPES[0]
    config = tiny_config(layers=layers, heads=heads, kv_heads=kv_heads)
    return method.needs(method.plan(config), config, CAPACITY, 4)


class Still:
    """A rotary that turns nothing, so that one planted key is as near to every query."""

    def at(self, positions, total=None, layer=0):
        """cos 1 and sin 0 at any positions."""
        shape = (*positions.shape, 8)
        return torch.ones(shape), torch.zeros(shape)

    apply = staticmethod(apply_rope)

    @staticmethod
    def rope_of(layer):
        """One rope for all layers."""
        return 0

    @staticmethod
    def turns_by(by):
        """cos 1 and sin 0 by any positions."""
        return torch.ones(*by.shape, 8), torch.zeros(*by.shape, 8)

    @staticmethod
    def rotate_by(x, by):
        """x as it is."""
        return x


def planted_runtime(method, positions, length=320, seed=0, backend="reference"):
    """A runtime that has read `length` tokens and run one step, whose keys at `positions` carry
    nearly all attention of every head.
    """
    config = tiny_config(layers=7, heads=4, kv_heads=2)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    generator = torch.Generator().manual_seed(seed)
    setup = setup_of(config, method, CAPACITY, backend=backend)
    bank, ring = (
        DeviceBank(config, setup.plan, CAPACITY, torch.float32, "cpu"),
        QueryRing(config, 1, torch.float32, "cpu"),
    )
    runtime = method.runtime(setup)

    def rows(count):
        """q, k, v of `count` tokens: queries of a K/V head point one way, keys are small noise."""
        way = torch.zeros(kv_heads, dim)
        way[torch.arange(kv_heads), 1 + 3 * torch.arange(kv_heads)] = 1.0
        q = way.repeat_interleave(heads // kv_heads, 0) + 0.05 * torch.randn(
            1, count, heads, dim, generator=generator
        )
        k = 0.1 * torch.randn(1, count, kv_heads, dim, generator=generator)
        return q, k, torch.randn(1, count, kv_heads, dim, generator=generator), way

    def step_of(n):
        return Step(
            torch.full((1, 1), n - 1),
            torch.full((1,), n, dtype=torch.int32),
            bank,
            CAPACITY,
            ring,
            Still(),
        )

    runtime.rotary = Still()  # of methods that turn rows themselves
    runtime.begin_prompt(0, length)
    newest = []
    for layer in range(config.num_layers):
        q, k, v, way = rows(length)
        k[0, positions] = 40.0 * way
        bank.write_chunk(layer, k, v, 0)
        runtime.attend_prompt(layer, q, bank, 0)
        newest.append(q[:, -64:])
    runtime.commit(length)
    ring.write_chunk(torch.stack(newest), length)
    ring.set_valid(length - 64, length)
    runtime.end_prompt(length, step_of(length))
    step = step_of(length + 1)
    for layer in range(config.num_layers):
        q, k, v, _ = rows(1)
        bank.write_step(layer, k, v, q, step)
        runtime.attend(layer, q, step)
    runtime.commit(1)
    return runtime


@contextlib.contextmanager
def everything_happened(llm, method, away=40, at=(100, 131, 140, 200, 260), **given):
    """A session to which everything happened that can, against a fresh one that read the same
    tokens in the same order: a prompt up to at[0] and steps up to at[2], cut at at[1] and `away`
    other tokens read, another method there; then a prompt up to at[3], steps up to at[4], and a
    fork. Every one of those steps has the same bits in all. Gives both.
    """
    read, cut, stepped, prompt, end = at
    ids = random_ids(end, seed=4)
    with llm.session(method, **given) as one, llm.session(method, **given) as other:
        for session in (one, other):
            session.prefill(ids[:read])
            for token in ids[read:stepped]:
                session.decode(token)
        one.truncate(cut)
        for token in random_ids(away, seed=9):
            one.decode(token)
        one.truncate(cut)
        one.set_method(Full())
        one.decode(ids[cut])
        one.truncate(cut)
        one.set_method(method)
        for token in ids[cut:stepped]:
            one.decode(token)
        with one.fork() as twin:
            for session in (one, other, twin):
                session.prefill(ids[stepped:prompt])
            for token in ids[prompt:]:
                expected = other.decode(token)
                assert torch.equal(one.decode(token), expected)
                assert torch.equal(twin.decode(token), expected)
        assert one.stats.sparse_steps > end - prompt
        yield one, other
