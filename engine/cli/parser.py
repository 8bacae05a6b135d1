"""The argument parser of our programs: errors in one line, names that are nearly right."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import NoReturn

from engine.terminal.display import Display


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
            near = difflib.get_close_matches(unknown[1].split("=")[0], flags, 1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
            message = f"{unknown[1]}: no such flag; {hint}"
        elif unknown:
            message = (
                f"{unknown[1]!r}: not expected here; name a model with --model, "
                "give a prompt with -p"
            )
        Display().error(message)
        sys.exit(2)
