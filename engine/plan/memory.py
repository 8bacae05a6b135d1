"""The memory plan: what a model will need, from config.json alone, before anything is allocated;
and what fits.
"""

import ctypes
from dataclasses import dataclass

import torch

from engine.errors import OutOfMemoryPlan
from engine.plan.free_memory import available_bytes
from engine.plan.layers import LayerPlan
from engine.plan.mem import mem_from_budget
from engine.plan.placement import SLOTS, fitting, full_placement
from engine.query_ring import RING
from engine.units import human
from kernels.scratch import scratch_bytes

GIB = 1024**3
# of the free memory may be planned for: a card filled to 98% is 5-20 times slower, without an error
HEADROOM = 0.95
# 3.3K tokens hide a layer's past at 650 TFLOP/s and 50 GB/s (docs/OFFLOAD.md)
OFFLOAD_CHUNK = 4096
ROUND = 64  # contexts are whole blocks


def trim_heap():
    """Give pages that the allocator holds but nobody uses back to the system (glibc; elsewhere
    nothing happens).

    Weights that are re-laid while loading leave holes of their size: 8% of a float32 160M model,
    measured.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def trimmed(stream, every=32 * 2**20):
    """Pass (name, tensor) pairs on, trimming the heap after each `every` bytes: what a load holds
    stays near what it has loaded.
    """
    since = 0
    for name, tensor in stream:
        since += tensor.numel() * tensor.element_size()
        yield name, tensor
        del tensor
        if since >= every:
            trim_heap()
            since = 0


@dataclass(frozen=True)
class Plan:
    """Layer plan and memory plan of one model under one method; printable, nothing allocated."""

    model: str
    method: object
    layers: LayerPlan
    device: str
    dtype: str
    max_context: int
    largest_context: int
    chunk: int
    dense_below: int
    items: tuple  # (name, bytes, note)
    free: int
    free_name: str
    note: str = ""
    # engine.plan.placement.Placement: what lives in host memory; None: nothing
    placement: object = None
    # host tier of one session at max_context (on a CPU it is part of the total)
    host_bytes: int = 0
    host_free: int = 0
    full_bank: int = 0  # bytes of all rows of all layers at max_context
    budget: int = 0  # selected (or retained) tokens at max_context
    # bytes of keys and values that an evicting method keeps after a prompt of max_context
    kept: int = 0

    @property
    def total(self):
        """Bytes at the peak: everything resident plus the prefill workspace."""
        return sum(size for _, size, _ in self.items)

    @property
    def fits(self):
        """Whether the peaks stay within the device and host memory that may be planned for."""
        return self.total <= self.free * HEADROOM and (
            self.device == "cpu" or self.host_bytes <= self.host_free * HEADROOM
        )

    @property
    def mem(self):
        """The paper's Mem% at max_context: a + b (1 - a), the share of the bank that a step reads."""
        return (
            mem_from_budget(self.budget, self.max_context, self.layers.dense_share)
            if self.budget
            else 1.0
        )

    @property
    def resident(self):
        """Share of the bank that is allocated on the device at max_context, slots, tail and staging
        included; where rows are evicted, what is kept: the bank stands beside it.
        """
        if self.kept:
            return self.kept / max(1, self.full_bank)
        held = sum(
            size
            for name, size, _ in self.items
            if name in ("context bank", "working sets", "streaming")
        )
        return held / max(1, self.full_bank)

    @property
    def where(self):
        """One line of what went where."""
        if self.placement is None:
            return "everything on the device"
        slow = (
            ""
            if self.device == "cpu" or self.chunk >= OFFLOAD_CHUNK
            else f"; chunks of {self.chunk} do not hide the past's way back"
        )
        return f"{self.placement.describe()}; {human(self.host_bytes)} of {human(self.host_free)} free host memory{slow}"

    def bytes_of(self, name):
        """Bytes of one item by name."""
        return next(size for item, size, _ in self.items if item == name)

    def to_dict(self):
        """Plain dict for JSON."""
        return {
            "model": self.model,
            "method": repr(self.method),
            "layers": self.layers.describe(),
            "device": self.device,
            "dtype": self.dtype,
            "max_context": self.max_context,
            "largest_context": self.largest_context,
            "chunk": self.chunk,
            "dense_below": self.dense_below,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "fits": self.fits,
            "items": {name: size for name, size, _ in self.items},
            "host_bytes": self.host_bytes,
            "mem": self.mem,
            "resident": self.resident,
            "placement": self.where,
        }

    def __str__(self):
        width = max(len(name) for name, _, _ in self.items)
        lines = [
            f"model     {self.model}, {self.dtype} on {self.device}",
            f"method    {self.method!r}",
            f"layers    {self.layers.describe()}",
        ]
        if self.layers.sparse_layers:
            lines.append(
                "sparse    "
                + (
                    "at every length"
                    if not self.dense_below
                    else f"from {self.dense_below} tokens on (below, full attention reads less)"
                )
            )
        lines += [
            f"context   {self.max_context} tokens, prefill in chunks of {self.chunk}",
            "memory",
        ]
        lines += [
            f"  {name:<{width}}  {human(size):>10}  {note}".rstrip()
            for name, size, note in self.items
        ]
        lines.append(
            f"  {'total at peak':<{width}}  {human(self.total):>10}  of {human(self.free)} {self.free_name}"
        )
        lines.append(
            f"placement {self.where}; mem {self.mem:.1%} (formula), resident {self.resident:.1%} (allocated)"
        )
        lines.append(f"largest context that fits here: {self.largest_context} tokens")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)

    def check(self, flag="max_context"):
        """Raise OutOfMemoryPlan with the remedies in order where the plan does not fit."""
        if self.fits:
            return
        if self.total <= self.free * HEADROOM:
            raise OutOfMemoryPlan(
                f"{self.model} at {self.max_context} tokens needs {human(self.host_bytes)} of host memory for offloaded layers, but "
                f"only {human(self.host_free * HEADROOM)} of the {human(self.host_free)} free may be used; remedies: {flag}="
                f"{self.largest_context}, then offload='device', then freeing memory"
            )
        part, size, _ = max(self.items, key=lambda item: item[1])
        fewer = (
            f"a context of at most {self.largest_context} tokens ({flag}={self.largest_context})"
            if self.largest_context >= ROUND
            else "a smaller model"
        )
        raise OutOfMemoryPlan(
            f"{self.model} at {self.max_context} tokens needs {human(self.total)} ({part}: {human(size)}), but only "
            f"{human(self.free * HEADROOM)} of the {human(self.free)} {self.free_name} may be used; remedies: {fewer}, "
            f"then a smaller dtype than {self.dtype}, then freeing memory"
        )


