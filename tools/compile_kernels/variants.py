"""Records what launchers launch: every distinct kernel, configuration and specialisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from kernels.launch.triton import triton
from tools.compile_kernels.calls import call
from tools.compile_kernels.cases import TYPES, Case


@dataclass
class Launch:
    """One recorded launch of a kernel (a triton.JITFunction): the types of its arguments, its
    constants, the pointers and sizes that are multiples of 16, and its options.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, Any]
    case: Case

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


def specialise(
    function: Any, arguments: dict[str, Any], options: dict[str, Any], case: Case
) -> Launch:
    """A Launch as triton's own launcher would specialise it: 1 is a constant, multiples of 16 and
    aligned pointers are marked.
    """
    signature, constants, aligned = {}, {}, []
    for parameter in function.params:
        name, value = parameter.name, arguments[parameter.name]
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
    return Launch(function, signature, constants, tuple(aligned), options, case)


@contextlib.contextmanager
def recorded() -> Iterator[list]:
    """While open, launching a Triton kernel appends (function, arguments by name, options) to the
    list and runs nothing.
    """
    launches: list = []

    def record(self, *args, grid, warmup, **named):
        arguments = dict(zip([parameter.name for parameter in self.params], args, strict=False))
        options = {}
        for name, value in named.items():
            (arguments if name in self.arg_names else options)[name] = value
        launches.append((self, arguments, options))

    with mock.patch.object(triton.JITFunction, "run", record):
        yield launches


def variants(cases: Iterable[Case], dependent: bool = False) -> list[Launch]:
    """Every distinct launch of the cases, in order. A variant that several cases share belongs to
    the first of them. dependent: as launched on a GPU with programmatic dependent launch.
    """
    found: dict[tuple, Launch] = {}
    for case in cases:
        with (
            recorded() as launches,
            mock.patch("kernels.launch.pdl.supported", lambda device: dependent),
        ):
            call(case)
        for function, arguments, options in launches:
            launch = specialise(function, arguments, options, case)
            found.setdefault(launch.key, launch)
    return list(found.values())
