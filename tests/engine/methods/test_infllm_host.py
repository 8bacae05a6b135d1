"""InfLLM over the host tier: the answers of a bank on the device, at most `cached` blocks of a
layer beside its first tokens and its window there, and over the link only what is not.

Stops: a block that comes over although it is there, or that stays although others were read since;
a window that comes once per piece; rows of a text that was taken back; bytes that no plan counts.
"""

import pytest
import torch

from engine import Full, InfLLM
from engine.methods.select.infllm_memory import Layout
from engine.plan.placement import part_bytes
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

CAPACITY = 320
SHAPES = ((4, 4), (8, 2), (8, 1))  # heads, K/V heads: groups of 1, 4 and 8
METHODS = (
    InfLLM(block=5, init=3, local=16, topk=2, representatives=2, cached=4, chunk=8),
    # blocks of one token that leave the ring at once; a cache as large as one choice
    InfLLM(block=1, init=0, local=4, topk=3, representatives=1, cached=3, chunk=4),
    InfLLM(block=7, init=20, local=11, topk=1, representatives=7, cached=9, chunk=11),
    # as wide as a block of host memory, and one more
    InfLLM(block=65, init=1, local=13, topk=2, representatives=3, cached=2, chunk=13),
    # a cache for more blocks than there are
    InfLLM(block=8, init=8, local=64, topk=9, representatives=2, cached=99, chunk=32),
)
EVERY = pytest.mark.parametrize("method", METHODS, ids=lambda m: f"blocks-of-{m.block}")


def llm_of(shape=SHAPES[1], **more):
    """Sessions take the method under test."""
    heads, kv_heads = shape
    config = tiny_config(layers=3, heads=heads, kv_heads=kv_heads)
    given = {"max_context": CAPACITY, "chunk": 50, **more}
    return tiny_llm(Full(), config, tiny_weights(config, seed=3), **given)


class Cache:
    """Counts by hand what every layer's cache must hold, told of each choice as it is made."""

    def __init__(self, session):
        self.session, self.method = session, session.method
        layers = session.bank.placement.layers
        self.used = {layer: {} for layer in layers}  # block -> number of the read that took it last
        self.reads = self.taken = self.missed = 0
        rank = session.runtime.memory.rank

        def watched(layer, *rest):
            chosen = rank(layer, *rest)
            self.take(layer, chosen.tolist())
            return chosen

        session.runtime.memory.rank = watched

    def held(self, layer):
        """Blocks that the device has."""
        cached = self.session.bank._cached
        return {*cached._slots[cached._at[layer]].slot_token.tolist()} - {-1}

    def take(self, layer, blocks):
        """The read before must have left what was used last; this one takes `blocks`."""
        known, there = self.used[layer], self.held(layer)
        assert there <= known.keys() and len(there) <= self.method.cached
        gone = [known[block] for block in known.keys() - there]
        newest = max(known.values(), default=0)
        kept = [known[block] for block in there if known[block] != newest]
        assert not gone or not kept or max(gone) <= min(kept)
        self.used[layer] = {block: known[block] for block in there}
        self.missed, self.taken = self.missed + len({*blocks} - there), self.taken + len(blocks)
        self.reads += 1
        self.used[layer] |= dict.fromkeys(blocks, self.reads)


def rows_are_the_text(on_host, on_device):
    """Whether the device keeps no row that is not the text's, of first tokens and of blocks."""
    cached, cache = on_host.bank._cached, on_host.bank.placement.cache
    for layer in on_host.bank.placement.layers:
        at = cached._at[layer]
        tokens = [*range(cached._first[at])]
        where = list(tokens)
        for place, block in enumerate(cached._slots[at].slot_token.tolist()):
            if block >= 0:
                tokens += range(
                    cache.first + block * cache.size, cache.first + (block + 1) * cache.size
                )
                where += range(
                    cache.first + place * cache.size, cache.first + (place + 1) * cache.size
                )
        assert max(tokens, default=0) < len(on_host)
        rows = on_host.bank._layout.views(cached._rows[at][where])
        for mine, text in zip(rows, on_device.bank.kv(layer)):
            assert torch.equal(mine, text[:, :, tokens])


def came(session):
    """Rows of one layer that have come over the link so far."""
    stats = session.stats
    return (stats.bytes_streamed + stats.bytes_fetched) / part_bytes(session.loaded.config, 4)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@EVERY
