"""Choices scored through the server, as a harness asks for them, are those of transformers.

Stops: a context's border that is off by one, scores in another dtype than the model's, a chance
result.
"""

import pytest
import torch

from engine.llm import LLM
from engine.methods.full import Full
from tests.engine.serve.conftest import serving
from tests.engine.serve.test_scores import harness

# made by hand; (question, choices, the right one)
ITEMS = [
    ("The capital of France is", ("Paris", "Berlin", "Madrid"), 0),
    ("Water freezes at zero degrees", ("Celsius", "Kelvin", "newton"), 0),
    ("A dog is a kind of", ("plant", "animal", "metal"), 1),
    ("Two plus two makes", ("five", "four", "nine"), 1),
    ("At night the sky is", ("green", "bright", "dark"), 2),
    ("Bread is made from", ("sand", "stone", "flour"), 2),
]


@pytest.fixture(scope="module")
def peer(real):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real)

    @torch.no_grad()
    def score(context, continuation):
        ids, before = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        every = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)[before - 1 : -1]
        own = torch.tensor(ids[before:])
        greedy = bool((every.argmax(-1) == own).all())
        return float(every.gather(1, own[:, None]).sum()), greedy, ids

    return score


def test_choices_are_scored_as_by_transformers(real, peer):
    llm = LLM(str(real), device="cpu", dtype="float32", method=Full(), max_context=256, load=False)
    right = 0
    with serving(llm) as server:
        for question, choices, best in ITEMS:
            mine = [harness(server, question, f" {choice}") for choice in choices]
            theirs = [peer(question, f" {choice}") for choice in choices]
            for (value, greedy, ids), (wanted, their_greedy, their_ids) in zip(mine, theirs):
                assert ids == their_ids and greedy == their_greedy
                assert value == pytest.approx(wanted, abs=1e-3)
            right += max(range(3), key=lambda i: mine[i][0]) == best
    assert right >= 5  # two by chance
