"""Plan the working set of one step without visiting the host: which chosen tokens have a slot
already, and which slots the others take.

Policy: exact least-recently-used at step granularity. A slot's age is the number of plans since its
token was last chosen (254 at most); empty slots are oldest. The misses of a plan take the oldest
slots, equal ages by slot number. The slots of tokens chosen in this plan have age 0 and are never
taken. Algorithm: probe, victims, assign, in three launches, because a store read by another thread
of the same Triton program needs a barrier that the language does not promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.launch.dispatch import choose
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton

EMPTY_AGE, OLDEST_AGE = 255, 254
PROBE = 256  # chosen tokens per program
TILE = 1024  # slots per iteration of the victims' program
HITS, MISSES, EVICTIONS, PLANS = range(4)


@dataclass(frozen=True)
class Slots:
    """Slots of one group and the plan of its latest step; int32 on the device, counters int64.

    token_slot [capacity]: slot of a token or -1; slot_token [W]: token of a slot or -1; stamp [W]:
    plan that last used a slot; now [1]: number of the latest plan; slot_of [K]: slot of every
    chosen token, the index of sparse attention; source, target [K]: tokens to fetch and the slots
    they go to, the first misses[0] of each; victims [K] and found [K / 256]: scratch; counters [4]:
    hits, misses, evictions and plans since the beginning.
    """

    token_slot: torch.Tensor
    slot_token: torch.Tensor
    stamp: torch.Tensor
    now: torch.Tensor
    slot_of: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    misses: torch.Tensor
    victims: torch.Tensor
    found: torch.Tensor
    counters: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())


def slots_bytes(capacity: int, slots: int, budget: int) -> int:
    """Count the bytes that `make_slots` of the same sizes allocates."""
    return 4 * (capacity + 2 * slots + 2 + 4 * budget + -(-budget // PROBE)) + 32


def make_slots(capacity: int, slots: int, budget: int, device: torch.device | str) -> Slots:
    """Make empty Slots for selections of up to `budget` tokens, all below `capacity`.

    Raises ValueError if there are fewer slots than `budget`.
    """
    if slots < budget:
        raise ValueError(f"slots: found {slots}, expected at least the budget of {budget} tokens")

    def filled(count: int, value: int = 0) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=device)

    return Slots(
        token_slot=filled(capacity, -1),
        slot_token=filled(slots, -1),
        stamp=filled(slots),
        now=filled(1),
        slot_of=filled(budget),
        source=filled(budget),
        target=filled(budget),
        misses=filled(1),
        victims=filled(budget),
        found=filled(-(-budget // PROBE)),
        counters=torch.zeros(4, dtype=torch.int64, device=device),
    )


def forget_slots(slots: Slots, length: int) -> None:
    """Drop tokens from `length` on, whose K and V will change; 0 empties the working set."""
    slots.token_slot[length:] = -1
    slots.slot_token.masked_fill_(slots.slot_token >= length, -1)


def plan_slots_ref(index: torch.Tensor, count: torch.Tensor, slots: Slots) -> None:
    """Reference of `plan_slots`, same arguments."""
    slots.now.add_(1)
    now, kept = int(slots.now), int(count)
    tokens = index[:kept].long()
    slot = slots.token_slot[tokens]
    hit = slot >= 0
    slots.stamp[slot[hit].long()] = now
    new = tokens[~hit]
    age = torch.where(slots.slot_token < 0, EMPTY_AGE, (now - slots.stamp).clamp(max=OLDEST_AGE))
    victims = torch.sort(torch.sort(age, descending=True, stable=True).indices[: len(new)]).values
    old = slots.slot_token[victims]
    slots.token_slot[old[old >= 0].long()] = -1
    slots.token_slot[new] = victims.int()
    slots.slot_token[victims] = new.int()
    slots.stamp[victims] = now
    slots.slot_of[:kept] = slots.token_slot[tokens]
    slots.source[: len(new)] = new.int()
    slots.target[: len(new)] = victims.int()
    slots.misses.fill_(len(new))
    step = (int(hit.sum()), len(new), int((old >= 0).sum()), 1)
    slots.counters.add_(torch.tensor(step, device=slots.counters.device))


def plan_slots(
    index: torch.Tensor, count: torch.Tensor, slots: Slots, backend: str = "auto"
) -> None:
    """Give every chosen token a slot.

    index [K] int32, the first count[0] entries ascending and distinct; count [1] int32. Fills
    slots.slot_of, and source, target and misses with the tokens to fetch before K and V are read.
    Mutates `slots` only. Raises ValueError for an unknown backend.
    """
    if choose(backend, index) == "triton":
        plan_slots_triton(index, count, slots)
    else:
        plan_slots_ref(index, count, slots)


@triton.jit
def probe_kernel(index, count, token_slot, stamp, now, slot_of, found, PROBE: tl.constexpr):
    """Look up PROBE chosen tokens, stamp the hits (tokens are distinct: one writer per slot) and
    count the misses.
    """
    pid = tl.program_id(0)
    i = pid * PROBE + tl.arange(0, PROBE)
    live = i < tl.load(count)
    token = tl.load(index + i, mask=live, other=0)
    slot = tl.load(token_slot + token, mask=live, other=0)
    tl.store(slot_of + i, slot, mask=live)
    hit = live & (slot >= 0)
    tl.store(stamp + slot, tl.load(now) + tl.zeros([PROBE], tl.int32), mask=hit)
    tl.store(found + pid, tl.sum((live & (slot < 0)).to(tl.int32), 0))


@triton.jit
def ages(slot_token, stamp, now, s, W):
    """Load (token, age) of slots s; slots past the end get age 0, which is never taken."""
    token = tl.load(slot_token + s, mask=s < W, other=0)
    age = tl.minimum(now - tl.load(stamp + s, mask=s < W, other=0), 254)
    return token, tl.where(s < W, tl.where(token < 0, 255, age), 0)


@triton.jit
def victims_kernel(
    count,
    slot_token,
    stamp,
    now,
    found,
    victims,
    misses,
    counters,
    W,
    programs,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Pick the oldest slots, one per miss, ascending by slot number: one program, two passes over
    the stamps.
    """
    p = tl.arange(0, PROGRAMS)
    missing = tl.sum(tl.load(found + p, mask=p < programs, other=0), 0)
    step = tl.load(now)
    hist = tl.zeros([256], tl.int32)
    for first in range(0, W, TILE):
        _, age = ages(slot_token, stamp, step, first + tl.arange(0, TILE), W)
        hist += tl.histogram(age, 256)
    bins = tl.arange(0, 256)
    at_least = tl.cumsum(hist, 0, reverse=True)  # slots of this age or older
    # the youngest age that must give slots
    limit = tl.max(tl.where(at_least >= missing, bins, 0), 0)
    # how many of that age: the lowest slot numbers
    ties = missing - tl.sum(tl.where(bins > limit, hist, 0), 0)
    taken = 0
    equal_before = 0
    evicted = 0
    for first in range(0, W, TILE):
        s = first + tl.arange(0, TILE)
        token, age = ages(slot_token, stamp, step, s, W)
        equal = (age == limit).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0) - equal
        take = ((age > limit) | ((equal > 0) & (rank < ties))).to(tl.int32)
        place = taken + tl.cumsum(take, 0) - take
        tl.store(victims + place, s, mask=take > 0)
        taken += tl.sum(take, 0)
        equal_before += tl.sum(equal, 0)
        evicted += tl.sum(((take > 0) & (token >= 0)).to(tl.int32), 0)
    tl.store(misses, missing)
    c = tl.arange(0, 4)
    more = tl.where(
        c == 0, tl.load(count) - missing, tl.where(c == 1, missing, tl.where(c == 2, evicted, 1))
    )
    tl.store(counters + c, tl.load(counters + c) + more)