def default_chunk(device_type, config):
    """Tokens per prefill chunk: large enough that products run at full rate, small beside any long
    prompt.

    On a CPU 1024 is within 4% of a whole prompt at once and 512 within 10% (docs/LOG.md,
    2026-11-20); above two billion parameters 512, because a chunk is also how long Ctrl-C waits.
    """
    if device_type == "cuda":
        return 2048
    return 1024 if config.parameters <= 2e9 else 512


def memory_items(
    config, method, layers, dtype, device, context, chunk, backend="auto", placement=None
):
    """The plan's parts at a context: tuple of (name, bytes, note). Everything but the bank and a
    few buffers is O(1) in context.

    placement: what lives in host memory; on a CPU, where it takes the same memory, the host tier is
    an item too.
    """
    size = dtype.itemsize
    kept = config.num_layers - (len(placement.layers) if placement else 0)
    bank = kept * context * config.kv_bytes(size)
    budget = method.budget_capacity(layers, context)
    windowed = getattr(method, "selector", "last") != "last"
    scratch = scratch_bytes(
        batch=1,
        queries=1,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        capacity=context,
        budget=budget,
        device=device,
        scored=budget > 0,
        window=method.window if windowed else 0,
        backend=backend,
        dtype=dtype,
    )
    selection = method.runtime_bytes(layers, context, config, size)
    ring = config.num_layers * RING * config.q_size * size
    store = method.store_bytes(layers, config, size, context)
    return (
        ("weights", config.parameters * size, f"{config.parameters / 1e9:.2f} B parameters"),
        ("context bank", bank, f"{kept} layers x {config.kv_bytes(size)} B per token"),
        *_tier_items(config, placement, size, context, device),
        ("query ring", ring, f"last {RING} queries of every layer"),
        ("decode scratch", scratch, ""),
        ("selection", selection, "scores and indices" if budget else ""),
        *((("retained rows", store, "the most that is kept beside the bank"),) if store else ()),
        (
            "prefill workspace",
            prefill_bytes(config, size, chunk, device.type),
            f"activations of one chunk of {chunk} tokens",
        ),
    )


def _tier_items(config, placement, size, context, device):
    if placement is None:
        return ()
    parts = placement.device_items(config, size, context)
    items = (
        (
            "working sets",
            parts["slots"] + parts["maps"],
            f"{placement.slots} slots and {placement.ring} newest rows per group",
        ),
        ("streaming", parts["staging"], f"blocks of {placement.block} tokens"),
    )
    if device.type == "cpu":
        items += (("host tier", placement.host_bytes(config, size, context), "in ordinary memory"),)
    return items


