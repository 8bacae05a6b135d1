"""The memory plan: the bytes that a model needs, and the longest context that fits.

Both follow from config.json alone, before anything is allocated. The result is a Plan
(engine/load/report.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.bank.query_ring import SLOTS as RING
from engine.bank.recurrent.state import FOLD, KEPT, snapshot_bytes, state_bytes
from engine.base.figures import human
from engine.forward.staged.staging import Staging
from engine.load.link_bytes import prompt_link_bytes, step_link_bytes
from engine.load.report import LARGER, OFFLOAD_CHUNK, ROUND, Item, Plan
from engine.methods.base import Method, scratch_shape
from engine.model.config.config import ModelConfig
from engine.model.config.latent import OPENED_ROWS, Latent
from engine.model.config.share import EXCHANGED, LANDING
from engine.model.low_bits import FewBits
from engine.model.share.divide import whole_of
from engine.plan.free_memory import HEADROOM, free_bytes
from engine.plan.layers import LayerPlan
from engine.plan.needs import MOST_WINDOW, STORES, NearKeys, Needs
from engine.plan.needs import RING as RING_QUERIES
from engine.plan.placement import (
    SLOTS,
    Placement,
    fitting,
    full_placement,
    near_rows,
    reserved_rows,
    ring_size,
)
from kernels.attention.scratch import scratch_bytes
from kernels.launch.dispatch import NATIVE, ON_CPU
from kernels.layer.linear import packs
from kernels.native.library import missing
from kernels.recurrent.delta import CHUNK, SEGMENT
from kernels.rows.forms import row_widths


def default_chunk(device_type: str, config: ModelConfig) -> int:
    """Return the tokens per prefill chunk: enough for full speed, few beside any long prompt.

    On a CPU 1024 is within 4% of a whole prompt at once and 512 within 10% (docs/LOG.md,
    2026-11-20). Above two billion parameters it is 512, because Ctrl-C waits for a chunk.
    """
    if device_type == "cuda":
        return 2048
    return 1024 if config.parameters <= 2e9 else 512


# ---------------------------------------------------------------- bytes at one context


def memory_items(
    config: ModelConfig,
    method: Method,
    layers: LayerPlan,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    chunk: int,
    backend: str = "auto",
    placement: Placement | None = None,
    weights: FewBits | None = None,
    head_twice: bool = False,
    shared: bool = False,
    savepoints: int = 0,
    staging: Staging | None = None,
) -> tuple[Item, ...]:
    """Return the plan's parts at a context of so many tokens: (name, bytes, note).

    Everything but the bank and a few buffers is O(1) in context. placement: what lives in host
    memory. On a CPU that is the same memory, so the host tier is an item too. weights: in few
    bits; None: all of them in `dtype`. head_twice: a tied lm_head has a copy of its own. shared: a
    GPU whose memory is the host's. savepoints: most earlier states of recurrent layers. staging:
    layers that stream; None: none.
    """
    size, context = dtype.itemsize, reserved_rows(context, device.type)
    kept = len(config.keeping_layers)
    kept -= len(placement.layers) if placement else 0
    rings = window_bytes(config, size, chunk, context)
    needs = method.needs(layers, config, context, size)
    rows, bank_note = config.bank_rows(context), _bank_note(config, size, device)
    bank = kept * rows * config.kv_bytes(size)
    if config.context is not None:
        bank += 2 * LANDING * config.kv_bytes(size)  # where a step's rows land
        bank_note += f", the rows of {rows} tokens of {context}"
    if needs.near is not None:
        freed = _keys_freed(config, needs.near, dtype, chunk, context)
        bank -= freed
        bank_note += f", but {human(freed)} of distant K that no layer reads"
    if needs.kept is not None:
        bank, bank_note = _blocks_item(config, needs, size, chunk, context, kept)
    elif needs.forgets:
        bank, bank_note = _waiting_item(config, needs, size, chunk, context)
    scratch = scratch_bytes(scratch_shape(config, needs, context, dtype), device, backend)
    ring = RING * _query_bytes(config, size)
    store = needs.store_bytes
    chunk = context if needs.one_chunk else min(chunk, needs.piece or chunk)
    workspace = prefill_bytes(config, size, chunk, device.type)
    chosen = method.prompt_bytes(config, context, chunk, size)
    return (
        *_weight_items(config, size, weights, head_twice, staging, device.type == "cpu" or shared),
        ("context bank", bank, f"{kept} layers x {bank_note}"),
        *((("sliding windows", rings, _window_note(config)),) if rings else ()),
        *_state_items(config, needs, size, savepoints, device.type, shared),
        *_tier_items(config, placement, size, context, device.type == "cpu" or shared),
        ("query ring", ring, f"last {RING} queries of every layer"),
        ("decode scratch", scratch, ""),
        *_exchange_item(config, chunk),
        ("selection", needs.device_bytes, "scores and indices" if needs.selected else ""),
        *((("retained rows", store, needs.store_note),) if store else ()),
        *((("draft weights", needs.draft_weights, "int8"),) if needs.draft_weights else ()),
        *_forgetting_items(config, needs, size, chunk, context, savepoints),
        *_again_item(config, needs, size),
        *((("sparse prefill", chosen, "what a chunk's queries choose from"),) if chosen else ()),
        ("prefill workspace", workspace, f"activations of one chunk of {chunk} tokens"),
    )


def _keys_freed(
    config: ModelConfig, near: NearKeys, dtype: torch.dtype, chunk: int, context: int
) -> int:
    """Return the bytes of the K that a bank does without under `near`."""
    rows = config.row_dtype(dtype)
    key = row_widths(config.head_dim, rows)[0] * rows.itemsize
    # a step's row in each such layer, twice, until it is taken to its place
    step = 2 * sum(map(bool, near.heads)) * config.kv_bytes(dtype.itemsize)
    return near.count * (context - near_rows(near, chunk, context)) * key - step


def _exchange_item(config: ModelConfig, chunk: int) -> tuple[Item, ...]:
    """Partial results of some queries: a rank's own, a copy that it sends, and all ranks'."""
    if config.context is None:
        return ()
    part = min(chunk, EXCHANGED) * config.num_heads * (config.head_dim + 1) * 4
    return (("exchange", (2 + config.context.ranks) * part, "partial results of all ranks"),)


def _again_item(config: ModelConfig, needs: Needs, size: int) -> tuple[Item, ...]:
    """Return the rows of a pass of a prompt's end, to the byte what its bank allocates."""
    if not needs.again:
        return ()
    # room for a step, and a step's rows, as in every bank of that kind
    rows = len(config.keeping_layers) * (needs.again + 3)
    note = f"{needs.again} rows of a pass at a prompt's end, at least its time again"
    return (("repeating", rows * config.kv_bytes(size), note),)


