"""Which form of a decode step runs: our own kernels where a rehearsal on this very device gives
what torch's operators give, else the plain form.

A kernel that is right on paper may not compile with another triton, or compute something else on a
card that nobody has tried. The rehearsal finds that before the first answer, costs one compilation
that the first token would have cost, and says what it found in one line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.bank.device import DeviceBank
from engine.decode import Step
from engine.errors import SettingError
from engine.model.halves import FusedHalves, Halves, PlainHalves, fusable
from engine.model.native_halves import NativeHalves, natively
from engine.model.prompt_halves import FUSED, PLAIN
from engine.plan.layers import layer_plan
from engine.query_ring import QueryRing
from engine.units import first_line
from kernels.dense_decode import decode_dense
from kernels.dispatch import choose_for
from kernels.few_rows import MOST_ROWS
from kernels.linear_quantised import QuantisedLinear
from kernels.native.library import native
from kernels.rows import floats, key_floats
from kernels.scratch import make_scratch

if TYPE_CHECKING:
    from engine.model.llama import Llama
    from engine.model.rope import Rotary

ROWS = 16 * 512 + 700  # of the rehearsed bank: splits that merge in two levels
CHUNK = 70  # tokens of the rehearsed prompt
TIMES = 3  # results must not depend on who ends last
# of the largest value: a few roundings, of sums in another order
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}


class StepForms:
    """The form of a model's decode steps under a kernel backend: rehearsed once."""

    def __init__(
        self, model: Llama, rotary: Rotary, pieces: tuple[Callable, Callable], step: str
    ) -> None:
        self._sizes, self._known = (model, rotary, pieces, step), dict[str, Halves]()

    def asked_for(self, step: str) -> StepForms:
        """Those of the same model where `step` is asked for."""
        return StepForms(*self._sizes[:-1], step)

    def __call__(self, backend: str) -> Halves:
        if backend not in self._known:
            self._known[backend] = step_halves(*self._sizes, backend)
        return self._known[backend]


def step_halves(
    model: Llama, rotary: Rotary, pieces: tuple[Callable, Callable], step: str, backend: str
) -> Halves:
    """The form of a model's decode steps. step: "auto" rehearses on a GPU and warns where that
    fails; "fused" and "plain" are taken as they are. Raises SettingError where "fused" cannot be.
    """
    if choose_for(backend, model.device) == "cpu":
        native()  # compiles now rather than in the first answer
    plain = PlainHalves(model, pieces)
    if rehearses(model.device):
        _check_few_bits(model)
    possible = choose_for(backend, model.device) == "triton" and fusable(model)
    if step == "fused":
        if not possible:
            raise SettingError(
                "step: found 'fused', expected 'auto' or 'plain': it needs a GPU, triton, a layer "
                "as Llama's and weights as they are stored"
            )
        return FusedHalves(model)
    if step == "plain" or not possible or not rehearses(model.device):
        torchs = step == "plain" or pieces != PLAIN or choose_for(backend, model.device) != "cpu"
        return plain if torchs or not natively(model) else NativeHalves(model)
    why = fault(model, rotary, plain)
    if why:
        warnings.warn(
            f"decode steps run on torch's operators: {why} (step='plain' asks for that)",
            stacklevel=2,
        )
        return plain
    return FusedHalves(model)


def rehearses(device: torch.device) -> bool:
    """Whether our own kernels are rehearsed on a device: on a GPU. Elsewhere they only run where
    they are asked for.
    """
    return device.type == "cuda"


def fault(model: Llama, rotary: Rotary, plain: Halves) -> str:
    """Run a layer both ways on this device: why our own kernels may not be used, or ""."""
    try:
        with torch.inference_mode():
            found = _halves_fault(model, rotary, plain) or _prompt_fault(model, rotary)
            return found or _merge_fault(model)
    except torch.OutOfMemoryError as error:
        return f"no memory for a rehearsal: {first_line(error)}"
    # whatever a compiler or a driver says is the finding
    except Exception as error:
        return f"a kernel fails: {type(error).__name__}: {first_line(error)}"


def _check_few_bits(model: Llama) -> None:
    """Let weights of few bits be multiplied by dequantising where a product in registers is not
    what that gives here; warn once.
    """
    held = [m for m in matrices(model) if m.words is not None and not m.dequantises]
    if not held:
        return
    try:
        with torch.inference_mode():
            why = _few_bits_fault(held, model)
    except torch.OutOfMemoryError as error:
        why = f"no memory for a rehearsal: {first_line(error)}"
    # whatever a compiler or a driver says is the finding
    except Exception as error:
        why = f"a kernel fails: {type(error).__name__}: {first_line(error)}"
    if why:
        for matrix in held:
            matrix.dequantises = True
        warnings.warn(
            f"weights of few bits are dequantised for every product, which takes several times as "
            f"long: {why}",
            stacklevel=4,
        )


