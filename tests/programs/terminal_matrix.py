"""The chat in every surrounding, at every moment, ended in every way: a clean end and nothing else.

    python -m tests.programs.terminal_matrix                  all of it, some minutes; prints a
    table python -m tests.programs.terminal_matrix --only pipe:answer:SIGTERM

Surroundings: pseudo-terminals (also TERM=dumb, 20 columns, LANG=C), pipes, files, standard input or
output closed, a full disk. Moments: start (imports), load, read, answer, command, exit. Events:
Ctrl-C once and twice, SIGTERM, SIGHUP, the end of input. Clean: no traceback, no error without a
type, an exit code that a shell knows, the terminal's settings as before, no child left, an end
within 30 s of the end of input. All moments but the start run in children forked from a process
that has imported the engine; there the work is slowed down, so that an event meets it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import io
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHERE = ("pty", "dumb", "narrow", "LANG=C", "pipe", "file", "no stdin", "no stdout", "full")
WHEN = ("start", "load", "read", "answer", "command", "exit")
WHAT = ("nothing", "Ctrl-C", "Ctrl-C twice", "SIGTERM", "SIGHUP", "EOF")
PTYS = WHERE[:4]
SECONDS = 30.0
# what a shell reports: done, failed, wrong usage, and the signals; negative: ended by the signal
CODES = (0, 1, 2, 129, 130, 143, -1, -2, -15)
BAD = ("Traceback", "Exception ignored", "shows where", "Error:", "panicked")
LINES = {"read": "/read {doc}\n", "answer": "What?\n", "command": "What?\n/check 200\n"}


class Slow:
    """Makes a function take long, and tells the parent when it is first called at a moment."""

    def __init__(self, moment: str, notify: int):
        self.moment, self.notify, self.at, self.told = moment, notify, "load", False

    def reached(self, at: str, seconds: float) -> None:
        self.at = at
        if at == self.moment:
            if not self.told:
                self.told = True
                os.write(self.notify, b"!")
            time.sleep(seconds)

    def install(self) -> None:
        """Slow down the moment's own function of the engine."""
        import engine.runner.step_runner
        import engine.session.check
        import engine.session.generate
        from weights.checkpoint import Checkpoint

        def before(home: object, name: str, at: str, seconds: float) -> None:
            original = getattr(home, name)

            def slowed(*arguments: object, **more: object) -> object:
                self.reached(at, seconds)
                return original(*arguments, **more)

            setattr(home, name, slowed)

        before(Checkpoint, "stream", "load", 1.0)
        before(engine.runner.step_runner, "run_chunk", "read", 0.3)
        before(engine.session.generate, "decode", "answer", 0.05)
        before(engine.session.check.Pair, "at", "command", 0.05)


