"""A text that is longer than the context, cut as its benchmark says; and a prompt of a whole text.

Both LongBenches and InfiniteBench keep a prompt's first and last tokens and lose its middle, before
the chat template is around it. What is lost is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.prompts.instance import altered
from tools.tasks.prompts import common_start

# (tokenizer, text, tokens it may have) -> (text, tokens that were lost)
Cut = Callable[[Tokenizer, str, int], tuple[str, int]]
MOST_CUTS = 20  # tries: a cut text may have a few tokens more when it is encoded again


def halves(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """LongBench's cut: half of `most` tokens from each end, each half decoded by itself."""
    ids = tokenizer.encode(text)
    half = most // 2
    if len(ids) <= most:
        return text, 0
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:]), len(ids) - 2 * half


def middle_out(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """The cut of LongBench v2 and InfiniteBench: `most` tokens from both ends, the odd one from the
    last, decoded together.
    """
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        return text, 0
    first = most // 2
    return tokenizer.decode(ids[:first] + ids[first - most :]), len(ids) - most


def head_kept(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """L-Eval's cut: the first `most` tokens of a document."""
    ids = tokenizer.encode(text, special=False)
    return (text, 0) if len(ids) <= most else (tokenizer.decode(ids[:most]), len(ids) - most)


def tail_kept(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """L-Eval's cut of a code base: its last `most` tokens."""
    ids = tokenizer.encode(text, special=False)
    return (text, 0) if len(ids) <= most else (tokenizer.decode(ids[-most:]), len(ids) - most)


def ids_of(tokenizer: Tokenizer, text: str, chat: bool, prefix: str = "") -> list[int]:
    """Token ids of a whole prompt, through the chat template where there is one and chat is True.
    A model without one reads the text as it is. prefix: how the answer begins, behind the template.
    """
    if chat and tokenizer.template is not None:
        written = tokenizer.render([{"role": "user", "content": text}])
        return tokenizer.encode(written + prefix.lstrip("\n "), special=False)
    return tokenizer.encode(text + prefix)


@dataclass(frozen=True)
class Fitted:
    """ids: of the whole prompt; shared: how many of them come before the question; cut: tokens that
    were lost.
    """

    ids: list[int]
    shared: int
    cut: int


def within(
    tokenizer: Tokenizer,
    text: str,
    question: str,
    chat: bool,
    cut: Cut,
    most: int,
    room: int,
    prefix: str = "",
) -> Fitted:
    """A prompt that ends with `question`, cut to `most` tokens, and to fewer where it has more than
    `room` with the template around it. prefix: the beginning of the answer, which is cut with the
    prompt as its last words and then stands behind the template. Raises UsageError where even
    nothing of it fits.
    """
    keep, whole = most, text + prefix
    for _ in range(MOST_CUTS):
        kept, lost = cut(tokenizer, whole, keep)
        begins = prefix if kept.endswith(prefix) else ""  # a cut may leave less than all of it
        kept = kept.removesuffix(begins)
        ids = ids_of(tokenizer, kept, chat, begins)
        if len(ids) <= room:
            start = max(0, len(kept) - max(1, len(question)))
            other = ids_of(tokenizer, kept[:start] + altered(kept[start:]), chat, begins)
            return Fitted(ids, common_start([ids, other]), lost)
        keep = min(keep, len(tokenizer.encode(whole))) - max(1, len(ids) - room)
        if keep < 2:
            break
    raise UsageError(
        f"found {room} tokens of room for a prompt, expected more: its chat template and its "
        "question do not fit; give a model with a longer context"
    )
