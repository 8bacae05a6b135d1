"""Text to ids and back: incremental decoding equals decoding the whole, nothing is doubled, cut or
half a character.
"""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.text.detokenizer import REPLACEMENT
from engine.text.stop import StopScanner, tokens_before
from engine.text.tokenizer import Tokenizer
from tests.builders import POCKET
from tests.engine.text.tokenizers_made import MADE, SPECIALS, byte_fallback, byte_level, save

TEXT = st.text(
    st.one_of(st.sampled_from(" \n\tabe<>|▁�.0"), st.characters(exclude_categories=("Cs",))),
    max_size=40,
)
FOLDERS = {"pocket": POCKET}
KINDS = [*MADE, *FOLDERS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenizers by kind, made or loaded once."""
    known = {}

    def get(kind):
        if kind not in known:
            folder = (
                save(MADE[kind](), tmp_path_factory.mktemp(kind)) if kind in MADE else FOLDERS[kind]
            )
            known[kind] = Tokenizer(folder)
        return known[kind]

    return get


def streamed(tokenizer, ids, context=()):
    """Pieces that an incremental decoder gives, the flush last."""
    stream = tokenizer.stream(context)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_pieces_of_any_text_join_to_its_decoding_and_are_never_half_a_character(made, kind, text):
    tokenizer = made(kind)
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    if REPLACEMENT not in tokenizer.decode(ids):
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_their_decoding(made, kind, data):
    """Models that are not trained, and sampling at high temperature, write bytes that are no
    characters.
    """
    tokenizer = made(kind)
    # padded embeddings: ids that the vocabulary does not have
    most = tokenizer.vocab_max_id + 3
    bytes_only = [i for i in range(most) if (tokenizer.token(i) or "").startswith("<0x")]
    one = (
        st.integers(0, most)
        if not bytes_only
        else st.one_of(st.integers(0, most), st.sampled_from(bytes_only))
    )
    ids = data.draw(st.lists(one, max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=TEXT, cut=st.integers(0, 60))
def test_a_continuation_shows_what_it_adds_to_its_context(made, kind, text, cut):
    tokenizer = made(kind)
    ids = tokenizer.encode("There was " + text, special=False)
    cut = min(cut, len(ids))
    before, after = ids[:cut], ids[cut:]
    whole, head = tokenizer.decode(ids), tokenizer.decode(before)
    if before and whole.startswith(head) and not head.endswith(REPLACEMENT):
        assert head + "".join(streamed(tokenizer, after, before)) == whole


def test_a_long_run_of_byte_tokens_is_shown_as_it_comes(made):
    tokenizer = made("byte-fallback")
    text = "界限" * 40
    ids = tokenizer.encode(text, special=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert sum(bool(piece) for piece in pieces) > 10  # not all at the end


def test_streaming_costs_the_same_at_any_length(made):
    """The number of ids given to the backend's decoder is bounded per token (a growing window would
    be quadratic).
    """
    tokenizer = made("byte-fallback")
    ids = tokenizer.encode("a little girl 界 " * 200, special=False)
    seen = []

    class Counting:
        def decode(self, some, **options):
            seen.append(len(some))
            return backend.decode(some, **options)

        def __getattr__(self, name):
            return getattr(backend, name)

    backend = tokenizer.backend
    tokenizer.backend = Counting()
    try:
        text = "".join(streamed(tokenizer, ids))
    finally:
        tokenizer.backend = backend
    assert text == tokenizer.decode(ids) and max(seen) <= 4 and sum(seen) <= 6 * len(ids)


# ---------------------------------------------------------------- encoding


def test_bos_comes_once(tmp_path):
    plain = Tokenizer(save(byte_level(), tmp_path / "a"))
    assert plain.encode("hi")[0] == 1 and 1 not in plain.encode("hi")[1:]
    assert plain.encode("<s>hi") == plain.encode("hi") == [1, *plain.encode("hi", special=False)]
    bare = byte_level()
    bare.post_processor = tokenizers.processors.ByteLevel()
    assert Tokenizer(save(bare, tmp_path / "b")).encode("hi")[0] != 1
    assert Tokenizer(save(bare, tmp_path / "c", add_bos_token=True)).encode("hi") == plain.encode(
        "hi"
    )
    assert (
        Tokenizer(save(bare, tmp_path / "d", bos_token=None, add_bos_token=True)).encode("hi")[0]
        != 1
    )
    spelled = Tokenizer(save(bare, tmp_path / "e", bos_token={"content": "<s>", "lstrip": False}))
    assert spelled.bos_token == "<s>" and spelled.eos_token == "<|end|>"


def test_stored_truncation_and_padding_are_not_obeyed(tmp_path):
    short = byte_level()
    short.enable_truncation(4)
    short.enable_padding(length=64)
    assert len(Tokenizer(save(short, tmp_path)).encode("girl " * 50)) > 50


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(name, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = FOLDERS[name]
    ours = Tokenizer(folder)
    theirs = (
        AutoTokenizer.from_pretrained(folder)
        if (folder / "tokenizer_config.json").is_file()
        else PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    )
    for text in [
        "Once upon a time",
        "",
        " ",
        "a\n\nb  c",
        "Grüße 你好 🙂",
        "x</s>",
        "<|user|>What?<|assistant|>",
    ]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace", "pocket"])
@settings(max_examples=100, deadline=None)
@given(first=TEXT, second=TEXT)
def test_a_text_in_two_parts_decodes_to_the_whole(made, kind, first, second):
    """A second turn is encoded alone and appended: no space may appear or vanish at the border."""
    tokenizer = made(kind)
    head, ends = tokenizer.encode_spans("x" + first)
    tail, more = tokenizer.encode_spans(second, continues=True)
    assert tokenizer.decode(head + tail) == tokenizer.decode(tokenizer.encode("x" + first + second))
    assert len(ends) == len(head) and len(more) == len(tail)
    assert list(more) == sorted(more) and (not more or more[-1] <= len(second))


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@settings(max_examples=100, deadline=None)
@given(text=TEXT, at=st.integers(0, 40))
def test_tokens_before_a_position_are_whole(made, kind, text, at):
    tokenizer = made(kind)
    ids, ends = tokenizer.encode_spans(text)
    n = tokens_before(ends, at)
    assert n == 0 or ends[n - 1] <= at
    assert text.startswith(tokenizer.decode(ids[:n])) or REPLACEMENT in tokenizer.decode(ids)
    assert tokens_before(ends, len(text)) == len(ids)


def test_special_tokens_are_marked_and_skipped(made):
    tokenizer = made("byte-level")
    assert {tokenizer.backend.token_to_id(s) for s in SPECIALS} <= tokenizer.special_ids
    ids = tokenizer.encode("<|user|>hello<|end|>")
    assert tokenizer.decode(ids) == "hello" == "".join(streamed(tokenizer, ids))
    assert tokenizer.vocab_max_id == tokenizer.backend.get_vocab_size(with_added_tokens=True) - 1


def test_damaged_folders_get_one_line(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: not found"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match=r"only tokenizer\.model; make it once"):
        Tokenizer(tmp_path)
    for content in [
        "",
        "{",
        "[]",
        '{"version": "1.0"}',
        json.dumps({"model": {"type": "Nonsense"}}),
    ]:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: not a tokenizer") as caught:
            Tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    for content in ["{", "[1]", "[" * 100_000]:
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json"):
            Tokenizer(tmp_path)


# ---------------------------------------------------------------- stop strings


def shown(stops, pieces):
    """(all that is shown, whether it stopped) for a text that comes in pieces."""
    holder = StopScanner(stops)
    text = "".join(holder.push(piece) for piece in pieces)
    return text + holder.flush(), holder.found


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab<|", max_size=30),
    stops=st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_how_a_text_is_cut(text, stops, cuts):
    borders = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = min(
        (text.find(s) for s in stops if s in text and text.find(s) + len(s) == min(ends)),
        default=len(text),
    )
    assert shown(stops, pieces) == shown(stops, list(text)) == (text[:expected], bool(ends))


def test_only_what_could_become_a_stop_string_is_held_back():
    holder = StopScanner(["</end>", "\n\nUser:"])
    assert [holder.push(text) for text in ("Hello <", "b> and </e", "nd")] == [
        "Hello ",
        "<b> and ",
        "",
    ]
    assert not holder.found and holder.push("> gone") == "" and holder.found
    assert holder.push("more") == holder.flush() == ""
    assert StopScanner([]).push("</end>") == "</end>"
