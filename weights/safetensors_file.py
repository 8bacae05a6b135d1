"""Read the header of an untrusted safetensors file; everything is checked before anything is
allocated.

A file is 8 bytes (little-endian header length N), N bytes of JSON, and the data. The JSON maps each
name to {"dtype", "shape", "data_offsets"}; offsets count from the end of the header
(https://huggingface.co/docs/safetensors, "Format").

The header is parsed here, not by the safetensors package, for two reasons. `Checkpoint.stream` maps
the files and needs each tensor's byte range, which the package does not return. And an error must
name the file, the tensor, the value found and the value expected, while the package says only
"invalid shape, data type, or offset for tensor". tools/studies/pocket writes files with the
package, and tests/weights checks this reader against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import DuplicateKey, parse, regular_size, shown

# bytes, the format's own limit; the largest real headers are about 10 MB
HEADER_LIMIT = 100_000_000
MAX_DIMENSIONS = 32  # bounds the shape product; no checkpoint has more than 5

# Bits per element of every dtype that the format names. The engine computes with FLOATS and refuses
# the others by name.
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes start..stop of `file`.

    shape: in elements; dtype: a name of the format, such as "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorInfo]:
    """List the tensors of one safetensors file in file order; reads the header only.

    Raises BadCheckpoint, naming file, tensor, found and expected, if the file is truncated or
    empty, its header has an absurd length, is no JSON or repeats a name, a shape does not match its
    bytes, or ranges overlap, leave holes or leave the file. Raises UnsupportedCheckpoint for an
    unknown dtype.
    """
    size = regular_size(path)
    if size < 8:
        raise BadCheckpoint(f"{path}: found {size} bytes, expected a safetensors file (at least 8)")
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > HEADER_LIMIT:
                raise BadCheckpoint(
                    f"{path}: found a header of {length} bytes, expected at most {HEADER_LIMIT}"
                )
            if length > size - 8:
                raise BadCheckpoint(
                    f"{path}: truncated: found {size} bytes, expected at least {8 + length} "
                    f"(8, and a header of {length})"
                )
            header = parse(file.read(length))
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    except DuplicateKey as error:
        raise BadCheckpoint(f"{path}: header: found {error}, expected every name once") from None
    except (ValueError, RecursionError) as error:
        reason = shown(str(error), 120)
        raise BadCheckpoint(
            f"{path}: header: found {length} bytes that are no JSON, expected a JSON object "
            f"({reason})"
        ) from None
    if not isinstance(header, dict):
        raise BadCheckpoint(
            f"{path}: header: found a JSON {type(header).__name__}, expected an object"
        )
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    return _in_order(path, found, 8 + length, size)


def _entry(path: Path, name: str, entry: object, data: int, size: int) -> TensorInfo:
    """Check one header entry: its types, its dtype, and a range in the file that fits the shape."""
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise BadCheckpoint(
            f"{where}: found {shown(entry)}, expected an object with dtype, shape and data_offsets"
        )
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise BadCheckpoint(f"{where}: dtype: found {shown(dtype)}, expected a name such as BF16")
    if dtype not in BITS:
        raise UnsupportedCheckpoint(
            f"{where}: dtype: found {shown(dtype)}, expected one of {', '.join(FLOATS)}"
        )
    if not _is_sizes(shape, MAX_DIMENSIONS):
        raise BadCheckpoint(
            f"{where}: shape: found {shown(shape)}, expected a list of sizes (at most "
            f"{MAX_DIMENSIONS})"
        )
    if (
        not _is_sizes(offsets, 2)
        or len(offsets) != 2
        or not offsets[0] <= offsets[1] <= size - data
    ):
        raise BadCheckpoint(
            f"{where}: data_offsets: found {shown(offsets)}, expected [begin, end] with "
            f"begin <= end <= {size - data}, the file's data (truncated?)"
        )
    bits = BITS[dtype]
    for extent in shape:
        bits *= extent
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise BadCheckpoint(
            f"{where}: found {end - begin} bytes, expected {shown(str(bits // 8))} for shape "
            f"{shown(shape)} of {dtype}"
        )
    return TensorInfo(path, dtype, tuple(shape), data + begin, data + end)


def _is_sizes(values: object, most: int) -> TypeGuard[list[int]]:
    """Tell whether `values` is a list of at most `most` integers in [0, 2^63)."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(v) is int and 0 <= v < 1 << 63 for v in values)
    )


def _in_order(
    path: Path, found: dict[str, TensorInfo], data: int, size: int
) -> dict[str, TensorInfo]:
    """Sort the tensors by position; raise BadCheckpoint unless they cover the data without overlap
    or hole, as the format demands.
    """
    end, last = data, "the header"
    ordered = sorted(found.items(), key=lambda item: (item[1].start, item[1].stop))
    for name, info in ordered:
        if info.start != end:
            kind = "overlaps" if info.start < end else "leaves a hole after"
            raise BadCheckpoint(
                f"{path}: tensor {shown(name)}: data_offsets: {kind} {shown(last)}: "
                f"found begin {info.start - data}, expected {end - data}"
            )
        end, last = info.stop, name
    if end != size:
        raise BadCheckpoint(
            f"{path}: found {size - end} bytes after the last tensor, expected none"
        )
    return dict(ordered)
