"""Tool calls in what a model writes: found in every form, however the text is cut into pieces.

Stops: a call that is shown as text or text that is taken for a call, a piece lost or doubled at a
border, a name that was not offered, a marker of a special token shown.
"""

import json
import random

import pytest

from engine.serve.request.calls.functions import FunctionReader
from engine.serve.request.calls.scanner import Call, CallScanner, form_of
from engine.serve.request.calls.typed import typed

GOOD = '{"name": "add", "arguments": {"a": 1, "b": "</tool_call> {"}}'
OFFERED = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "say": {"type": "object", "properties": {}},
}


def scanned(form, pieces, hidden=None, single=False):
    """(text, [(name, arguments)]) of an answer in pieces: texts, or (text, token id)."""
    scanner = CallScanner(form, OFFERED, hidden, single)
    parts = []
    for piece in pieces:
        parts += scanner.push(*piece) if isinstance(piece, tuple) else scanner.push(piece)
    parts += scanner.end()
    calls = [(p.name, json.loads(p.arguments)) for p in parts if not isinstance(p, str)]
    assert len({p.id for p in parts if not isinstance(p, str)}) == len(calls)
    assert all(len(p.id) == 9 and p.id.isalnum() for p in parts if not isinstance(p, str))
    return "".join(p for p in parts if isinstance(p, str)), calls


