"""tools/common/documents.py: the splits share nothing, lengths are exact, and what a text says
about its end is so.
"""

import re

import pytest

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.common import documents
from tools.common.documents import AGAIN, KINDS, SPLITS, Originals, shingles, texts
from tools.common.program import POCKET


@pytest.fixture(scope="module", autouse=True)
def few():
    """Fewer documents than a measurement takes: reading them is what takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PER_SPLIT", 8)
        patch.setattr(documents, "LARGEST", 12_000)
        for made in (documents._all, documents._identifiers):
            made.cache_clear()
        yield
    for made in (documents._all, documents._identifiers):
        made.cache_clear()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET)


def every(split):
    return [d for kind in documents.REAL for d in documents.documents(split, kind)]


def test_the_splits_share_no_document_and_no_near_copy():
    one, other = every("search"), every("held-out")
    assert len(one) >= 8 and len(other) >= 8
    assert not {d.sha256 for d in one} & {d.sha256 for d in other}
    assert not {d.name for d in one} & {d.name for d in other}
    for first in one:
        mine = shingles(first.text)
        for second in other:
            theirs = shingles(second.text)
            assert len(mine & theirs) <= documents.NEAR * min(len(mine), len(theirs))


def test_a_near_copy_is_left_out_and_another_text_is_not():
    text = " ".join(f"word{n} of a text" for n in range(400))
    originals = Originals()
    assert originals.take(text)
    assert not originals.take(text.replace("word77 ", "another ").upper())
    assert not originals.take(text[: len(text) // 2])
    assert originals.take(" ".join(f"thing{n} and so on" for n in range(400)))


def test_the_same_machine_gives_the_same_texts(tokenizer):
    first = texts(tokenizer, "search", 600, 4)
    documents._all.cache_clear()
    assert texts(tokenizer, "search", 600, 4) == first
    assert [t.kind for t in first] == list(KINDS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [300, 1001])
def test_texts_have_their_length_and_share_no_document(tokenizer, split, length):
    found = texts(tokenizer, split, length, 6, ("prose", "code"))
    assert [len(t.ids) for t in found] == [length] * 6
    used = [name for t in found for name in t.documents]
    assert len(used) == len(set(used))
    assert set(used) <= {d.name for d in every(split)}


def test_a_copy_and_the_values_at_the_end_stand_earlier(tokenizer):
    copy, values = texts(tokenizer, "held-out", 900, 2, ("copy", "key-value"), end=120)
    again = tokenizer.encode(AGAIN, special=False)
    text, end = copy.ids, copy.ids[-120:]
    assert any(text[i : i + 120] == end for i in range(900 - 240))
    assert list(text[-120 - len(again) : -120]) == again
    head, tail = tokenizer.decode(values.ids).split(AGAIN.strip())
    entries = re.findall(r"^(\w+: \d{5})$", head, re.M)
    assert len(entries) > 20
    asked = re.findall(r"^(\w+: \d{5})\n", tail, re.M)
    assert len(asked) >= 3 and set(asked) <= set(entries)


def test_the_splits_ask_about_other_values(tokenizer):
    one, other = (texts(tokenizer, split, 600, 1, ("key-value",))[0] for split in SPLITS)
    assert one.ids != other.ids and one.sha256 != other.sha256


def test_what_cannot_be_meant_is_refused(tokenizer):
    for split, length, count, kinds, words in [
        ("train", 600, 1, KINDS, "found 'train'"),
        ("search", 600, 1, ("poems",), "poems"),
        ("search", 100, 1, KINDS, "at least 256"),
        ("search", 600, 500, ("prose",), "too few documents"),
    ]:
        with pytest.raises(UsageError, match=words):
            texts(tokenizer, split, length, count, kinds)
