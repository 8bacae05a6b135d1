"""The chat's start over a host tier: what went where and how rows travel, one line each, before the
first answer.
"""

import pytest

import engine.chat.cli
from engine.bank.pool.link import Link
from engine.llm import LLM
from tests.engine.chat.chat_model import chat_model

FLAGS = ["--device", "cpu", "--ctx", "512", "-p", "hi", "-n", "2"]
HOST = [
    "--offload",
    "host",
    "--filter-layers",
    "0",
    "--wait-layers",
    "0",
    "--tokens",
    "16",
    "--dense-below",
    "0",
]


@pytest.fixture
def say(tmp_path, capsys):
    """Run the chat once on a small real model; its lines on stderr."""
    folder = str(chat_model(tmp_path / "model"))

    def run(*flags):
        assert engine.chat.cli.main(["--model", folder, *FLAGS, *flags]) == 0
        return capsys.readouterr().err.splitlines()

    return run


def test_an_offloading_start_says_what_went_where_and_that_memory_is_ordinary(say):
    lines = say(*HOST)
    where = [number for number, line in enumerate(lines) if "layers 1 in host memory" in line]
    link = [
        number
        for number, line in enumerate(lines)
        if line.startswith("link: not measured, host memory is ordinary memory")
    ]
    assert len(where) == len(link) == 1 and where[0] + 1 == link[0]


def test_a_measured_link_is_printed_with_its_configuration(say, monkeypatch):
    monkeypatch.setattr(
        LLM, "link", Link(8, 49e9, 54e9, "1.07 GB pinned in 0.31 s, mapped and registered")
    )
    assert [line for line in say(*HOST) if line.startswith("link")] == [
        "link: gather 49.0 GB/s with 8 programs, contiguous pinned copy 54.0 GB/s (91%); "
        "1.07 GB pinned in 0.31 s, mapped and registered"
    ]


def test_nothing_is_said_where_everything_is_on_the_device(say):
    assert not [
        line
        for line in say(*HOST, "--offload", "device")
        if "link" in line or "host memory" in line
    ]