def _query_bytes(config: ModelConfig, size: int) -> int:
    """Return the bytes of one token's queries of all layers, each as wide as the widest head."""
    widest = max(config.heads_of(layer)[1] for layer in config.attending_layers)
    return len(config.attending_layers) * config.num_heads * widest * size


def _waiting(needs: Needs, chunk: int, context: int) -> int:
    """Return the most rows of a layer that wait for the store of a method that forgets."""
    return min(context, needs.waiting_rows(min(chunk, context)))


def _waiting_item(
    config: ModelConfig, needs: Needs, size: int, chunk: int, context: int
) -> tuple[int, str]:
    """Return the bytes of rows that wait for a store, with a step's in each layer, and their
    note.
    """
    rows, step = _waiting(needs, chunk, context), 2
    until = "of a prompt, until its cut" if needs.waiting >= context else "of a chunk"
    each = config.kv_bytes(size)
    note = f"{each} B x {rows} rows {until}; what the store does not take is freed"
    if not needs.leaves_rows:
        note = f"{each} B x {step} rows of a step"
    return len(config.keeping_layers) * (rows + step) * each, note


def _blocks_item(
    config: ModelConfig, needs: Needs, size: int, chunk: int, context: int, here: int
) -> tuple[int, str]:
    """Return the bytes of a bank of blocks, to the byte what it allocates, and their note. here:
    layers whose blocks are on the device.
    """
    assert needs.kept is not None
    each, kept, ring = config.kv_bytes(size), needs.kept, ring_size(needs.tail, chunk, context)
    note = f"{each} B x {kept.rows} rows of {kept.held} blocks and {kept.first} first tokens, and "
    note += f"a ring of {ring} newest, twice"
    return (here * kept.rows + len(config.keeping_layers) * 2 * ring) * each, note


