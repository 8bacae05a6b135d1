"""Tool calls in what a model writes: found in every form, however the text is cut into pieces.

Stops: a call that is shown as text or text that is taken for a call, a piece lost or doubled at a
border, a name that was not offered, a marker of a special token shown.
"""

import json
import random

import pytest

from engine.serve.request.calls import CallScanner, form_of

GOOD = '{"name": "add", "arguments": {"a": 1, "b": "</tool_call> {"}}'
NAMES = ("add", "say")


def scanned(form, pieces, hidden=None, single=False):
    """(text, [(name, arguments)]) of an answer in pieces: texts, or (text, token id)."""
    scanner = CallScanner(form, NAMES, hidden, single)
    parts = []
    for piece in pieces:
        parts += scanner.push(*piece) if isinstance(piece, tuple) else scanner.push(piece)
    parts += scanner.end()
    calls = [(p.name, json.loads(p.arguments)) for p in parts if not isinstance(p, str)]
    assert len({p.id for p in parts if not isinstance(p, str)}) == len(calls)
    assert all(len(p.id) == 9 and p.id.isalnum() for p in parts if not isinstance(p, str))
    return "".join(p for p in parts if isinstance(p, str)), calls


ADD = ("add", {"a": 1, "b": "</tool_call> {"})
SAY = ("say", {})
CASES = [
    ("tags", f"Well. <tool_call>\n{GOOD}\n</tool_call>", "Well. ", [ADD]),
    ("tags", f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>", "", [ADD, ADD]),
    ("tags", f"<tool_call>\n{GOOD}", "", [ADD]),  # the end was forgotten
    ("tags", '<tool_call>{"name": "say"}</tool_call> so', " so", [SAY]),
    ("tags", '<tool_call>{"name": "say", "arguments": "{}"}</tool_call>', "", [SAY]),
    ("tags", "a <tool_cal", "a <tool_cal", []),
    ("tags", "<tool_call>none</tool_call> b", "<tool_call>none</tool_call> b", []),
    ("tags", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("tags", '<tool_call>{"name": "say", "arguments": [1]}</tool_call>', ..., []),
    ("tags", f"<tool_call>{GOOD} and</tool_call>", ..., []),
    ("tags", '<tool_call>{"a": </tool_call><tool_call>{"name": "say"}</tool_call>', ..., [SAY]),
    ("tags", GOOD, GOOD, []),
    ("tags", "<tool_call>" + "[" * 100_000, ..., []),
    ("list", f"Well. [TOOL_CALLS][{GOOD}]", "Well. ", [ADD]),
    ("list", f'[TOOL_CALLS] [{GOOD}, {{"name": "say", "arguments": {{}}}}]', "", [ADD, SAY]),
    ("list", "[TOOL_CALLS]say[ARGS]{}[TOOL_CALLS]say[ARGS]{}", "", [SAY, SAY]),
    ("list", f"[TOOL_CALLS][{GOOD}", ..., []),
    ("list", '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', ..., []),
    ("list", f"[{GOOD}]", ..., []),
    ("bare", f" {GOOD}", "", [ADD]),
    ("bare", '{"name": "say", "parameters": {}}; {"name": "say", "parameters": {}}', "", [SAY] * 2),
    ("bare", f"It is {GOOD}", ..., []),
    ("bare", '{"answer": 3}', ..., []),
    ("bare", f'{GOOD} {{"answer": 3}}', ..., []),
    ("bare", f"{GOOD} as you see", ..., []),
]


@pytest.mark.parametrize("form, text, shown, calls", CASES)
def test_calls_are_found_and_lookalikes_stay_text(form, text, shown, calls):
    rng = random.Random(text)
    ways = [[text], list(text[:2000]) + [text[2000:]]]
    for _ in range(6):
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
        borders = [0, *cuts, len(text)]
        ways.append([text[a:b] for a, b in zip(borders, borders[1:], strict=False)])
    for pieces in ways:
        found = scanned(form, pieces)
        if shown is ... and calls:
            assert found[1] == calls
        else:
            assert found == (text if shown is ... else shown, calls)


def test_text_before_a_call_is_shown_at_once():
    scanner = CallScanner("tags", NAMES)
    assert scanner.push("One <") == ["One "] and scanner.push("b> two") == ["<b> two"]
    bare = CallScanner("bare", NAMES)
    assert bare.push("a {") == ["a {"]


def test_markers_that_are_special_tokens_are_seen_and_never_shown():
    """A detokenizer shows nothing for them: their ids say where they are."""
    hidden = {7: "<tool_call>", 8: "</tool_call>", 9: "[TOOL_CALLS]", 6: "<|python_tag|>"}
    call = [("a", None), ("", 7), (GOOD, 5), ("", 8), (" b", 5)]
    assert scanned("tags", call, hidden) == ("a b", [ADD])
    assert scanned("tags", [("", 7), ("no call", 5), ("", 8)], hidden) == ("no call", [])
    assert scanned("list", [("", 9), (f"[{GOOD}]", 5)], hidden) == ("", [ADD])
    assert scanned("list", [("a ", 5), ("", 9), ("[1]", 5)], hidden) == ("a [1]", [])
    assert scanned("bare", [("", 6), (GOOD, 5)], hidden) == ("", [ADD])
    assert scanned("bare", [("", 6), ("print(1)", 5)], hidden) == ("print(1)", [])


def test_a_single_call_ends_what_counts():
    text = f"a<tool_call>{GOOD}</tool_call><tool_call>{GOOD}</tool_call>b"
    assert scanned("tags", [text], single=True) == ("a", [ADD])
    assert scanned("tags", list(text), single=True) == ("a", [ADD])
    assert scanned("bare", [GOOD + GOOD], single=True) == ("", [ADD])


def test_forms_by_template():
    assert form_of("{% if tools %}<tool_call>{% endif %}") == "tags"
    assert form_of("{{ tools }}[TOOL_CALLS]") == "list"
    assert form_of('{{ tools }} {"name": 1, "parameters": 2}') == "bare"
    assert form_of("{{ tools }}<tool_call><function=name>") is None
    assert form_of("{{ tools }}") is None and form_of("<tool_call>") is None
