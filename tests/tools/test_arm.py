"""The emulated ARM: what it is told of its processor, how it is started, and which tests are left
out of a second run. No part of it is fetched, and nothing is emulated.

Stops: a test that is left out though a source has changed or it had failed, a processor that torch
cannot read, a line of help that names no package.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tools.arm import __main__ as program
from tools.arm import machine, record


def outcome(name, said="passed", when="call"):
    failed = said == "failed"
    return SimpleNamespace(
        nodeid=name, outcome=said, when=when, failed=failed, longreprtext="E" * 9999
    )


def left(one, names):
    """Which tests a run still has, and which it deselects."""
    gone = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    items = [SimpleNamespace(nodeid=name) for name in names]
    one.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    return [item.nodeid for item in items], [item.nodeid for item in gone]


def test_a_second_run_leaves_out_what_passed_with_these_sources(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.jsonl"
    first = record.Record(path)
    for report in (
        outcome("a", when="setup"),
        outcome("a"),
        outcome("b", "failed"),
        outcome("c", "skipped", "setup"),
        outcome("d", "failed", "setup"),
    ):
        first.pytest_runtest_logreport(report)
    with path.open("a") as file:
        file.write('{"test": "e", "outc')  # killed as it wrote
    assert program.count(path.parent / "none") == {}
    second = record.Record(path)
    assert left(second, "abcde") == (["b", "d", "e"], ["a", "c"])
    second.pytest_runtest_logreport(outcome("b"))
    assert program.count(path) == {"passed": 2, "skipped": 1, "failed": 1}
    assert max(len(line) for line in path.read_text().splitlines()) < 5000
    monkeypatch.setattr(record, "digest", lambda: "other sources")
    assert left(record.Record(path), "abcde")[1] == []
    assert path.read_text() == ""


def test_the_digest_follows_kernels_and_tests(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "one.cpp"
    monkeypatch.setattr(record, "ROOT", tmp_path)
    seen = [record.digest()]
    for text in ("int x;", "int y;"):
        source.write_text(text)
        seen.append(record.digest())
    (tmp_path / "kernels" / "page.md").write_text("no source")
    assert len(set(seen)) == 3 and record.digest() == seen[-1]


def test_torch_finds_every_core_of_the_processor(tmp_path):
    machine._processor(tmp_path)
    said = (tmp_path / "proc" / "cpuinfo").read_text()
    assert said.count("processor\t:") == said.count("asimddp i8mm bf16\n") == machine.CORES
    identities = list((tmp_path / "sys").rglob("midr_el1"))
    assert len(identities) == machine.CORES
    part = int(identities[0].read_text(), 16) >> 4 & 0xFFF
    assert f"CPU part\t: {part:#x}\n" in said


def test_the_command_starts_its_python_and_names_itself(tmp_path, monkeypatch):
    """By an emulator that says what it is told."""
    folder = tmp_path / "an arm"
    (folder / "site").mkdir(parents=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("qemu-aarch64-static", "aarch64-linux-gnu-g++"):
        text = '#!/bin/sh\necho "$QEMU_LD_PREFIX|$PYTHONPATH|$*"\n'
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "before")
    for _ in range(2):  # again over what is there
        command = machine._command(folder, "python3.11")
    done = subprocess.run([command, "-c", "a b"], capture_output=True, text=True, check=True)
    prefix, path, words = done.stdout.strip().split("|")
    assert prefix == str(folder / "root") and path == f"{folder / 'site'}:before"
    assert words == f"-cpu max {folder}/root/usr/bin/python3.11 -c a b"
    assert (command.parent / "c++").resolve() == tools / "aarch64-linux-gnu-g++"
    again = "import sitecustomize, sys; print(sys.executable)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", again],
        env={"PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(command)


def test_a_step_that_is_done_is_not_done_again_and_one_that_failed_is(tmp_path):
    done = []

    def fails():
        done.append("fails")
        raise machine.EngineError("no index")

    for work in (fails, lambda: done.append("works"), lambda: done.append("again")):
        try:
            machine._once(tmp_path, "wheels", work)
        except machine.EngineError:
            pass
    assert done == ["fails", "works"]


def test_what_is_missing_is_named_by_its_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program.main(["--folder", str(tmp_path / "arm")]) == 2
    said = capsys.readouterr().err
    assert "qemu-user-static" in said and "g++-aarch64-linux-gnu" in said
    assert said.count("\n") == 1 and not (tmp_path / "arm").exists()


def test_a_program_that_fails_is_one_line(tmp_path):
    script = tmp_path / "pip"
    script.write_text("#!/bin/sh\necho first >&2\necho 'no such wheel' >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(machine.EngineError, match=r"pip failed \(3\): no such wheel"):
        machine._run([str(script)], "pip")
    with pytest.raises(machine.EngineError, match="delete .* and begin again"):
        machine._python(tmp_path)


def test_results_are_counted_and_a_failure_fails(tmp_path, monkeypatch):
    wrote = [{"test": "a", "outcome": "failed", "sources": ""}]

    def ran(words, cwd, env):
        assert env["OMNIKV_ARM"] == "neon" and env["OMNIKV_ARM_RESULTS"].endswith("neon.jsonl")
        assert env["PATH"].startswith(f"{tmp_path}:")
        lines = "".join(json.dumps(one) + "\n" for one in wrote)
        (tmp_path / "results-neon.jsonl").write_text(lines)
        return SimpleNamespace(returncode=int(wrote[-1]["outcome"] == "failed"))

    monkeypatch.setattr(program.subprocess, "run", ran)
    with pytest.raises(machine.EngineError, match="tests failed on neon"):
        program.run(tmp_path / "python", tmp_path, "neon", ["tests"], again=False)
    wrote.append({"test": "a", "outcome": "passed", "sources": ""})
    program.run(tmp_path / "python", tmp_path, "neon", ["tests"], again=True)
    assert program.count(tmp_path / "results-neon.jsonl") == {"passed": 1}