def _forgetting_items(
    config: ModelConfig, needs: Needs, size: int, chunk: int, context: int, savepoints: int
) -> tuple[Item, ...]:
    """Return what a method that forgets takes beside its store: a layer's rows twice as they are
    cut, and the stores that it can go back to; nothing where no row outlives its step.
    """
    if not (needs.forgets and needs.leaves_rows):
        return ()
    points = min(STORES, savepoints) if needs.point_bytes else 0
    # the newest queries before rotation, which no full attention can compute again, and on a
    # model's first device logits
    fixed = MOST_WINDOW * _query_bytes(config, size) + 4 * config.vocab_size * config.ends[0]
    point = needs.point_bytes + fixed
    rows = _waiting(needs, chunk, context) + min(needs.retained, context)
    cut = 0 if needs.kept else rows * config.kv_bytes(size)  # blocks are copied one by one
    saved, note = points * point, f"{points} x {human(point)}, a prompt's store to go back to"
    if needs.proportional and needs.waiting >= context:
        # of a shorter prompt the stores are smaller, and the next prompt is what is left
        waiting, _ = _waiting_item(config, needs, size, chunk, context)
        # two stores are there as a chunk behind them is cut, and not as a whole prompt is
        less = max(0, context - needs.retained - chunk) * (config.kv_bytes(size) + needs.row_scores)
        saved = max(points * fixed, (points + 1) * point - waiting - less)
        note += ", in the place of rows that waited"
    if not points:
        note = "none: going back reads again from the beginning"
    return (
        *((("cut of a layer", cut, "its rows once more"),) if cut else ()),
        ("savepoints", saved, note),
    )


def _state_items(
    config: ModelConfig, needs: Needs, size: int, savepoints: int, device: str, shared: bool
) -> tuple[Item, ...]:
    """Return the bytes of recurrent layers: their state, that of a chunk before it is committed,
    and savepoints where they take the device's memory.
    """
    if config.recurrent is None:
        return ()
    held, layers = state_bytes(config.recurrent, size), len(config.recurrent.layers)
    one = savepoint_bytes(config, needs, size, 1)
    one_memory, note = device == "cpu" or shared, f"{savepoints} x {human(one)}"
    kept = savepoints * one if one_memory else 0
    note += "" if one_memory else " in host memory"
    if not savepoints:
        note = "none: going back reads again from the beginning"
    plain = config.recurrent.ssd is not None and device != "cpu"
    how = ", run by torch's operators" if plain else ""
    return (
        ("recurrent state", held, f"of {layers} layers, at any length{how}"),
        ("state savepoints", kept, note),
    )


def savepoint_bytes(config: ModelConfig, needs: Needs, size: int, savepoints: int) -> int:
    """Return the most bytes of a session's savepoints of recurrent layers, in host memory: with the
    queries before rotation that a selector's window reads.
    """
    if config.recurrent is None:
        return 0
    window = min(needs.window + KEPT + FOLD - 1, RING_QUERIES) if needs.window else 0
    queries = len(config.attending_layers) * window * config.q_size * size
    return savepoints * (snapshot_bytes(config.recurrent, size) + queries)


def _bank_note(config: ModelConfig, size: int, device: torch.device) -> str:
    note = f"{config.kv_bytes(size)} B per token"
    if config.bank == "fp8" and device.type == "cpu":
        return f"{note}, in 8-bit floats (int8 takes as many, and is nearer and faster on a CPU)"
    if config.bank != "int4":
        return note
    slower = ", slower to read than floats" if device.type == "cpu" and missing() else ""
    return f"{note}, values in 4 bits, keys in 6{slower}"


