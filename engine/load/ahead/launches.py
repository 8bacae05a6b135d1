"""What a plan will launch: its self-test, its first prompt and its first steps, run by the engine's
own code on tensors that have shapes and no memory.

No list of kernels stands beside the code that launches them, so none can fall behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Bank
from engine.bank.device import DeviceBank
from engine.bank.host.tiered import TieredBank
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import Allocator, ordinary
from engine.bank.query_ring import QueryRing
from engine.forward.decode import Decoder
from engine.forward.graphs import FIRST_BUCKET
from engine.forward.layer import FusedLayer, LayerForm, TorchLayer, fusable
from engine.forward.prefill import run_chunk
from engine.forward.prompt_layer import prompt_pieces
from engine.forward.recurrent.self_test import launch_recurrence, mixers
from engine.forward.self_test import launch_tested
from engine.load.ahead.recording import Launch, recorded, specialise
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.model.config.config import ModelConfig
from engine.model.llama import Llama, Matrix, assemble
from engine.model.low_bits import AsStored, Held, OnTheWay, Rounding
from engine.model.rope import Rotary
from engine.model.share.matrix import Joined
from engine.model.tensors import targets
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from kernels.launch.shapes import Card, imagined
from kernels.prefill.dense import CUDNN_BLOCK
from kernels.quant.linear import pack_quantised
from kernels.quant.matrix import Quantised

META = torch.device("meta")
ODD = 37  # tokens of a chunk: no multiple of 16, as a prompt's last chunk has them


@dataclass(frozen=True)
class FirstAnswer:
    """What decides about the launches of the first answer. method and layers are resolved for the
    config, which stands at the planned context of `capacity` tokens; placement: None for a bank on
    the device alone; chunk: tokens of a prompt's chunk; fused: whether steps run on our own kernels
    where they can.
    """

    config: ModelConfig
    method: Method
    layers: LayerPlan
    dtype: torch.dtype
    rounding: Rounding
    capacity: int
    chunk: int
    placement: Placement | None
    fused: bool
    card: Card


def launches(answer: FirstAnswer) -> list[Launch]:
    """One Launch of each variant. Nothing is allocated but a small block of host memory, and no
    device is asked.
    """
    with recorded() as found, imagined(answer.card), torch.inference_mode():
        # what comes so far is compiled though a later part may not run without memory
        with contextlib.suppress(Exception):
            _run(answer)
    return list({specialise(launch).key: launch for launch in found}.values())


def _run(answer: FirstAnswer) -> None:
    config, dtype = answer.config, answer.dtype
    model = _model(answer)
    rotary = Rotary(config, META)
    ours = answer.fused and fusable(model)
    halves: LayerForm = FusedLayer(model) if ours else TorchLayer(model, backend="triton")
    pieces = prompt_pieces(halves)
    if ours:
        launch_tested(model, rotary)
    for net in mixers(model)[:1]:
        launch_recurrence(net, config.rms_norm_eps)
    full = Full()
    for method, layers in ((answer.method, answer.layers), (full, full.plan(config))):
        bank, ring = _bank(answer), QueryRing(config, 1, dtype, META)
        setup = Setup.of(
            config, method, bank.capacity, plan=layers, device=META, dtype=dtype,
            backend="triton", sinks=model.sinks,
        )  # fmt: skip
        if not ours:
            setup = replace(setup, scratch=setup.scratch.merging_apart())
        runtime = method.runtime(setup)
        runtime.bank = bank
        decoder = Decoder(model, rotary, runtime, ring, halves)
        with contextlib.suppress(Exception):
            _step(decoder, bank)
        with contextlib.suppress(Exception):
            _prompt(answer, model, rotary, runtime, bank, pieces)


def _step(decoder: Decoder, bank: Bank) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=META)
    length = torch.zeros(1, dtype=torch.int32, device=META)
    decoder.step(token, length, bank, min(FIRST_BUCKET, bank.capacity))


def _prompt(
    answer: FirstAnswer, model: Llama, rotary: Rotary, runtime: Runtime, bank: Bank, pieces: Any
) -> None:
    """A first chunk, one behind blocks of the past and a remainder, and a last one."""
    chunk = answer.chunk
    deep = -(-CUDNN_BLOCK // chunk) * chunk + chunk
    for start, count in ((0, chunk), (deep, chunk), (deep, ODD), (0, ODD)):
        if start + count <= answer.capacity:
            tokens = torch.zeros(1, count, dtype=torch.int64, device=META)
            stop = start + count
            runtime.begin_prompt(0, stop)
            run_chunk(
                model, rotary, runtime, bank, tokens, start, stop,
                last_logits=True, pieces=pieces, backend="triton",
            )  # fmt: skip


def _bank(answer: FirstAnswer) -> Bank:
    sizes = answer.config, answer.layers, answer.capacity, answer.dtype, META
    if answer.placement is None:
        return DeviceBank(*sizes, chunk=answer.chunk)
    pool = HostPool(slab_bytes=1 << 22, allocators=[Allocator("ordinary", ordinary, pinned=True)])
    return TieredBank(*sizes, answer.placement, pool, "triton")


def _model(answer: FirstAnswer) -> Llama:
    """The model without memory. Matrices that are held alike are one: laying out the blocks of
    thousands takes seconds even so.
    """
    config, dtype, rounding = answer.config, answer.dtype, answer.rounding
    weights = (
        (target.name, torch.empty(target.shape, dtype=dtype, device=META))
        for target in targets(config)
    )
    model = assemble(config, dtype, META, weights, "plain")
    made: dict[Any, Matrix] = {}

    def held(name: str, matrix: Matrix) -> Matrix:
        if (form := held_as(rounding, name, matrix.shape)) is None:
            return matrix
        assert not isinstance(matrix, Joined)  # of one process
        key = form, matrix.shape, matrix.bias is None
        if key not in made:
            made[key] = pack_quantised(_quantised(form, matrix.shape), matrix.bias, dtype, "words")
        return made[key]

    layers = [
        replace(
            layer,
            qkv=held(f"{i}.qkv", layer.qkv),
            o=held(f"{i}.o", layer.o),
            gate_up=layer.gate_up and held(f"{i}.gate_up", layer.gate_up),
            down=layer.down and held(f"{i}.down", layer.down),
        )
        for i, layer in enumerate(model.layers)
    ]
    return replace(model, layers=layers, lm_head=held("lm_head", model.lm_head))


def held_as(rounding: Rounding, name: str, shape: Sequence[int]) -> Held | None:
    """How a target is held; None for floats."""
    if isinstance(rounding, AsStored):
        return rounding.held(name, tuple(shape))
    return rounding.held(name, shape[-1]) if isinstance(rounding, OnTheWay) else None


def _quantised(held: Held, shape: Sequence[int]) -> Quantised:
    """A matrix as it is held, without memory."""
    rows, columns = shape
    kinds = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
    width = columns // 2 if held.kind == "int4" else columns
    values = torch.empty(rows, width, dtype=kinds[held.kind], device=META)
    # whole rows and what a checkpoint stores have scales of 32 bits, what is rounded here of 16
    wide = held.scale_bytes == 4 or held.group >= columns
    kind = torch.float32 if wide else torch.bfloat16
    scales = torch.empty(rows, -(-columns // held.group), dtype=kind, device=META)
    order = torch.empty(columns, dtype=torch.int64, device=META) if held.permuted else None
    table = torch.empty(16, device=META) if held.table else None
    offsets = scales if held.offsets else None
    return Quantised(held.kind, values, scales, held.group, offsets, order, table)
