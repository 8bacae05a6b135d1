"""Memory in pages of its own: what lies in it, and that it goes back as it is freed.

Stops: a tensor of another size, dtype or memory than was asked for; holes in the heap that freed
tensors leave; weights on their way, stores or rows that wait which torch's allocator has.
"""

import ctypes
import mmap
import platform
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from engine.bank.chunk_bank import ChunkBank
from engine.load.files import Folder
from engine.methods.evict.shared.store import Part, Rows
from engine.model.tensors import random_stream, targets
from kernels.native import own_pages
from kernels.native.own_pages import LEAST, Joins, copied, empty, empty_on
from tests.builders import tiny_config

GLIBC = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a C library without mallinfo2"
)

# torch's own tensors are the control; those of its wheel for ARM begin pages too and leave no holes
CONTROL = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="torch's own lie in pages here too"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [0, 1, LEAST - 1, LEAST, LEAST + 1, 1_000_003])
def test_tensors_have_the_size_that_was_asked_for_and_share_nothing(dtype, size):
    shape = -(-size // dtype.itemsize), 1
    made = [empty_on(shape, dtype, "cpu").fill_(number) for number in range(3)]
    for number, tensor in enumerate(made):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert (tensor == number).all()


def test_a_copy_is_contiguous_equal_and_its_own():
    source = torch.randn(3, 70_001, 2).transpose(0, 1)
    copy = copied(source)
    assert torch.equal(copy, source) and copy.is_contiguous() and source.nbytes > LEAST
    source.zero_()
    assert copy.any()
    assert empty((5,), torch.ones(2, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("rows", [0, 1, 700, 701])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_joins_are_torch_s_cat(rows, dtype):
    """Larger, smaller, of several pairs and other widths, and again after they were dropped."""
    joins = Joins()
    for again, (heads, more) in enumerate([(1, 800), (4, 1), (2, 1500), (2, 0), (1, 3)]):
        old = (torch.randn(heads, 2000, 2) * 99).to(dtype)[:, :rows]
        pairs = [(old, (torch.randn(heads, more, 2) * 99).to(dtype)), (old[..., :1], old[..., 1:])]
        found = joins.joined(pairs)
        assert all(torch.equal(one, torch.cat(pair, 1)) for one, pair in zip(found, pairs))
        if again == 3:
            joins.drop()


def test_a_join_is_overwritten_by_the_next_and_by_nothing_else():
    joins, old, new = Joins(), torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    (first,) = joins.joined([(old, new)])
    old.zero_()
    assert first.all()
    (second,) = joins.joined([(old, new)])
    assert second.data_ptr() == first.data_ptr() and not first.all()
    joins.drop()
    joins.joined([(new, new)])
    assert not first.all()


def test_without_mappings_torch_allocates(monkeypatch):
    def nothing(*args, **given):
        raise OSError("too many mappings")

    monkeypatch.setattr(own_pages.mmap, "mmap", nothing)
    assert empty_on((LEAST,), torch.float32, "cpu").shape == (LEAST,)
    monkeypatch.delattr(own_pages.mmap, "MAP_PRIVATE")
    assert empty_on((LEAST,), torch.float32, "cpu").shape == (LEAST,)


HOLES = """
import ctypes, gc, sys, torch
from kernels.native.own_pages import empty_on
from engine.bank.pool.heap import free_in_heap
own = sys.argv[1] == "own"
ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, where glibc's own growth ends
ctypes.CDLL(None).malloc_trim(0)
before, held = free_in_heap(), []
for _ in range(60):
    size, kind = (1 << 20,), torch.uint8
    made = empty_on(size, kind, "cpu") if own else torch.empty(size, dtype=kind)
    held.append(made)
del held[::2], made
gc.collect()
print(free_in_heap() - before)
"""


@GLIBC
@pytest.mark.parametrize("whose", ["own", pytest.param("torch", marks=CONTROL)])
def test_freed_tensors_leave_no_holes(whose):
    """Every second one of 60 of 1 MB goes; torch's own, the control, leave holes. In a process of
    its own: this one's heap has holes already.
    """
    command = [sys.executable, "-c", HOLES, whose]
    left = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (left < 10 << 20) == (whose == "own")


def apart(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins a page, as no block of the C library does."""
    return tensor.nbytes < LEAST or tensor.untyped_storage().data_ptr() % mmap.PAGESIZE == 0


@CONTROL
def test_torch_s_own_tensors_begin_pages_by_chance_only():
    assert not all(apart(torch.empty(LEAST << number)) for number in range(6))


def test_weights_on_their_way_are_apart(tmp_path):
    config = tiny_config(hidden_size=512, intermediate_size=1024)
    made = dict(random_stream(config, torch.float32, "cpu"))
    assert sum(tensor.nbytes >= LEAST for tensor in made.values()) > config.num_layers
    assert all(map(apart, made.values()))
    stored = {
        name: part
        for target in targets(config)
        for (name, _), part in zip(
            target.parts, made[target.name].split([shape[0] for _, shape in target.parts])
        )
    }
    save_file({k: v.clone() for k, v in stored.items()}, tmp_path / "model.safetensors")
    read = dict(Folder(tmp_path).tensors(config).stream(targets(config)))
    assert all(torch.equal(read[name], made[name]) for name in made)
    assert all(map(apart, read.values()))


def test_stores_their_copies_and_rows_that_wait_are_apart():
    k = torch.randn(2, 1500, 64)
    part = Part(slice(0, 2), k, k, torch.zeros(2, 1500, dtype=torch.int32), torch.rand(2, 40, 1500))
    rows = Rows.gather(part, torch.arange(1200).expand(2, -1))
    again = rows.clone()
    kept = rows.state(rows=True)[-1]
    for tensor in (rows.k, rows.v, rows.scores, again.k, again.v, *kept):
        assert tensor.nbytes >= LEAST and apart(tensor)
    assert torch.equal(rows.k[:, :1200], k[:, :1200]) and torch.equal(kept[1], k[:, :1200])
    config = tiny_config()
    bank = ChunkBank(config, 4096, torch.float32, "cpu", span=4096)
    new = torch.randn(1, 4096, config.num_kv_heads, config.head_dim)
    bank.write_chunk(0, new, new, 0)
    held = bank.rows(0, 0, 4096)
    assert (
        bank.nbytes >= LEAST and apart(held[0]) and torch.equal(held[1][0].transpose(0, 1), new[0])
    )