def _weight_items(
    config: ModelConfig,
    size: int,
    weights: FewBits | None,
    head_twice: bool,
    staging: Staging | None,
    one_memory: bool,
) -> tuple[Item, ...]:
    held, note = weights[:2] if weights else _plain_weights(config, size, head_twice)
    if staging is None:
        return (("weights", held, note),)
    buffers = f"{staging.buffers} x a layer in transit"
    kept = (("host weights", staging.bytes, "in ordinary memory"),) if one_memory else ()
    return (
        ("weights", held - staging.bytes, f"{note}; {staging.describe()}"),
        ("weight buffers", staging.buffer_bytes, buffers),
        *kept,
    )


def _plain_weights(config: ModelConfig, size: int, head_twice: bool) -> tuple[int, str]:
    held, note = config.parameters, f"{config.parameters / 1e9:.2f} B parameters"
    if head_twice:
        held, note = held + config.vocab_size * config.hidden_size, f"{note}, lm_head packed beside"
    if (stored := mxfp4_bytes(config)) > 0:
        said = f"stored in MXFP4 ({human(stored)}), held as floats"
        note = f"{note}, {said}; --weights int4 takes about as much as the file"
    return held * size, note


def mxfp4_bytes(config: ModelConfig) -> int:
    """Return the bytes of a checkpoint whose experts are stored in MXFP4; 0 for any other."""
    experts = config.experts
    if experts is None or experts.stored != "mxfp4":
        return 0
    layers = config.num_layers - len(experts.dense)
    packed = layers * experts.count * 3 * config.hidden_size * experts.width
    # 4 bits each, a scale of 8 for 32 of them, and the rest in 16
    return packed * 17 // 32 + 2 * (config.parameters - packed)


def window_bytes(config: ModelConfig, size: int, chunk: int, context: int) -> int:
    """Return the bytes of the rings of sliding-window layers, to the byte what a bank allocates."""
    rows = (2 * ring_size(config.windows[i], chunk, context) for i in config.ring_layers)
    return sum(rows) * config.kv_bytes(size, local=True)


def _full_bank(config: ModelConfig, size: int, chunk: int, context: int) -> int:
    """Return the bytes of K and V of all layers."""
    whole = len(config.keeping_layers) * context * config.kv_bytes(size)
    return whole + window_bytes(config, size, chunk, context)


def _window_note(config: ModelConfig) -> str:
    return f"{len(config.local_layers)} layers see their newest {config.window} tokens"


def _tier_items(
    config: ModelConfig,
    placement: Placement | None,
    size: int,
    context: int,
    one_memory: bool,
) -> tuple[Item, ...]:
    if placement is None:
        return ()
    context = config.bank_rows(context)
    parts, kept = placement.device_items(config, size, context), placement.kept
    held = f"{placement.slots} slots and {placement.ring} newest rows per group"
    if kept is not None and placement.cache is not None:
        held = f"first tokens and {placement.cache.held} blocks of each layer"
    rows = placement.block if kept is None else kept.size
    items: tuple[Item, ...] = (
        ("working sets", parts["slots"] + parts["maps"], held),
        ("streaming", parts["staging"], f"blocks of {rows} tokens"),
    )
    if one_memory:
        host = placement.host_bytes(config, size, context)
        items += (("host tier", host, "in ordinary memory"),)
    return items


