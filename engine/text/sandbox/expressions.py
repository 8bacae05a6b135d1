"""Expressions of an untrusted tokenizer.json that would never end.

The native library gives up on such an expression (`(a+)+$` over 60 letters) with a panic, which
writes a stack trace on stderr before anything can catch it. So a file whose expressions repeat what
repeats is tried on short texts in a child process first, where nobody sees the trace. Expressions
of the usual tokenizers repeat single characters only, and cost nothing here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from engine.base.errors import BadCheckpoint
from engine.text.sandbox.template import child_environment
from weights.jsonfile import shown

SECONDS = 20.0  # of a trial; an endless expression takes 0.1 to 0.4 s until the library gives up
MOST_TEXTS = 32
REPEATS = 64  # of a piece of text: 2^64 ways to split it are over every limit
REGEX = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
# what an expression may hold: an escape, a class of characters, a bound of repetition, or one sign
SIGN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)


def repeats_what_repeats(expression: str) -> bool:
    """Whether a group that repeats without bound holds a repetition or alternatives: the form of
    an expression that can be endless.
    """
    holds: list[bool] = []  # of each open group
    before, held = "", False  # the sign before; whether the group that it closed holds one
    for sign in SIGN.findall(expression):
        repeats = sign in ("*", "+") or (sign.startswith("{") and sign.endswith(",}"))
        if repeats and before == ")" and held:
            return True
        if sign == "(":
            holds.append(False)
        elif sign == ")" and holds:
            held = holds.pop()
            if holds:
                holds[-1] |= held
        elif holds and (repeats or sign == "|" or (sign == "?" and before != "(")):
            holds[-1] = True
        before = sign
    return False


def texts(expressions: list[str]) -> list[str]:
    """Short texts on which an endless expression is: each sign of it many times, then another."""
    signs = dict.fromkeys(c for e in expressions for c in e if c.isalnum() or c == " ")
    pieces = [*dict.fromkeys(["a", " ", "1", "\n", "a ", ".", "\u00e9", *signs])][:MOST_TEXTS]
    ends = ["!", "\t", "!" + "".join(signs)]  # the last: some look for a sign of theirs first
    return [piece * REPEATS + end for piece in pieces for end in ends]


def require_endings(path: Path, text: str) -> None:
    """Raise BadCheckpoint where an expression of the tokenizer.json `text`, read from `path`, does
    not end on short texts.
    """
    found = [json.loads(quoted, strict=False) for quoted in REGEX.findall(text)]
    doubtful = [expression for expression in found if repeats_what_repeats(expression)]
    if not doubtful:
        return
    request = json.dumps([str(path), texts(doubtful)])
    script = Path(__file__).with_name("expression_worker.py")
    try:
        trial = subprocess.run(
            [sys.executable, str(script)],
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        why = f"ran for {SECONDS:.0f} s"
    except OSError:
        return  # no child can be started here: the library's own words have to do
    else:
        if trial.returncode == 0:
            return
        why = trial.stdout.decode("utf-8", "replace").strip() or f"exit code {trial.returncode}"
    raise BadCheckpoint(
        f"{path}: found the expression {shown(doubtful[0])}, expected one that ends: on a "
        f"text of {REPEATS} characters it did not ({why})"
    )