def streams(where: str, folder: Path) -> tuple[dict[int, int | None], int | None, int | None]:
    """({0, 1, 2: descriptor or None for closed}, a pty's leader, the pipe to standard input)."""
    (folder / "out").touch()
    out = os.open(folder / "out", os.O_RDWR | os.O_APPEND)
    err = os.open(folder / "err", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if where in PTYS:
        leader, follower = pty.openpty()
        columns = 20 if where == "narrow" else 120
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        return {0: follower, 1: follower, 2: follower}, leader, None
    if where == "file":
        return {0: os.open(folder / "in", os.O_RDONLY), 1: out, 2: err}, None, None
    reader, writer = os.pipe()
    if where == "no stdin":
        return {0: None, 1: out, 2: err}, None, writer
    if where == "no stdout":
        return {0: reader, 1: None, 2: err}, None, writer
    return (
        {0: reader, 1: os.open("/dev/full", os.O_WRONLY) if where == "full" else out, 2: err},
        None,
        writer,
    )


def take(given: dict[int, int | None], where: str) -> None:
    """Make `given` this process's standard streams, as Python makes them at its start."""
    os.setsid()
    kept = {number: None if fd is None else os.dup(fd) for number, fd in given.items()}
    for number, fd in kept.items():
        if fd is None:
            os.close(number)
        else:
            os.dup2(fd, number)
    if where in PTYS:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ |= {"TERM": "dumb" if where == "dumb" else "xterm"}
    os.environ.pop("COLUMNS", None)
    coding = "ascii" if where == "LANG=C" else "utf-8"
    made: list[io.TextIOWrapper | None] = []
    for number, mode in enumerate(("rb", "wb", "wb")):
        if given[number] is None:
            made.append(None)
            continue
        raw = open(number, mode, closefd=False, buffering=-1)  # noqa: SIM115
        tty = os.isatty(number)
        errors = "backslashreplace" if number == 2 else "strict"
        made.append(io.TextIOWrapper(raw, coding, errors, line_buffering=tty or number == 2))
    sys.stdin, sys.stdout, sys.stderr = made
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = made
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def flags_of(where: str, when: str, model: str, doc: Path) -> list[str]:
    flags = ["--model", model, "-n", "150", "--ignore-eos", "--threads", "1", "--chunk", "64"]
    flags += ["--method", "omnikv", "--filter-layers", "0", "--tokens", "8", "--dense-below", "0"]
    flags += ["--tail", "64"]  # or it covers all, and /check has nothing to compare
    if where == "no stdin":  # nothing can be typed
        flags += ["-f", str(doc), "-p", "What?"]
    return flags


def child(
    given: dict[int, int | None], where: str, when: str, flags: list[str], notify: int
) -> None:
    """Run the chat in this forked process, to its end."""
    take(given, where)
    slow = Slow(when, notify)
    slow.install()
    from engine.chat import __main__ as program

    code = 1
    try:
        sys.argv = ["chat", *flags]
        code = program.start()
        slow.reached("exit", 0.5)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            os.write(2, f"Exception ignored: {error}\n".encode())
    atexit._run_exitfuncs()
    os._exit(code)


def begin(
    where: str, when: str, model: str, folder: Path
) -> tuple[int, int | None, int | None, int]:
    """Start a chat; (its pid, the pty's leader, the pipe to its input, the pipe of its moment)."""
    doc = folder / "doc.txt"
    doc.write_text("The sun was warm and the day was long. " * 60)
    lines = LINES.get(when, "").format(doc=doc)
    (folder / "in").write_text(lines)
    given, leader, writer = streams(where, folder)
    flags = flags_of(where, when, model, doc)
    told, notify = os.pipe()
    if when == "start":
        pid = start(given, where, flags)
    else:
        pid = os.fork()
        if pid == 0:
            for fd in (leader, writer, told):
                if fd is not None:
                    os.close(fd)
            child(given, where, when, flags, notify)
    os.close(notify)
    for fd in {fd for fd in given.values() if fd is not None}:
        os.close(fd)
    to = leader if leader is not None else writer
    if to is not None and lines and where != "no stdin":
        os.write(to, lines.encode())
    return pid, leader, writer, told


def start(given: dict[int, int | None], where: str, flags: list[str]) -> int:
    """A process of its own, as a shell starts it."""

    def own() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background ignores them
            signal.signal(number, signal.SIG_DFL)
        for number, fd in given.items():
            os.close(number) if fd is None else os.dup2(fd, number)
        if where in PTYS:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    env = {**os.environ, "TERM": "dumb" if where == "dumb" else "xterm", "OMP_NUM_THREADS": "1"}
    env |= {"LC_ALL": "C", "LANG": "C"} if where == "LANG=C" else {}
    command = [sys.executable, "-m", "engine.chat", *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, start_new_session=True, preexec_fn=own,
        stdin=given[0], stdout=given[1], stderr=given[2], restore_signals=True,
    ).pid  # fmt: skip


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes with the context, and not with a forked child's exit."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(where: str, when: str, what: str, model: str) -> tuple[str, int | None]:
    """One cell: ("" or what was not clean, exit code)."""
    with scratch() as folder:
        pid, leader, writer, told = begin(where, when, model, folder)
        before = termios.tcgetattr(leader) if leader is not None else None
        shown = bytearray()
        came = await_moment(told, leader, shown, when)
        try:
            closed = act(what, pid, leader, writer)
            code = end(pid, leader, None if closed else writer, shown)
        finally:
            if leader is not None:
                after = termios.tcgetattr(leader)
                os.close(leader)
            os.close(told)
        text = shown.decode("utf-8", "replace")
        text += "".join((folder / file).read_text(errors="replace") for file in ("out", "err"))
        wrong = [word for word in BAD if word in text]
        if not came:
            return f"the moment never came: {text[-400:]!r}", code
        if code is None:
            return f"did not end: {text[-200:]!r}", code
        if wrong or code not in CODES:
            return f"{wrong or 'exit code'} {code}: {text[-400:]!r}", code
        if before is not None and after[:4] != before[:4]:
            return "the terminal's settings are others", code
        if children(pid):
            return "a child is left", code
        return "", code


def await_moment(told: int, leader: int | None, shown: bytearray, when: str) -> bool:
    """Wait until the chat is where the event is due; a chat that ends before gets it then. Whether
    it came there.
    """
    if when == "start":
        time.sleep(0.7)
        return True
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop:
        ready = select.select([fd for fd in (told, leader) if fd is not None], [], [], 0.5)[0]
        if told in ready:  # the byte, or the end
            time.sleep(0.1)
            return True
        drain(leader, shown)
        if when == "exit" and stop - time.monotonic() < SECONDS - 1:
            return True  # the end of input brings it there
    return False


def drain(leader: int | None, shown: bytearray) -> None:
    while leader is not None and select.select([leader], [], [], 0)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:
            return
        if not data:
            return
        shown += data


def act(what: str, pid: int, leader: int | None, writer: int | None) -> bool:
    """Do what a cell is about; return whether standard input was closed."""
    try:
        if what == "EOF" and leader is not None:
            os.write(leader, b"\x04")
        elif what == "EOF" and writer is not None:
            os.close(writer)
            return True
        elif what.startswith("Ctrl-C"):
            for _ in range(2 if what.endswith("twice") else 1):
                os.write(leader, b"\x03") if leader is not None else os.kill(pid, signal.SIGINT)
                time.sleep(0.15)
        elif what.startswith("SIG"):
            os.kill(pid, getattr(signal, what))
    except OSError:
        pass  # it has ended
    return False


def end(pid: int, leader: int | None, writer: int | None, shown: bytearray) -> int | None:
    """Give the end of input until the process ends; its exit code, None if it must be killed."""
    if writer is not None:
        os.close(writer)
    stop, again = time.monotonic() + SECONDS, 0.0
    while time.monotonic() < stop:
        drain(leader, shown)
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            drain(leader, shown)
            return os.waitstatus_to_exitcode(status)
        if leader is not None and time.monotonic() > again:
            again = time.monotonic() + 1
            try:
                os.write(leader, b"\x04")
            except OSError:
                pass
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def children(group: int) -> list[int]:
    """Processes of a session that live on 2 s after its leader."""
    for _ in range(20):
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(path.parent.name))
        if not found:
            return []
        time.sleep(0.1)
    return found


