"""What a compiler made is tried before anything runs on it: attention, a prompt's attention and
products on small tensors, against torch's operators in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.native.attention import attend
from kernels.native.few_bits import Panels, product
from kernels.native.prefill import attend_prompt, attends_prompt
from kernels.native.product import Product
from kernels.quantised import Quantised
from kernels.reference import attend_alone
from kernels.rows import FORMS, floats, key_floats

# of the largest element; a wrong kernel is off by all of it
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROWS, HEADS, GROUP, DIM = 300, 2, 3, 64  # more than a block of rows, and a rest
Case = tuple[str, torch.Tensor, torch.Tensor, torch.dtype]


def fault() -> str:
    """Why the library may not be used, or ""."""
    for name, found, expected, dtype in _cases():
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        if not error <= ALLOWED[dtype]:
            return f"{name} in {str(dtype)[6:]} is wrong by {float(error):.1%} as compiled here"
    return ""


def _cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for dtype in ALLOWED:
        k, v = some(HEADS, ROWS, DIM).to(dtype), some(HEADS, ROWS, DIM).to(dtype)
        yield from _attention(dtype, k, v, some)
        weight, x = some(40, DIM).to(dtype), some(3, DIM).to(dtype)
        yield "a product", Product(weight)(x), x.double() @ weight.double().t(), dtype
    k, v = some(HEADS, ROWS, DIM), some(HEADS, ROWS, DIM)
    for form in FORMS.values():
        packed = form.keys.pack(k), form.values.pack(v)
        q = some(2, HEADS * GROUP, DIM)
        expected = _attended(q, key_floats(packed[0]), floats(packed[1]), [ROWS - 1, ROWS])
        yield "attention to packed rows", attend(q, *packed, 0.125)[0], expected, torch.float32
    values = torch.randint(-127, 128, (64, DIM), generator=generator).to(torch.int8)
    few = Quantised("int8", values, some(64, DIM // 32).abs(), 32)
    x = some(3, DIM)
    # scales are held in 16 bits
    yield (
        "a product in few bits",
        product(x, Panels.of(few)),
        x @ few.dense(torch.float32).t(),
        torch.float16,
    )


def _attention(
    dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor, some: Callable[..., torch.Tensor]
) -> Iterator[Case]:
    q = some(2, HEADS * GROUP, DIM).to(dtype)
    yield "attention", attend(q, k, v, 0.125)[0], _attended(q, k, v, [ROWS - 1, ROWS]), dtype
    q = some(20, HEADS * GROUP, DIM).to(dtype)
    if attends_prompt(q, k, v):
        expected = _attended(q, k, v, [ROWS - 19 + i for i in range(20)])
        yield "a prompt's attention", attend_prompt(q, k, v, 0.125, ROWS - 20)[0], expected, dtype


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[int]
) -> torch.Tensor:
    return attend_alone(q.float(), k.float(), v.float(), visible, 0.125)[0]