def prefill_bytes(config: ModelConfig, size: int, chunk: int, device_type: str) -> int:
    """Return the peak bytes of one chunk's activations, for elements of `size` bytes.

    They are the residual, norm, q/k/v, attention in float32 with its log-sum-exp, gate, up and
    their product. On a CPU a product of many rows re-packs its weight, and the heap keeps what
    tensors of different sizes leave between each other: half as much again as all of a layer's
    activations (measured for chunks of 512: 50 MB for the 160M shape in bfloat16, 95 in float32,
    115 for Llama-3.2-1B in bfloat16; planned 43, 80 and 157).
    """
    # streams: as they were, as predicted, and as corrected twice
    residual = 4 * (
        config.hidden_size * (size + 1) + config.block.streams * config.hidden_size * size
    )
    # what layers add beside their halves, those of later parts too
    residual += (config.num_layers + config.behind) * config.block.per_layer * size
    pending = recurrent_bytes(config, chunk)
    attention = config.q_size * (2 * size + 8) + 2 * config.kv_size * size + 8 * config.num_heads
    if config.latent:  # queries before and after rotation, and what they are joined from
        attention += 2 * config.q_size * size
        pending += opened_bytes(config.latent, config.num_heads, size)
    mlp = 3 * config.mlp_width * size
    logits = 4 * config.vocab_size
    if device_type != "cpu":
        return chunk * (residual + max(attention, mlp)) + logits + pending
    widest = 2 * config.mlp_width * config.hidden_size * size
    activations = chunk * (residual + attention + mlp + config.mlp_width * size)
    return activations * 3 // 2 + widest + logits + pending


def opened_bytes(latent: Latent, heads: int, size: int) -> int:
    """Return the bytes of the keys and values that a prompt's attention makes of rows, and of the
    product that makes the larger half. Its queries and sums are shorter than those of a chunk that
    makes none.
    """
    return OPENED_ROWS * heads * (2 * latent.opened + max(latent.plain, latent.value)) * size


def recurrent_bytes(config: ModelConfig, chunk: int) -> int:
    """Return the bytes of a chunk beside its activations in recurrent layers: each layer's new S
    until the commit, and in one layer the float32 products of a segment.
    """
    sizes = config.recurrent
    if sizes is None:
        return 0
    state = 4 * sizes.value_heads * sizes.key_dim * sizes.value_dim
    tokens = min(chunk, CHUNK * SEGMENT)
    # the projection and what becomes of it; decays, scores and the solved system of each head
    wide = 4 * chunk * 3 * (sizes.channels + 2 * sizes.value_size)
    among = 4 * tokens * sizes.value_heads * (4 * CHUNK + 4 * (sizes.key_dim + sizes.value_dim))
    return len(sizes.layers) * state + wide + among


# ---------------------------------------------------------------- what fits


