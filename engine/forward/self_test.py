"""Self-test of the decode step's kernels: they run if they agree with torch's operators on this
device; else the plain form does.

A kernel that is right on paper may not compile with another triton, or compute something else on an
untried card. The self-test finds that before the first answer. It costs one compilation, which the
first token would have cost, and reports its finding in one line. Our kernels are compared with
torch's operators uncompiled: torch.compile runs only where the plain form is chosen, since it would
add 15 to 30 seconds (estimated) to every first answer on a fresh machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from engine.bank.base import Step
from engine.bank.device import DeviceBank
from engine.bank.query_ring import QueryRing
from engine.base.device import synchronize
from engine.base.errors import DeviceFailed, SettingError
from engine.base.figures import first_line
from engine.forward.graphs import captured
from engine.forward.layer import FusedLayer, LayerForm, TorchLayer, fusable
from engine.forward.native_backend import require_native
from engine.forward.native_layer import NativeLayer, natively
from engine.forward.prompt_layer import FUSED, PLAIN, Pieces
from engine.forward.recurrent.self_test import mixers, recurrence_failure
from engine.forward.split.layers import on_parts
from engine.model.llama import Llama
from engine.model.mixture import Mixture
from engine.model.rope import Rotary
from engine.plan.layers import layer_plan
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.experts.choose import Choice, choose_experts, choose_experts_ref
from kernels.experts.open import open_experts, open_experts_ref
from kernels.experts.sum import sum_experts, sum_experts_ref
from kernels.launch.dispatch import NATIVE, choose_for
from kernels.launch.pdl import refuse, supported
from kernels.launch.tolerance import OVERALL, differs, differs_overall
from kernels.layer.gemv import MOST_ROWS, multiply_rows
from kernels.native.library import try_all
from kernels.quant.linear import QuantisedLinear
from kernels.rows.forms import floats, key_floats

ROWS = 16 * 512 + 700  # of the tested bank: splits that merge in two levels
CHUNK = 70  # tokens of the tested prompt
TIMES = 3  # results must not depend on who ends last
STEP_ROWS = (1, 3, MOST_ROWS)  # tokens of the tested steps
REPLAYS = 2  # of a tested graph: a replay must not live on what the one before left
COARSE = 0.1  # of the norm of rows in four bits: an eighth of them a step apart


class StepForms:
    """The form of a model's decode steps under each kernel backend, tested once."""

    def __init__(
        self, model: Llama, rotary: Rotary, pieces: tuple[Callable, Callable], step: str
    ) -> None:
        self._sizes, self._known = (model, rotary, pieces, step), dict[str, LayerForm]()

    def asked_for(self, step: str) -> StepForms:
        """Return the forms of the same model for another `step`."""
        return StepForms(*self._sizes[:-1], step)

    def __call__(self, backend: str) -> LayerForm:
        if backend not in self._known:
            model, rotary, pieces, step = self._sizes
            ropes = iter(rotary.parts or (rotary,))
            made = on_parts(
                model, lambda part: step_layer(part, next(ropes), pieces, step, backend)
            )
            self._known[backend] = made
        return self._known[backend]


def step_layer(
    model: Llama, rotary: Rotary, pieces: tuple[Callable, Callable], step: str, backend: str
) -> LayerForm:
    """Return the form of a model's decode steps. step: "auto" runs the self-test on a GPU and warns
    if it fails; "fused" and "plain" run none. Raises SettingError if "fused" is impossible.
    """
    if backend in NATIVE and model.device.type == "cpu":
        try_all()  # compiles now rather than in the first answer
    require_native(backend, model.device, compile=True)
    if is_tested(model.device):
        _check_few_bits(model)
        _check_mixtures(model)
        _check_recurrence(model, backend)
    plain = TorchLayer(model, pieces, backend)
    possible = choose_for(backend, model.device) == "triton" and fusable(model)
    if step == "fused":
        if not possible:
            raise SettingError(
                "step: found 'fused', expected 'auto' or 'plain': it needs a GPU, triton, a layer "
                "as Llama's and weights as they are stored"
            )
        return FusedLayer(model)
    if step == "plain" or not possible or not is_tested(model.device):
        torchs = step == "plain" or pieces != PLAIN or backend not in NATIVE
        return plain if torchs or not natively(model) else NativeLayer(model)
    why = failure(model, rotary)
    if why:
        warnings.warn(
            f"decode steps run on torch's operators: {why} (step='plain' asks for that)",
            stacklevel=2,
        )
        return plain
    return FusedLayer(model)


