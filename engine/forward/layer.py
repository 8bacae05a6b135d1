"""The two halves of a layer in a decode step, in two forms: torch's operators, or our own kernels.

The plain form is `pre_attention` and `post_attention` (engine/model/llama.py), plain or compiled:
on a GPU 11 launches a layer beside attention, and the store. The fused form is 7: norm, q/k/v,
rotation with the store, output projection with the residual, norm, gate and up with SwiGLU, down
with the residual. Both round where torch's operators round; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from engine.bank.base import Step
from engine.model.config.block import LLAMA
from engine.model.llama import Llama, Matrix, post_attention, pre_attention, pre_recurrence
from engine.model.recurrent import Mixed
from engine.model.share.matrix import Joined
from kernels.launch.dispatch import NATIVE, choose_for
from kernels.layer.gemv import MOST_ROWS, multiply_rows
from kernels.layer.norm import normalize_rows
from kernels.layer.rotate_store import rotate_store
from kernels.quant.gemv import multiply_few_bits
from kernels.quant.linear import QuantisedLinear


class LayerForm(Protocol):
    """The interface of a form to a decode step. x [B, Q, hidden]: Q is the tokens of all sequences
    that share the step, one after the other.
    """

    most_rows: int  # B * Q at most
    model: Llama  # as its backend multiplies it
    backend: str  # of the launchers that it calls

    @property
    def parts(self) -> tuple[LayerForm, ...]:
        """The forms of a model's parts, each on its device; (): it is one."""
        ...

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        """Norm, q/k/v and rotation of a layer; the rows of each of `steps` go to its own bank and
        query ring. cos, sin float32 [B, Q, D/2]. Returns rotated q [B, q, H, D] of each.
        """
        ...

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        """What a recurrent layer makes of its tokens before its convolution."""
        ...

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP of a layer; attended [B, Q, H, D] -> new x."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x after the last layer -> float32 logits [B, Q, vocab]."""
        ...


def one_by_one(piece: Callable) -> Callable[..., Any]:
    """`piece` of a step's tokens, one token at a time: tensors [.., Q, ...] are cut along their
    second dimension. A token gets the same bits however many others go with it: for the reference.
    """

    def run(*arguments: object) -> Any:
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        count = max(t.shape[1] for t in tensors)
        if count == 1:
            return piece(*arguments)
        parts = [
            piece(*(a[:, j : j + 1] if isinstance(a, torch.Tensor) else a for a in arguments))
            for j in range(count)
        ]
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts, dim=1)
        return tuple(torch.cat(same, dim=1) for same in zip(*parts))

    return run


