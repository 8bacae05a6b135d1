"""Weight products: one copy of each weight, held in the form that is fastest for few rows.

A decode step multiplies 1 to 8 rows by every weight of the model, so reading each weight once is
its bound. `F.linear` reaches that bound on a GPU and in float32 on a CPU. In bfloat16 on a CPU it
re-packs the weight on every call and reads it at half to four fifths of the rate of `torch.mv`, or
of `torch.mm` with the weight as the LEFT factor (docs/LOG.md, 2026-11-20). Where the C++ kernels
run, they multiply few rows by a weight as it is stored (kernels/layer/native_product.py); the forms
below are for more rows then, and for machines without a compiler. Beside them no copy is worth it:
in large pages (kernels/native/pages.py) they read weights of 15 to 117 MB at 24 to 26 GB/s for one
row where oneDNN's copy is read at 13 to 16. Prefill multiplies many rows and is bound by
arithmetic: there `F.linear` is as good as any on one thread, but for float32 on CPUs that are not
Intel's and for 16 bits that a CPU emulates; our own kernels (kernels/layer/many/) share their
threads with all other calls.
"""

from __future__ import annotations

from copy import copy as shallow

import torch
import torch.nn.functional as F

from kernels.launch.isa import isa, multiplies, vectorises
from kernels.layer.many.strips import LEAST, StripProduct, strips_multiply
from kernels.layer.many.tiles import TiledProduct, tiles_multiply
from kernels.layer.native_product import Product, reads

# bfloat16 with AMX: weight-left products win up to here; from 64 rows on all forms are equal
FEW_ROWS = 32
# float32: a [I, O] copy reads 15% faster than [O, I] for one row where rows are this short
NARROW = 1024
# 16 bits that the CPU emulates: float32 products win from here on
WIDE_ROWS = {"default": 2, "avx2": 6, "avx512": 6, "avx512_bf16": 6}
WIDE_BLOCK = 1 << 20  # elements of a weight that are float32 at a time (4 MB)
# for one row, which reads them once: 1 MB stays in a core's cache
WIDE_BLOCK_ONE = 1 << 18
FORMS = ("plain", "left", "narrow", "packed", "widened")


def choose_form(
    weight: torch.Tensor, form: str = "auto", found: str | None = None, copy: bool = True
) -> str:
    """Resolve the form in which `pack_linear` holds a weight [O, I].

    form: "auto" picks the fastest for the weight's device and dtype; one of FORMS is taken as it
    is. found: an instruction set of kernels/launch/isa.py, without C++ kernels; None for this
    machine's, with them where it has them: they read a weight as it is stored. copy: False picks
    only forms that keep the tensor that was passed. Raises ValueError for any other word. The
    forms:

    "plain": `F.linear` on the weight as it is. CUDA, anything unknown.
    "left": stored as it is, multiplied from the left for few rows. bfloat16 with AMX; float32 with
        long rows.
    "narrow": stored transposed. float32 with short rows.
    "widened": stored as it is; many rows are multiplied in float32, a block of the weight at a
        time. 16 bits on a CPU that emulates them at a fifth of its float32 rate.
    "packed": oneDNN's blocked copy, opaque, so not for torch.compile. bfloat16 with avx512_bf16 and
        no AMX, where it reads 1.4 to 1.8x as fast as F.linear and 3x as fast as torch.mv.
    """
    if form != "auto":
        if form not in FORMS:
            raise ValueError(f"form: found {form!r}, expected 'auto' or one of {', '.join(FORMS)}")
        return form
    known = (torch.float32, torch.bfloat16, torch.float16)
    if weight.device.type != "cpu" or weight.dtype not in known:
        return "plain"
    copy = copy and not (found is None and reads(weight))
    if weight.dtype == torch.float32:
        return "narrow" if copy and weight.shape[1] <= NARROW else "left"
    found = isa() if found is None else found
    if not multiplies(weight.dtype, found):
        return "widened"
    if weight.dtype == torch.bfloat16 and found == "amx":
        return "left"
    if weight.dtype == torch.bfloat16 and found == "avx512_bf16":
        return "packed" if copy and torch.backends.mkldnn.is_available() else "plain"
    # ARM from neon_dot or neon_bf16 on, and a CPU that is not known
    return "plain"


