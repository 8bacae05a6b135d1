"""The argument parser of our programs: errors in one line, names that are nearly right,
versions.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from engine.base.errors import OutputFailed, UsageError
from engine.base.version import versions
from engine.terminal.lines import Lines
from engine.terminal.output import abandon_output, emit

# Flags by the names that other engines give them, or that ours had: there are no aliases, but the
# error says ours.
OURS = {
    "--attention": "--method",
    "--budget": "--tokens",
    "--ctx-size": "--ctx",
    "--dry-run": "--plan",
    "--kv-cache-dtype": "--bank",
    "--max-model-len": "--ctx",
    "--quantization": "--weights",
    "--temperature": "--temp",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints each error as one line, with the nearest flag or value."""

    def error(self, message: str) -> NoReturn:
        """Print one line that names the flag and exit with 2."""
        message = message.removeprefix("argument ").replace(
            "expected one argument", "found nothing, expected a value"
        )
        message = re.sub(
            r"invalid (int|float) value: (.*)", r"found \2, expected a number", message
        )
        choice = re.fullmatch(r"(.*): invalid choice: (.*) \(choose from (.*)\)", message)
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if choice:
            known = choice[3].replace("'", "").split(", ")
            near = difflib.get_close_matches(choice[2].strip("'"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"{choice[1]}: found {choice[2]}, expected one of {', '.join(known)}{hint}"
        elif unknown and unknown[1].startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = f"{unknown[1]}: no such flag; {_hint(unknown[1].split('=')[0], flags)}"
        elif unknown:
            message = (
                f"{unknown[1]!r}: not expected here; name a model with --model, "
                "give a prompt with -p"
            )
        Lines().error(message)
        sys.exit(2)

    def print_help(self, file: Any = None) -> None:
        """Print the help."""
        self.tell(self.format_help(), file)

    def tell(self, text: str, file: Any = None) -> None:
        """Print a text; exit with 1 where standard output cannot take it."""
        try:
            emit(text, file)
        except BrokenPipeError:
            abandon_output()
            sys.exit(1)
        except OutputFailed as error:
            abandon_output()
            Lines().error(str(error))
            sys.exit(error.exit_code)

    def require(
        self,
        sense: Callable[[argparse.Namespace], None],
        answer: Callable[[argparse.Namespace], str | None] = lambda args: None,
    ) -> None:
        """End with a line and 2 where this command line is wrong, or with what needs no engine:
        a program does so before it imports torch, which takes seconds.

        sense: raises UsageError. answer: a text to print, or None where the engine must run.
        """
        args = self.parse_args()
        try:
            sense(args)
        except UsageError as error:
            self.error(str(error))
        if (text := answer(args)) is not None:
            self.tell(text + "\n")
            sys.exit(0)


class _Versions(argparse.Action):
    """Prints the versions and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        assert isinstance(parser, Parser)
        parser.tell(versions() + "\n")
        parser.exit()


def version_flag(add: Callable) -> None:
    """Add --version. add: add_argument of a Parser or of a group of it."""
    add(
        "--version",
        action=_Versions,
        nargs=0,
        help="print the versions of the engine and its libraries and end",
    )


def _hint(unknown: str, flags: list[str]) -> str:
    """Say which of a program's flags an unknown one may have meant."""
    if OURS.get(unknown) in flags:
        return f"use {OURS[unknown]}"
    near = [] if unknown in OURS else difflib.get_close_matches(unknown, flags, 1)
    return f"did you mean {near[0]}?" if near else "--help lists the flags"
