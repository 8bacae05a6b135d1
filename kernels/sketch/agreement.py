"""In how many tables of signs tokens agree with queries: by one call of C++ on a CPU, else by
torch's operators. What MagicPIG draws by.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.library import Binding, Case, loaded

PIECE = 256  # tokens that torch's operators compare at a time


class _Agree(ctypes.Structure):
    """`Agree` of agree.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("asked", "codes")),
        *((name, ctypes.c_long) for name in ("code_head", "code_table")),
        ("agreed", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("agreed_head", "agreed_query")),
        ("most", ctypes.c_void_p),
        ("most_head", ctypes.c_long),
        ("found", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "tables", "tokens", "least", "threads")
        ),
    ]


_BINDING = Binding("agreement of signs", omnikv_sizeof_agree=_Agree)


def agreement(
    asked: torch.Tensor,
    codes: torch.Tensor,
    agreed: torch.Tensor,
    most: torch.Tensor,
    least: int,
    backend: str = "auto",
) -> torch.Tensor:
    """Count the tables in which a token's code is a query's.

    asked int16 [Hkv, G, L], L at most 255; codes int16 [Hkv, L, >= n]; agreed uint8 [Hkv, G, n]
    takes the counts, most float32 [Hkv, n] the largest of a group. Last dims contiguous. Returns
    how many tokens of each head agree in `least` tables with a query of the group: int32 [Hkv].
    Mutates agreed and most. Raises ValueError for an unknown backend.
    """
    native = choose(backend, codes, _BINDING.usable) == "native"
    return (_agreement if native else agreement_ref)(asked, codes, agreed, most, least)


def _agreement(
    asked: torch.Tensor, codes: torch.Tensor, agreed: torch.Tensor, most: torch.Tensor, least: int
) -> torch.Tensor:
    """By agree.cpp."""
    (heads, group, tables), asked = asked.shape, asked.contiguous()
    found = torch.empty(heads, dtype=torch.int32)
    assert codes.stride(2) == agreed.stride(2) == most.stride(1) == 1
    call = _Agree(
        asked.data_ptr(), codes.data_ptr(), *codes.stride()[:2], agreed.data_ptr(),
        *agreed.stride()[:2], most.data_ptr(), most.stride(0), found.data_ptr(),
        heads, group, tables, agreed.shape[2], least, torch.get_num_threads(),
    )  # fmt: skip
    loaded().omnikv_agree(ctypes.byref(call))
    return found


def agreement_ref(
    asked: torch.Tensor, codes: torch.Tensor, agreed: torch.Tensor, most: torch.Tensor, least: int
) -> torch.Tensor:
    """`agreement` in plain torch, same arguments and result, some tokens at a time."""
    n = agreed.shape[2]
    for first in range(0, n, PIECE):
        part = slice(first, min(n, first + PIECE))
        agreed[:, :, part] = (codes[:, None, :, part] == asked.unsqueeze(3)).sum(2)
    most.copy_(agreed.amax(1))
    return (most >= least).sum(1, dtype=torch.int32)


@_BINDING.self_test
def _agreements() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for group, tables, n in ((3, 7, 1131), (7, 150, 33)):
        asked = torch.randint(4, (2, group, tables), generator=generator).short()
        codes = torch.randint(4, (2, tables, n + 5), generator=generator).short()
        results = []
        for form in (_agreement, agreement_ref):
            agreed, most = torch.empty(2, group, n, dtype=torch.uint8), torch.empty(2, n)
            found = form(asked, codes, agreed, most, 2)
            results.append((agreed.int(), most, found))
        for name, one, other in zip(("tables", "the most of a group", "tokens"), *results):
            yield f"agreement of signs: {name}", one, other, one.dtype