def packs(dtype: torch.dtype) -> bool:
    """Whether the fastest form of a weight of `dtype` on this CPU is oneDNN's own copy of it."""
    return choose_form(torch.empty(1, 1, dtype=dtype)) == "packed"


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    form: str = "auto",
    copy: bool = True,
) -> Linear:
    """Hold a weight [O, I] and an optional bias [O] as a callable `x [..., I] -> [..., O]`.

    weight: float32, bfloat16 or float16; form and copy as in `choose_form`. One copy of the weight
    lives here: "plain", "left" and "widened" keep the tensor that was passed, "narrow" and "packed"
    make their own, so drop the original. (A weight that is also the embedding stays: copy=False.)
    Only with "auto" the C++ kernels multiply few rows: a form that is named is torch's.
    Every form but "packed" passes through torch.compile. Raises ValueError if `weight` is no matrix
    or `form` is unknown.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: found shape {tuple(weight.shape)}, expected [out, in]")
    return Linear(weight, bias, choose_form(weight, form, copy=copy), own=form == "auto")


class Linear:
    """A packed weight, made by `pack_linear`.

    `.form` is one of FORMS, `.shape` is (O, I), `.nbytes` counts the weight and its bias. own:
    whether the C++ kernels may multiply it.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, form: str, own: bool = False
    ) -> None:
        self.form, self.bias, self.dtype = form, bias, weight.dtype
        self.wide_rows, self.vectorises = WIDE_ROWS.get(isa(), 6), vectorises(weight.dtype, isa())
        self.shape: tuple[int, ...] = tuple(weight.shape)
        if form == "narrow":
            weight = weight.t().contiguous()
        elif form == "packed":
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.weight = weight
        stored = own and form in ("plain", "left", "widened") and reads(weight)
        in_tiles = stored and tiles_multiply(weight)
        in_strips = stored and not in_tiles and strips_multiply(weight)
        few = LEAST - 1 if in_strips else None
        self.product = Product(weight, bias, few) if stored else None
        self.many: TiledProduct | StripProduct | None = None
        if in_tiles or in_strips:
            self.many = (TiledProduct if in_tiles else StripProduct)(weight, bias)
        elements = self.shape[0] * self.shape[1] + (0 if bias is None else bias.numel())
        self.nbytes = elements * self.dtype.itemsize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I], in the weight's dtype: [..., O], contiguous."""
        product = self.own(x)
        if product is not None:
            return product(x)
        if self.many is not None and self.many.takes(x):
            return self.many(x)
        if self.form == "plain":
            return F.linear(x, self.weight, self.bias)
        if self.form == "packed":
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        flat = x.reshape(-1, self.shape[1])
        if self.form == "widened":
            return self._widened(flat, x)
        if self.form == "narrow":
            return self._narrow(flat).view(*x.shape[:-1], self.shape[0])
        return self._left(flat, x)

    @property
    def native(self) -> bool:
        """Whether the C++ kernels multiply few rows by it: decided when it was packed."""
        return self.product is not None

    def on_torch(self) -> Linear:
        """Return the same weight, of the same memory, multiplied by torch's operators alone."""
        twin = shallow(self)
        twin.product = twin.many = None
        return twin

    def own(self, x: torch.Tensor) -> Product | None:
        """Return the C++ kernels' product where it is the fastest for x [..., I]."""
        if self.product is None or torch.compiler.is_compiling():
            return None
        ours = 0 < x.numel() <= self.product.most_rows * self.shape[1]
        return self.product if ours and x.dtype == self.dtype else None

    def strips(self, x: torch.Tensor) -> StripProduct | None:
        """Return the C++ kernels' product of many rows, which takes what follows it along, where it
        multiplies x [..., I].
        """
        many = self.many
        return many if isinstance(many, StripProduct) and many.takes(x) else None

    def _narrow(self, flat: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.mm(flat, self.weight)
        return torch.addmm(self.bias, flat, self.weight)

    def _widened(self, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if flat.shape[0] == 1 and self.vectorises:
            return self._left(flat, x)
        if 1 < flat.shape[0] < self.wide_rows:
            return F.linear(x, self.weight, self.bias)
        wide, out = flat.float(), flat.new_empty(flat.shape[0], self.shape[0])
        block = WIDE_BLOCK if flat.shape[0] > 1 else WIDE_BLOCK_ONE
        size = max(1, block // self.shape[1])
        for start in range(0, self.shape[0], size):
            part = slice(start, start + size)
            bias = None if self.bias is None else self.bias[part].float()
            out[:, part] = F.linear(wide, self.weight[part].float(), bias)
        return out.view(*x.shape[:-1], self.shape[0])

    def _left(self, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = flat.shape[0]
        # float32: F.linear has 2 and 3 rows free
        if rows != 1 and (rows > FEW_ROWS or (rows <= 3 and self.dtype == torch.float32)):
            return F.linear(x, self.weight, self.bias)
        if self.bias is None and rows == 1:
            out = torch.mv(self.weight, flat[0])
        elif self.bias is None:
            out = torch.mm(self.weight, flat.t()).t().contiguous()
        elif rows == 1:
            out = torch.addmv(self.bias, self.weight, flat[0])
        else:
            out = torch.addmm(self.bias[:, None], self.weight, flat.t()).t().contiguous()
        return out.view(*x.shape[:-1], self.shape[0])
