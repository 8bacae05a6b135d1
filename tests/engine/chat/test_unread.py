"""Standard input that -p leaves unread is named: a pipe or a file with something in it."""

import os
import subprocess
import sys

import pytest

from engine.chat.repl import unread

LINE = "standard input is not read beside -p; add -f - if it is a document"


@pytest.fixture
def standard_input(monkeypatch):
    """Put a file descriptor at standard input, closed at the end."""
    opened = []

    def put(number):
        opened.append(os.fdopen(number))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield put
    for file in opened:
        file.close()


def test_a_pipe_with_bytes_is_seen_and_an_empty_or_ended_one_is_not(standard_input):
    read, write = os.pipe()
    standard_input(read)
    assert not unread()
    os.write(write, b"x")
    assert unread()
    os.read(read, 10)
    os.close(write)
    assert not unread()


def test_a_file_is_seen_until_it_has_been_read(standard_input, tmp_path):
    (tmp_path / "text").write_text("a line\n")
    number = os.open(tmp_path / "text", os.O_RDONLY)
    standard_input(number)
    assert unread()
    os.read(number, 100)
    assert not unread()
    standard_input(os.open(os.devnull, os.O_RDONLY))
    assert not unread()


def test_what_is_no_file_has_nothing_to_read(monkeypatch):
    for there in (None, object()):
        monkeypatch.setattr("sys.stdin", there)
        assert not unread()


@pytest.mark.parametrize("flags, said", [((), True), (("-f", "-"), False), (("-i",), False)])
def test_the_chat_names_it(flags, said):
    command = [sys.executable, "-m", "engine.chat", "-p", "What is the pass key of Alice?", *flags]
    chat = subprocess.Popen(
        [*command, "-n", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    chat.stdin.write("The pass key of Alice is 12345.\n")
    chat.stdin.flush()
    _, err = chat.communicate(timeout=120)
    assert chat.returncode == 0
    assert (LINE in err) is said