@triton.jit
def assign_kernel(
    index,
    count,
    token_slot,
    slot_token,
    stamp,
    now,
    slot_of,
    found,
    victims,
    source,
    target,
    PROGRAMS: tl.constexpr,
    PROBE: tl.constexpr,
):
    """Give the r-th miss the r-th victim.

    race: an evicted token is not chosen now (its slot would have age 0) and victims are distinct,
    so the two writes to token_slot never meet, whatever the order of programs.
    """
    pid = tl.program_id(0)
    i = pid * PROBE + tl.arange(0, PROBE)
    live = i < tl.load(count)
    miss = live & (tl.load(slot_of + i, mask=live, other=0) < 0)
    p = tl.arange(0, PROGRAMS)
    before = tl.sum(tl.load(found + p, mask=p < pid, other=0), 0)
    one = miss.to(tl.int32)
    rank = before + tl.cumsum(one, 0) - one
    token = tl.load(index + i, mask=miss, other=0)
    slot = tl.load(victims + rank, mask=miss, other=0)
    old = tl.load(slot_token + slot, mask=miss, other=-1)
    tl.store(token_slot + old, tl.full([PROBE], -1, tl.int32), mask=miss & (old >= 0))
    tl.store(token_slot + token, slot, mask=miss)
    tl.store(slot_token + slot, token, mask=miss)
    tl.store(stamp + slot, tl.load(now) + tl.zeros([PROBE], tl.int32), mask=miss)
    tl.store(slot_of + i, slot, mask=miss)
    tl.store(source + rank, token, mask=miss)
    tl.store(target + rank, slot, mask=miss)


def plan_slots_triton(index: torch.Tensor, count: torch.Tensor, slots: Slots) -> None:
    """`plan_slots` by the Triton kernels of this file, same arguments. Four launches; 24 bytes per
    chosen token and 16 per slot.
    """
    budget, width = slots.slot_of.shape[0], slots.slot_token.shape[0]
    programs = -(-budget // PROBE)
    many = max(2, power_of_two(programs))
    s = slots
    s.now.add_(1)
    probe_kernel[(programs,)](
        index, count, s.token_slot, s.stamp, s.now, s.slot_of, s.found, PROBE=PROBE, num_warps=4
    )
    victims_kernel[(1,)](
        count,
        s.slot_token,
        s.stamp,
        s.now,
        s.found,
        s.victims,
        s.misses,
        s.counters,
        width,
        programs,
        PROGRAMS=many,
        TILE=TILE,
        num_warps=8,
    )
    assign_kernel[(programs,)](
        index,
        count,
        s.token_slot,
        s.slot_token,
        s.stamp,
        s.now,
        s.slot_of,
        s.found,
        s.victims,
        s.source,
        s.target,
        PROGRAMS=many,
        PROBE=PROBE,
        num_warps=4,
    )
