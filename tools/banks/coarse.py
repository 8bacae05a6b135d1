"""The control of the engine's own packed banks: rows of fewer levels than their form has, int8 of
15, int4 of 8 for K and 4 for V. It must come out worse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from kernels.rows.forms import DTYPES, FORMS, Side

SUFFIX = "_coarse"
NAMES = ("int8_coarse", "int4_coarse")
STEP = 18  # int8 values of the control are multiples of it: 15 of them, as 4 bits have


@contextlib.contextmanager
def coarser(name: str) -> Iterator[None]:
    """Rows of a bank that are written meanwhile hold fewer levels, where `name` is one of NAMES."""
    if name not in NAMES:
        yield
        return
    dtype = DTYPES[name.removesuffix(SUFFIX)]
    form = FORMS[dtype]

    def control(side: Side, kept: int, put: int) -> Side:
        def pack(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
            rows = side.pack(x, backend)
            if dtype == torch.int8:
                held = side.values(rows)
                held.copy_((held.float() / STEP).round() * STEP)
            else:
                # the lower bits of every number become those of one near the middle
                rows[..., :-4].bitwise_and_(kept).bitwise_or_(put)
            return rows

        return side._replace(pack=pack)

    keys, values = control(form.keys, 0xF8, 0x04), control(form.values, 0xCC, 0x22)
    changed = form._replace(keys=keys, values=values)
    with mock.patch.dict(FORMS, {dtype: changed}):
        yield