def test_only_blocks_that_are_not_there_come_over(method, backend):
    """Row by row, in two prompts of several chunks and in steps: the first tokens once, and the
    blocks that the cache does not hold. No more than the plan says.
    """
    llm = llm_of(backend=backend)
    plan = llm.plan(method, offload="host")
    layers, part = plan.placement.layers, part_bytes(llm.config, 4)
    assert len(layers) == llm.config.num_layers
    with llm.session(method, offload="host") as session:
        cache = Cache(session)
        for count in (130, 70):
            session.prefill(random_ids(count, seed=count))
            if len(session) == count:
                alone = llm.plan(method, offload="host", max_context=count)
                assert came(session) <= alone.prompt_link_bytes / part
            for token in random_ids(30, seed=count):
                before = came(session)
                session.decode(token)
                assert came(session) - before <= plan.step_link_bytes / part
            first = len(layers) * Layout.at(method, len(session) - 1).initial
            assert came(session) == first + cache.missed * method.block
        stats, misses = session.stats, cache.missed
        assert stats.misses == misses > 0 and stats.bytes_fetched == misses * method.block * part
        assert stats.hits + misses == cache.taken
        whole = len(layers) * len(session)
        rows = session.runtime.rows_read(len(session))
        assert sum(rows) < whole  # it really was sparse


@pytest.mark.parametrize(
    ("method", "shape"),
    [(m, SHAPES[i % 3]) for i, m in enumerate(METHODS)],
    ids=lambda x: f"blocks-of-{x.block}" if isinstance(x, InfLLM) else f"{x[0]}-{x[1]}",
)
def test_answers_are_those_of_a_bank_on_the_device(method, shape):
    """To the bit, with answers and prompts taken back, and a fork that goes its own way."""
    llm = llm_of(shape)
    with llm.session(method, offload="device") as one, llm.session(method, offload="host") as two:

        def both(call):
            expected, got = call(one), call(two)
            assert torch.equal(expected, got)

        both(lambda s: s.prefill(random_ids(140)))
        [both(lambda s, t=token: s.decode(t)) for token in random_ids(60, seed=1)]
        for back in (190, 90, 15):
            rows_are_the_text(two, one)
            one.truncate(back), two.truncate(back)
            rows_are_the_text(two, one)
            # other tokens from here on: a block that was kept would be seen
            [both(lambda s, t=token: s.decode(t)) for token in random_ids(9, seed=back)]
            both(lambda s, b=back: s.prefill(random_ids(31, seed=b)))
        one.truncate(40), two.truncate(40)
        both(lambda s: s.prefill(random_ids(60, seed=5)))
        with one.fork() as first, two.fork() as second:
            for token in random_ids(5, seed=7):
                assert torch.equal(first.decode(token), second.decode(token))
            rows_are_the_text(second, first)
        both(lambda s: s.decode(3))


@pytest.mark.parametrize("bank", ["int8", "fp8"])
def test_rows_in_fewer_bits_lie_in_the_cache_as_they_are(bank):
    llm = llm_of(bank=bank)
    seen = []
    for offload in ("device", "host"):
        with llm.session(METHODS[0], offload=offload) as session:
            found = [session.prefill(random_ids(140))]
            found += [session.decode(token) for token in random_ids(20, seed=1)]
            seen.append(torch.stack(found))
            assert (session.stats.hits > 0) == (offload == "host")
    assert torch.equal(*seen)


@EVERY
def test_the_device_holds_what_the_plan_says(method):
    """First tokens, cached blocks and rings of windows; of a longer context only maps and
    representatives are larger.
    """
    llm = llm_of()
    plan, config = llm.plan(method, offload="host"), llm.config
    with llm.session(method, offload="host") as session:
        session.prefill(random_ids(200))
        names = ("context bank", "working sets", "streaming")
        assert session.bank.nbytes == sum(size for name, size, _ in plan.items if name in names)
        cached, cache = session.bank._cached, plan.placement.cache
        assert cache.held <= method.cached and plan.placement.ring >= method.local + method.block
        rows = cache.first + cache.held * cache.size
        assert cached._rows.shape[:2] == (config.num_layers, rows)
        assert cached._rows.nbytes == config.num_layers * rows * part_bytes(config, 4)
    assert f"{cache.held} blocks of {cache.size}" in str(plan)
