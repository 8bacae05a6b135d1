"""Run kernels as a compiler with sanitizers makes them: tests/kernels_cpu/test_sources.py starts
this in a process of its own.
"""

import sys
from collections.abc import Callable

import torch

import kernels.chain.layers  # registers its self-test, as do the others
import kernels.experts.native_rows
import kernels.index.choose
import kernels.index.learn
import kernels.index.step
import kernels.kept.noisy
import kernels.kept.stream
import kernels.layer.many.strips
import kernels.layer.many.tiles
import kernels.layer.native_latent
import kernels.layer.native_step
import kernels.recurrent.conv
import kernels.recurrent.delta  # prompts and steps at seams
import kernels.recurrent.gates
import kernels.recurrent.ssd
import kernels.select.drop
import kernels.select.turns
import kernels.select.window.native
import kernels.sketch.agreement
import kernels.sketch.channel_bounds
import kernels.sketch.drawn
import kernels.sketch.guesses
import kernels.sketch.rebuilt
import kernels.sketch.shares
from kernels.attention.native import attend
from kernels.launch.softmax import PLAIN, Softmax
from kernels.layer.native_product import Product
from kernels.native import compilers, library
from kernels.native.amx import TILES
from kernels.prefill.native import attend_prompt
from kernels.quant import native
from kernels.quant.native import Panels, product
from kernels.quant.rounding import to_int4, to_int8
from kernels.rows.forms import FORMS

SANITIZER = sys.argv[1] if len(sys.argv) > 1 else "address,undefined"
library.FLAGS = (
    *(flag for flag in library.FLAGS if flag != "-O3"),
    "-O0",
    "-g1",
    *(f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all"),
    "-DOMNIKV_AMX_REFERENCE",  # tiles in plain C++
)
compilers.PATIENCE = 900  # a sanitizer's code is long, and other tests have the cores


def main() -> None:
    torch.set_num_threads(3 if SANITIZER == "thread" else 2)
    library.try_all()
    assert library.native() is not None and not library.missing(), library.missing()
    generator = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    if SANITIZER == "thread":
        share(some)
        print("clean")
        return
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
            packed = FORMS[torch.int8]
            rows = packed.keys.pack(k.float()), packed.values.pack(v.float())
            for softmax in (PLAIN, Softmax(query_bits=8)):
                attend_prompt(some(9, 8, 64).to(dtype), *rows, 0.125, None, softmax=softmax)
                odd = packed.keys.pack(some(2, count, 80)), packed.values.pack(some(2, count, 80))
                attend_prompt(some(9, 8, 80).to(dtype), *odd, 0.125, None, softmax=softmax)
            Product(some(count, 72).to(dtype))(some(3, 72).to(dtype))
    # whole numbers in every build: rows, outputs and columns of odd counts
    native.prefers_integers = lambda library: True
    for kind, outputs, columns, rows in (("int8", 33, 100, 32), ("int4", 130, 328, 41)):
        weight = some(outputs, columns)
        few = to_int8(weight, columns) if kind == "int8" else to_int4(weight, columns)
        native.product(some(rows, columns).bfloat16(), native.Panels.of(few))
    assert kernels.layer.native_step.usable()
    assert all(binding.usable() for binding in library.BINDINGS if binding not in TILES)
    if library._set() in ("avx512_bf16", "amx"):
        assert not [why for binding in TILES if (why := binding._fault(library.loaded()))]
    print("clean")


def share(some: Callable[..., torch.Tensor]) -> None:
    """Run what shares its work between threads, at sizes from which it does. Each is the same with
    one thread, to the bit.
    """
    k, v = some(2, 3000, 64), some(2, 3000, 64)
    packed = {name: (form.keys.pack(k), form.values.pack(v)) for name, form in FORMS.items()}
    weight = some(700, 512)
    few_bits = Panels.of(to_int8(weight, 128)), Panels.of(to_int4(weight, 64))

    def results() -> list[torch.Tensor]:
        found = [attend(some_q, k, v, 0.125)[0] for some_q in queries]
        found += [attend(queries[0], *rows, 0.125)[0] for rows in packed.values()]
        found += [form.keys.pack(long).view(torch.uint8) for form in FORMS.values()]
        found += attend_prompt(prompt, k, v, 0.125, 2900)
        found += [Product(weight)(x) for x in (rows[:1], rows[:8], rows)]
        found += [product(x, panels) for panels in few_bits for x in (rows[:1], rows)]
        return found

    queries = [some(1, 8, 64), some(4, 8, 64)]
    prompt, rows, long = some(100, 8, 64), some(40, 512), some(2, 2000, 64)
    for _ in range(5):
        shared = results()
        torch.set_num_threads(1)
        pairs = list(zip(results(), shared, strict=True))
        assert not [i for i, pair in enumerate(pairs) if not torch.equal(*pair)]
        torch.set_num_threads(3)


if __name__ == "__main__":
    main()
