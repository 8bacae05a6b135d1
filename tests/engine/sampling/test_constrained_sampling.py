"""logit_bias and grammars in the sampler: what is forbidden is never drawn, and nothing else moves.

Stops: a mask that is applied after top-k, a grammar's state that drafts or restored samplers leave
behind, one answer's state in the next, a bias that changes reported log probabilities.
"""

import json

import pytest
import torch

from engine import SamplingParams
from engine.base.errors import SettingError
from engine.sampling.sampler import Sampler
from engine.text.tokenizer import Tokenizer
from tests.builders import POCKET

VOCAB = 5120


def test_a_bias_is_added_and_hides_nothing():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    best = int(logits.argmax())
    bias = {best: -100.0, 7: 2.5, 8: 100.0}
    sampler = Sampler(SamplingParams(logit_bias=tuple(bias.items())), 50)
    assert not sampler.greedy and sampler.sample(logits)[0] == 8
    drawn = Sampler(SamplingParams(temperature=1.0, logit_bias=tuple(bias.items())), 50)
    expected = logits.double().clone()
    for token, value in bias.items():
        expected[token] += value
    found = drawn.probabilities(logits).double()
    assert torch.allclose(found, expected.softmax(0), atol=1e-6)
    params = SamplingParams(logit_bias=((8, 100.0),), logprobs=2)
    token, logprob, top = Sampler(params, 50).sample(logits)
    assert token == 8 and logprob == pytest.approx(float(logits.log_softmax(0)[8]), abs=1e-5)
    assert top[0][0] == best
    for bad in ((("a", 1),), ((1, float("nan")),), ((-1, 0),), 5, ((1, 2, 3),)):
        with pytest.raises(SettingError, match="logit_bias"):
            SamplingParams(logit_bias=bad)
    with pytest.raises(SettingError, match="expected 0 to 49"):
        Sampler(SamplingParams(logit_bias=((50, 1.0),)), 50)


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("llguidance")
    from engine.text.grammar import Grammars

    tokenizer = Tokenizer(POCKET)
    end = tokenizer.backend.token_to_id("<|end|>")
    return tokenizer, Grammars(tokenizer, VOCAB, [end]), end


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "yes": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    },
    "required": ["kind", "yes", "list"],
    "additionalProperties": False,
}


def written(sampler, end, generator, most=120):
    """The tokens of an answer to random logits, in which nothing is likely JSON."""
    ids = []
    while len(ids) < most:
        token, _, _ = sampler.sample(torch.randn(VOCAB, generator=generator) * 4)
        if token == end:
            return ids
        ids.append(token)
    raise AssertionError("it did not end")


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.3, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.2}]
)
def test_every_answer_follows_its_schema(grammars, settings):
    tokenizer, made, end = grammars
    params = SamplingParams(seed=3, grammar=made.json(SCHEMA), **settings)
    generator = torch.Generator().manual_seed(5)
    texts = set()
    for _ in range(4):
        text = tokenizer.decode(written(Sampler(params, VOCAB, [5, 9]), end, generator))
        found = json.loads(text)
        assert found["kind"] in ("one", "two") and isinstance(found["yes"], bool)
        assert set(found["list"]) <= {1, 22} and len(found["list"]) <= 3
        assert list(found) == ["kind", "yes", "list"]
        texts.add(text)
    assert len(texts) > 1


def test_drafts_leave_a_grammar_where_it_was(grammars):
    tokenizer, made, end = grammars
    params = SamplingParams(grammar=made.json(SCHEMA))

    def logits(step):
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(step))

    plain = Sampler(params, VOCAB)
    expected = [plain.sample(logits(step))[0] for step in range(12)]
    sampler, found = Sampler(params, VOCAB), []
    for step in range(12):
        with sampler.drafting() as guess:
            drafts = [guess(logits(step + ahead)) for ahead in range(3)]
        found.append(sampler.sample(logits(step))[0])
        assert drafts[0] == found[-1] == expected[step]


def test_schemas_that_cannot_be_used_are_one_line(grammars):
    _, made, _ = grammars
    for schema in (
        {"type": "strange"},
        {"$ref": "http://127.0.0.1:1/secret"},
        {"$ref": "file:///etc/passwd"},
        {"type": "string", "pattern": "(("},
    ):
        with pytest.raises(SettingError, match="^grammar: ") as caught:
            made.json(schema)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},  # fits nothing
        {"type": "integer", "multipleOf": 999_999_937, "minimum": -(10**18), "maximum": 10**18},
    ],
)
def test_a_schema_that_fits_nothing_or_takes_too_much_ends_the_answer_in_one_line(grammars, schema):
    _, made, _ = grammars
    with pytest.raises(SettingError, match="^grammar: ") as caught:
        sampler = Sampler(SamplingParams(grammar=made.json(schema)), VOCAB)
        for _ in range(40):
            sampler.sample(torch.zeros(VOCAB))
    assert "\n" not in str(caught.value)
