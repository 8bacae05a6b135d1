"""Kernels are compiled once for all capacities.

Stops: seconds of compilation in mid-answer, when the last bucket (the capacity itself, often no
multiple of 16) is reached.
"""

import importlib
import pkgutil

import pytest

import kernels

pytest.importorskip("triton")


def test_no_kernel_is_compiled_again_for_another_capacity():
    """Triton compiles an int argument apart where it is 1 or a multiple of 16."""
    found, apart = [], []
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if not name.endswith("_kernel") or not hasattr(kernel, "params"):
                continue
            for parameter in kernel.params:
                if parameter.name == "capacity":
                    found.append(name)
                    apart += [] if parameter.do_not_specialize else [name]
    assert apart == [] and {"dense_kernel", "head_max_kernel", "emit_kernel"} <= set(found)
