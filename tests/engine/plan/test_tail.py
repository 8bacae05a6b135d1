"""The tail is a pure function of the length, and a long answer costs what a short one costs.

Stops: a tail that grows with the answer (as the published code's does), a generated token that is
lost once it leaves the tail, a step that allocates, and counters that say something else than what
was read.
"""

import gc

import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.model.rope import apply_rope
from engine.plan.layers import tail_start
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

PROMPT, ANSWER, TAIL, TOKENS = 300, 3000, 256, 64
CONFIG = tiny_config(layers=5, heads=4, kv_heads=2, hidden=64, max_positions=4096)
SPARSE_LAYERS = 3  # filter 1, sparse 2 to 4
# bytes of K and V of one token in one layer
ROW = 2 * 2 * 16 * 4


def test_tail_start():
    """max(0, (n // 64) * 64 - tail): at least `tail` tokens once there are as many, at most 63
    more, moving by whole blocks.
    """
    assert [tail_start(n, 256) for n in (0, 1, 255, 256, 319, 320, 383, 384, 1000)] == [
        0,
        0,
        0,
        0,
        0,
        64,
        64,
        128,
        704,
    ]
    assert [tail_start(n, 100) for n in (63, 64, 127, 128, 191, 192)] == [0, 0, 0, 28, 28, 92]
    for tail in (64, 100, 256):
        for n in range(tail, 3 * tail + 200):
            assert tail <= n - tail_start(n, tail) <= tail + 63
            assert tail_start(n + 1, tail) - tail_start(n, tail) in (0, 64) or n < tail + 64


def test_tail_start_of_a_tensor_is_that_of_its_ints():
    lengths = torch.arange(1000, dtype=torch.int32)
    for tail in (0, 64, 100, 256):
        found = tail_start(lengths, tail)
        assert found.dtype == torch.int32
        assert found.tolist() == [tail_start(n, tail) for n in range(1000)]
    assert torch.equal(lengths, torch.arange(1000, dtype=torch.int32))


def rows_expected(n):
    """Rows that one sparse layer reads at n tokens, from the definition."""
    start = max(0, n // 64 * 64 - TAIL)
    return min(TOKENS, start) + n - start


def live_bytes():
    """Bytes of every tensor that is alive, storages counted once."""
    gc.collect()
    # not the stand-ins that torch.compile leaves
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def test_three_thousand_tokens_after_a_short_prompt(monkeypatch):
    import engine.methods.omnikv.runtime as module

    asked = []

    def counting(q, k, v, index, counts, start, lengths, *rest, **named):
        asked.append(int(counts[0]) + int(lengths[0]) - int(start[0]))
        return decode_sparse(q, k, v, index, counts, start, lengths, *rest, **named)

    decode_sparse = module.decode_sparse
    monkeypatch.setattr(module, "decode_sparse", counting)
    # else C++ calls the kernel
    monkeypatch.setattr(module.OmniKVRuntime, "chained", lambda *_: None)
    method = OmniKV(filter_layers=(1,), tokens=TOKENS, tail=TAIL, dense_below=0)
    llm = tiny_llm(method, CONFIG, tiny_weights(CONFIG), max_context=PROMPT + ANSWER)
    with llm.session() as session:
        planned = {
            name: llm.plan().bytes_of(name)
            for name in ("context bank", "query ring", "decode scratch", "selection")
        }
        session.prefill(random_ids(PROMPT))
        generated, rows = set(), []
        for step, token in enumerate(random_ids(ANSWER, seed=1), 1):
            session.decode(token)
            n, read = PROMPT + step, asked[-SPARSE_LAYERS:]
            assert len(asked) == step * SPARSE_LAYERS and set(read) == {rows_expected(n)}
            rows.append(read[0])
            chosen = session.selections[1]
            assert (
                len(chosen) == min(TOKENS, tail_start(n, TAIL))
                and (chosen < tail_start(n, TAIL)).all()
            )
            generated |= set(chosen[chosen >= PROMPT].tolist())
            if step == 100:
                live = live_bytes()
        stats = session.stats
        held = (stats.bank_bytes, stats.ring_bytes, stats.scratch_bytes, stats.selection_bytes)
        assert held == tuple(planned.values()) and stats.bank_bytes == 5 * (PROMPT + ANSWER) * ROW
        # this test's own lists hold no tensors; the engine none either
        assert live_bytes() - live < 200_000
        assert stats.sparse_steps == ANSWER and stats.dense_steps == 0
        assert stats.rows_read_sparse == sum(asked) == sum(rows) * SPARSE_LAYERS
        assert stats.bytes_read_sparse == sum(rows) * SPARSE_LAYERS * ROW
        settled = rows[TAIL + 2 * 64 :]
        # whatever the length
        assert max(settled) == TOKENS + TAIL + 63 and min(settled) == TOKENS + TAIL
        assert all(a == b for a, b in zip(settled, settled[64:]))
        # old generated tokens are found and read
        assert len(generated) > 200 and max(generated) > 2500


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_generated_token_is_found_again_when_it_has_left_the_tail(backend):
    """Planted: a generated row whose key is the query's own direction. In the tail it is seen,
    outside it is chosen.
    """
    method = OmniKV(filter_layers=(1,), tokens=8, tail=64, dense_below=0)
    llm = tiny_llm(method, CONFIG, tiny_weights(CONFIG), max_context=1024, backend=backend)
    with llm.session() as session:
        session.prefill(random_ids(PROMPT))
        planted = PROMPT + 5
        for token in random_ids(200, seed=1):
            session.decode(token)
        k, _ = session.bank.kv(1)
        # 305 has left the tail of 64 from n = 384 on
        for length in (499, 447, 390):
            session.truncate(length)
            session.decode(9)
            assert planted not in session.selections[1].tolist()
            at = torch.tensor([[length]])
            q = apply_rope(session.query_ring.read(1, at), *llm.rotary.at(at))[0, 0, 0]
            kept = k[0, 0, planted].clone()
            k[0, 0, planted] = 60 * q / q.norm()
            session.truncate(length)
            session.decode(9)
            assert planted in session.selections[1].tolist()
            k[0, 0, planted] = kept
        assert session.stats.sparse_steps == session.stats.decode_steps == 206


def test_a_tail_block_becomes_a_candidate_exactly_when_it_leaves_the_tail():
    """Before n = 384 position 305 is never chosen (it is seen anyway), and a selection never
    overlaps the tail.
    """
    method = OmniKV(filter_layers=(1,), tokens=1000, tail=64, dense_below=0)
    with tiny_llm(method, CONFIG, tiny_weights(CONFIG), max_context=1024).session() as session:
        session.prefill(random_ids(PROMPT))
        for token in random_ids(100, seed=1):
            session.decode(token)
            n, chosen = len(session), session.selections[1]
            assert chosen.tolist() == list(range(n // 64 * 64 - 64))
            assert (PROMPT + 5 in chosen.tolist()) == (n >= 384)


def test_full_reads_everything_and_says_so():
    with tiny_llm(Full(), CONFIG, tiny_weights(CONFIG), max_context=1024).session() as session:
        session.prefill(random_ids(PROMPT))
        for token in random_ids(10):
            session.decode(token)
        stats = session.stats
        assert stats.bytes_read_dense == sum(range(PROMPT + 1, PROMPT + 11)) * 5 * ROW
        assert stats.bytes_read_sparse == stats.rows_read_sparse == stats.sparse_steps == 0