def is_tested(device: torch.device) -> bool:
    """Return whether our own kernels are tested on a device: on a GPU. On another device they only
    run on request.
    """
    return device.type == "cuda"


def failure(model: Llama, rotary: Rotary) -> str:
    """Run a layer both ways on this device. Returns the reason against our own kernels, or "".
    Raises DeviceFailed if a kernel has left the device unusable.
    """
    return _either_way(model.device, lambda: _failure(model, rotary))


def _either_way(device: torch.device, test: Callable[[], str]) -> str:
    """Return what `test` says. Where kernels only fail under programmatic dependent launch, that is
    off for the rest of the process, and a warning says so.
    """
    why = test()
    if not why or not supported(device):
        return why
    refuse(device)
    still = test()
    if not still:
        warnings.warn(
            f"kernels of a decode step are launched one after the other on this GPU: {why}",
            stacklevel=4,
        )
    return still


def _failure(model: Llama, rotary: Rotary) -> str:
    return _reason(
        model.device,
        lambda: (
            _layer_failure(model, rotary) or _prompt_failure(model, rotary) or _merge_failure(model)
        ),
        "step='plain'",
    )


def _reason(device: torch.device, test: Callable[[], str], remedy: str) -> str:
    """Return what `test` says, or what it raises: whatever a compiler or a driver says is the
    finding. remedy: the setting that does without the tested kernels.
    """
    try:
        with torch.inference_mode():
            why = test()
    except torch.OutOfMemoryError as error:
        return f"no memory for a self-test: {first_line(error)}"
    except Exception as error:
        why = f"a kernel fails: {type(error).__name__}: {first_line(error)}"
    if why:
        _require_alive(device, why, remedy)
    return why


def _require_alive(device: torch.device, why: str, remedy: str) -> None:
    """Raise DeviceFailed if a device takes no more work: after an illegal access every later launch
    of the process fails, torch's operators too.
    """
    try:
        synchronize(device)
        torch.ones(1, device=device).add_(1)
        synchronize(device)
    except Exception as error:
        raise DeviceFailed(
            f"a kernel broke this process's GPU context in its self-test ({why}): "
            f"{first_line(error)}; start anew with {remedy}"
        ) from error


def _check_few_bits(model: Llama) -> None:
    """Multiply weights of few bits by dequantising if their product in registers differs from that
    on this device; warn once.
    """
    held = [m for m in matrices(model) if m.words is not None and not m.dequantises]
    if not held:
        return
    why = _reason(model.device, lambda: _few_bits_failure(held, model), "backend='reference'")
    if why:
        for matrix in held:
            matrix.dequantises = True
        warnings.warn(
            f"weights of few bits are dequantised for every product, which takes several times as "
            f"long: {why}",
            stacklevel=4,
        )


def matrices(model: Llama) -> list[QuantisedLinear]:
    """Return the matrices of few bits that a model multiplies."""
    held = [model.lm_head] * model.config.ends[1]
    held += [m for layer in model.layers for m in layer.matrices]
    return [matrix for matrix in held if isinstance(matrix, QuantisedLinear)]


def _few_bits_failure(held: list[QuantisedLinear], model: Llama) -> str:
    """Test one matrix of each shape and form, for one row, for several and for a chunk's rows."""
    alike = {(m.shape, m.kind, m.group, m.bias is None): m for m in held}
    whose = {id(m): i for i, layer in enumerate(model.layers) for m in layer.matrices}
    for matrix in alike.values():
        model.place(whose.get(id(matrix), -1))
        for rows in (1, MOST_ROWS - 1, CHUNK):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, matrix.shape[1], generator=generator)
            x = x.to(model.device, model.dtype)
            found = matrix(x)
            matrix.dequantises = True
            want = matrix(x)
            matrix.dequantises = False
            name = f"{matrix.kind} {matrix.shape[0]} x {matrix.shape[1]}, {rows} rows,"
            if why := differs(name, found, want, model.dtype) or differs_overall(name, found, want):
                return why
    return ""


def _check_mixtures(model: Llama) -> None:
    """Let the host choose a mixture's experts if those that the device chooses say something else
    on this device; warn once.
    """
    mixtures = [m for m in (layer.mixture for layer in model.layers) if m is not None and m.stacks]
    if not mixtures:
        return
    why = _either_way(
        model.device,
        lambda: _reason(
            model.device, lambda: _mixture_failure(model, mixtures), "backend='reference'"
        ),
    )
    if why:
        for mixture in mixtures:
            mixture.choose_on_host()
        warnings.warn(
            f"the host chooses a mixture's experts, and no step is captured: {why}", stacklevel=4
        )


