"""The decode step itself, beyond what a session asks of it today: several queries at once (drafts),
and the same step again.

Stops: a draft's query that sees the tokens after it; a step that leaves something behind.
"""

import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from tests.builders import batched, random_ids, tiny_config, tiny_llm, tiny_weights

CAPACITY = 512
CONFIG = tiny_config(layers=7, heads=4, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=6)
SPARSE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
METHODS = {
    "full": Full(),
    "last": OmniKV(**SPARSE),
    "raw": OmniKV(scores="raw", wait_layers=0, **SPARSE),
    "uniform": OmniKV(selector="uniform", **SPARSE),
    "exponential": OmniKV(selector="exponential", sink=2, **SPARSE),
}


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_sequence_with_nothing_to_choose_stands_beside_one_that_has(backend):
    """The method table's U5 has batches whose sequences all choose as many."""
    llm = tiny_llm(METHODS["last"], CONFIG, WEIGHTS, max_context=CAPACITY, backend=backend)
    sessions = [llm.session() for _ in range(2)]
    for session, length in zip(sessions, (300, 40)):
        session.prefill(random_ids(length, seed=length))
    decoder, bank = batched(llm, sessions, backend, CAPACITY)
    lengths = torch.tensor([300, 40], dtype=torch.int32)
    with torch.inference_mode():
        logits = decoder.step(torch.tensor([[5], [9]]), lengths, bank)
    for number, token in enumerate((5, 9)):
        expected = sessions[number].decode(token)
        torch.testing.assert_close(logits[number, 0], expected, atol=2e-5, rtol=2e-5)
    assert [int(counts[number]) for counts in decoder.runtime.counts for number in (0, 1)] == [
        20,
        0,
        20,
        0,
    ]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("queries", [1, 2, 5, 8])
@pytest.mark.parametrize("everything", [False, True])
def test_several_queries_at_once_are_as_many_steps(queries, everything, backend):
    """Full, and OmniKV with a budget for everything: query j sees j tokens more than the first,
    whatever tail block they span.
    """
    method = OmniKV(**{**SPARSE, "tokens": CAPACITY}) if everything else Full()
    llm = tiny_llm(method, CONFIG, WEIGHTS, max_context=CAPACITY, backend=backend)
    # 192 and 256 lie inside the last two
    for length in (171, 188, 252):
        with llm.session() as session:
            session.prefill(random_ids(length))
            decoder, bank = batched(llm, [session], backend, CAPACITY)
            tokens = random_ids(queries, seed=5)
            with torch.inference_mode():
                logits = decoder.step(
                    torch.tensor([tokens]), torch.tensor([length], dtype=torch.int32), bank
                )
            for j, token in enumerate(tokens):
                torch.testing.assert_close(
                    logits[0, j], session.decode(token), atol=2e-5, rtol=2e-5
                )
            for layer in range(CONFIG.num_layers):
                for mine, theirs in zip(
                    bank.kv(layer, length + queries), session.bank.kv(layer, length + queries)
                ):
                    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_advances_nothing(name):
    """Graph warm-ups rely on it: the same step again gives the same bits, selection and rows."""
    llm = tiny_llm(METHODS[name], CONFIG, WEIGHTS, max_context=CAPACITY)
    with llm.session() as session:
        session.prefill(random_ids(300))
        decoder, bank = batched(llm, [session], "reference", CAPACITY)
        tokens, lengths = torch.tensor([[5]]), torch.tensor([300], dtype=torch.int32)
        with torch.inference_mode():
            seen = [
                (
                    decoder.step(tokens, lengths, bank).clone(),
                    bank.kv(4, 301)[0].clone(),
                    decoder.runtime.selections(),
                )
                for _ in range(3)
            ]
        for logits, rows, chosen in seen[1:]:
            assert torch.equal(logits, seen[0][0]) and torch.equal(rows, seen[0][1])
            assert all(torch.equal(a, b) for a, b in zip(chosen.values(), seen[0][2].values()))
        assert lengths.tolist() == [300] and tokens.tolist() == [[5]]