ADD = ("add", {"a": 1, "b": "</tool_call> {"})
XML = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
</tool_call> {
</parameter>
</function>
</tool_call>"""
QUOTED = "<a>\n</parameter>\n\n<function=say>\n</function>\n</tool_call>\n</parameter>"
BARE = XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
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
    ("functions", f"Well. {XML}", "Well. ", [ADD]),
    ("functions", f"{XML}\n{XML}", "", [ADD, ADD]),
    ("functions", f"<tool_call>{BARE}{BARE}</tool_call> so", " so", [ADD, ADD]),
    ("functions", f"{BARE} so", " so", [ADD]),  # the tag was forgotten
    ("functions", f"<tool_call>\n{BARE}", "", [ADD]),
    ("functions", XML[:-3], "", [ADD]),
    ("functions", XML.replace("\n", ""), "", [ADD]),
    ("functions", "<tool_call><function=say></function></tool_call>", "", [SAY]),
    ("functions", XML.replace("</tool_call> {", QUOTED), "", [("add", {"a": 1, "b": QUOTED})]),
    ("functions", XML.replace("1", "one"), "", [("add", {"a": "one", "b": ADD[1]["b"]})]),
    ("functions", XML.replace("1", ""), "", [("add", {"a": "", "b": ADD[1]["b"]})]),
    ("functions", XML.replace("=add>", "=rm>"), ..., []),
    ("functions", f"{XML.replace('=add>', '=rm>')}\n{XML}", ..., [ADD]),
    ("functions", XML.replace("</function>", ""), ..., []),  # cut: what comes is not known
    ("functions", XML[: XML.index("</parameter>\n</f")], ..., []),
    ("functions", XML[:30], ..., []),
    ("functions", XML.replace("=b>", "=>"), ..., []),
    ("functions", XML.replace("=b>", "=" + "b" * 300 + ">"), ..., []),
    ("functions", "<tool_call>\nnone</tool_call> b", "<tool_call>\nnone</tool_call> b", []),
    ("functions", f"<tool_call> so: <function= {XML} </tool_call>", ..., [ADD]),
    ("functions", "a <tool_cal", "a <tool_cal", []),
    ("functions", "1 <function", "1 <function", []),
    ("functions", GOOD, GOOD, []),
    ("functions", "<tool_call>" * 3000, ..., []),
    ("functions", "<function=add>" * 3000, ..., []),
    ("functions", "<function=add><parameter=a>" * 2000, ..., []),
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
    scanner = CallScanner("tags", OFFERED)
    assert scanner.push("One <") == ["One "] and scanner.push("b> two") == ["<b> two"]
    bare = CallScanner("bare", OFFERED)
    assert bare.push("a {") == ["a {"]
    functions = CallScanner("functions", OFFERED)
    assert functions.push("One <") == ["One "] and functions.push("b> two <f") == ["<b> two "]
    assert functions.push("un") == [] and functions.push("ny>") == ["<funny>"]


def test_a_function_is_a_call_before_its_tag_ends():
    scanner = CallScanner("functions", OFFERED)
    assert scanner.push(XML[: XML.index("</function>") + 10]) == []
    (call,) = scanner.push(">")
    assert (call.name, json.loads(call.arguments)) == ADD
    assert scanner.push("\n</tool") == [] and scanner.push("_call>\n\n") == []
    assert scanner.push("so") == ["\n\nso"] and scanner.end() == []


def test_markers_that_are_special_tokens_are_seen_and_never_shown():
    """A detokenizer shows nothing for them: their ids say where they are."""
    hidden = {7: "<tool_call>", 8: "</tool_call>", 9: "[TOOL_CALLS]", 6: "<|python_tag|>"}
    call = [("a", None), ("", 7), (GOOD, 5), ("", 8), (" b", 5)]
    assert scanned("tags", call, hidden) == ("a b", [ADD])
    assert scanned("tags", [("", 7), ("no call", 5), ("", 8)], hidden) == ("no call", [])
    assert scanned("list", [("", 9), (f"[{GOOD}]", 5)], hidden) == ("", [ADD])
    assert scanned("list", [("a ", 5), ("", 9), ("[1]", 5)], hidden) == ("a [1]", [])
    assert scanned("bare", [("", 6), (GOOD, 5)], hidden) == ("", [ADD])
    function = [("a", None), ("", 7), (BARE, 5), ("", 8), (" b", 5)]
    assert scanned("functions", function, hidden) == ("a b", [ADD])
    assert scanned("functions", [("", 7), ("no call", 5), ("", 8)], hidden) == ("no call", [])
    assert scanned("bare", [("", 6), ("print(1)", 5)], hidden) == ("print(1)", [])


def test_a_single_call_ends_what_counts():
    text = f"a<tool_call>{GOOD}</tool_call><tool_call>{GOOD}</tool_call>b"
    assert scanned("tags", [text], single=True) == ("a", [ADD])
    assert scanned("tags", list(text), single=True) == ("a", [ADD])
    assert scanned("bare", [GOOD + GOOD], single=True) == ("", [ADD])
    assert scanned("functions", list(f"a{XML}{XML}b"), single=True) == ("a", [ADD])


def test_forms_by_template():
    assert form_of("{% if tools %}<tool_call>{% endif %}") == "tags"
    assert form_of("{{ tools }}[TOOL_CALLS]") == "list"
    assert form_of('{{ tools }} {"name": 1, "parameters": 2}') == "bare"
    assert form_of("{{ tools }}<tool_call><function=' + name + '><parameter=") == "functions"
    assert form_of("{{ tools }}<function=name>{json}</function>") is None
    assert form_of("{{ tools }}") is None and form_of("<tool_call>") is None


@pytest.mark.parametrize("form", ["tags", "list", "bare"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "1" * 5000, "[" * 100_000])
def test_what_is_no_json_for_a_client_is_no_call(form, value):
    """Python reads the first three; of the others it raises errors that are not JSONDecodeError."""
    call = f'{{"name": "add", "arguments": {{"a": {value}}}}}'
    around = {"tags": "<tool_call>{}</tool_call>", "list": "[TOOL_CALLS][{}]", "bare": "{}"}
    text = around[form].format(call)
    shown, calls = scanned(form, [text])
    assert (shown, calls) == (text, [])
    assert scanned(form, [text[:40], text[40:]]) == (text, [])


@pytest.mark.parametrize("form", ["tags", "functions", "list", "bare"])
def test_an_argument_of_any_depth_is_a_call_or_text(form):
    """Python's own limit is somewhere between: reading and writing may reach it apart."""
    found = set()
    for deep in [*range(100, 1100, 50), 3000]:
        value = "[" * deep + "]" * deep
        text = {
            "tags": '<tool_call>{{"name": "say", "arguments": {{"a": {}}}}}</tool_call>',
            "functions": "<function=say><parameter=a>{}</parameter></function>",
            "list": '[TOOL_CALLS][{{"name": "say", "arguments": {{"a": {}}}}}]',
            "bare": '{{"name": "say", "arguments": {{"a": {}}}}}',
        }[form].format(value)
        scanner = CallScanner(form, OFFERED)
        (part,) = [*scanner.push(text), *scanner.end()]
        assert isinstance(part, Call) or part == text
        found.add(type(part))
        if isinstance(part, Call):
            assert value in part.arguments
    assert Call in found


ROOT = {
    "type": "object",
    "$defs": {
        "Deep": {"$ref": "#/$defs/Number"},
        "Number": {"type": "number"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b": {"type": "boolean"},
    },
    "properties": {
        "text": {"type": "string"},
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object"},
        "shape": {"properties": {"a": {}}},
        "nothing": {"type": "null"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "optional": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        "nullable": {"type": "integer", "nullable": True},
        "sizes": {"enum": [1, 2, "auto"]},
        "digits": {"enum": ["1", "2"]},
        "one": {"const": 1},
        "referred": {"$ref": "#/$defs/Deep"},
        "slashed": {"$ref": "#/$defs/a~1b"},
        "loop": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/None/of/these"},
        "far": {"$ref": "http://example.com/schema"},
        "any": {},
        "yes": True,
        "odd": {"type": 5, "enum": 3, "anyOf": "x"},
    },
}


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", ' {"a": 1}\n', ' {"a": 1}\n'),
        ("integer", " 5 ", 5),
        ("integer", "5.0", 5),
        ("integer", "-1e3", -1000),
        ("integer", "5.5", "5.5"),
        ("integer", "five", "five"),
        ("integer", "true", "true"),
        ("integer", "", ""),
        ("integer", "1" * 5000, "1" * 5000),
        ("number", "5", 5),
        ("number", "5.5", 5.5),
        ("number", "5.0", 5.0),
        ("number", "NaN", "NaN"),
        ("number", "1e999", "1e999"),
        ("number", "\u0665", "\u0665"),  # a digit, but none of JSON's
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "1", "1"),
        ("list", '["a", "ü"]', ["a", "ü"]),
        ("list", "[1, NaN]", "[1, NaN]"),
        ("list", "[" * 100_000, "[" * 100_000),
        ("list", "a, b", "a, b"),
        ("object", '{"a": {"b": [null]}}', {"a": {"b": [None]}}),
        ("object", "{'a': 1}", "{'a': 1}"),
        ("shape", '{"a": 1}', {"a": 1}),
        ("nothing", "None", None),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("maybe", "nullable", "nullable"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("optional", "null", None),
        ("optional", "3", 3),
        ("nullable", "null", None),
        ("sizes", "2", 2),
        ("sizes", "auto", "auto"),
        ("digits", "2", "2"),
        ("one", "1", 1),
        ("referred", "1.5", 1.5),
        ("slashed", "True", True),
        ("loop", "[1]", [1]),
        ("lost", "[1]", [1]),
        ("far", "[1]", [1]),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", '"a"', '"a"'),
        ("any", "a", "a"),
        ("yes", "5", 5),
        ("odd", "5", 5),
        ("unknown", "5", 5),
    ],
)
def test_a_text_has_the_type_of_its_schema(key, text, value):
    found = typed(text, key, ROOT)
    assert found == value and type(found) is type(value)


def test_parameters_that_are_referred_to_or_combined_have_their_types():
    inner = {"properties": {"a": {"$ref": "#/$defs/A"}}, "additionalProperties": {"type": "string"}}
    root = {"$defs": {"A": {"type": "string"}, "B": inner}}
    for schema in ({**root, "allOf": [inner]}, {**root, "$ref": "#/$defs/B"}, {**root, **inner}):
        assert typed("5", "a", schema) == typed("5", "b", schema) == "5"
    for schema in (True, None, {}, {"properties": []}, {"properties": {"b": 1}}, {"allOf": [None]}):
        assert typed("5", "a", schema) == 5 and typed("[", "a", schema) == "["


def test_a_long_value_is_looked_at_once():
    """Reading does not begin anew with every token."""
    value, scanner = "</parameter> x" * 4000, CallScanner("functions", OFFERED)
    looks = 0

    class Counted(str):
        def find(self, *arguments):
            nonlocal looks
            text, at = arguments
            found = str.find(self, text, at)
            looks += (len(self) if found < 0 else found) - at
            return found

    reader = FunctionReader()
    text = f"<function=add><parameter=b>{value}</parameter></function>"
    for stop in range(1, len(text) + 1, 3):
        assert not reader.over(Counted(text[:stop]), False) or stop > len(text) - 3
    assert reader.over(Counted(text), False) and reader.values == {"b": value}
    assert looks < 10 * len(text)
    assert [part.name for part in scanner.push(text)] == ["add"]
