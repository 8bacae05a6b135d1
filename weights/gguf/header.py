"""The header of a GGUF file, checked against the file before anything is believed.

Layout (version 3, little-endian): "GGUF", u32 version, u64 tensors, u64 keys; each key a string, a
u32 type and its value; each tensor a name, u32 dimensions, u64 sizes (fastest first), u32 type, u64
offset from the start of the data, which begins at the next multiple of general.alignment. Source:
ggml's docs/gguf.md. Every count, length and offset is the file's claim: each is held against the
file's size before anything is read or allocated by it (CVE-2026-7482 is a reader that did not).
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.gguf.blocks import SIZES
from weights.gguf.magic import MAGIC
from weights.jsonfile import regular_size, shown

VERSION = 3
HEADER_LIMIT = 256 << 20  # bytes; the largest vocabularies take under 16 MB
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
# type number -> struct's letter; 8 is a string, 9 an array
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
KINDS = tuple(SIZES)
# ggml's numbers of its types, so that a type that is not read is refused by its name
TYPES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS "
        "IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 "
        "Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4".split()
    )
)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its shape, slowest dimension first, its type, its bytes' place."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows, each as long as the last dimension."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUF:
    """A file's keys (numbers, flags, strings, lists of strings, arrays of numbers) and tensors."""

    path: Path
    size: int
    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def raw(self, tensor: StoredTensor, rows: slice | None = None) -> bytearray:
        """The stored bytes of a tensor, or of some of its rows. Raises BadCheckpoint if the file
        was cut meanwhile.
        """
        width = tensor.nbytes // tensor.rows
        first, stop = (0, tensor.rows) if rows is None else (rows.start, rows.stop)
        data = bytearray((stop - first) * width)
        with open(self.path, "rb") as file:
            file.seek(tensor.start + first * width)
            if file.readinto(data) != len(data):
                raise BadCheckpoint(f"{self.path}: changed while it was read")
        return data


def read_header(path: Path) -> GGUF:
    """Read keys and tensors of a GGUF file; no tensor data.

    Raises BadCheckpoint for a file that is damaged or contradicts itself, UnsupportedCheckpoint for
    another version or a tensor type that is not in KINDS.
    """
    size = regular_size(path)
    try:
        with open(path, "rb") as file:
            return _Reader(path, file, size).read()
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None


class _Reader:
    """Walks through the header; every read is inside the file or raises BadCheckpoint."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 0

    def refuse(self, what: str) -> NoReturn:
        raise BadCheckpoint(f"{self.path}: {what}")

    def read(self) -> GGUF:
        if self.take(4, "the magic") != MAGIC:
            self.refuse('not a GGUF file: it does not begin with "GGUF"')
        version = self.number("I", "the version")
        if version != VERSION:
            raise UnsupportedCheckpoint(
                f"{self.path}: found GGUF version {version}, expected {VERSION} (little-endian); "
                "convert the model anew with llama.cpp"
            )
        tensors, keys = self.number("Q", "the counts"), self.number("Q", "the counts")
        found = self.keys(keys)
        infos = [self.tensor() for _ in range(self.count(tensors, 32, "tensors"))]
        return GGUF(self.path, self.size, found, self.placed(infos, found))

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        end = self.at + count
        if end > self.size:
            self.refuse(
                f"{what} would end at byte {end:,}, the file has {self.size:,}: cut or damaged"
            )
        if end > HEADER_LIMIT:
            self.refuse(f"the header is longer than {HEADER_LIMIT:,} bytes")
        data = self.file.read(count)
        if len(data) != count:
            self.refuse("changed while it was read")
        self.at = end
        return data

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def count(self, count: int, least: int, what: str) -> int:
        """`count`, if so many things of at least `least` bytes fit into the rest of the file."""
        if count * least > self.size - self.at:
            self.refuse(f"{count:,} {what} do not fit into the file's {self.size:,} bytes")
        return count

    def string(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8")

    def keys(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self.count(count, 13, "keys")):
            name = self.string("the name of a key")
            if name in found:
                self.refuse(f"key {shown(name)} is given twice")
            kind = self.number("I", f"the type of {shown(name)}")
            found[name] = self.array(name) if kind == ARRAY else self.value(name, kind)
        return found

    def value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self.string(shown(name))
        if kind not in SCALARS:
            self.refuse(f"key {shown(name)}: found the unknown type {kind}")
        return self.number(SCALARS[kind], shown(name))

    def array(self, name: str) -> Any:
        """A list of strings, or an array of numbers; flags as bytes."""
        kind = self.number("I", shown(name))
        count = self.number("Q", shown(name))
        if kind == STRING:
            self.count(count, 8, f"strings of {shown(name)}")
            return [self.string(shown(name)) for _ in range(count)]
        if kind not in SCALARS:
            self.refuse(f"key {shown(name)}: found an array of the unknown type {kind}")
        letter = SCALARS[kind].replace("?", "B")
        width = struct.calcsize("<" + letter)
        return array(letter, self.take(count * width, shown(name)))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type number, offset) of the next tensor."""
        name = self.string("the name of a tensor")
        dims = self.number("I", shown(name))
        if not 1 <= dims <= MAX_DIMS:
            self.refuse(f"tensor {shown(name)}: found {dims} dimensions, expected 1 to {MAX_DIMS}")
        sizes = tuple(self.number("Q", shown(name)) for _ in range(dims))
        if min(sizes) < 1:
            self.refuse(f"tensor {shown(name)}: found a dimension of 0")
        return name, sizes[::-1], self.number("I", shown(name)), self.number("Q", shown(name))

    def placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], keys: dict[str, Any]
    ) -> dict[str, StoredTensor]:
        """The tensors with their places in the file, none outside of it and none on another."""
        alignment = keys.get("general.alignment", 32)
        power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not power or alignment > MAX_ALIGNMENT:
            self.refuse(f"general.alignment: found {shown(alignment)}, expected a power of two")
        base = -(-self.at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in found:
                self.refuse(f"tensor {shown(name)} is given twice")
            if offset % alignment:
                self.refuse(f"tensor {shown(name)}: offset {offset} is no multiple of {alignment}")
            known, nbytes = self.bytes_of(name, shape, kind)
            if base + offset + nbytes > self.size:
                self.refuse(
                    f"tensor {shown(name)} would end at byte {base + offset + nbytes:,}, the file "
                    f"has {self.size:,}: cut or damaged"
                )
            found[name] = StoredTensor(name, shape, known, base + offset, nbytes)
        inside = sorted(found.values(), key=lambda tensor: tensor.start)
        for before, after in zip(inside, inside[1:]):
            if before.start + before.nbytes > after.start:
                self.refuse(f"tensors {shown(before.name)} and {shown(after.name)} overlap")
        return found

    def bytes_of(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        """(type, bytes) of a tensor; blocks lie within its rows."""
        known = TYPES.get(kind)
        if known is None:
            self.refuse(f"tensor {shown(name)}: found the unknown type {kind}")
        if known not in SIZES:
            raise UnsupportedCheckpoint(
                f"{self.path}: tensor {shown(name)}: found type {known}, expected one of "
                + ", ".join(KINDS)
            )
        block, width = SIZES[known]
        if shape[-1] % block:
            self.refuse(
                f"tensor {shown(name)}: rows of {shape[-1]} are no multiple of {known}'s "
                f"blocks of {block}"
            )
        return known, math.prod(shape) // block * width
