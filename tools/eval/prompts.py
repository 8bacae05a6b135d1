"""Questions about a document as a model's token ids, and whether an answer is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import LLM
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


def split_prompts(llm: LLM, sample: Sample) -> tuple[list[int], list[list[int]]]:
    """(ids that all questions share, the ids that follow per question), through the model's own
    chat template.
    """
    whole = []
    for question in sample.questions:
        text = llm.tokenizer.render(
            [{"role": "user", "content": sample.document.rstrip() + "\n\n" + question}]
        )
        whole.append(llm.tokenizer.encode(text, special=False))
    shared = common_start(whole)
    return whole[0][:shared], [ids[shared:] for ids in whole]


def is_right(judge: str, text: str, sample: Sample, question: int) -> bool:
    """Whether a text answers a question, by one of JUDGES."""
    if judge == "exact":
        return text.strip() == sample.answers[question]
    return sample.meta["exact"][question] in text
