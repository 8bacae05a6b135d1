"""Run kernels as a compiler with sanitizers makes them: tests/kernels_cpu/test_sources.py starts
this in a process of its own.
"""

import torch

import kernels.index.choose  # registers its self-test, as do the others
import kernels.index.learn
import kernels.index.step
import kernels.kept.noisy
import kernels.kept.stream
import kernels.layer.native_step
import kernels.recurrent.conv
import kernels.recurrent.delta  # prompts and steps at seams
import kernels.recurrent.gates
import kernels.recurrent.ssd
import kernels.select.drop
import kernels.select.turns
import kernels.sketch.agreement
import kernels.sketch.channel_bounds
import kernels.sketch.drawn
import kernels.sketch.guesses
import kernels.sketch.rebuilt
import kernels.sketch.shares
from kernels.attention.native import attend
from kernels.layer.native_product import Product
from kernels.native import library
from kernels.prefill.native import attend_prompt
from kernels.rows.forms import FORMS

library.FLAGS = (
    *(flag for flag in library.FLAGS if flag != "-O3"),
    *("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def main() -> None:
    torch.set_num_threads(2)
    library.try_all()
    assert library.native() is not None and not library.missing(), library.missing()
    generator = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    # rows of their own allocation, of counts around the 16 that a list of rows is filled up to
    for count in (1, 5, 15, 16, 17, 31, 33, 255, 257, 300):
        for form in FORMS.values():
            k, v = form.keys.pack(some(2, count, 64)), form.values.pack(some(2, count, 64))
            for queries in (1, 2, 4):
                attend(some(queries, 8, 64), k, v, 0.125)
            index = torch.arange(count, dtype=torch.int32)[None]
            attend(some(1, 8, 64), k, v, 0.125, index, count, count)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            k, v = some(2, count, 64).to(dtype), some(2, count, 64).to(dtype)
            attend(some(3, 8, 64).to(dtype), k, v, 0.125, narrow=True)
            attend_prompt(some(9, 8, 64).to(dtype), k, v, 0.125, None)
            Product(some(count, 72).to(dtype))(some(3, 72).to(dtype))
    assert kernels.layer.native_step.usable()
    assert all(binding.usable() for binding in library.BINDINGS)
    print("clean")


if __name__ == "__main__":
    main()
