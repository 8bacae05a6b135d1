"""Exact mode on our own kernels, interpreted: a row of a step has the bits that it has alone.

Stops: sums whose order follows the number of rows, a verification whose logits are full attention's
but for rounding, so that ties fall to another token.
"""

import numpy as np
import pytest
import torch

from engine import Exact, Full, OmniKV, SamplingParams
from engine.session.generate import generate
from kernels.attention.dense import decode_dense
from kernels.launch.triton import tl
from tests.builders import random_ids, session_config, tiny_llm
from tests.kernels.interpreter import bf16_to_f32

interpreter = pytest.importorskip("triton.runtime.interpreter")

DRAFTER = OmniKV(filter_layers=(0,), tokens=24, tail=64, dense_below=0)


@pytest.fixture(autouse=True)
def dots_that_know_no_place(monkeypatch):
    """Sum the interpreter's products in float64: its BLAS takes another order in another row of a
    tile, and tensor cores do not.
    """
    builder = interpreter.InterpreterBuilder

    def create_dot(self, a, b, d, precision, imprecise):
        wide = [bf16_to_f32(t.data) if t.dtype.scalar == tl.bfloat16 else t.data for t in (a, b)]
        found = np.matmul(*(t.astype(np.float64) for t in wide)) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", create_dot)


@pytest.mark.parametrize("group, queries", [(1, 8), (4, 4), (2, 7), (8, 2)])
def test_attention_of_up_to_16_packed_rows(group, queries):
    """Queries under the heads of a group, 16 rows together: each query alone, at its own length.
    700 rows are two splits, and the newest is the first of a third where 1,025 are.
    """
    for rows in (700, 1025):
        generator = torch.Generator().manual_seed(rows)
        k, v = torch.randn(2, 1, 2, rows, 64, generator=generator).bfloat16()
        q = torch.randn(1, queries, 2 * group, 64, generator=generator).bfloat16()

        def attend(q, visible, k=k, v=v):
            lengths = torch.tensor([visible], dtype=torch.int32)
            return decode_dense(q, k, v, lengths, 0.125, backend="triton")

        together = attend(q, rows)
        for j in range(queries):
            alone = attend(q[:, j : j + 1], rows - (queries - 1 - j))
            assert torch.equal(together[:, j : j + 1], alone)


def test_exact_mode_has_the_logits_of_full_attention():
    """To the bit, in a fused step: verifications of up to four tokens under groups of four heads,
    drafted by sparse steps.
    """
    config = session_config(layers=2, hidden=528, head_dim=16, heads=4, kv_heads=1, vocab_size=23)
    llm = tiny_llm(Full(), config, max_context=256, backend="triton", step="fused", sharpness=2.0)
    ids, params = random_ids(96, 23, seed=3), SamplingParams(max_tokens=5)
    with llm.session(Exact(DRAFTER, draft=3, lookup=False)) as exact, llm.session() as full:
        pairs = zip(generate(exact, ids, params), generate(full, ids, params), strict=True)
        for mine, theirs in pairs:
            assert mine.token_id == theirs.token_id
            assert torch.equal(exact.last_logits, full.last_logits)
        assert exact.runner.fused and exact.counters.accepted >= 3