def matrices(model: Llama) -> list[QuantisedLinear]:
    """The matrices of few bits that a model multiplies."""
    held = [model.lm_head, *(m for layer in model.layers for m in layer.matrices)]
    return [matrix for matrix in held if isinstance(matrix, QuantisedLinear)]


def _few_bits_fault(held: list[QuantisedLinear], model: Llama) -> str:
    """One matrix of each shape and form, for one row, for several and for a chunk's."""
    alike = {(m.shape, m.kind, m.group, m.bias is None): m for m in held}
    for matrix in alike.values():
        for rows in (1, MOST_ROWS - 1, CHUNK):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, matrix.shape[1], generator=generator)
            x = x.to(model.device, model.dtype)
            found = matrix(x)
            matrix.dequantises = True
            want = matrix(x)
            matrix.dequantises = False
            name = f"{matrix.kind} {matrix.shape[0]} x {matrix.shape[1]}, {rows} rows,"
            if why := _differs(name, want, found, model.dtype):
                return why
    return ""


def _halves_fault(model: Llama, rotary: Rotary, plain: Halves) -> str:
    config, device, dtype = model.config, model.device, model.dtype
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, config.hidden_size, generator=generator).to(device, dtype)
    positions = torch.full((1, 1), 5, device=device)
    cos, sin = rotary.at(positions)
    results = []
    for form in (plain, FusedHalves(model)):
        bank = DeviceBank(config, layer_plan(config.num_layers), 64, dtype, device)
        ring = QueryRing(config, 1, dtype, device)
        for rows in (*bank.kv(0), ring.slots):
            rows.zero_()
        visible = torch.full((1,), 6, dtype=torch.int32, device=device)
        (q,) = form.before(0, x, cos, sin, [Step(positions, visible, bank, 64, ring, rotary)])
        found = form.after(0, x, q)
        k, v = bank.kv(0)
        stored = key_floats(k), floats(v)
        results.append([q, *stored, ring.slots, found, form.logits(found)])
    for name, one, other in zip(
        ("query", "K", "V", "query ring", "layer", "logits"), *results, strict=True
    ):
        if why := _differs(name, one, other, dtype):
            return why
    return ""


def _prompt_fault(model: Llama, rotary: Rotary) -> str:
    """The halves of a layer for a prompt's chunk."""
    config, layer = model.config, model.layers[0]
    generator = torch.Generator().manual_seed(1)
    x, attended = (
        torch.randn(1, CHUNK, width, generator=generator).to(model.device, model.dtype)
        for width in (config.hidden_size, config.q_size)
    )
    cos, sin = rotary.at(torch.arange(CHUNK, device=model.device)[None])
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    attended = attended.unflatten(2, (config.num_heads, config.head_dim))
    results = [
        [*before(layer, x, cos, sin, *sizes), after(layer, x, attended, config.rms_norm_eps)]
        for before, after in (PLAIN, FUSED)
    ]
    for name, one, other in zip(("query", "K", "V", "query", "layer"), *results, strict=True):
        if why := _differs(f"a prompt's {name}", one, other, model.dtype):
            return why
    return ""


def _merge_fault(model: Llama) -> str:
    """Merging by whichever program ends last, against merging in launches of its own."""
    config, device, dtype = model.config, model.device, model.dtype
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    generator = torch.Generator(device).manual_seed(0)
    k, v = torch.randn(2, 1, kv_heads, ROWS, dim, generator=generator, device=device).to(dtype)
    q = torch.randn(1, 1, heads, dim, generator=generator, device=device).to(dtype)
    lengths = torch.full((1,), ROWS, dtype=torch.int32, device=device)
    scratch = make_scratch(1, 1, heads, kv_heads, dim, ROWS, 0, device, False, 0, "triton")
    apart = scratch.merging_apart()
    want = decode_dense(q, k, v, lengths, dim**-0.5, scratch=apart, backend="triton")
    for _ in range(TIMES):
        found = decode_dense(q, k, v, lengths, dim**-0.5, scratch=scratch, backend="triton")
        if why := _differs("merge", want, found, dtype):
            return why
    return "a ticket is left over" if bool(scratch.tickets.any()) else ""


def _differs(name: str, want: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> str:
    want, found = want.float(), found.float()
    allowed = TOLERANCE[dtype] * float(want.abs().max())
    error = float((want - found).abs().max())
    # also where it is not a number
    return "" if error <= allowed else f"{name} differs by {error:.2g}, allowed {allowed:.2g}"
