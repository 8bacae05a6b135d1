"""Records what launchers launch, on tensors without memory: every kernel, configuration and
specialisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.launch.triton import triton

TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}


@dataclass
class Launch:
    """A recorded launch of a kernel (a triton.JITFunction): its arguments by name, and its options,
    such as num_warps.
    """

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile it for triton's active target, through the cache that launches look in. Raises
        the compiler's errors.
        """
        self.function.run(grid=(1,), warmup=True, **self.arguments, **self.options)


@dataclass
class Variant:
    """What decides about a launch's code: the types of its arguments, its constants, the pointers
    and sizes that are multiples of 16, and its options.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]

    @property
    def key(self) -> tuple:
        """Equal for launches that compile to the same code."""
        return (
            self.function.__name__,
            tuple(self.signature.items()),
            tuple(self.constants.items()),
            self.aligned,
            tuple(sorted(self.options.items())),
        )


def specialise(launch: Launch) -> Variant:
    """A launch as triton's own launcher would specialise it: 1 is a constant, multiples of 16 and
    aligned pointers are marked.
    """
    signature, constants, aligned = {}, {}, []
    for parameter in launch.function.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif parameter.is_constexpr or (
            isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        ):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(name)
        else:
            signature[name] = "fp32"
    return Variant(launch.function, signature, constants, tuple(aligned), launch.options)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """While open, launching a Triton kernel appends a Launch to the list and runs nothing."""
    launches: list[Launch] = []
    real = triton.JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        arguments = dict(zip([parameter.name for parameter in self.params], args, strict=False))
        options: dict[str, Any] = {}
        for name, value in named.items():
            (arguments if name in self.arg_names else options)[name] = value
        launches.append(Launch(self, arguments, options))

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = real
