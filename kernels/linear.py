"""Weight products: one copy of a weight, in the form that is fastest for few rows on this device
and right for many.

A decode step multiplies 1 to 8 rows by every weight of the model: it is bound by reading each
weight once. `F.linear` reaches that bound on a GPU and in float32 on a CPU, but in bfloat16 on a
CPU it re-packs the weight on every call and reads it at half to four fifths of the rate of
`torch.mv` and of `torch.mm` with the weight as the LEFT factor (docs/LOG.md, 2026-11-20). Prefill
multiplies many rows and is bound by arithmetic: there `F.linear` is as good as any.
"""

import torch
import torch.nn.functional as F

# bfloat16 with AMX: weight-left products win up to here; from 64 rows on all forms are equal
FEW_ROWS = 32
# float32: a [I, O] copy reads 15% faster than [O, I] for one row where rows are this short
NARROW = 1024
# bfloat16 without bfloat16 instructions: from here on float32 products win, 1.5x at 32 rows, 5.9x
# at 256
WIDE_ROWS = 24
WIDE_BLOCK = 1 << 20  # elements of a weight that are float32 at a time (4 MB)
FORMS = ("plain", "left", "narrow", "packed", "widened")


def choose_form(weight, backend="auto"):
    """The form in which `pack_linear` holds a weight [O, I]: one of FORMS.

    "plain": `F.linear` on the weight as it is (CUDA, float16, anything unknown); "left": as it is,
    multiplied from the left for few rows (bfloat16 with AMX; float32 with long rows); "narrow":
    stored transposed (float32, short rows); "widened": as it is, but many rows are multiplied in
    float32, a block of the weight at a time (bfloat16 on a CPU without bfloat16 instructions, which
    emulates them at a fifth of its float32 rate); "packed": oneDNN's blocked copy (bfloat16 with
    avx512_bf16 and no AMX, where it reads 1.5x as fast as the others; opaque, so not for
    torch.compile). backend: "auto", or one of FORMS to have it so. Raises ValueError for another
    word.
    """
    if backend != "auto":
        if backend not in FORMS:
            raise ValueError(
                f"backend: found {backend!r}, expected 'auto' or one of {', '.join(FORMS)}"
            )
        return backend
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return "plain"
    if weight.dtype == torch.float32:
        return "narrow" if weight.shape[1] <= NARROW else "left"
    if torch.cpu._is_amx_tile_supported():
        return "left"
    if torch.cpu._is_avx512_bf16_supported():
        return "packed" if torch.backends.mkldnn.is_available() else "plain"
    # ARM has bfloat16 products of its own
    return "widened" if torch.cpu._is_avx2_supported() else "plain"


def pack_linear(weight, bias=None, backend="auto"):
    """A weight [O, I] (float32, bfloat16, float16) and an optional bias [O] as a callable `x [...,
    I] -> [..., O]`.

    It holds one copy of the weight: "plain" and "left" keep the tensor that was passed, "narrow"
    and "packed" a copy of their own, so drop the original (a weight that is also the embedding
    stays: pass backend="left" for it). All forms but "packed" pass through torch.compile; see
    `choose_form`. Raises ValueError for what is no matrix or no backend.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: found shape {tuple(weight.shape)}, expected [out, in]")
    return Linear(weight, bias, choose_form(weight, backend))


class Linear:
    """What `pack_linear` returns. `.form` is one of FORMS, `.shape` (O, I), `.nbytes` what it
    holds.
    """

    def __init__(self, weight, bias, form):
        self.form, self.shape, self.bias, self.dtype = form, tuple(weight.shape), bias, weight.dtype
        if form == "narrow":
            weight = weight.t().contiguous()
        elif form == "packed":
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.weight = weight
        self.nbytes = (
            self.shape[0] * self.shape[1] + (0 if bias is None else bias.numel())
        ) * self.dtype.itemsize

    def __call__(self, x):
        """x [..., I] in the weight's dtype -> [..., O], contiguous."""
        if self.form == "plain":
            return F.linear(x, self.weight, self.bias)
        if self.form == "packed":
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        flat = x.reshape(-1, self.shape[1])
        if self.form == "widened":
            return self._widened(flat, x)
        return (
            self._narrow(flat).view(*x.shape[:-1], self.shape[0])
            if self.form == "narrow"
            else self._left(flat, x)
        )

    def _narrow(self, flat):
        return (
            torch.mm(flat, self.weight)
            if self.bias is None
            else torch.addmm(self.bias, flat, self.weight)
        )

    def _widened(self, flat, x):
        if flat.shape[0] < WIDE_ROWS:
            return (
                self._left(flat, x) if flat.shape[0] == 1 else F.linear(x, self.weight, self.bias)
            )
        wide, out = flat.float(), flat.new_empty(flat.shape[0], self.shape[0])
        size = max(1, WIDE_BLOCK // self.shape[1])
        for start in range(0, self.shape[0], size):
            part = slice(start, start + size)
            bias = None if self.bias is None else self.bias[part].float()
            out[:, part] = F.linear(wide, self.weight[part].float(), bias)
        return out.view(*x.shape[:-1], self.shape[0])

    def _left(self, flat, x):
        rows = flat.shape[0]
        if rows == 1:
            out = (
                torch.mv(self.weight, flat[0])
                if self.bias is None
                else torch.addmv(self.bias, self.weight, flat[0])
            )
        # float32: F.linear has 2 and 3 rows free
        elif rows > FEW_ROWS or (rows <= 3 and self.dtype == torch.float32):
            return F.linear(x, self.weight, self.bias)
        elif self.bias is None:
            out = torch.mm(self.weight, flat.t()).t().contiguous()
        else:
            out = torch.addmm(self.bias[:, None], self.weight, flat.t()).t().contiguous()
        return out.view(*x.shape[:-1], self.shape[0])
