"""The names of the banks: a quantiser and its bits, such as kivi2."""

from __future__ import annotations

import re

from engine.base.errors import UsageError
from kernels.rows.forms import DTYPES
from tools.banks import coarse
from tools.banks.base import Quantiser
from tools.banks.bfp import BlockFloat
from tools.banks.gear import Gear
from tools.banks.kivi import Kivi
from tools.banks.kvquant import KVQuant
from tools.banks.mikv import MiKV
from tools.banks.rotatekv import RotateKV
from tools.banks.saq import PerToken, Staircase
from tools.banks.sign import Sign
from tools.banks.zipcache import ZipCache

FAMILIES: dict[str, type[Quantiser]] = {
    "kivi": Kivi,
    "kvquant": KVQuant,
    "rotatekv": RotateKV,
    "bfp": BlockFloat,
    "zipcache": ZipCache,
    "gear": Gear,
    "mikv": MiKV,
    "saq": Staircase,
    "token": PerToken,
    "sign": Sign,
}
REAL = tuple(DTYPES)  # banks of the engine itself, which are no simulation
BITS = (*range(1, 9), 16)
USUAL = 4  # bits of a name without any


def quantiser(name: str) -> Quantiser:
    """The quantiser of a name: a family and bits (1 to 8, or 16 for rows as they are; 4 where none
    are given). Raises UsageError for another name.
    """
    match = re.fullmatch(r"([a-z]+)(\d{0,2})", name)
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None:
        raise UsageError(
            f"--bank: found {name[:40]!r}, expected {', '.join(REAL)}, or one of "
            f"{', '.join(FAMILIES)} and its bits, such as kivi2"
        )
    bits = 1 if family is Sign else int(match[2] or USUAL)
    least = 2 if family is BlockFloat else 1
    if bits not in BITS or bits < least or (family is Sign and match[2]):
        raise UsageError(
            f"--bank: found {name!r}, expected {match[1]} "
            + ("alone" if family is Sign else f"and {least} to 8 bits, or 16")
        )
    return family(bits)


def checked(names: list[str], controls: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names, each once, of banks that there are, and of these controls. Raises UsageError for
    another.
    """
    for name in names:
        if name not in (*REAL, *controls):
            quantiser(name)
    return tuple(dict.fromkeys(names))


def shown(name: str) -> str:
    """A bank's name for tables, which says what is simulated."""
    return name if name in (*REAL, *coarse.NAMES) else f"{name} (simulated)"
