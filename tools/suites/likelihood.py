"""How likely texts are behind a context, by a method's own steps or as one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from engine import LLM

# "steps": the context is read as a prompt, the continuation token by token as an answer's would be;
# "prompt": both are one prompt, as a server scores them
WAYS = ("steps", "prompt")
Score = tuple[float, bool]  # sum of log probabilities in nats; whether each token was the likeliest


def by_prompt(llm: LLM, context: Sequence[int], continuation: Sequence[int]) -> Score:
    """Score a continuation of a context, both token ids and not empty, read as one prompt.

    Most methods read a prompt by full attention, so their score is full attention's.
    """
    scores = llm.score([*context, *continuation], 1)
    own, best = scores.logprobs[len(context) :], scores.top_logprobs[len(context) :]
    greedy = all(top[0][0] == token for top, token in zip(best, continuation, strict=True))
    return sum(value for value in own if value is not None), greedy


def by_steps(
    llm: LLM,
    context: Sequence[int],
    continuations: Sequence[Sequence[int]],
    asked: int = 0,
    tally: Counter[str] | None = None,
) -> Iterator[Score]:
    """Scores of continuations of one context, token ids and not empty, as the method's decode steps
    give them; the context is read once.

    asked: so many last tokens of the context are read by steps too (all but its first at most).
    The first token behind a context that is all prompt has the prompt's logits, which no step made.
    tally: gets how many "steps" there were, and how many of them "sparse".
    """
    stop = len(context)
    head = max(1, stop - asked)
    room = stop + max(map(len, continuations), default=0)
    with llm.session(max_context=room) as session:
        logits = session.prefill(context[:head])
        assert logits is not None  # of a prompt that is not open
        for token in context[head:]:
            logits = session.decode(token)
        begin = logits.clone()
        for number, continuation in enumerate(continuations):
            if number:
                session.truncate(stop)
            total, greedy, logits = 0.0, True, begin
            for place, token in enumerate(continuation):
                if place:
                    logits = session.decode(continuation[place - 1])
                total += float(torch.log_softmax(logits, -1)[token])
                greedy = greedy and int(logits.argmax()) == token
            yield total, greedy
        if tally is not None:
            tally["steps"] += session.stats.decode_steps
            tally["sparse"] += session.stats.sparse_steps


def pieces(
    ids: Sequence[int], prefix: int, most: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """(context, what is predicted) of a text that is scored whole, in windows of `most` tokens that
    are read: each is predicted once. The first window begins with `prefix`; the last begins early
    enough to be as long as the others.
    """
    for start in range(0, len(ids), most):
        stop = min(len(ids), start + most)
        context = ids[stop - 1 - most : start] if start else [prefix]
        yield context, ids[start:stop]
