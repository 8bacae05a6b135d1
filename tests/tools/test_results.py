"""Results on disk: whole to every reader, never lost, one run per folder; paths and numbers of a
calibration are looked at before it works.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.base.errors import BadCheckpoint, UsageError
from engine.evidence.provenance import Run
from tools.calibrate import cli
from tools.calibrate.pod_groups import read_blocks
from tools.common.program import guarded, one_at_a_time, replace_json, replace_text

ROOT = Path(__file__).resolve().parents[2]


WRITER = """
import sys, time
from pathlib import Path
from tools.common.program import replace_json
path, number, end = Path(sys.argv[1]), int(sys.argv[2]), time.monotonic() + 1.0
while time.monotonic() < end:
    replace_json(path, {"made_by": number, "layers": [number] * 2000})
"""


def test_several_writers_leave_whole_files_to_every_reader(tmp_path):
    path, reads = tmp_path / "omnikv.json", 0
    replace_json(path, {"made_by": 9, "layers": [9] * 2000})
    # not forked: a worker of the suite may have mapped more than the system lets it copy
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(n)], cwd=ROOT) for n in range(2)]
    while any(writer.poll() is None for writer in writers):
        data = json.loads(path.read_text())
        assert data["layers"] == [data["made_by"]] * 2000
        reads += 1
    assert reads > 10 and all(writer.returncode == 0 for writer in writers)
    assert data["made_by"] != 9 and os.listdir(tmp_path) == ["omnikv.json"]


def test_links_stay_and_devices_are_not_replaced(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    replace_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        replace_text(tmp_path / "pipe", "new")


def test_one_run_per_folder(tmp_path):
    held = "from tools.common.program import one_at_a_time\nfrom pathlib import Path\n"
    held += "import sys, time\n"
    held += "with one_at_a_time(Path(sys.argv[1])):\n    print('has it', flush=True)\n"
    held += "    time.sleep(60)\n"
    command = [sys.executable, "-c", held, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(UsageError, match="in use by another run"), one_at_a_time(tmp_path):
            raise AssertionError("two runs at once")
        other.kill()
        other.wait()
    with one_at_a_time(tmp_path):  # the lock went with its process
        pass


def test_a_full_disk_is_one_line(capsys):
    def work():
        raise OSError(28, "No space left on device", "answers.jsonl")

    assert guarded(work) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No space left" in said


def calibrate(*arguments):
    cli.require_places(args := cli.parser().parse_args(["--model", "x", *arguments]))
    cli.require_numbers(args, 8)


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--wait-layers", "-1"),
        ("--filters", "0"),
        ("--filters", "-3"),
        ("--filters", "99"),
        ("--most-dense", "nan"),
        ("--slack", "nan"),
        ("--out", "/proc/nowhere/omnikv.json"),
        ("--json", "/proc/nowhere/x.json"),
        ("--json", "/dev/null"),
        ("--plot", "/proc/nowhere"),
    ],
)
def test_calibration_refuses_before_it_measures(flag, value):
    calibrate("--filters", "3", "--slack", "0.01")
    with pytest.raises(UsageError, match=flag):
        calibrate(flag, value)


def test_a_run_looks_at_its_places_before_it_loads_and_at_its_numbers_before_it_measures(
    monkeypatch,
):
    loaded = []

    def load(*arguments, **settings):
        loaded.append(arguments)
        return SimpleNamespace(config=SimpleNamespace(num_layers=8, local_layers=()))

    monkeypatch.setattr(cli, "loaded", load)
    for flag, value, loads in (("--json", "/proc/nowhere/x.json", 0), ("--filters", "99", 1)):
        with pytest.raises(UsageError, match=flag):
            cli.run(cli.parser().parse_args(["--model", "x", flag, value]))
        assert len(loaded) == loads


def test_no_matplotlib_is_said_before_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib"):
        calibrate("--plot", str(tmp_path))


def test_deep_and_endless_files_are_refused(tmp_path):
    (tmp_path / "pod.json").write_text("[" * 100_000)
    with pytest.raises(BadCheckpoint, match="nested too deeply"):
        read_blocks(tmp_path)
    run = {"format": 1, "model": "m", "method": "x", "text": "abc", "passages": [[0, 3, 1]]}
    for score in ("NaN", "Infinity", "1e999"):
        text = json.dumps({**run, "answer": [["a", [[0, 0.5]]]]}).replace("0.5", score)
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(BadCheckpoint, match="no numbers"):
            Run.load(tmp_path / "run.json")
