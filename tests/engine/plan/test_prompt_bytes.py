"""The buffers of a sparse prefill are in the plan: within 2% of the bytes that torch hands out.

Stops: gigabytes of scores that only a prompt of a million tokens shows.
"""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import OmniKV
from engine.methods.select.minference import MInference
from engine.methods.select.minference_patterns import LAST, line_sums
from kernels.prefill.block_sparse import block_lists, block_mass, choose_blocks
from tests.builders import random_ids, session_config, tiny_llm

BF16 = torch.bfloat16
CONFIG = session_config()
H, HKV, D = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim


class Peak(TorchDispatchMode):
    """The most bytes of storages made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self.known = set()

    def gone(self, key, size):
        self.known.discard(key)
        self.alive -= size

    def __torch_dispatch__(self, op, types, arguments=(), named=None):
        found = op(*arguments, **(named or {}))
        given = {a.untyped_storage()._cdata for a in arguments if isinstance(a, torch.Tensor)}
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in given or storage._cdata in self.known:
                continue
            self.known.add(storage._cdata)
            self.alive += storage.nbytes()
            weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return found


def peak_of(run):
    with torch.inference_mode(False), Peak() as peak:
        run()
    return peak.peak


def planned(method, context, chunk):
    return method.prompt_bytes(CONFIG, context, chunk, 2)


@pytest.mark.parametrize("most", [1 << 23, 1 << 17, 1 << 14])
def test_block_estimates(most, monkeypatch):
    """The logits of all blocks at once, of some, and of so few that the sort holds more."""
    monkeypatch.setattr("kernels.prefill.block_sparse.MASS_FLOATS", most)
    monkeypatch.setattr(
        "kernels.prefill.block_sparse.multiplies", lambda dtype: True
    )  # as on a GPU
    chunk, stop = 2048, 8192
    config = session_config(heads=32, kv_heads=16)
    q = torch.randn(1, chunk, 32, D).to(BF16)
    k = torch.randn(1, 16, stop, D).to(BF16)

    def choose():
        mass = partial(block_mass, q, k, stop - chunk, 8, D**-0.5)
        block_lists(choose_blocks(mass(), stop - chunk, 0.9), stop - chunk)

    method = OmniKV(filter_layers=(1, 4), dense_layers="block_sparse", dense_stride=8)
    expected = method.prompt_bytes(config, stop, chunk, 2)
    assert peak_of(choose) == pytest.approx(expected, rel=0.02)


def test_lines_of_minference():
    stop = 8192
    q, k = torch.randn(LAST, H, D).to(BF16), torch.randn(HKV, stop, D).to(BF16)
    method = MInference(patterns=("vertical_slash", 100, 200))
    found = peak_of(partial(line_sums, q, k, stop, D**-0.5))
    assert found == pytest.approx(planned(method, stop, stop), rel=0.02)
    assert planned(MInference(patterns=("a_shape", 64, 256)), stop, stop) == 0


def test_what_omnikv_prefill_chooses():
    """A chunk of sparse blocks only, over the host tier."""
    method = OmniKV(
        filter_layers=(1, 4), tokens=64, tail=64, dense_below=0, prefill_ratio=1, prefill_block=64,
        prefill_dense_end=0,
    )  # fmt: skip
    with tiny_llm(method, CONFIG, max_context=2048, chunk=256, offload="host").session() as session:
        session.prefill(random_ids(2048))
        selector = session.runtime.prefill
        held = [*selector.index.values()]
        # the last layer's one query has a list of its own
        for (_, start), runs in selector.named.items():
            if start == 1792:
                held += [t for run in runs for rows, at, _ in run for t in (rows.tokens, at)]
        found = sum(t.nbytes for t in held)
        assert found == pytest.approx(method.prompt_bytes(CONFIG, 2048, 256, 4), rel=0.02)


def test_the_plan_has_them():
    sparse = OmniKV(filter_layers=(1, 4), dense_layers="block_sparse")
    llm = tiny_llm(sparse, CONFIG, max_context=2048, chunk=512)
    items = {name: size for name, size, _ in llm.plan().items}
    assert items["sparse prefill"] == sparse.prompt_bytes(CONFIG, 2048, 512, 4)
    assert "sparse prefill" in str(llm.plan())
    plain = llm.plan(OmniKV(filter_layers=(1, 4)))
    assert all(name != "sparse prefill" for name, _, _ in plain.items)