def split_rows(steps: Sequence[Step], *tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Tensors [B, Q, ...] cut along their second dimension into what each step's tokens have."""
    if len(steps) == 1:
        return [tensors]
    sizes = [step.positions.shape[1] for step in steps]
    return zip(*(tensor.split(sizes, dim=1) for tensor in tensors))


def begin(form: LayerForm, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As Llama.begun, of a step."""
    if form.backend != "reference" or form.model.per_layer is None:
        return form.model.begun(tokens)
    return one_by_one(form.model.begun)(tokens)


def enter(
    form: LayerForm, number: int, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As Llama.entered, of a step."""
    if form.backend != "reference" or form.model.altup is None:
        return form.model.entered(number, x)
    return one_by_one(lambda x: form.model.entered(number, x))(x)


def refine(
    form: LayerForm,
    number: int,
    x: torch.Tensor,
    inputs: torch.Tensor | None,
    predicted: torch.Tensor | None,
) -> torch.Tensor:
    """Finish the output x [B, Q, hidden] of a layer, as Llama.refined; inputs: of `begin`."""
    mine = None if inputs is None else inputs[:, :, number]
    if form.backend != "reference" or mine is None:
        return form.model.refined(number, x, mine, predicted)
    given = (x, mine) if predicted is None else (x, mine, predicted)
    return one_by_one(lambda *parts: form.model.refined(number, *parts))(*given)


class TorchLayer:
    """torch's operators. pieces: the two halves of a layer, plain or compiled. backend: of what is
    stored, and of the products: few rows are C++'s under "auto" and "native", experts are chosen on
    the device under "triton". Under "reference" each token of a step goes through the products by
    itself.
    """

    most_rows = 1 << 30
    parts: tuple[LayerForm, ...] = ()

    def __init__(
        self,
        model: Llama,
        pieces: tuple[Callable, Callable] = (pre_attention, post_attention),
        backend: str = "auto",
    ) -> None:
        model = model if backend in NATIVE else model.on_torch()
        if choose_for(backend, model.device) != "triton":
            model = model.on_host()
        if not model.capturable:  # a compiler would look into what the host chooses
            pieces = pre_attention, post_attention
        self.model, self.backend = model, backend
        whole = (*pieces, model.logits)
        pre, post, logits = map(one_by_one, whole) if backend == "reference" else whole
        self._pre_attention, self._post_attention, self._logits = pre, post, logits
        self._pre_recurrence = (
            one_by_one(pre_recurrence) if backend == "reference" else pre_recurrence
        )
        config = model.config
        self._eps = config.rms_norm_eps
        self._sizes = [config.sizes_of(layer) for layer in range(config.num_layers)]

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        found = self._pre_attention(self.model.layers[number], x, cos, sin, *self._sizes[number])
        queries = []
        for step, (q, k, v, q_pre_rope) in zip(steps, split_rows(steps, *found)):
            step.bank.write_step(number, k, v, q_pre_rope, step, self.backend)
            queries.append(q)
        return queries

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        return Mixed(*self._pre_recurrence(self.model.layers[number], x, self._eps))

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._post_attention(self.model.layers[number], x, attended, self._eps)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._logits(x)


class FusedLayer:
    """Our own kernels, for weights that are held as they were stored or as words of few bits."""

    most_rows, backend = MOST_ROWS, "auto"
    parts: tuple[LayerForm, ...] = ()

    def __init__(self, model: Llama) -> None:
        assert fusable(model), "a block that our own kernels do not know"
        self.model, self._eps = model, model.config.rms_norm_eps

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        layer, config = self.model.layers[number], self.model.config
        assert layer.input_norm is not None  # as in every block like Llama's
        normed = normalize_rows(x, layer.input_norm, self._eps)
        qkv = _product(normed, layer.qkv).view(
            *x.shape[:2], config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        queries = []
        for step, parts in zip(steps, split_rows(steps, qkv, cos, sin)):
            mine, c, s = (part.contiguous() for part in parts)
            k, v, twice = step.bank.step_rows(number)
            ring = step.query_ring.of(number)
            queries.append(rotate_store(mine, c, s, k, v, ring, step.positions, twice))
        return queries

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        return pre_recurrence(self.model.layers[number], x, self._eps)

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.model.layers[number]
        attended = attended.flatten(2).contiguous()
        x = _product(attended, layer.o, residual=x)
        assert layer.post_norm is not None and layer.gate_up is not None
        assert layer.down is not None
        normed = normalize_rows(x, layer.post_norm, self._eps)
        mixed = _product(normed, layer.gate_up, gated=True)
        return _product(mixed, layer.down, residual=x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = normalize_rows(x, self.model.norm, self._eps)
        return _product(normed, self.model.lm_head, out_dtype=torch.float32)


def fusable(model: Llama) -> bool:
    """Whether our own kernels can do what a model's layers do: a block as Llama's, whole heads that
    rotate, and weights as they are stored or as words.
    """
    config = model.config
    # these three are done elsewhere
    block = replace(config.block, o_bias=True, fused=False, embedding=1.0, score=None)
    ropes = config.layer_ropes or (config.rope,)
    whole = all(r.kind != "none" and r.width(config.head_dim) == config.head_dim for r in ropes)
    held = [model.lm_head, *(m for layer in model.layers for m in layer.matrices)]
    ours = all(_ours(matrix) for matrix in held)
    alike = config.experts is None and not config.bare and config.beside is None
    alike = alike and config.latent is None
    return block == LLAMA and whole and ours and alike


def _ours(matrix: Matrix) -> bool:
    """Whether our own kernels read a matrix."""
    if isinstance(matrix, Joined):
        return _ours(matrix.inner)
    if isinstance(matrix, QuantisedLinear):
        return matrix.words is not None and not matrix.dequantises
    return matrix.form == "plain" and matrix.weight.is_contiguous()


def _product(
    x: torch.Tensor,
    matrix: Matrix,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product of our own kernels with what follows it, as kernels.layer.gemv.multiply_rows. Over
    ranks a residual is added to what all have multiplied.
    """
    if isinstance(matrix, Joined):
        assert not gated  # gate and up are a rank's own rows
        found = matrix.join(_product(matrix.whole(x), matrix.inner, out_dtype=out_dtype))
        return found if residual is None else residual + found
    if isinstance(matrix, QuantisedLinear):
        assert matrix.words is not None
        x = matrix.ordered(x)
        return multiply_few_bits(x, matrix.words, matrix.bias, residual, gated, out_dtype)
    return multiply_rows(x, matrix.weight, matrix.bias, residual, gated, out_dtype)
