"""Prompts whose evidence is known token by token, and full attention's own greedy answers to them
with a meter in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine import LLM
from engine.bank.base import Attends
from engine.forward.decode import Decoder
from engine.session.session import Session
from tools.tasks import make_sample
from tools.tasks.prompts import completed, token_counter

QUESTION = 96  # tokens of a question, an answer and a template's words, about


@dataclass(frozen=True)
class Asked:
    """Token ids of a document with its question behind it. evidence: (first, one past the last)
    token of every piece that the answer rests on; exact: the value that is right.
    """

    task: str
    ids: list[int]
    evidence: list[tuple[int, int]]
    exact: str


def asked(llm: LLM, task: str, length: int, number: int, depth: float | None = None) -> Asked:
    """A made document of about `length` tokens with its question, through the model's template; a
    base model completes it. Raises UsageError without a tokenizer.
    """
    tokenizer = llm.tokenizer
    assert tokenizer is not None  # of tools.common.arguments.loaded
    count = token_counter(tokenizer)
    sample = make_sample(task, max(64, length - QUESTION), count, number, 1, depth)
    plain = tokenizer.template is None
    if plain:
        text = completed(sample.document, sample.questions[0])
    else:
        content = f"{sample.document.rstrip()}\n\n{sample.questions[0]}"
        text = tokenizer.render([{"role": "user", "content": content}])
    found = []
    for piece in sample.meta["evidence"][0]:
        start = text.index(piece.strip())
        begin, stop = (count(text[:at]) for at in (start, start + len(piece.strip())))
        found.append((begin, max(begin + 1, stop)))
    return Asked(task, tokenizer.encode(text, special=plain), found, sample.meta["exact"][0])


def follow(session: Session, ids: Sequence[int], steps: int, meter: Attends) -> list[int]:
    """The greedy answer to `ids`, of at most `steps` tokens, in an empty session; `meter.attend` is
    the attention of its steps. At least one step is made, also where the answer is empty.
    """
    session.prefill(ids[:-1])
    decoder = Decoder(session.loaded.model, session.loaded.rotary, meter, session.query_ring)
    device, token, out = session.loaded.model.device, ids[-1], list[int]()
    with torch.inference_mode():
        for position in range(len(ids) - 1, len(ids) - 1 + steps):
            at = torch.tensor([position], dtype=torch.int32, device=device)
            logits = decoder.step(torch.tensor([[token]], device=device), at, session.bank)
            token = int(logits[0, -1].argmax())
            if token in session.loaded.end_token_ids:
                break
            out.append(token)
    return out
