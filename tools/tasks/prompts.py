"""Questions about a document as a model's token ids, and whether an answer is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.tokenizer import Tokenizer
from tools.tasks import Sample

JUDGES = ("exact", "contains")
JUDGE_HELP = (
    "exact: the whole answer; contains: the value stands in it "
    "(for models that answer in their own words)"
)


def token_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """A function that counts a text's tokens, special ones left out."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, special=False))

    return count


def common_start(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share; every prompt keeps at least one of its own."""
    shared, most = 0, min(map(len, prompts)) - 1
    while shared < most and all(ids[shared] == prompts[0][shared] for ids in prompts):
        shared += 1
    return shared


def completed(document: str, question: str) -> str:
    """The text that a base model completes with an answer."""
    return f"{document.rstrip()}\n\nQuestion: {question}\nAnswer:"


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of an answer; a base model's first line, as it goes on with questions of its own."""
    text = tokenizer.decode(tokens)
    return text.split("\n")[0] if tokenizer.template is None and text.strip() else text


def is_right(judge: str, text: str, sample: Sample, question: int) -> bool:
    """Whether a text answers a question, by one of JUDGES."""
    if judge == "exact":
        return text.strip() == sample.answers[question]
    return sample.meta["exact"][question] in text
