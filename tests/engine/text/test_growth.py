"""Stops: a tokenizer.json that aborts the process or fills its memory, and a file of the folder
that is no file of bounded size.
"""

import base64
import json
import os
import struct
from unittest.mock import Mock

import pytest

from engine.base.errors import BadCheckpoint, EngineError, SettingError, UsageError
from engine.text.sandbox import growth
from engine.text.sandbox.template import ChatTemplate, checked_messages
from engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers_made import MADE, save


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def sequence(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


def table(*strings, size=8):
    """A sentencepiece table with a trie of zeros."""
    data = struct.pack("<I", size) + bytes(8) + b"\0".join(s.encode() for s in strings) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


AROUND = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 1000
GROWING = {
    "long content": {"normalizer": replace("b" * 1000)},
    "a chain": {"normalizer": sequence(*[replace("a" * 10)] * 9)},
    "a chain in a chain": {"normalizer": sequence(sequence(*[replace("aaa")] * 5), replace("aa"))},
    "between all characters": {"normalizer": replace("b" * 64, String="")},
    "an empty expression": {"normalizer": sequence(*[replace("bb", Regex="x*")] * 4)},
    "an unknown expression": {"normalizer": sequence(*[replace("bb", Regex="(?<x>a)\\g<x>")] * 4)},
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "b" * 1000}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [replace("b" * 99)]}},
    "table": {"normalizer": table("b" * 300)},
    "table of no length": {"normalizer": table(size=2**32 - 4)},
    "template": {"post_processor": {"type": "TemplateProcessing", "single": AROUND, "pair": []}},
    "hidden by escapes": {"normalizer": replace("b" * 1000)},
    "given twice": {"normalizer": replace("b")},
}


@pytest.mark.parametrize("kind", GROWING)
def test_what_could_grow_without_bounds_is_refused_before_the_library_sees_it(
    kind, tmp_path, monkeypatch
):
    folder = save(MADE["byte-level"](), tmp_path / "m")
    path = folder / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text()) | GROWING[kind])
    if kind == "hidden by escapes":
        text = text.replace('"Replace"', '"\\u0052eplace"')
    if kind == "given twice":
        text = text.replace('"content": "b"', '"content": "b", "content": "bbbb"')
    path.write_text(text)
    library = Mock()
    monkeypatch.setattr("tokenizers.Tokenizer", library)
    with pytest.raises(BadCheckpoint) as caught:
        Tokenizer(folder)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not library.mock_calls


@pytest.mark.parametrize("kind", MADE)
def test_the_parts_of_real_tokenizers_are_accepted(kind, tmp_path):
    """Every kind, also with the tables and the replacements that published models have."""
    made = MADE[kind]()
    folder = save(made, tmp_path / "m")
    data = json.loads((folder / "tokenizer.json").read_text())
    growth.require_bounded(data, folder)
    growth.require_bounded(
        {"normalizer": sequence({"type": "Prepend", "prepend": "\u2581"}, replace("\u2581"))},
        folder,
    )
    growth.require_bounded({"normalizer": sequence(table("\u0641" * 18), replace("x"))}, folder)
    assert Tokenizer(folder).encode("a b")


def test_a_file_without_growing_parts_is_not_parsed_here(tmp_path, monkeypatch):
    """Parsing one of a vocabulary of 128,000 costs 0.2 s."""
    folder = save(MADE["byte-level"](), tmp_path / "m")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text()) | {"post_processor": None}
    path.write_text(json.dumps(data, ensure_ascii=False))
    parsed = []
    monkeypatch.setattr(growth, "require_bounded", lambda *given: parsed.append(given))
    assert Tokenizer(folder).encode("a b") and not parsed


def test_an_expression_without_end_that_no_trial_finds_is_one_typed_error(tmp_path):
    folder = save(MADE["byte-level"](), tmp_path / "m")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"((?:\p{Cyrillic}\d)+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    path.write_text(json.dumps(data))
    tokenizer = Tokenizer(folder)
    with pytest.raises(BadCheckpoint, match="encoding the text"):
        tokenizer.encode("\u044f1" * 60 + "!")


NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", [*NAMES, "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "outside", "long", "bytes", "parts"])
def test_every_file_is_a_regular_one_inside_of_bounded_size_and_text(name, kind, tmp_path):
    folder = save(MADE["byte-level"](), tmp_path / "m")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "outside":
        (tmp_path / "other").write_text("{}")
        path.symlink_to(tmp_path / "other")
    elif kind == "long":
        path.touch()
        os.truncate(path, 3 * 10**9)  # sparse
    elif kind == "bytes":
        path.write_bytes(b'{"a": "\xff"}')
    elif name.endswith(".jinja"):
        pytest.skip("a template has no parts")
    else:
        path.write_bytes(b"[" + b"[]," * 9_000_000 + b"1]")
    with pytest.raises(BadCheckpoint, match=name.replace(".", r"\.")):
        Tokenizer(folder)


@pytest.mark.parametrize("text", ["\udcff", "a\ud800b"])
def test_half_a_surrogate_pair_is_refused_by_name(text, tmp_path):
    tokenizer = Tokenizer(save(MADE["byte-level"](), tmp_path / "m"))
    for call in (tokenizer.encode, tokenizer.encode_spans):
        with pytest.raises(UsageError, match="expected Unicode text"):
            call(text)


@pytest.mark.parametrize(
    "template",
    [
        [{"name": ["x"], "template": "y"}],
        [{"name": {"x": 1}, "template": "y"}, {"name": "default"}],
        [{"name": 5, "template": 6}],
        "x" * 5_000_000,
    ],
)
def test_templates_of_another_shape_are_refused(template, tmp_path):
    with pytest.raises(EngineError) as caught:
        Tokenizer(save(MADE["byte-level"](), tmp_path / "m", chat_template=template))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "source", ["{{ '\\ud800' }}", "{{ raise_exception('a\\n\\x1b[31m' * 99999) }}"]
)
def test_what_a_template_writes_or_raises_is_text_of_one_line(source, tmp_path):
    tokenizer = Tokenizer(save(MADE["byte-level"](), tmp_path / "m", chat_template=source))
    with pytest.raises(EngineError) as caught:
        tokenizer.render([{"role": "user", "content": "x"}])
    assert len(str(caught.value)) <= 300 and not set(str(caught.value)) & set("\n\x1b")


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        None,
        5,
        [("user", "hi")],
        {"role": "user"},
        [{"role": "user", "content": b"hi"}],
        [{"role": "user", "content": "hi", "more": {1}}],
    ],
    ids=repr,
)
def test_what_is_no_list_of_messages_is_refused(messages):
    for take in (checked_messages, ChatTemplate("x").render):
        with pytest.raises(SettingError, match="messages: found"):
            take(messages)


def test_a_message_without_end_is_refused():
    message = {"role": "user"}
    message["content"] = message
    with pytest.raises(SettingError, match="Circular"):
        checked_messages([message])
