"""The bytes that a method holds: K and V on the device, metadata, buffers and host memory, each
read from what a session allocated.

A method is measured in the form in which it saves memory: offloaded layers are in host memory, with
one slot per selected token. Answers may come from a bank on the device: placement never changes an
answer. Of an evicting method `device` is the store. One that forgets holds nothing else; beside the
others this engine keeps the whole bank, unread, so that a session can go back, and counts it in
`peak`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine import LLM, Full, OmniKV
from engine.load.memory import window_bytes
from engine.load.planner import Planner
from engine.methods.base import Method
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.evict.shared.settings import Evicting
from engine.session.session import Session
from tools.banks.registry import REAL, quantiser
from tools.banks.simulated import SimulatedBank, simulated
from tools.common.synthetic_bank import synthesize
from tools.compare.kept import inner_of, kept_of


@dataclass(frozen=True)
class Held:
    """Bytes of one session after a prompt and a step.

    device: K and V (slots and tails included); metadata: scores, indices, positions, maps; buffers:
    staging of rows on their way; host: host blocks; peak: the most on the device at once; full: K
    and V of full attention at the same capacity.
    """

    device: int
    metadata: int
    buffers: int
    host: int
    peak: int
    full: int

    @property
    def resident(self) -> float:
        """Mem%: K and V on the device as a share of full attention's."""
        return self.device / self.full

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self) | {"resident": self.resident}


def offloaded(llm: LLM, method: Method, capacity: int) -> LLM:
    """An LLM over the same weights with sessions that hold `method` as it saves memory: OmniKV's
    kin and brutal offload in host memory, one slot per selected token, all others as published, on
    the device.
    """
    inner = inner_of(method)
    inner = getattr(inner, "method", inner)
    offload = "host" if isinstance(inner, (OmniKV, BrutalOffload)) else "device"
    return LLM.sharing(llm, method=method, max_context=capacity, offload=offload, slots=1)


def full_bytes(llm: LLM | Planner, capacity: int) -> int:
    """Bytes of all keys and values of `capacity` tokens; a sliding-window layer keeps its ring."""
    config, size = llm.config, llm.dtype.itemsize
    seeing = config.num_layers - len(config.local_layers)
    rings = window_bytes(config, size, llm.chunk, capacity)
    return seeing * capacity * config.kv_bytes(size) + rings


def device_share(llm: LLM, method: Method, capacity: int) -> float:
    """Planned Mem% of a method as `offloaded` holds it; `held` reads the same from a session."""
    if isinstance(method, Evicting):
        size = llm.dtype.itemsize
        resolved, layers = llm.resolve_method(method)
        assert isinstance(resolved, Evicting)
        method = resolved
        kept = method.kv_bytes(layers, llm.config, size, capacity - 1, 1)
        return kept / full_bytes(llm, capacity)
    plan = offloaded(llm, method, capacity).plan()
    slots = (
        plan.placement.device_items(llm.config, llm.dtype.itemsize, capacity)["slots"]
        if plan.placement
        else 0
    )
    bank = plan.bytes_of("context bank")
    bank += window_bytes(llm.config, llm.dtype.itemsize, llm.chunk, capacity)
    return (bank + slots) / full_bytes(llm, capacity)


def resident(session: Session) -> tuple[int, int]:
    """(bytes of K and V that a session which forgets has allocated, those of all its tokens so far
    under full attention).
    """
    stores = getattr(session.runtime, "sequences", None)  # none where rows are made anew
    layers = stores[0].layers if stores else ()
    rows = sum(side.nbytes for layer in layers for part in layer for side in (part.k, part.v))
    full = full_bytes(session.planner, len(session))
    return rows + session.stats.bank_bytes, full


def held(session: Session) -> Held:
    """Held of an open session. Raises AssertionError where the parts do not add up to what is
    allocated.
    """
    config, stats = session.loaded.config, session.stats
    total, placement = (
        full_bytes(session.planner, session.capacity),
        getattr(session.bank, "placement", None),
    )
    if session.runtime.needs.history == "store":
        kept, layers = kept_of(session.method), session.runtime.sequences[0].layers
        sizes = [
            sum(t.numel() * t.element_size() for rows in layer for t in (rows.k, rows.v))
            for layer in layers
        ]
        # a kept layer is read from the bank, and its store not at all
        whole = total // config.num_layers
        device = sum(whole if layer in kept else size for layer, size in enumerate(sizes))
        return Held(
            device,
            stats.store_bytes - sum(sizes),
            0,
            0,
            stats.bank_bytes + stats.store_bytes,
            total,
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
    size = session.loaded.dtype.itemsize
    parts = placement.device_items(config, size, session.capacity)
    dense = (
        (config.num_layers - len(config.local_layers) - len(placement.layers))
        * session.capacity
        * config.kv_bytes(size)
    )
    dense += session.bank.ring_bytes
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


def measure(llm: LLM, method: Method, capacity: int, ids: Sequence[int]) -> Held:
    """Held of a session of `method` that has read `capacity` - 1 tokens and decoded one.

    An evicting method may keep more or less of another text, so it reads `ids`, repeated as often
    as it takes. For the others random rows are filled in.
    """
    with offloaded(llm, method, capacity).session() as session:
        if isinstance(inner_of(method), Evicting):
            session.prefill((list(ids) * -(-capacity // len(ids)))[: capacity - 1])
        else:
            synthesize(session, capacity - 1)
        session.decode(ids[-1])
        return held(session)


def measure_banks(
    llm: LLM, names: Sequence[str], capacity: int, ids: Sequence[int]
) -> dict[str, Held]:
    """Held of whole banks of other forms, wherever they lie, that hold `capacity` tokens of `ids`,
    repeated as often as it takes. `full` is the same in 16 bits; of a simulated bank `device` is
    what its format would take.
    """
    if not names:
        return {}
    found = {}
    full = llm.config.num_layers * capacity * llm.config.kv_bytes(2)
    with llm.session(Full(), max_context=capacity, offload="device") as base:
        base.prefill((list(ids) * -(-capacity // len(ids)))[:capacity])
        for name in names:
            if name in REAL:
                settings: dict[str, Any] = dict(max_context=capacity, offload="device")
                with LLM.sharing(llm, bank=name).session(Full(), **settings) as session:
                    size = session.stats.bank_bytes
            else:
                with simulated(base, quantiser(name)) as session:
                    assert isinstance(session.bank, SimulatedBank)
                    session.bank.settle(capacity)
                    size = session.bank.held_bytes(capacity)
            found[name] = Held(size, 0, 0, 0, size, full)
    return found
