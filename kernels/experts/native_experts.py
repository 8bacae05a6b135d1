"""A mixture of experts by the C++ kernels in one call, for a few rows, or for one where experts are
in few bits: the router's product, the choice, and every chosen expert, each read once as it is
stored.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from kernels.experts.choose import best_experts
from kernels.experts.open import SILU, Activation, activated
from kernels.layer.native_product import Product
from kernels.layer.native_step import ACTIVATIONS
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.quant.native import FewBits, Panels
from kernels.quant.native import usable as few_bits_usable
from kernels.quant.rounding import to_int8

CHOSEN = 64  # experts that a row may choose there
ROWS = 8  # of a call


class _Mixture(ctypes.Structure):
    """`Mixture` of mixture.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("router", "first", "last")),
        *((name, ctypes.c_void_p) for name in ("few_first", "few_last", "correction", "factors")),
        *((name, ctypes.c_int) for name in ("count", "per_token", "normalise", "activation")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    ]


class _Call(ctypes.Structure):
    """`MixtureCall` of mixture.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mixture", "x", "routed", "residual", "out")),
        *((name, ctypes.c_void_p) for name in ("numbers", "shares")),
        *((name, ctypes.c_int) for name in ("rows", "threads")),
    ]


_BINDING = Binding("mixtures", omnikv_sizeof_mixture=_Mixture, omnikv_sizeof_mixture_call=_Call)


class NativeExperts:
    """A layer's router [E, H], contiguous, and both products of its E experts as the kernels take
    them, for up to `rows` rows: all of floats of one dtype, or the experts in few bits. per_token,
    normalise, activation: as in `mix_experts` (kernels/experts/mix.py). bias [E]: of the router;
    correction [E]: sigmoids choose then; factors [E]: of each expert's shares.
    """

    def __init__(
        self,
        router: torch.Tensor,
        first: Sequence[Product | FewBits],
        last: Sequence[Product | FewBits],
        per_token: int,
        normalise: bool,
        activation: Activation = SILU,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        count, (kind, limit, alpha) = len(first), activation
        self.dtype, self.per_token = router.dtype, per_token
        self._product = Product(router, bias)
        told: list[object] = []
        arrays = [(ctypes.c_void_p * count)(*self._addresses(own, told)) for own in (first, last)]
        wide = [None if t is None else t.float().contiguous() for t in (correction, factors)]
        self._held = first, last, arrays, wide, told  # the kernels have their addresses only
        given = (None if t is None else t.data_ptr() for t in wide)
        own = [ctypes.addressof(array) for array in arrays]
        self.rows = 1 if told else ROWS
        at = (None, None, *own) if told else (*own, None, None)
        numbers = count, per_token, normalise, ACTIVATIONS.index(kind)
        self._mixture = _Mixture(self._product.address, *at, *given, *numbers, limit, alpha)
        self.address = ctypes.addressof(self._mixture)  # of the struct that kernels take

    def _addresses(
        self, products: Sequence[Product | FewBits], told: list[object]
    ) -> Iterator[int]:
        """Where what the kernels read of each product lies; `told` has that of few bits."""
        for product in products:
            if isinstance(product, Product):
                yield product.address
            else:
                call, _ = product.told(self.dtype, self.dtype)
                told.append(call)
                yield ctypes.addressof(call)

    @staticmethod
    def takes(
        router: torch.Tensor, sides: Sequence[Sequence[Product | FewBits]], per_token: int
    ) -> bool:
        """Whether the kernels take this router with both sides' products: all of floats of its
        dtype, or each side's in few bits of one form.
        """
        ours = router.device.type == "cpu" and router.is_contiguous() and router.dtype in FLOATS
        floats = [p for side in sides for p in side if isinstance(p, Product)]
        few = [{p.form for p in side if isinstance(p, FewBits)} for side in sides]
        alike = all(p.dtype == router.dtype for p in floats)
        one = not any(few) or (not floats and all(len(forms) == 1 for forms in few))
        return ours and alike and one and per_token <= CHOSEN and _BINDING.usable()

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        routed: torch.Tensor | None = None,
        chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the experts that the rows x [R, H] choose and add residual [R, H]: [R, H].

        At most `rows` rows. routed [R, H]: what the router reads in place of x. chosen: shares and
        numbers int64, both [R, per_token], where the choice was made elsewhere. Equal logits go to
        the lower number, and a row's choice does not hang on the others. Sums are float32, rounded
        to the dtype after each product, the gate's activation, the activation, the experts' sum
        (ascending) and the residual. Results do not depend on the number of threads. Raises
        MemoryError where the kernel's own buffers do not fit.
        """
        x, (shares, numbers) = x.contiguous(), (None, None) if chosen is None else chosen
        shares, out = None if shares is None else shares.float(), torch.empty_like(x)
        given = (x, routed, residual, out, numbers, shares)
        held = [t if t is None else t.contiguous() for t in given]
        at = (None if t is None else t.data_ptr() for t in held)
        call = _Call(self.address, *at, len(x), torch.get_num_threads())
        check(_function()(ctypes.addressof(call)), f"a mixture of {self.dtype}")
        return out


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    function = loaded().omnikv_mixture
    function.argtypes = [ctypes.c_void_p]
    return function


@_BINDING.self_test
def _mixtures() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    count, hidden, width, taken = 5, 72, 20, 3
    sizes = (count, hidden), (count,), (1, hidden), (1, hidden)
    held = [torch.randn(*size, generator=generator) for size in sizes]
    opened = torch.randn(count, 2 * width, hidden, generator=generator) / 8
    closed = torch.randn(count, hidden, width, generator=generator) / 4
    for dtype in FLOATS:
        router, correction, x, residual = (t.to(dtype) for t in held)
        first, last = opened.to(dtype), closed.to(dtype)
        firsts, lasts = ([Product(weight) for weight in both] for both in (first, last))
        for corrected in (None, correction):
            logits = F.linear(x, router)
            shares, numbers = best_experts(logits, taken, True, corrected)
            expected = residual.double()
            for share, number in zip(shares[0].to(dtype).double(), numbers[0].tolist()):
                middle = activated(F.linear(x.double(), first[number].double()))
                expected = expected + share * F.linear(middle, last[number].double())
            found = NativeExperts(router, firsts, lasts, taken, True, correction=corrected)
            yield f"a mixture in {dtype}", found(x, residual), expected, dtype
            if few_bits_usable():
                yield _in_few_bits(x, residual, router, opened, closed, corrected)


def _in_few_bits(
    x: torch.Tensor,
    residual: torch.Tensor,
    router: torch.Tensor,
    opened: torch.Tensor,
    closed: torch.Tensor,
    correction: torch.Tensor | None,
) -> Case:
    """A mixture whose experts are int8 in whole rows."""
    sides = [[FewBits(Panels.of(to_int8(w)), None) for w in held] for held in (opened, closed)]
    firsts, lasts = sides
    shares, numbers = best_experts(F.linear(x, router), 3, True, correction)
    expected = residual.double()
    for share, number in zip(shares[0].to(x.dtype).double(), numbers[0].tolist()):
        first, last = (side[number].weight.rows(slice(None), torch.float64) for side in sides)
        expected = expected + share * F.linear(activated(F.linear(x.double(), first)), last)
    found = NativeExperts(router, firsts, lasts, 3, True, correction=correction)
    return f"a mixture in few bits in {x.dtype}", found(x, residual), expected, x.dtype