@dataclass(frozen=True)
class _Search:
    """Which placements of one model under one method fit on one machine.

    free, host_free: bytes of the device and of host memory, the same ones on a CPU and where
    `shared`; the other fields are as in `plan_at`.
    """

    config: ModelConfig
    method: Method
    layers: LayerPlan
    dtype: torch.dtype
    device: torch.device
    chunk: int
    backend: str
    offload: str
    slots: float
    free: int
    host_free: int
    weights: FewBits | None = None
    head_twice: bool = False
    shared: bool = False
    savepoints: int = 0
    staging: Staging | None = None

    @property
    def one_memory(self) -> bool:
        """Whether rows in host memory take the device's bytes."""
        return self.device.type == "cpu" or self.shared

    def items(self, context: int, placement: Placement | None) -> tuple[Item, ...]:
        """Return the memory items at a context with this placement."""
        return memory_items(
            self.config,
            self.method,
            self.layers,
            self.dtype,
            self.device,
            context,
            min(self.chunk, context),
            self.backend,
            placement,
            self.weights,
            self.head_twice,
            self.shared,
            self.savepoints,
            self.staging,
        )

    def packing_head(self, context: int) -> _Search:
        """With a copy of a tied lm_head where that is faster and fits beside everything else.

        Packed it is multiplied twice as fast as the embedding that it is (29.5 instead of 15.0 GB/s
        for 128,256 x 2,048 in bfloat16, avx512_bf16), and rows of a packed one cannot be looked up.
        """
        if not (
            self.config.tied_embeddings
            and self.weights is None
            and self.device.type == "cpu"
            and self.backend in ON_CPU
            and packs(self.dtype)
        ):
            return self
        twice = replace(self, head_twice=True)
        return twice if twice.fits(context, twice.placement(context)) else self

    def fits(self, context: int, placement: Placement | None) -> bool:
        """Say whether a context with this placement fits on the device and in host memory."""
        held = self.host_bytes(context, placement) + (self.staging.bytes if self.staging else 0)
        if held > self.host_free * HEADROOM and not self.one_memory:
            return False
        return self.fits_device(context, placement)

    def host_bytes(self, context: int, placement: Placement | None) -> int:
        """Return the bytes in host memory: of the host tier, and of savepoints where the device's
        memory is another.
        """
        size = self.dtype.itemsize
        rows = self.config.bank_rows(context)
        tier = placement.host_bytes(self.config, size, rows) if placement else 0
        if self.one_memory:
            return tier
        needs = self.method.needs(self.layers, self.config, context, size)
        return tier + savepoint_bytes(self.config, needs, size, self.savepoints)

    def fits_device(self, context: int, placement: Placement | None) -> bool:
        """Say whether the device's part of a context with this placement fits there."""
        return sum(size for _, size, _ in self.items(context, placement)) <= self.free * HEADROOM

    def placement(self, context: int) -> Placement | None:
        """Return the placement that `offload` asks for at a context; None: nothing offloaded.

        "auto" returns as much to the device as fits.
        """
        if self.offload == "device" or (self.offload == "auto" and self.one_memory):
            return None
        context = reserved_rows(context, self.device.type)
        rows = self.config.bank_rows(context)
        full = full_placement(
            self.method.needs(self.layers, self.config, context, self.dtype.itemsize),
            rows,
            min(self.chunk, rows),
            self.slots,
            by_layer=self.device.type == "cuda",
            row_layers=self.config.row_layers,
        )
        if full is None or self.offload == "host" or full.staged_layers:
            return full
        return fitting(full, lambda candidate: self.fits_device(context, candidate))

    def outlook(self, context: int, placement: Placement | None) -> str:
        """Return what the method has to say of its speed at a context with this placement."""
        offloaded = placement.layers if placement else ()
        size, kind = self.dtype.itemsize, self.device.type
        return self.method.outlook(
            self.layers, self.config, size, kind, context, offloaded, self.weights
        )

    def link_bytes(self, context: int, placement: Placement | None) -> int:
        """Return the most bytes that reading `context` tokens brings from host memory."""
        size, chunk = self.dtype.itemsize, min(self.chunk, context)
        needs = self.method.needs(self.layers, self.config, context, size)
        chunk = context if needs.one_chunk else chunk
        whole = needs.every_query or needs.outputs
        span = placement, size, chunk, context, context, whole
        return prompt_link_bytes(self.config, self.method, *span)

    def largest_context(self, asked: int | None = None) -> int:
        """Return the most tokens that fit, up to the model's own positions, or to a context beyond
        them that was asked for.
        """
        return _largest(
            lambda context: self.fits(context, self.placement(context)),
            max(self.config.max_positions, asked or 0),
        )


def make_plan(
    name: str,
    config: ModelConfig,
    method: Method,
    layers: LayerPlan,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None = None,
    chunk: int | None = None,
    **settings: Any,
) -> Plan:
    """Plan a model as `plan_at` does, with the best chunk for its placement if `chunk` is None.

    On a GPU with offloaded layers that is OFFLOAD_CHUNK, if it fits: a chunk of C tokens hides the
    transfer of a layer's past while C >= operations per second / (4 x link bytes per second). With
    weights that stream, which cross once a chunk, it is the first of LARGER that fits.
    """
    model = name, config, method, layers, dtype, device
    free_to_choose = chunk is None and device.type == "cuda"
    for size in LARGER if free_to_choose and settings.get("staging") else ():
        found = plan_at(*model, max_context, size, **settings)
        if found.fits and (max_context or found.max_context >= min(size, config.max_positions)):
            return found
    plan = plan_at(*model, max_context, chunk, **settings)
    if not free_to_choose or plan.placement is None:
        return plan
    larger = plan_at(*model, max_context or plan.max_context, OFFLOAD_CHUNK, **settings)
    return larger if larger.fits or not plan.fits else plan


