"""Check the host tier's kernels; shared by the interpreted, the reference and the GPU tests.

The model of the slot policy is plain Python on purpose: dictionaries and no tensors, the definition
spelled out.
"""

from __future__ import annotations

import random

import torch

from kernels.layer.store import store_step
from kernels.tier.gather import BLOCK_TOKENS, move_rows
from kernels.tier.lru_slots import forget_slots, make_slots, plan_slots


class SlotModel:
    """Exact least-recently-used at step granularity, ties by slot number, empty slots first."""

    def __init__(self, slots: int) -> None:
        self.token = [None] * slots
        self.used = [0] * slots
        self.step = 0
        self.counters = [0, 0, 0, 0]

    def plan(self, chosen: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Plan one step: (slot of every chosen token, [(token, slot)] to fetch)."""
        self.step += 1
        where = {token: slot for slot, token in enumerate(self.token) if token is not None}
        misses = [token for token in chosen if token not in where]
        for token in chosen:
            if token in where:
                self.used[where[token]] = self.step

        def age(slot: int) -> int:
            return 255 if self.token[slot] is None else min(254, self.step - self.used[slot])

        oldest = sorted(range(len(self.token)), key=lambda slot: (-age(slot), slot))
        victims = sorted(oldest[: len(misses)])
        evicted = sum(self.token[slot] is not None for slot in victims)
        for token, slot in zip(misses, victims, strict=True):
            self.token[slot], self.used[slot], where[token] = token, self.step, slot
        for i, more in enumerate((len(chosen) - len(misses), len(misses), evicted, 1)):
            self.counters[i] += more
        return [where[token] for token in chosen], list(zip(misses, victims, strict=True))

    def forget(self, length: int) -> None:
        self.token = [
            None if token is not None and token >= length else token for token in self.token
        ]


def selection(rng: random.Random, capacity: int, budget: int, last: list[int]) -> list[int]:
    """Make a hostile selection: empty, as large as allowed, mostly the last one, or random."""
    kind = rng.choice(["none", "same", "part", "random", "full"])
    if kind == "none":
        return []
    if kind == "same":
        return last
    keep = rng.sample(last, len(last) * 3 // 4) if kind == "part" else []
    count = budget if kind == "full" else rng.randint(0, budget)
    fresh = rng.sample(range(capacity), min(capacity, count))
    return sorted(set(keep) | set(fresh[: max(0, count - len(keep))]))[:budget]


def check_slots(
    device: str, backend: str, seed: int, budget: int, width: int, capacity: int, steps: int
) -> SlotModel:
    """Drive plan_slots and the model with one sequence of selections; all defined fields must be
    identical.
    """
    rng, model = random.Random(seed), SlotModel(width)
    slots = make_slots(capacity, width, budget, device)
    index, last = torch.zeros(budget, dtype=torch.int32, device=device), []
    for _ in range(steps):
        if rng.random() < 0.1:
            length = rng.randint(0, capacity)
            forget_slots(slots, length)
            model.forget(length)
        last = selection(rng, capacity, budget, last)
        index.fill_(-1)
        index[: len(last)] = torch.tensor(last, dtype=torch.int32)
        plan_slots(
            index, torch.tensor([len(last)], dtype=torch.int32, device=device), slots, backend
        )
        where, fetched = model.plan(last)
        assert slots.slot_of[: len(last)].tolist() == where
        assert int(slots.misses) == len(fetched)
        assert (
            list(
                zip(
                    slots.source[: len(fetched)].tolist(),
                    slots.target[: len(fetched)].tolist(),
                    strict=True,
                )
            )
            == fetched
        )
        assert slots.slot_token.tolist() == [
            -1 if token is None else token for token in model.token
        ]
        held = {token: slot for slot, token in enumerate(model.token) if token is not None}
        assert {t: s for t, s in enumerate(slots.token_slot.tolist()) if s >= 0} == held
        assert slots.counters.tolist() == model.counters
    return model


def host_blocks(
    count: int, block_bytes: int, generator: torch.Generator, slabs: int = 2, pin: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Place random blocks in several slabs, in random order: (slabs, addresses int64 [count])."""
    per = -(-count // slabs)
    memory = []
    for _ in range(slabs):
        raw = torch.empty(per * block_bytes + 64, dtype=torch.uint8, pin_memory=pin).random_(
            0, 256, generator=generator
        )
        skip = -raw.data_ptr() % 64
        memory.append(raw[skip : skip + per * block_bytes])
    every = [slab.data_ptr() + i * block_bytes for slab in memory for i in range(per)]
    order = torch.randperm(len(every), generator=generator)[:count]
    return memory, torch.tensor(every)[order]


def check_moves(
    device: str,
    backend: str,
    seed: int,
    width: int,
    layers: int,
    blocks: int,
    count: int,
    programs: int | None = None,
    pin: bool = False,
) -> None:
    """Check that rows fetched by list, streamed in order and written back to host memory land where
    a plain loop over bytes puts them, and nowhere else.
    """
    generator = torch.Generator().manual_seed(seed)
    pitch, tokens = layers * width, blocks * BLOCK_TOKENS
    slabs, addresses = host_blocks(blocks, BLOCK_TOKENS * pitch, generator, pin=pin)
    table, layer = addresses.to(device), layers - 1

    def host_row(token: int, at: int = layer * width, size: int = width) -> torch.Tensor:
        address = int(addresses[token // BLOCK_TOKENS]) + (token % BLOCK_TOKENS) * pitch + at
        slab = next(s for s in slabs if s.data_ptr() <= address < s.data_ptr() + s.numel())
        return slab[address - slab.data_ptr() : address - slab.data_ptr() + size]

    def as_bytes(row: torch.Tensor) -> torch.Tensor:
        return row.cpu().contiguous().view(torch.uint8)

    token = torch.randperm(tokens, generator=generator)[:count].int().to(device)
    slot = torch.randperm(count + 5, generator=generator)[:count].int().to(device)
    buffer = torch.full((count + 5, layers * width // 4), -1, dtype=torch.int32, device=device)
    part = buffer[:, layer * width // 4 : (layer + 1) * width // 4]
    moved = torch.zeros(1, dtype=torch.int64, device=device)
    common = dict(slabs=slabs, backend=backend, programs=programs)
    some = count - count // 3
    move_rows(
        table,
        layer * width,
        pitch,
        part,
        token,
        slot,
        torch.tensor([some], dtype=torch.int32, device=device),
        moved=moved,
        **common,
    )
    assert int(moved) == some * width
    for t, s in zip(token[:some].tolist(), slot[:some].tolist(), strict=True):
        assert torch.equal(as_bytes(part[s]), host_row(t))
    rest = torch.ones(count + 5, dtype=torch.bool)
    rest[slot[:some].cpu().long()] = False
    assert (buffer.cpu()[rest] == -1).all() and (buffer[:, : layer * width // 4] == -1).all()
    # in order, from an odd place
    first = 3
    move_rows(table, 0, pitch, buffer, first, 2, count, **common)
    for i in range(count):
        assert torch.equal(as_bytes(buffer[2 + i]), host_row(first + i, 0, pitch))
    # written back to their host rows, and only there
    before = [slab.clone() for slab in slabs]
    new = (
        torch.randint(
            -(2**31), 2**31 - 1, (count, width // 4), generator=generator, dtype=torch.int64
        )
        .int()
        .to(device)
    )
    move_rows(table, layer * width, pitch, new, first, 0, count, to_host=True, **common)
    if device != "cpu":
        torch.cuda.synchronize()
    for i in range(count):
        assert torch.equal(host_row(first + i), as_bytes(new[i]))
        host_row(first + i).zero_()
    for slab, old in zip(slabs, before, strict=True):
        changed = slab != old
        assert int(changed.sum()) <= count * width
    assert sum(int((slab != old).any()) for slab, old in zip(slabs, before, strict=True)) > 0


STORES = [
    dict(),
    dict(batch=3, queries=3, group=1, layout="tokens"),
    dict(queries=8, group=8, kv_heads=1, dim=80),
    dict(batch=2, dim=5, group=3, layout="tokens"),
    dict(queries=7, slots=7, capacity=7, dtype=torch.bfloat16),
    dict(kv_heads=5, dim=128, dtype=torch.float16, capacity=1),
    dict(layout="tokens", twice=(40, 192), capacity=424),
    dict(layout="tokens", twice=(3, 5), capacity=300, queries=4, dim=80, group=1),
    dict(batch=2, twice=(3, 5), capacity=302, queries=4),  # passes the ring's end
]


def check_store(
    device: str,
    backend: str,
    seed: int,
    batch: int = 1,
    queries: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    dim: int = 64,
    capacity: int = 300,
    slots: int = 128,
    dtype: torch.dtype = torch.float32,
    layout: str = "heads",
    twice: tuple[int, int] | None = None,
) -> None:
    """Check that `store_step` puts every row in its place and touches nothing else, bit for bit
    against a loop over tokens.
    """
    gen = torch.Generator().manual_seed(seed)
    heads = kv_heads * group

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).to(device, dtype)

    # split views, as a layer makes them
    qkv = made(batch, queries, heads + 2 * kv_heads, dim)
    q_pre_rope, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    if layout == "heads":
        bank_k, bank_v = made(2, batch, kv_heads, capacity, dim)
    else:
        bank_k, bank_v = made(batch, capacity, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
    ring = made(batch, slots, heads, dim)
    starts = torch.randint(0, capacity - queries + 1, (batch,), generator=gen)
    starts[0] = capacity - queries
    want = [t.clone() for t in (bank_k, bank_v, ring)]
    for b, start in enumerate(starts.tolist()):
        for j in range(queries):
            at = start + j
            places = (
                [at] if twice is None else [twice[0] + at % twice[1] + n * twice[1] for n in (0, 1)]
            )
            for place in places:
                want[0][b, :, place], want[1][b, :, place] = k[b, j], v[b, j]
            want[2][b, (start + j) % slots] = q_pre_rope[b, j]
    store_step(
        k,
        v,
        q_pre_rope,
        bank_k,
        bank_v,
        ring,
        (starts[:, None] + torch.arange(queries)).to(device),
        twice,
        backend,
    )
    assert all(torch.equal(a, b) for a, b in zip((bank_k, bank_v, ring), want, strict=True))
