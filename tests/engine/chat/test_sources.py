"""From planted selections to quoted passages."""

from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.evidence.sources import LONGEST, Choices, rank_passages, split_passages

FILLER = "The weather in the valley was mild and nothing of note was written down that day. "
FACT = "The key of the north gate is 48213."


def word_ends(text):
    """Tokens of one word each, a leading space included, as byte-level tokenizers cut."""
    ends, at = array("q"), 0
    for word in text.split(" "):
        at += len(word) + (1 if ends else 0)
        ends.append(at)
    return ends


def test_the_passage_that_was_read_comes_first_with_its_place():
    document = FILLER * 40 + "\n" + FACT + "\n" + FILLER * 30
    text = "<s>" + document + " Question: which key?"
    ends = word_ends(text)
    begin = text.index(FACT)
    inside = [i for i, end in enumerate(ends) if begin < end <= begin + len(FACT)]
    choices = Choices()
    # each step: the fact's tokens, and as many elsewhere that change from step to step
    for step in range(6):
        choices.add({2: torch.tensor(inside), 5: torch.tensor(range(step * 20, step * 20 + 15))})
    assert choices.made == 12
    best = rank_passages(text, ends, choices.counts, 3, 3 + len(document))
    assert best[0].text == FACT and best[0].line == 2 and best[0].score > 2 * best[1].score
    assert text[best[0].start : best[0].stop] == FACT and set(inside) <= set(
        range(best[0].first, best[0].last + 1)
    )
    assert len(best) == 5 and all(a.score >= b.score for a, b in zip(best, best[1:], strict=False))


def test_scores_weigh_what_was_chosen_and_stand_for_their_layer():
    ends = word_ends(FILLER * 30 + FACT)
    fact, noise = len(ends) - 8, list(range(12, 60))
    choices = Choices()
    for _ in range(300):  # more than are kept unfolded
        picked = torch.tensor([*noise, fact])
        choices.add(
            {1: torch.tensor(noise), 4: picked}, {4: torch.tensor([0.001] * len(noise) + [0.9])}
        )
    assert (
        choices.made == 300
        and abs(choices.counts[fact] - 270) < 1e-3
        and abs(choices.counts[noise[0]] - 0.3) < 1e-6
    )
    assert rank_passages(FILLER * 30 + FACT, ends, choices.counts)[0].text == FACT


def test_nothing_chosen_gives_nothing_and_full_attention_counts_nothing():
    choices = Choices()
    choices.add({})
    choices.add({3: torch.empty(0, dtype=torch.int64)})
    assert choices.made == 0 and rank_passages(FILLER, word_ends(FILLER), choices.counts) == []


def test_a_long_passage_does_not_win_by_its_length():
    text = "A short one about the green gate here. " + "word " * 70 + "end."
    ends = word_ends(text)
    counts = {i: 1 for i in (2, 3, 4, 5)} | {i: 1 for i in range(10, 18)}
    assert rank_passages(text, ends, counts)[0].text.startswith("A short one")


def test_sentences_lines_numbers_and_fragments():
    text = "Pi is 3.14 and e.g. nothing else. Yes! It is.\nname: value\n\n  def f(x): return x\n"
    assert [text[a:b] for a, b in split_passages(text)] == [
        "Pi is 3.14 and e.g. nothing else. Yes! It is.",
        "name: value",
        "def f(x): return x",
    ]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab .\n!", max_size=900),
    picks=st.dictionaries(st.integers(0, 300), st.integers(1, 9), max_size=40),
)
def test_passages_are_in_order_within_bounds_and_miss_no_text(text, picks):
    spans = split_passages(text)
    assert all(
        0 <= a < b <= len(text) and b - a <= LONGEST and not text[a].isspace() for a, b in spans
    )
    assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False))
    assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
    ends = word_ends(text)
    passages = rank_passages(text, ends, picks, most=1000)
    covered = {i for p in passages for i in range(p.first, p.last + 1)}
    spelled = {
        i for i in picks if i < len(ends) and text[ends[i - 1] if i else 0 : ends[i]].strip()
    }
    assert spelled <= covered
    assert all(p.line == text.count("\n", 0, p.start) + 1 for p in passages)
