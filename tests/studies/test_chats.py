"""tools/studies/chats.py: what counts as answered, refused in one line, and failed.

Stops: a table that says "nothing failed" over an exception, an empty answer or silence.
"""

import json

import pytest

from tools.studies.chats import ASKED, OPENING, parsed, script, table


def came_to(line, *printed):
    """The step of one line of a script and what the chat printed after it."""
    return parsed([line], "seed = 0\n" + "".join(f"{text}\n" for text in printed))[1]


def answer(text):
    return json.dumps({"text": text, "finish_reason": "stop"})


@pytest.mark.parametrize(
    ("line", "printed", "failed", "refused"),
    [
        ("Who?", [answer("Simon."), "[9 written]"], "", ""),
        ("Who?", [answer(" "), "[0 written]"], "an empty answer", ""),
        ("Who?", [], "an empty answer", ""),
        ("/retry", ["[0 written]"], "an empty answer", ""),
        ("Who?", ["error: context: found 9, expected 8"], "", "error: context"),
        ("/save x", ["error: h2o: cannot be saved (KeyError of a file)"], "", "error: h2o"),
        ("/save x", ["error: KeyError: 'rows'"], "error: KeyError", ""),
        ("/check", ["error: torch.OutOfMemoryError: none"], "error: torch", ""),
        ("/check", ["Traceback (most recent call last):", "  File x"], "Traceback", ""),
        ("/check", [], "silence", ""),
        ("/check", ["nothing to compare: full reads all"], "", ""),
    ],
)
def test_a_step_is_answered_refused_or_failed(line, printed, failed, refused):
    step = came_to(line, *printed)
    assert step.failed.startswith(failed) and bool(step.failed) == bool(failed)
    if not failed:
        assert step.refused.startswith(refused) and bool(step.refused) == bool(refused)


def test_the_script_asks_every_question_and_output_is_cut_at_its_marks(tmp_path):
    lines = script(tmp_path / "talk")
    assert {question for question, _ in ASKED} <= set(lines) and len(set(ASKED)) == 10
    assert {"/sources", "/check 4", "/retry", "/reset"} < set(lines)
    steps = parsed(lines, f"loaded\nseed = 3\nread\n{answer('7')}\nseed = 4\n")
    assert [s.line for s in steps] == [OPENING, lines[3], lines[4]]
    assert steps[0].said == ["loaded"] and steps[1].answers == ["7"] and not steps[0].failed


def test_a_table_names_every_failure_and_whose_it_is():
    row = dict(method="quest", tier="host", opened=True, answers=12, right=9, back="same")
    row |= {"restored": "other", "fork": "same", "truncate": "FAILED: KeyError: 1", "/check": ""}
    row |= {"refused": [], "failed": ["truncate: FAILED: KeyError: 1"], "/sources": ""}
    page = table([row, row | {"tier": "device", "failed": [], "truncate": "same"}])
    assert "| quest | host | 12 | 9 | same | other | same | FAILED | 0 | 1 |" in page
    assert "- quest (host): `truncate: FAILED: KeyError: 1`" in page