def _mixture_failure(model: Llama, mixtures: list[Mixture]) -> str:
    """Test the mixtures of the first layer and the last that have one, part by part over the same
    logits, since others in their last place may choose other experts; and one row's as a graph.
    """
    device, dtype = model.device, model.dtype
    for number, mixture in {0: mixtures[0], -1: mixtures[-1]}.items():
        assert mixture.stacks is not None
        (gate_up, down), experts = mixture.stacks, mixture.experts
        for rows in STEP_ROWS:
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, model.config.hidden_size, generator=generator).to(device, dtype)
            router = mixture.router, None if experts.sigmoid else mixture.bias
            logits = torch.nn.functional.linear(x, *router)
            if why := differs("router", multiply_rows(x, *router), logits):
                return why
            correction = mixture.bias if experts.sigmoid else None
            given = logits, experts.per_token, experts.normalise, correction, mixture.share
            choice, wanted = choose_experts(*given), choose_experts_ref(*given)
            for name, one, other in zip(Choice._fields, choice, wanted, strict=True):
                listed = slice(None if name == "listed" else int(wanted.listed))
                if why := differs(f"choice of {name}", one[listed], other[listed]):
                    return f"{why} ({rows} rows)"
            want = open_experts_ref(x, gate_up, wanted, experts.activation)
            want = sum_experts_ref(want, down, wanted)

            def run(x=x, choice=choice, made=experts.activation, up=gate_up, down=down):
                return sum_experts(open_experts(x, up, choice, made), down, choice)

            name, found = "sum of experts", run()
            if why := differs(name, found, want, dtype) or differs_overall(name, found, want):
                return f"{why} ({rows} rows)"
            if number or rows > 1 or not torch.cuda.is_available():
                continue
            graph, found = captured(device, run)
            for _ in range(REPLAYS):
                found.zero_()
                graph.replay()
                if why := differs(name, found, want, dtype):
                    return f"replayed as a graph, {why}"
    return ""


def _check_recurrence(model: Llama, backend: str) -> None:
    """Run recurrent layers on torch's operators if our own kernels say something else on this
    device; warn once. All of a model's layers have one shape.
    """
    nets = mixers(model)
    if not nets or choose_for(backend, model.device) != "triton":
        return
    eps = model.config.rms_norm_eps
    why = _either_way(
        model.device,
        lambda: _reason(
            model.device, lambda: recurrence_failure(nets[0], eps), "backend='reference'"
        ),
    )
    if why:
        for net in nets:
            net.refuse()
        warnings.warn(f"recurrent layers run on torch's operators: {why}", stacklevel=4)


class _Layer:
    """A decode step of some tokens through one layer in one form, over a bank and a query ring of
    its own.
    """

    RESULTS = ("query", "K", "V", "query ring", "layer", "logits")

    def __init__(
        self, form: LayerForm, model: Llama, rotary: Rotary, number: int, rows: int
    ) -> None:
        config, device, dtype = model.config, model.device, model.dtype
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(1, rows, config.hidden_size, generator=generator)
        self._form, self._number, self._x = form, number, x.to(device, dtype)
        positions = torch.arange(5, 5 + rows, device=device)[None]
        self._turns = rotary.of_layers(positions)[number]
        bank = DeviceBank(config, layer_plan(config.num_layers), 64, dtype, device)
        self._ring = QueryRing(config, 1, dtype, device)
        self._k, self._v, _ = bank.step_rows(number)
        visible = torch.full((1,), 5 + rows, dtype=torch.int32, device=device)
        self._step = Step(positions, visible, bank, 64, self._ring, rotary)
        self.clear()
        model.place(number)

    def clear(self) -> None:
        """Forget what a run has stored."""
        for rows in (self._k, self._v, self._ring.slots):
            rows.zero_()

    def run(self) -> list[torch.Tensor]:
        """Run it: what RESULTS names, K and V as floats."""
        (q,) = self._form.before(self._number, self._x, *self._turns, [self._step])
        found = self._form.after(self._number, self._x, q)
        stored = key_floats(self._k), floats(self._v)
        model = self._form.model  # of a part before the last the head lies elsewhere
        logits = [self._form.logits(found)] if model.config.ends[1] else []
        return [q, *stored, self._ring.slots, found, *logits]


