"""A prompt's own tokens are scored while it is read.

Stops: scores that are off by one, that differ at a chunk's or a slice's border, a method that reads
another prompt because it is scored, logits of the whole prompt held at once, values that are no
numbers.
"""

from types import SimpleNamespace

import pytest
import torch

import engine.forward.scores
from engine import EngineError, Full
from engine.forward.scores import PromptScores
from tests.builders import VOCAB, random_ids, session_config, tiny_llm
from tests.engine.methods.method_table import OF_SESSIONS


def stepwise(llm, ids):
    """The log probability of each token behind the first, by a decode step before it: float64."""
    found = []
    with llm.session(method=Full()) as session:
        logits = session.prefill(ids[:1])
        for token in ids[1:]:
            found.append(float(logits.double().log_softmax(-1)[token]))
            logits = session.decode(token)
    return found


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 131])
def test_scores_are_those_of_steps(length, windows):
    slides = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    llm = tiny_llm(Full(), session_config(**slides | {"sliding_window": 40} if windows else {}))
    assert bool(llm.config.local_layers) == windows
    ids = random_ids(length, seed=length)
    scores = llm.score(ids, 3)
    assert scores.token_ids == ids and scores.logprobs[0] is None and scores.top_logprobs[0] == []
    assert len(scores.logprobs) == len(scores.top_logprobs) == length
    assert scores.logprobs[1:] == pytest.approx(stepwise(llm, ids), abs=2e-4)
    for token, own, top in zip(ids[1:], scores.logprobs[1:], scores.top_logprobs[1:]):
        values = [value for _, value in top]
        assert len(top) == 3 and values == sorted(values, reverse=True) and own <= values[0]
        assert dict(top).get(token, own) == own  # to the bit: a client asks whether it is the best
    assert llm.score(ids).top_logprobs == [[]] * length


@pytest.mark.parametrize("row", OF_SESSIONS, ids=lambda row: row.name)
def test_a_scored_prompt_is_read_as_every_other(row):
    """The last token's logits, and the steps behind it: what a method keeps is the same."""
    method = row.sparse[0] if row.sparse else row.neutral
    llm, ids = tiny_llm(method, max_context=512), random_ids(300, seed=7)
    scores = PromptScores(llm.model, ids)
    with llm.session() as scored, llm.session() as plain:
        last = scored.prefill(ids, every=scores.take)
        torch.testing.assert_close(last, plain.prefill(ids), rtol=0, atol=1e-4)
        for token in random_ids(4, seed=8):
            theirs = plain.decode(token)
            torch.testing.assert_close(scored.decode(token), theirs, rtol=0, atol=1e-4)
        dense = row.name in ("minference", "quoka", "xattention")  # only their prompts choose
        sparse = 4 if row.sparse and not dense else 0
        assert scored.stats.sparse_steps == plain.stats.sparse_steps == sparse
    assert all(value < 0 for value in scores.logprobs[1:])


def test_a_few_rows_of_logits_are_held_at_once(monkeypatch):
    llm, ids = tiny_llm(Full()), random_ids(131, seed=3)
    whole, logits, rows = llm.score(ids, 2), llm.model.logits, []

    def counted(x):
        rows.append(x.shape[:-1].numel())
        return logits(x)

    monkeypatch.setattr(llm.model, "logits", counted)
    monkeypatch.setattr(engine.forward.scores, "SLICE", 7 * VOCAB + 1)
    sliced = llm.score(ids, 2)
    assert max(rows) == 7 and sum(rows) == 130 + 1  # of the last token, for the next
    assert sliced.logprobs[1:] == pytest.approx(whole.logprobs[1:], abs=1e-5)
    assert [[i for i, _ in top] for top in sliced.top_logprobs] == [
        [i for i, _ in top] for top in whole.top_logprobs
    ]


def test_logits_that_are_no_numbers_are_an_error():
    for value in (float("nan"), float("inf")):
        config = SimpleNamespace(vocab_size=5)
        logits = torch.tensor([[0.0, value, 0.0, 0.0, 0.0]])
        model = SimpleNamespace(config=config, logits=lambda x, logits=logits: logits)
        with pytest.raises(EngineError, match="logits hold"):
            PromptScores(model, [0, 1]).take(torch.zeros(1, 2, 4), 0)


def test_what_is_no_prompt_is_refused():
    llm = tiny_llm(Full())
    for prompt, words in (([], "no tokens"), ([VOCAB], "token id"), ([-1], "token id")):
        with pytest.raises(EngineError, match=words):
            llm.score(prompt)
    with pytest.raises(EngineError, match="top_logprobs: found -1"):
        llm.score([1], -1)
    with pytest.raises(EngineError, match="every: found"):
        llm.session().prefill([1], every=3)
