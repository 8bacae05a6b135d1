"""A method at a share of the bytes that full attention's step reads: the largest budget whose steps
read no more, what they read to choose included.

Bytes are what the method itself declares (`rows_read`, `choosing_bytes`), over the last STEPS steps
of a session: rows of K and V in every layer, those that read everything included, and the index, or
the keys, by which a layer chooses. A bound's choosing is left out: an oracle is told.
"""

from __future__ import annotations

from engine import LLM
from engine.methods.base import Method
from tools.bench.floor import step_bytes
from tools.bench.run import counted
from tools.compare.build import Entry, Facts, largest

STEPS = 32  # over which a step's bytes are averaged: OmniKV's tail moves by blocks


def step_share(llm: LLM, method: Method, capacity: int, told: bool = False) -> float:
    """Bytes of the last STEPS steps of a session of `capacity` tokens, as a share of full
    attention's. told: what choosing reads does not count.
    """
    resolved, layers = llm.resolve_method(method)
    prompt, size, read, full = capacity - STEPS, llm.dtype.itemsize, 0, 0
    count = counted(llm, resolved, layers, prompt, capacity)
    for n in range(prompt + 1, capacity + 1):
        rows, choosing = count(n)
        read += step_bytes(llm.config, size, layers, n, rows).read + choosing * (not told)
        full += sum(llm.config.rows_seen(n)) * llm.config.kv_bytes(size)
    return read / full


def share_at(facts: Facts, entry: Entry, part: float) -> float | str:
    """The share of the tokens at which an entry's method reads at most `part` of full attention's
    bytes, or a text why there is none. An oracle has as many tokens as the method that it bounds.
    """
    if entry.of is not None:
        return share_at(facts, entry.of, part)
    build = entry.build if entry.within is None else entry.within(part)
    told = entry.group == "bounds"

    def read(tokens: int) -> float | str:
        made = build(facts, tokens / facts.capacity)
        return made if isinstance(made, str) else step_share(facts.llm, made, facts.capacity, told)

    least = read(1)
    if isinstance(least, str):
        return least
    if least > part:
        return f"a step reads {100 * least:.1f}% of full attention's bytes at the least"
    most = largest(1, facts.capacity, lambda tokens: float(read(tokens)) <= part)
    return most / facts.capacity


def at_read(facts: Facts, entry: Entry, part: float) -> Method | str:
    """The method of an entry that reads at most `part` of full attention's bytes, or why there is
    none.
    """
    share = share_at(facts, entry, part)
    if isinstance(share, str):
        return share
    build = entry.build if entry.within is None else entry.within(part)
    made: Method | str = build(facts, share)
    return made
