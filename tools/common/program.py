"""What every program of tools shares: one-line errors and exit codes, progress, files that are
whole or absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.base.errors import EngineError, UsageError
from engine.text.boundary import one_line

# the shipped models, which programs use where no --model is given: the demonstration's, and the one
# that methods are compared on
POCKET = Path(__file__).resolve().parents[2] / "weights" / "pocket"
JUDGE = POCKET.parent / "judge"


def model_label(model: str) -> str:
    """A model as reports name it: a shipped one by its place in the repository."""
    return next((f"weights/{x.name}" for x in (POCKET, JUDGE) if model == str(x)), model)


def guarded(work: Callable[[], int | None], stopped: str = "") -> int:
    """Run a program and return its exit code.

    work: returns an exit code, or None for 0. An EngineError becomes one line on stderr and its own
    code, an error of the system (a full disk) 1, Ctrl-C 130 after the line `stopped`.
    """
    try:
        return work() or 0
    except EngineError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that is gone
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if stopped:
            print(f"\n{stopped}", file=sys.stderr)
        return 130


def entry(
    parse: Callable[[Sequence[str] | None], Any],
    run: Callable[[Any], int | None],
    quiet: bool = False,
) -> Callable[[Sequence[str] | None], int]:
    """The `main` of a program, from an argv (None: the command line's) to an exit code: 0, 1 (the
    run failed), 2 (usage) or 130 (Ctrl-C). quiet: warnings to users of the engine are not shown.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        if quiet:
            warnings.simplefilter("ignore", UserWarning)
        args = parse(argv)
        return guarded(lambda: run(args))

    return main


def no_program(name: str) -> int:
    """Exit code 2, after a line that says what a module is that somebody ran."""
    say(f"error: {name} is no program, other programs use it: `python -m tools` lists what runs")
    return 2


def say(line: str) -> None:
    """One line of news on stderr; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Write the progress line over itself on stderr; call `say("")` at the end."""
    print(f"\r{text}   ", end="", file=sys.stderr, flush=True)


def replace_text(path: Path, text: str) -> Path:
    """Write a file beside its place and rename it: a reader finds the old one or the new one, also
    where several processes write it. Nothing is left of a file that could not be written.
    """
    # a symbolic link stays one, and a device node is not replaced by a file
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: found no regular file")
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".part", dir=path.parent)
    beside = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


GRACE = 10.0  # seconds that a killed process gets to be reaped


def ended(process: subprocess.Popen, seconds: float) -> str:
    """Wait for a process, kill it after `seconds`: "" where it ended well, else how it ended.

    One that is stuck in a driver cannot be reaped: it is left behind, and nobody waits for it.
    """
    try:
        status = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s, and still there {GRACE:.0f} s after that"
        return f"stopped after {seconds:.0f} s"
    return f"its process ended with status {status}" if status else ""


def _umask() -> int:
    """The permissions that new files of this process go without."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def require_writable(flag: str, path: str | Path) -> None:
    """Raise UsageError where a file cannot be written to `path`: better before hours of work. It
    is not touched.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag}: found {str(path)[:200]}: {error}; expected a file that can be written"
        ) from error


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a folder of results for this process. Raises UsageError where another has it; the lock
    goes with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as handle:
        with contextlib.suppress(ImportError):  # Windows has no flock
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"--out: found {folder} in use by another run, expected a folder of its own; "
                    f"wait for that run, or give another --out"
                ) from None
        yield


def replace_json(path: Path, data: Any) -> Path:
    """`replace_text` of JSON."""
    return replace_text(path, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(no_program("tools.common.program"))
