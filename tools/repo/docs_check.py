"""Run the commands of README.md and docs/*.md, so that no reader is the first to type one.

A command is a line of a code block, or code in a sentence, that begins with make, python or pip.
What needs a hub, a GPU, hours or a server is not run as it stands: RULES says in one line each how
it is checked instead. A command that no rule knows fails. FOLDER, MODEL and NAME stand for the
shipped model. The last lines say how many of each page's commands ran as it has them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.common.program import guarded, say

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "examples/README.md", "docs/*.md")
DATED = ("docs/LOG.md",)  # what was typed on its day
BEGINS = re.compile(r"(make|python3?|pip|omnikv-\w+|cat [\w.]+ \| python3?) ")
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACES = {"FOLDER": "weights/pocket", "MODEL": "weights/pocket", "NAME": "pocket"}
MINUTES = 10  # a command may take
REAL = Path.home() / ".cache/omnikv/models/smollm2-135m-instruct"  # as pages name it


@dataclass(frozen=True)
class Rule:
    """How commands that match `pattern` are checked. way: "run", "real" (run where the real model
    is, else as "help"), "help" (the program's --help names every flag), "skip", or a flag that is
    added. why: of a skip. codes: exit codes that are right. fast: whether the test suite runs it
    too.
    """

    pattern: str
    way: str
    why: str = ""
    codes: tuple[int, ...] = (0,)
    fast: bool = False


RULES = (
    Rule(r"pip install '?\.(\[|'|$)", "extras"),
    Rule(r"pip install ", "skip", "fetches packages"),
    Rule(r"make test-arm\b", "target"),
    Rule(r"make (test|studies-test|quick|lint|format)\b", "target", "what the suite itself is"),
    Rule(r"make (real-model|check-gpu|bench|kernels|eval|pocket|docs-check|wheel)\b", "target"),
    Rule(r"make (chat|compare) MODEL=", "target"),
    Rule(r"make serve\b", "target"),
    Rule(r"python examples/", "skip", "shown as what does not work"),
    Rule(r"python -m examples\.", "run"),
    # a plan that does not fit this machine exits 1
    Rule(r"python -m engine\.chat .*--plan", "run", codes=(0, 1), fast=True),
    Rule(r"python -m engine\.chat --list-models$", "run", fast=True),
    Rule(r"python -m engine\.chat --list-models", "run"),
    Rule(r"python -m engine\.chat .*--model \$HOME", "real"),
    Rule(r"python -m engine\.(chat|serve) .*--model llama", "help"),
    Rule(r"python -m engine\.chat .*--method NAME", "help"),
    Rule(r"python -m engine\.chat\b", "run"),
    # longer than the shipped model
    Rule(r"python -m engine\.serve .*--ctx 128K", "help"),
    Rule(r"python -m engine\.serve\b", "--plan", codes=(0, 1)),
    Rule(r"python -m tools$", "run"),
    Rule(r"python -m tools\.(fidelity|compare)\b", "--estimate"),
    Rule(r"python -m tools\.paper --list$", "run"),
    Rule(r"python -m tools\.studies\.exact report\b", "run", fast=True),
    Rule(r"python -m tools\.repo\.core$", "run", fast=True),
    Rule(r"python -m tools\.real_model$", "real"),
    Rule(r"python -m tests\.programs\.launches\b", "run"),
    Rule(r"python -m tools\.compile_kernels\.predict$", "run"),
    Rule(
        r"python -m (engine\.fleet\.dynamo|tests\.programs\.ray_replicas)\b",
        "skip",
        "needs Ray or Dynamo, which are no requirements",
    ),
    Rule(r"python -m (engine\.fleet\b|(tools|tests)\.)", "help"),
)


@dataclass(frozen=True)
class Command:
    """A command as a page has it, and the page."""

    page: str
    text: str

    @property
    def rule(self) -> Rule | None:
        """The first rule that matches; None: nobody has thought of it."""
        plain = plainly(self.text)
        return next((rule for rule in RULES if re.search(rule.pattern, plain)), None)


def pages() -> list[Path]:
    """The pages whose commands are for today."""
    found = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if str(path.relative_to(ROOT)) not in DATED]


def commands(text: str, page: str = "") -> list[Command]:
    """Every command of a page, each once."""
    found: dict[str, None] = {}
    for block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = " ".join(re.sub(r"^\$ ", "", re.sub(r"\s+# .*", "", line)).split())
            if BEGINS.match(line):
                found[line] = None
    for line in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text)):
        line = " ".join(line.split())
        # a sentence may name a program by a word or two: those are checked as they stand
        if BEGINS.match(line) and not re.search(r"[|{]|\.\.\.", line):
            found[line] = None
    return [Command(page, line) for line in found]


def all_commands(wanted: Collection[str] = ()) -> list[Command]:
    """Those of these pages, or of all; the first place of each."""
    found: dict[str, Command] = {}
    for path in pages():
        name = str(path.relative_to(ROOT))
        if wanted and name not in wanted:
            continue
        for command in commands(path.read_text(encoding="utf-8"), name):
            found.setdefault(command.text, command)
    return list(found.values())


def plainly(text: str) -> str:
    """A make target's command without make: `make chat ARGS="--x"` is `python -m engine.chat --x`;
    a target that a rule judges as one stays.
    """
    text = re.sub(r"^cat [\w.]+ \| ", "", text).replace("python3 ", "python ")
    target = re.match(r"make chat(?: ARGS=\"(.*)\")?$", text)
    return f"python -m engine.chat {target[1] or ''}".strip() if target else text


def check(command: Command, out: Path) -> str:
    """ "" where a command works, else what is wrong in one line. out: an empty folder."""
    rule = command.rule
    if rule is None:
        return "no rule knows it (RULES in tools/repo/docs_check.py)"
    words = shlex.split(os.path.expandvars(plainly(command.text)))
    words = [
        PLACES.get(word, str(out / "out") if word in ("OUT", "DIR") else word) for word in words
    ]
    if rule.way == "skip":
        return ""
    if rule.way == "extras":
        return _extras(command.text)
    if rule.way == "target":
        return _target(words)
    if rule.way == "help" or rule.way == "real" and not REAL.is_dir():
        return _helped(words)
    return _ran(words, rule, out)


def _extras(text: str) -> str:
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    asked = re.findall(r"\.\[([\w,]+)\]", text)
    lost = [name for part in asked for name in part.split(",") if name not in known]
    return f"no extra {', '.join(lost)} in pyproject.toml" if lost else ""


def _target(words: list[str]) -> str:
    """A target of the Makefile, whose program knows the flags of ARGS."""
    recipe = re.search(
        rf"^{words[1]}:.*\n(?:\t.*\n)*?\t@\$\(PY\) (.*)",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    if recipe is None:
        return f"the Makefile has no target {words[1]} that runs a program"
    module = re.match(r"-m ([\w.]+)", recipe[1])
    flags = [part for word in words if word.startswith("ARGS=") for part in shlex.split(word[5:])]
    return _helped(["python", "-m", module[1], *flags]) if module and flags else ""


def _helped(words: list[str]) -> str:
    """Whether `python -m MODULE --help` names every flag of a command."""
    module, flags = words[2], {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    said, code = help_of(module)
    if code:
        return f"python -m {module} --help exits {code}"
    if len(words) > 3 and re.fullmatch(r"[a-z]\w*", words[3]):
        said += help_of(module, words[3])[0]  # what it does, with flags of its own
    lost = sorted(flag for flag in flags - {"-m"} if not re.search(rf"(?<!\S){flag}\b", said))
    return f"{module} has no flag {', '.join(lost)}" if lost else ""


@cache
def help_of(module: str, *what: str) -> tuple[str, int]:
    """(text, exit code) of `python -m MODULE [WHAT] --help`, run in this process."""
    out, argv = io.StringIO(), sys.argv
    sys.argv = [module, *what, "--help"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(bool(done.code))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=out)
        code = 1
    finally:
        sys.argv = argv
    return out.getvalue(), code


def _ran(words: list[str], rule: Rule, out: Path) -> str:
    more = [rule.way] if rule.way.startswith("--") else []
    if rule.way == "--estimate":
        # the warm-up of a comparison is bounded too
        more += ["--minutes", "1", "--out", str(out / "out")]
    try:
        done = subprocess.run(
            [sys.executable, *words[1:], *more],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
        )
    except subprocess.TimeoutExpired:
        return f"not over after {MINUTES} minutes"
    if done.returncode not in rule.codes or "Traceback" in done.stderr:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        return f"exit {done.returncode}: {said[:200]}"
    return ""


def shown(command: Command) -> Iterator[str]:
    """What is said of a command before it is checked."""
    rule = command.rule
    yield f"{command.page}: {command.text}"
    if rule is not None and rule.way != "run":
        yield f"  ({rule.way}{': ' + rule.why if rule.why else ''})"


def run(args: argparse.Namespace) -> int:
    """Check them all; 1 where one does not work."""
    failed, todo = [], all_commands(args.page or ())
    todo = [c for c in todo if not args.fast or c.rule is None or c.rule.fast]
    for number, command in enumerate(todo, 1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="omnikv-docs-") as folder:
            wrong = check(command, Path(folder))
        for line in shown(command):
            say(line)
        say(f"  {number} of {len(todo)}: {wrong or 'works'}, {time.monotonic() - began:.1f} s")
        if wrong:
            failed.append(f"{command.page}: {command.text}: {wrong}")
    for page in dict.fromkeys(c.page for c in todo):
        own = [c.rule for c in todo if c.page == page and c.rule is not None]
        ran = sum(rule.way not in ("help", "target", "extras", "skip") for rule in own)
        print(f"{page}: {ran} run, {len(own) - ran} by their flags")
    print("\n".join([f"{len(todo)} commands, {len(failed)} fail", *failed]))
    return 1 if failed else 0


def main() -> int:
    """Exit code 0, 1 (a command does not work), 2 (usage) or 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.repo.docs_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fast", action="store_true", help="only those that take seconds")
    parser.add_argument("--page", nargs="+", metavar="PAGE", help="only these, as docs/BATCH.md")
    args = parser.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