def _layer_failure(model: Llama, rotary: Rotary) -> str:
    """Test a step's halves in the first layer and the last, for one token and for several; and one
    token's once more as a graph, as an answer will run it.
    """
    coarse = model.config.bank == "int4"
    for number in sorted({0, model.config.num_layers - 1}):
        for rows in STEP_ROWS:
            sizes = model, rotary, number, rows
            wanted = _Layer(TorchLayer(model), *sizes).run()
            layer = _Layer(FusedLayer(model), *sizes)
            if why := _unlike(layer.run(), wanted, model.dtype, coarse):
                return f"{why} ({rows} rows, layer {number})"
            if rows > 1 or number or not torch.cuda.is_available():
                continue
            graph, results = captured(model.device, layer.run)
            for _ in range(REPLAYS):
                layer.clear()
                graph.replay()
                if why := _unlike(results, wanted, model.dtype, coarse):
                    return f"replayed as a graph, {why}"
    return ""


def launch_tested(model: Llama, rotary: Rotary) -> None:
    """Launch the kernels that the self-test launches and compare nothing: for a model without
    memory, so that they are compiled before.
    """
    for rows in STEP_ROWS:
        _Layer(FusedLayer(model), model, rotary, 0, rows).run()
    _prompt_halves(model, rotary, FUSED)
    whole, apart, merge = _merges(model)
    merge(whole)
    merge(apart)


def _unlike(
    found: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype, coarse: bool
) -> str:
    """Say which result of a `_Layer` differs. coarse: rows of so few bits that a sum's last bit may
    be a step of theirs.
    """
    names = _Layer.RESULTS[: len(wanted)]  # a part before the last has no logits
    for name, one, other in zip(names, found, wanted, strict=True):
        stored = coarse and name in ("K", "V")
        why = "" if stored else differs(name, one, other, dtype)
        if why := why or differs_overall(name, one, other, COARSE if stored else OVERALL):
            return why
    return ""


def _prompt_failure(model: Llama, rotary: Rotary) -> str:
    """Test the halves of a layer for a prompt's chunk."""
    results = [_prompt_halves(model, rotary, pieces) for pieces in (PLAIN, FUSED)]
    for name, one, other in zip(("query", "K", "V", "query", "layer"), *results, strict=True):
        name = f"a prompt's {name}"
        if why := differs(name, other, one, model.dtype) or differs_overall(name, other, one):
            return why
    return ""


def _prompt_halves(model: Llama, rotary: Rotary, pieces: Pieces) -> list[torch.Tensor]:
    """Run both halves of the first layer for a prompt's chunk: query, K, V, query, layer."""
    config, layer = model.config, model.layers[0]
    model.place(0)
    before, after = pieces
    generator = torch.Generator().manual_seed(1)
    x, attended = (
        torch.randn(1, CHUNK, width, generator=generator).to(model.device, model.dtype)
        for width in (config.hidden_size, config.q_size)
    )
    cos, sin = rotary.at(torch.arange(CHUNK, device=model.device)[None])
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    attended = attended.unflatten(2, (config.num_heads, config.head_dim))
    found = before(layer, x, cos, sin, *sizes)
    return [*found, after(layer, x, attended, config.rms_norm_eps)]


def _merges(model: Llama) -> tuple[Scratch, Scratch, Callable[[Scratch], torch.Tensor]]:
    """Scratch whose splits the last program merges, and whose splits launches of their own do; and
    attention to ROWS rows over either.
    """
    config, device, dtype = model.config, model.device, model.dtype
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    where = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator(where).manual_seed(0)
    k, v, q = (
        torch.randn(shape, generator=generator, device=where).to(device, dtype)
        for shape in (*[(1, kv_heads, ROWS, dim)] * 2, (1, 1, heads, dim))
    )
    lengths = torch.full((1,), ROWS, dtype=torch.int32, device=device)
    scratch = make_scratch(ScratchShape(1, 1, heads, kv_heads, dim, ROWS), device, "triton")

    def attend(merged: Scratch) -> torch.Tensor:
        return decode_dense(q, k, v, lengths, dim**-0.5, scratch=merged, backend="triton")

    return scratch, scratch.merging_apart(), attend


def _merge_failure(model: Llama) -> str:
    """Test merging by the program that ends last against merging in separate launches."""
    device, dtype = model.device, model.dtype
    scratch, apart, attend = _merges(model)
    want = attend(apart)

    def run() -> torch.Tensor:
        return attend(scratch)

    for _ in range(TIMES):
        found = run()
        if why := differs("merge", found, want, dtype) or differs_overall("merge", found, want):
            return why
    if torch.cuda.is_available():
        graph, found = captured(device, run)
        for _ in range(REPLAYS):
            graph.replay()
            if why := differs("merge", found, want, dtype):
                return f"replayed as a graph, {why}"
    return "a ticket is left over" if bool(scratch.tickets.any()) else ""