def plan_at(
    name: str,
    config: ModelConfig,
    method: Method,
    layers: LayerPlan,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None = None,
    chunk: int | None = None,
    budget: int | None = None,
    note: str = "",
    backend: str = "auto",
    offload: str = "auto",
    slots: float = SLOTS,
    host_budget: int | None = None,
    weights: FewBits | None = None,
    imagined: int | None = None,
    imagined_host: int | None = None,
    idle_host: int = 0,
    savepoints: int = 0,
    staging: Staging | None = None,
    shared_by: tuple[int, int] = (1, 1),
) -> Plan:
    """Plan a model with chunks of `chunk` tokens (None: the device's default).

    max_context None: the model's own or what fits. budget, host_budget: bytes to stay within.
    imagined, imagined_host, idle_host: as in `free_bytes`. offload: as in Options. slots: per
    selected token. weights, staging: as in `memory_items`. shared_by: parts on the device, in all.
    """
    chunk, memory = chunk or default_chunk(device.type, config), (imagined, imagined_host)
    found = free_bytes(device, budget, host_budget, *memory, idle_host).divided(*shared_by)
    known = config, method, layers, dtype, device, chunk, backend, offload, slots
    within = found.bytes, found.host, weights, False, found.shared, savepoints, staging
    search = _Search(*known, *within)
    size, largest = dtype.itemsize, search.largest_context(max_context)
    context = max_context or max(min(ROUND, config.context_limit), largest)
    search = search.packing_head(context)
    placement, needs = search.placement(context), method.needs(layers, config, context, size)
    return Plan(
        model=name,
        method=method,
        layers=layers,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_context=context,
        largest_context=largest,
        chunk=context if needs.one_chunk else min(chunk, context),
        dense_below=method.dense_below_tokens(layers, whole_of(config), size, device.type, context),
        items=search.items(context, placement),
        **found.facts,
        note=note,
        placement=placement,
        host_bytes=search.host_bytes(context, placement),
        full_bank=_full_bank(config, size, chunk, context),
        budget=needs.retained or needs.selected,
        kept=needs.retained_bytes,
        outlook=search.outlook(context, placement),
        staging=staging,
        prompt_link_bytes=search.link_bytes(context, placement),
        step_link_bytes=step_link_bytes(config, needs, placement, size, context),
        offload=offload,
        head_copy=search.head_twice * config.vocab_size * config.hidden_size * size,
        kernels=missing() if backend in NATIVE and device.type == "cpu" else "",
    )


class Largest(NamedTuple):
    """The longest context that fits, in tokens (0: none), what then lives in host memory, and the
    bytes on the device.
    """

    context: int
    placement: Placement | None
    bytes: int


def largest_context(
    config: ModelConfig,
    method: Method,
    layers: LayerPlan,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    host_free: int,
    weights: FewBits | None = None,
    offload: str = "auto",
    most: int | None = None,
    savepoints: int = 0,
) -> Largest:
    """Find the longest context that fits into so many free bytes of a device and of host memory.

    The device need not exist. Offloads what does not fit on a GPU, or as `offload` says. weights,
    savepoints: see `memory_items`. most: tokens to look for, of the model's own positions.
    """
    chunk, asked = default_chunk(device.type, config), ("auto", offload, SLOTS)
    search = _Search(
        *(config, method, layers, dtype, device, chunk, *asked, free, host_free, weights),
        savepoints=savepoints,
    )
    context = search.largest_context()
    context = context if most is None else min(context, most)
    placement = search.placement(context) if context else None
    items = search.items(context, placement) if context else ()
    return Largest(context, placement, sum(size for _, size, _ in items))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest context that fits: `most`, or whole blocks below it, by bisection."""
    if fits(most):
        return most
    low, high = 0, (most - 1) // ROUND
    # most models that do not fit do not with one block
    if not high or not fits(ROUND):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * ROUND) else (low, middle - 1)
    return low * ROUND