def cells(only: list[str]) -> list[tuple[str, str, str]]:
    """Every (where, when, what) that one of `only` names (parts may be *)."""
    wanted = [words.split(":") for words in only]
    return [
        cell
        for cell in ((a, b, c) for a in WHERE for b in WHEN for c in WHAT)
        if any(all(part in ("*", own) for part, own in zip(words, cell)) for words in wanted)
    ]


def table(results: dict[tuple[str, str, str], tuple[str, int | None]]) -> str:
    """Exit codes by surrounding and moment, in Markdown; ! marks what was not clean."""
    rows = [f"| | {' | '.join(WHEN)} |", "|---" * (len(WHEN) + 1) + "|"]
    for where in WHERE:
        row = []
        for when in WHEN:
            got = [results.get((where, when, what)) for what in WHAT]
            row.append(
                " ".join("-" if one is None else f"{'!' if one[0] else ''}{one[1]}" for one in got)
            )
        rows.append(f"| {where} | {' | '.join(row)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.terminal_matrix")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*:*:*"],
        metavar="WHERE:WHEN:WHAT",
        help="some cells; * for all of a kind",
    )
    options = parser.parse_args()
    import engine.chat.cli  # noqa: F401  (children are forked with everything imported)
    from tests.engine.chat.chat_model import chat_model

    results: dict[tuple[str, str, str], tuple[str, int | None]] = {}
    with scratch() as folder:
        model = str(chat_model(folder / "model"))
        for cell in cells(options.only):
            results[cell] = run(*cell, model)
            print(":".join(cell), results[cell][1], results[cell][0] or "clean", flush=True)
    wrong = [cell for cell, (text, _) in results.items() if text]
    print(f"\nExit codes of: {', '.join(WHAT)}\n\n{table(results)}\n")
    codes = Counter(code for _, code in results.values())
    print(f"{len(results)} cells, {len(wrong)} not clean, exit codes {dict(codes)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
