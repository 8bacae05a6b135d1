"""The header reader against the reference library, and against files made to hurt."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_model import joined, packed
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.safetensors_file import BITS, HEADER_LIMIT, read_header

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def refused(path, content, kind=BadCheckpoint):
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        read_header(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 400
    return line


def test_agrees_with_the_reference_library(tmp_path):
    reference = pytest.importorskip("safetensors.torch")
    weights = {
        "b": torch.randn(3, 5),
        "a.c": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.ones(()),
        "half": torch.randn(2, 1, 3).half(),
    }
    path = tmp_path / "x.safetensors"
    reference.save_file(weights, path, metadata={"format": "pt", "note": "\u00e9"})
    found = read_header(path)
    content = path.read_bytes()
    assert found.keys() == weights.keys()
    for name, info in found.items():
        assert (
            info.shape == tuple(weights[name].shape)
            and info.nbytes == weights[name].nbytes
            and info.file == path
        )
        again = reference.load(
            joined(
                {
                    "t": {
                        "dtype": info.dtype,
                        "shape": list(info.shape),
                        "data_offsets": [0, info.nbytes],
                    }
                },
                content[info.start : info.stop],
            )
        )
        assert torch.equal(again["t"], weights[name])
    assert list(found) == sorted(found, key=lambda name: (found[name].start, found[name].stop))


def test_our_own_writer_is_read_by_the_reference_library(tmp_path):
    """Otherwise the spoilt files would be spoilt in more ways than intended."""
    reference = pytest.importorskip("safetensors.torch")
    weights = {"a": torch.randn(4, 2), "b": torch.randn(3).half()}
    again = reference.load(joined(*packed(weights)))
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_a_file_without_tensors_is_a_file(tmp_path):
    (tmp_path / "x").write_bytes(joined({"__metadata__": {"a": "b"}}, b""))
    assert read_header(tmp_path / "x") == {}


@pytest.mark.parametrize(
    "length", [9, 100, HEADER_LIMIT, HEADER_LIMIT + 1, 2**32, 2**63 - 1, 2**64 - 1]
)
def test_absurd_header_lengths_cost_nothing(tmp_path, length):
    """Nothing of that size is allocated: the length is compared with the file before the header is
    read.
    """
    line = refused(tmp_path / "x", length.to_bytes(8, "little") + b"{}")
    assert str(length) in line


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format_is_measured(tmp_path, dtype):
    entry = {"t": {"dtype": dtype, "shape": [4, 8], "data_offsets": [0, 4 * BITS[dtype]]}}
    (tmp_path / "x").write_bytes(joined(entry, bytes(4 * BITS[dtype])))
    assert read_header(tmp_path / "x")["t"].dtype == dtype
    assert "found" in refused(
        tmp_path / "x", joined({"t": {**entry["t"], "shape": [5, 8]}}, bytes(4 * BITS[dtype]))
    )


def test_unknown_dtype_is_named(tmp_path):
    line = refused(
        tmp_path / "x", joined({"t": {**ENTRY, "dtype": "Q4_K"}}, bytes(16)), UnsupportedCheckpoint
    )
    assert "Q4_K" in line and "tensor t" in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", None),
        ("shape", 4),
        ("shape", [2, "2"]),
        ("shape", [2.0, 2]),
        ("shape", [True, 4]),
        ("shape", [-2, -2]),
        ("shape", [2**63]),
        ("shape", [1] * 33),
        ("shape", [2**62] * 32),
        ("shape", [3]),
        ("shape", [0]),
        ("data_offsets", None),
        ("data_offsets", [0]),
        ("data_offsets", [0, 8, 16]),
        ("data_offsets", [16, 0]),
        ("data_offsets", [0, 17]),
        ("data_offsets", [-16, 0]),
        ("data_offsets", [0.0, 16.0]),
        ("data_offsets", [0, 2**64]),
        ("data_offsets", "0"),
        ("dtype", None),
        ("dtype", 32),
        ("dtype", ["F32"]),
    ],
)
def test_senseless_entries(tmp_path, field, value):
    line = refused(tmp_path / "x", joined({"t": {**ENTRY, field: value}}, bytes(16)))
    assert "tensor t" in line


def test_ranges_must_tile_the_data(tmp_path):
    def two(first, second, size=32):
        shape = {"a": first, "b": second}
        return joined(
            {
                name: {
                    "dtype": "F32",
                    "shape": [(stop - start) // 4],
                    "data_offsets": [start, stop],
                }
                for name, (start, stop) in shape.items()
            },
            bytes(size),
        )

    assert "overlaps a" in refused(tmp_path / "x", two((0, 16), (12, 32)))
    assert "overlaps" in refused(tmp_path / "x", two((0, 32), (0, 32)))
    assert "hole after a" in refused(tmp_path / "x", two((0, 12), (16, 32)))
    assert "hole after the header" in refused(tmp_path / "x", two((4, 16), (16, 32)))
    assert "4 bytes after the last" in refused(tmp_path / "x", two((0, 16), (16, 28)))
    (tmp_path / "x").write_bytes(two((16, 32), (0, 16)))  # any order in the header is fine
    assert list(read_header(tmp_path / "x")) == ["b", "a"]


def test_names_are_safe_to_print(tmp_path):
    line = refused(
        tmp_path / "x", joined({"evil\n\x1b[2J" + "x" * 500: {**ENTRY, "shape": [3]}}, bytes(16))
    )
    assert "\x1b" not in line and "..." in line


_sound = joined(*packed({"a": torch.ones(2, 3), "b": torch.ones(4).half()}))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(_sound) - 1), st.integers(0, 255), st.integers(0, len(_sound)))
def test_any_flipped_byte_or_cut_is_read_or_refused(tmp_path_factory, at, value, cut):
    """No damage escapes as another exception, and what is accepted lies inside the file."""
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    content = bytearray(_sound)
    content[at] = value
    path.write_bytes(bytes(content[:cut] if cut % 3 == 0 else content))
    try:
        found = read_header(path)
    except (BadCheckpoint, UnsupportedCheckpoint) as error:
        assert "\n" not in str(error)
    else:
        assert all(8 <= info.start <= info.stop <= path.stat().st_size for info in found.values())


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["t", "dtype", "shape", "data_offsets"]), inner, max_size=3
            )
        ),
    )
)
def test_any_json_header_is_refused_in_words(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "json.safetensors"
    path.write_bytes(joined(json.dumps(value).encode(), b""))
    if value == {}:
        assert read_header(path) == {}
        return
    with pytest.raises((BadCheckpoint, UnsupportedCheckpoint)):
        read_header(path)
