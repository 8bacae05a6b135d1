"""/sources with a model that retrieves: the passage that holds the fact is listed first."""

import pytest

from engine import LLM, OmniKV, SamplingParams
from engine.chat.talk.conversation import Conversation
from tests.builders import POCKET

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)


@pytest.mark.parametrize("before, name, key", [(10, "Alice", "48213"), (60, "Bob", "70951")])
def test_the_planted_fact_comes_first(before, name, key):
    """A document of 1900 tokens; filter layer 4 chooses 64 of them at each step; the fact leads by
    a factor of two or more. Layer 2, in which this model looks things up, waits and so reads all.
    """
    llm = LLM(
        POCKET,
        method=OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=64, dense_below=0),
        max_context=4096,
    )
    talk, fact = Conversation(llm), f"The pass key of {name} is {key}."
    read = talk.read(FILLER * before + fact + "\n" + FILLER * (75 - before), "walk.txt")
    assert 1800 < read.tokens == read.total
    question = f"What is the pass key of {name}?"
    answer = "".join(piece.text for piece in talk.ask(question, SamplingParams(max_tokens=24)))
    assert (
        key in answer and talk.session.stats.sparse_steps > 3 and not talk.session.stats.dense_steps
    )
    first, second = talk.sources(2)
    assert first.text == fact and first.line == before + 1 and first.score > 2 * second.score
