"""The tasks that a command line names: of RULER and other synthetic suites, and of local files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.common.program import say
from tools.suites.local import infinitebench as infinitebench_files
from tools.suites.local import leval, longbench, longbench2, longbench_e
from tools.suites.made import graphwalks, infinitebench
from tools.suites.prompts.instance import asked_once
from tools.suites.prompts.task import Prompt, Task
from tools.suites.ruler import DEFAULT, TASKS, make

Found = dict[str, Task]
# as reports call them
TITLES = {
    "ruler": "RULER",
    "graphwalks": "GraphWalks",
    "infinitebench": "InfiniteBench",
    "longbench": "LongBench",
    "longbench_e": "LongBench-E",
    "longbench2": "LongBench v2",
    "leval": "L-Eval",
}
# {suite: names of its tasks}, and how one is made
MADE_NAMES: dict[str, tuple[str, ...]] = {
    "graphwalks": tuple(graphwalks.WALKS),
    "infinitebench": tuple(infinitebench.KINDS),
}
MADE: dict[str, Callable[[str, int], Task]] = {
    "graphwalks": graphwalks.task,
    "infinitebench": infinitebench.task,
}


def _each(task: Callable[[Path, str], Task | None]) -> Callable[[Path, Sequence[str]], Found]:
    return lambda folder, names: {n: found for n in names if (found := task(folder, n))}


# of those that have files: (folder, names) -> {name: Task} where there is a file
FILE_NAMES: dict[str, tuple[str, ...]] = {
    "infinitebench": infinitebench_files.NAMES,
    "longbench": tuple(longbench.KINDS),
    "longbench_e": longbench_e.NAMES,
    "longbench2": ("easy", "hard"),
    "leval": leval.NAMES,
}
FILES: dict[str, Callable[[Path, Sequence[str]], Found]] = {
    "infinitebench": _each(infinitebench_files.task),
    "longbench": _each(longbench.task),
    "longbench_e": _each(longbench_e.task),
    "longbench2": longbench2.tasks,
    "leval": _each(leval.task),
}
HELP = (
    "RULER's by name, and a suite or one of its tasks: " + ", ".join(TITLES) + ", longbench/qasper "
    "(default: RULER's eleven that need no file)"
)


def chosen(
    words: Sequence[str], seed: int, files: Mapping[str, Path], data: Path | None
) -> dict[str, Task]:
    """{name: Task} of words such as "vt", "ruler", "longbench", "longbench/qasper", in their order.

    files: RULER's, {"squad" | "hotpotqa": a file}; data: the folder of the suites that have files.
    Raises UsageError for a word that names none, and for data that is not there or no such data; of
    a whole suite those tasks are left out that have no file, and a line says which.
    """
    found: dict[str, Task] = {}
    for word in words:
        suite, _, name = word.partition("/")
        if word in TASKS or word == "ruler":
            for each in DEFAULT if word == "ruler" else (word,):
                found[each] = _ruler(each, seed, files)
        elif suite in TITLES and name in (
            "",
            *MADE_NAMES.get(suite, ()),
            *FILE_NAMES.get(suite, ()),
        ):
            found |= {task.name: task for task in _of(suite, name, seed, data)}
        else:
            tables = (MADE_NAMES, FILE_NAMES)
            known = [f"{s}/{n}" for table in tables for s, names in table.items() for n in names]
            raise UsageError(
                f"unknown task {word!r}: one of {', '.join([*TITLES, *TASKS, *known])}"
            )
    return found


def brought(suite: str, task: str) -> bool:
    """Whether a task's prompts come from a file, so that they have their own lengths."""
    return task.rpartition("/")[2] in FILE_NAMES.get(suite, ())


def _of(suite: str, name: str, seed: int, data: Path | None) -> list[Task]:
    """A task of a suite, or all of them; where some are made, those of files only with `data`."""
    made = [n for n in MADE_NAMES.get(suite, ()) if name in ("", n)]
    found = [MADE[suite](each, seed) for each in made]
    if brought(suite, name) or (not name and suite in FILES and not (made and data is None)):
        found += _local(suite, name, data, bool(made))
    return found


def _local(suite: str, name: str, data: Path | None, others: bool) -> list[Task]:
    """Tasks of local files. others: the suite has more than these, so none of them may be there."""
    if data is None:
        raise UsageError(f"{suite} is read from local files: give --data FOLDER")
    if not data.is_dir():
        raise UsageError(f"--data: found no folder {data}, expected one with files of {suite}")
    names = (name,) if name else FILE_NAMES[suite]
    found = FILES[suite](data, names)
    if not found and not others:
        file = f"{name}_e.jsonl" if suite == "longbench_e" else f"{name}.jsonl"
        what = file if name and suite != "longbench2" else f"file of {suite}"
        raise UsageError(
            f"--data: found no {what} in {data} (docs/SUITES.md says where it may lie)"
        )
    if missing := [each for each in names if each not in found]:
        say(f"{suite}: no file of {', '.join(missing)} in {data}: left out")
    return list(found.values())


def _ruler(name: str, seed: int, files: Mapping[str, Path]) -> Task:
    kind = TASKS[name].file
    if kind and kind not in files:
        raise UsageError(f"task {name} needs a file of {kind}: give --{kind} FILE")
    return Task("ruler", name, TASKS[name].written, partial(_ruler_prompt, name, seed, files))


def _ruler_prompt(
    name: str,
    seed: int,
    files: Mapping[str, Path],
    tokenizer: Tokenizer,
    length: int,
    number: int,
    room: int,
) -> Prompt:
    found = make(name, length, number, tokenizer, seed, files)
    return asked_once(tokenizer, found, partial(TASKS[name].score, expected=found.answers))