def prefill_bytes(config, size, chunk, device_type):
    """Peak activations of one chunk: residual, norm, q/k/v, attention in float32 with its
    log-sum-exp, gate, up and product.

    On a CPU a product of many rows re-packs its weight, and the heap keeps what tensors of
    different sizes leave between each other: half as much again as all of a layer's activations
    (measured for chunks of 512: 50 MB for the 160M shape in bfloat16, 95 in float32, 115 for
    Llama-3.2-1B in bfloat16; planned 43, 80 and 157).
    """
    residual = 4 * config.hidden_size * size + 4 * config.hidden_size
    attention = config.q_size * (2 * size + 8) + 2 * config.kv_size * size + 8 * config.num_heads
    mlp = 3 * config.intermediate_size * size
    if device_type != "cpu":
        return chunk * (residual + max(attention, mlp)) + 4 * config.vocab_size
    widest = 2 * config.intermediate_size * config.hidden_size * size
    return (
        chunk * (residual + attention + mlp + config.intermediate_size * size) * 3 // 2
        + widest
        + 4 * config.vocab_size
    )


def make_plan(
    name, config, method, layers, dtype, device, max_context=None, chunk=None, **settings
):
    """The Plan of a model (`plan_at`). chunk None: the device's default, on a GPU a larger one
    where layers are offloaded and it fits.

    A chunk of C tokens hides the past's way back while C >= operations per second / (4 x link bytes
    per second).
    """
    plan = plan_at(name, config, method, layers, dtype, device, max_context, chunk, **settings)
    if chunk is None and plan.placement is not None and device.type == "cuda":
        larger = plan_at(
            name,
            config,
            method,
            layers,
            dtype,
            device,
            max_context or plan.max_context,
            OFFLOAD_CHUNK,
            **settings,
        )
        return larger if larger.fits or not plan.fits else plan
    return plan


def plan_at(
    name,
    config,
    method,
    layers,
    dtype,
    device,
    max_context=None,
    chunk=None,
    budget=None,
    note="",
    backend="auto",
    offload="auto",
    slots=SLOTS,
    host_budget=None,
):
    """The Plan of a model. max_context None: the model's own length or what fits, whichever is
    less. budget: bytes to stay within.

    offload: "auto" offloads on a GPU what does not fit, "host" everything that the method lets go,
    "device" nothing. slots: per budgeted token. host_budget: bytes of host memory to stay within.
    """
    chunk = chunk or default_chunk(device.type, config)
    free, free_name = available_bytes(device)
    if budget is not None:
        free, free_name = min(free, int(budget / HEADROOM)), "allowed"
    cpu = torch.device("cpu")
    host_free = available_bytes(cpu)[0] if device.type != "cpu" else free
    if host_budget is not None:
        host_free = min(host_free, int(host_budget / HEADROOM))
    size = dtype.itemsize

    def items(context, placement):
        return memory_items(
            config, method, layers, dtype, device, context, min(chunk, context), backend, placement
        )

    def fits(context, placement):
        if (
            placement is not None
            and device.type != "cpu"
            and placement.host_bytes(config, size, context) > host_free * HEADROOM
        ):
            return False
        return sum(b for _, b, _ in items(context, placement)) <= free * HEADROOM

    def everything(context):
        if offload == "device" or (offload == "auto" and device.type == "cpu"):
            return None
        return full_placement(
            config,
            method,
            layers,
            size,
            context,
            min(chunk, context),
            slots,
            by_layer=device.type == "cuda",
        )

    def best(context):
        full = everything(context)
        if full is None or offload == "host" or method.stages:
            return full
        return fitting(full, lambda placement: fits(context, placement))

    largest = _largest(lambda context: fits(context, best(context)), config.max_positions)
    context = max_context or max(ROUND, largest)
    placement = best(context)
    below = method.dense_below_tokens(layers, config, size, device.type, context)
    return Plan(
        name,
        method,
        layers,
        str(device),
        str(dtype).removeprefix("torch."),
        context,
        largest,
        min(chunk, context),
        below,
        items(context, placement),
        free,
        free_name,
        note,
        placement,
        placement.host_bytes(config, size, context) if placement else 0,
        host_free,
        config.num_layers * context * config.kv_bytes(size),
        min(context, method.budget(layers, context))
        if method.evicts
        else method.budget_capacity(layers, context),
        method.kv_bytes(layers, config, size, context - 1, 1)
        if method.evicts and context > 1
        else 0,
    )


def _largest(fits, most):
    low, high = 0, most
    while high - low >= 1:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low == most else low // ROUND * ROUND
