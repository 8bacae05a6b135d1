"""The real chat on a real engine: through a pseudo-terminal as a person types, and from the shell
as a script calls it.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.chat.chat_model import base_model, chat_model

pty = pytest.importorskip("pty", reason="pseudo-terminals are a Unix thing")
ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 120  # seconds: importing torch on a loaded machine takes most of it


def environment(**more):
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm",
        "COLUMNS": "200",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


class Terminal:
    """A chat behind a pseudo-terminal. `screen` is all that was shown so far."""

    def __init__(self, *flags):
        leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.chat", *flags],
            cwd=ROOT,
            env=environment(),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(follower)
        self.leader, self.screen, self.seen = leader, "", 0

    def until(self, pattern, seconds=PATIENCE, press=""):
        """Wait for a pattern in what was shown since the last wait; returns the match. `press` is
        typed again every 5 s.

        (A Ctrl-C between the prompt's writing and Python's wait for input is seen at the next key
        only: a race of CPython's own, microseconds for a person, but a preempted process can sit in
        it for long.)
        """
        end, again = time.monotonic() + seconds, time.monotonic()
        while True:
            match = re.compile(pattern).search(self.screen, self.seen)
            if match:
                self.seen = match.end()
                return match
            left = end - time.monotonic()
            assert left > 0, (
                f"{pattern!r} not shown; the screen since: {self.screen[self.seen :][-2000:]!r}"
            )
            if press and time.monotonic() >= again:
                self.press(press, time.monotonic() > end - seconds + 4)
                again = time.monotonic() + 5
            if select.select([self.leader], [], [], min(left, 1.0))[0]:
                try:
                    data = os.read(self.leader, 65536)
                except OSError:  # the other end is closed
                    data = b""
                assert data, f"ended before {pattern!r}: {self.screen[-2000:]!r}"
                self.screen += data.decode("utf-8", "replace")

    def type(self, text):
        os.write(self.leader, text.encode())

    def press(self, key, repeated):
        """Type a key; once it was lost, a blank behind it, which is the next key that the race
        waits for (until).
        """
        self.type(key)
        if repeated:
            time.sleep(0.3)
            try:
                self.type(" ")
            except OSError:  # the chat has left meanwhile
                return

    def code(self, seconds=PATIENCE, press=""):
        """The exit code; the rest of the screen is read away meanwhile. `press` as in until()."""
        end, again = time.monotonic() + seconds, time.monotonic()
        while self.process.poll() is None and time.monotonic() < end:
            if press and time.monotonic() >= again:
                self.press(press, time.monotonic() > end - seconds + 4)
                again = time.monotonic() + 5
            if select.select([self.leader], [], [], 0.2)[0]:
                try:
                    self.screen += os.read(self.leader, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return self.process.wait(timeout=max(0.1, end - time.monotonic()))

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.leader)


def _own_terminal():
    # a suite run in the background of a shell ignores it, and children inherit that
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed there is a signal here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("chat-model")))


@pytest.fixture
def terminal(model):
    opened = []

    def start(*flags):
        opened.append(Terminal("--model", model, "--ignore-eos", *flags))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_session_as_a_person_has_it(terminal):
    """Two turns, /stats, /reset, Ctrl-C in the middle of an answer, the chat goes on, Ctrl-D leaves
    with 0.
    """
    t = terminal("-n", "12")
    t.until(r"/help lists the commands")
    t.until("> ")
    t.type("Hello there\n")
    first = t.until(
        r"\[0 cached \+ (\d+) new tokens · .*? · 12 written at .*? tok/s.*? context (\d+) of 8,192"
    )
    t.until("> ")
    t.type("And again\n")
    second = t.until(r"\[(\d+) cached \+ (\d+) new tokens · .*? · 12 written")
    # the second turn appends to all of the first
    assert int(second[1]) == int(first[2]) == int(first[1]) + 12
    t.until("> ")
    t.type("/stats\n")
    t.until(r"read +" + str(int(first[1]) + int(second[2])) + " tokens in ")
    t.until("> ")
    t.type("/stats all\n")
    t.until(r"prefill tokens +" + str(int(first[1]) + int(second[2])))
    t.until("> ")
    t.type("/set max_tokens 7000\n")
    t.until("max_tokens = 7000")
    t.until("> ")
    t.type("Go on for long\n")
    time.sleep(0.5)
    t.until(r"(?s)\n.{20}")  # the answer is on its way
    t.type("\x03")
    stopped = t.until(r"([\d,]+) written at .*? · stopped\]")
    assert 0 < int(stopped[1].replace(",", "")) < 7000
    t.until("> ")
    t.type("/reset\n")
    t.until("a new conversation")
    t.until("> ")
    t.type("/set n 3\n")
    t.until("> ")
    t.type("Hello there\n")
    assert t.until(r"\[0 cached \+ (\d+) new")[1] == first[1]
    t.until("> ")
    t.type("\x04")
    assert t.code() == 0
    assert "Traceback" not in t.screen and "error" not in t.screen


def test_ctrl_c_twice_leaves_with_130(terminal):
    t = terminal()
    t.until("> ")
    t.until(r"Ctrl-C again or Ctrl-D leaves", press="\x03")
    t.until("> ")
    assert t.code(press="\x03") == 130 and "Traceback" not in t.screen


def run(*arguments, stdin=None):
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "engine.chat", *arguments],
        cwd=ROOT,
        env=environment(),
        input=stdin,
        timeout=300,
        capture_output=True,
        text=True,
    )


def test_from_the_shell(model, tmp_path):
    """A pipe in, JSON out; the same prompt twice gives the same ids; a reader that leaves early is
    no error to shout about.
    """
    done = run(
        "--model",
        model,
        "-f",
        "-",
        "-p",
        "What?",
        "--json",
        "-n",
        "5",
        "--ignore-eos",
        stdin="A line.\n" * 40,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (
        len(data["token_ids"]) == 5
        and data["finish_reason"] == "length"
        and data["context"]["limit"] == 8192
    )
    chat = f"{sys.executable} -m engine.chat --model {model} -p hi -n 300 --ignore-eos --quiet"
    pipe = f"{chat} | head -c 1"
    left = subprocess.run(
        ["sh", "-c", pipe], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in left.stderr and "Error" not in left.stderr


def test_a_completion_is_that_of_transformers(tmp_path):
    """Greedy from the same folder, token by token; and the text continues the prompt's."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = str(base_model(tmp_path / "base"))
    options = ("-p", "Once upon a time", "--temp", "0", "--ignore-eos", "-n", "100", "--json")
    done = run("--model", folder, *options)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    oracle = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    prompt = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        whole = oracle.generate(prompt, max_new_tokens=100, do_sample=False)[0].tolist()
    assert data["token_ids"] == whole[prompt.shape[1] :]
    text = tokenizer.decode(whole, skip_special_tokens=True)
    assert "Once upon a time" + data["text"] == text


def test_importing_the_engine_is_quick_and_brings_in_nothing_heavy():
    """Under 2 s beyond torch and triton, which is torch's own on a GPU (processor time, one of
    three); neither transformers nor the hub's client nor torch.compile's machinery.
    """
    code = """
import sys, time, torch
try:
    import triton
except ImportError:
    pass
start = time.process_time()     # not the clock on the wall: other tests run beside this one
import engine, engine.chat
print(time.process_time() - start)
print([m for m in ("transformers", "huggingface_hub", "torch._dynamo") if m in sys.modules])
"""
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        seconds, heavy = done.stdout.split("\n", 1)
        assert heavy.strip() == "[]", heavy
        times.append(float(seconds))
        if times[-1] < 2.0:
            return
    raise AssertionError(times)
