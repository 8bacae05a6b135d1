"""Memory in large pages: what lies in it, what it gives back, and whose weights do."""

import ctypes
import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from engine import LLM
from kernels.native import pages
from kernels.native.pages import ALIGN, BLOCK, LEAST, PAGE, moved, zeros
from tests.builders import stream_of, tiny_config, tiny_weights

FLAGS = "/sys/kernel/mm/transparent_hugepage/enabled"


def _flagged(address: int) -> bool:
    """Whether the mapping of an address asks for large pages (proc_pid_smaps(5), hg)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, stop = (int(bound, 16) for bound in bounds.groups())
            inside = first <= address < stop
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping holds the address")


def _says_so() -> bool:
    """Whether this system says what a mapping was advised: an emulated process's does not."""
    if not Path(FLAGS).exists():
        return False
    mapping = mmap.mmap(-1, 4 * PAGE)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return _flagged(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))


ADVISED = pytest.mark.skipif(not _says_so(), reason="a system that shows no large pages")


def advised(tensor: torch.Tensor) -> bool:
    """Whether the mapping in which a tensor begins asks for large pages."""
    return _flagged(tensor.data_ptr())


@ADVISED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_tensors_lie_one_after_the_other_and_keep_their_values(dtype):
    shapes = [(257, 129), (64, 1024), (1, 70_001), (3, 5, 7_001), (513, 511)]
    made = [zeros(*shape, dtype=dtype) for shape in shapes]
    assert all(not tensor.any() for tensor in made)
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
    for number, (tensor, shape) in enumerate(zip(made, shapes)):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert (tensor == number + 1).all() and tensor.data_ptr() % ALIGN == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # of its own bytes only
        assert advised(tensor)
    # the control: torch's own, mapped anew (malloc may give a smaller one memory of advised rows)
    assert not advised(torch.zeros(BLOCK, dtype=torch.uint8))


@ADVISED
def test_a_tensor_beyond_a_block_begins_a_page_and_small_ones_stay_with_torch():
    assert zeros(BLOCK + 1, dtype=torch.uint8).data_ptr() % PAGE == 0
    small = torch.ones(LEAST // 4 - 1)
    assert moved(small) is small
    taken = pages._current and pages._current._at
    assert not zeros(LEAST // 4 - 1, dtype=torch.float32).any()
    assert (pages._current and pages._current._at) == taken  # no part of a block
    zeros(LEAST // 4, dtype=torch.float32)
    assert (pages._current and pages._current._at) != taken  # the control


@ADVISED
def test_memory_goes_back_with_the_last_tensor_of_a_block():
    pages._current = None
    first, last = (zeros(LEAST, dtype=torch.uint8) for _ in range(2))
    block = pages._current
    assert block is not None and block._view() is not None
    del first
    gc.collect()
    assert block._view() is not None and not last.any()
    del last
    gc.collect()
    assert block._view() is None  # unmapped
    assert zeros(LEAST, dtype=torch.uint8).numel() == LEAST and pages._current is not block


def test_without_memory_or_large_pages_torch_allocates(monkeypatch):
    weight = torch.randn(300, 300)

    def nothing(*args, **given):
        raise OSError("nothing is left")

    monkeypatch.setattr(pages, "_current", None)
    monkeypatch.setattr(pages.mmap, "mmap", nothing)
    assert torch.equal(moved(weight), weight) and pages._current is None
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert moved(weight) is weight and not zeros(300, 300, dtype=torch.int32).any()


@ADVISED
@pytest.mark.parametrize("weights", ["float", "int8"])
def test_weights_of_a_model_lie_in_large_pages(weights):
    config = tiny_config(hidden_size=256, intermediate_size=512)
    llm = LLM.from_stream(
        config, stream_of(tiny_weights(config)), weights=weights, dtype="bfloat16", device="cpu"
    )
    matrices = [layer.gate_up for layer in llm.loaded.model.layers]
    if not all(matrix.native for matrix in matrices):
        pytest.skip("no C++ kernels here: torch holds a copy in a form of its own")
    held = [m.panels.values if weights == "int8" else m.weight for m in matrices]
    assert all(tensor.nbytes >= LEAST and advised(tensor) for tensor in held)
