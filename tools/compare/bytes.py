"""What a method holds: keys and values on the device, metadata, buffers and host memory, each read
from what a session allocated.

A method is measured in the form in which it saves memory: what it lets go lies in host memory, with
one slot per selected token. Answers may be given over a bank that is on the device altogether:
placement never changes an answer. What an evicting method holds is its store; the bank stands
beside it in this engine, unread, so that a session can go back: it counts in `peak`.
"""

from dataclasses import asdict, dataclass

from engine.methods.evict.store import row_bytes
from tools.clone import clone
from tools.synthetic_bank import synthesize


@dataclass(frozen=True)
class Held:
    """Bytes of one session after a prompt and a step. full: keys and values of full attention at
    the same capacity.

    device: keys and values (slots and tails included); metadata: scores, indices, positions, maps;
    buffers: what rows stream through; host: host blocks; peak: the most that stood on the device at
    once.
    """

    device: int
    metadata: int
    buffers: int
    host: int
    peak: int
    full: int

    @property
    def resident(self):
        """Mem%: device keys and values as a share of full attention's."""
        return self.device / self.full

    def to_dict(self):
        """Plain dict for JSON."""
        return asdict(self) | {"resident": self.resident}


def offloaded(llm, method, capacity):
    """An LLM over the same weights whose sessions hold `method` as it saves memory: host placement,
    one slot per selected token.
    """
    return clone(llm, method=method, max_context=capacity, offload="host", slots=1)


def full_bytes(llm, capacity):
    """Bytes of all keys and values of `capacity` tokens."""
    return llm.config.num_layers * capacity * llm.config.kv_bytes(llm.dtype.itemsize)


def device_share(llm, method, capacity):
    """Planned Mem% of a method as `offloaded` would hold it; `held` reads the same from a session."""
    if method.evicts:
        size, (method, plan) = llm.dtype.itemsize, llm.resolve_method(method)
        rows = method.held_bytes(plan, llm.config, size, capacity - 1, 1) // row_bytes(
            llm.config, size, method.scored
        )
        return (
            rows * llm.config.kv_bytes(size) / llm.config.num_kv_heads / full_bytes(llm, capacity)
        )
    plan = offloaded(llm, method, capacity).plan()
    slots = (
        plan.placement.device_items(llm.config, llm.dtype.itemsize, capacity)["slots"]
        if plan.placement
        else 0
    )
    return (plan.bytes_of("context bank") + slots) / full_bytes(llm, capacity)


def held(session):
    """Held of an open session. Raises AssertionError where the parts do not add up to what is
    allocated.
    """
    llm, stats = session.llm, session.stats
    total, placement = full_bytes(llm, session.capacity), getattr(session.bank, "placement", None)
    if session.runtime.evicts:
        rows = [rows for layer in session.runtime.sequences[0].layers for rows in layer]
        device = sum(t.numel() * t.element_size() for part in rows for t in (part.k, part.v))
        return Held(
            device, stats.store_bytes - device, 0, 0, stats.bank_bytes + stats.store_bytes, total
        )
    if placement is None:
        return Held(
            stats.bank_bytes,
            stats.selection_bytes,
            0,
            0,
            stats.bank_bytes + stats.selection_bytes,
            total,
        )
    size = llm.dtype.itemsize
    parts = placement.device_items(llm.config, size, session.capacity)
    dense = (
        (llm.config.num_layers - len(placement.layers))
        * session.capacity
        * llm.config.kv_bytes(size)
    )
    if dense + sum(parts.values()) != stats.bank_bytes:
        raise AssertionError(
            f"planned {dense + sum(parts.values())} bytes of bank, allocated {stats.bank_bytes}"
        )
    return Held(
        dense + parts["slots"],
        parts["maps"] + stats.selection_bytes,
        parts["staging"],
        stats.host_bytes,
        stats.bank_bytes + stats.selection_bytes,
        total,
    )


def measure(llm, method, capacity, ids):
    """Held of a session of `method` that has read `capacity` - 1 tokens and decoded one.

    What evicting methods keep may depend on what was read: they read `ids`, repeated as often as it
    takes. For the others rows are filled.
    """
    with offloaded(llm, method, capacity).session() as session:
        if method.evicts:
            session.prefill((ids * -(-capacity // len(ids)))[: capacity - 1])
        else:
            synthesize(session, capacity - 1)
        session.decode(ids[-1])
        return held(session)
