"""The process of a stranger's template: no secrets, no processes of its own, gone with its parent.

Stops: a looping template that outlives the killed chat at 100% CPU, and one that reads HF_TOKEN.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.text.sandbox.template import ChatTemplate, child_environment

ROOT = Path(__file__).resolve().parents[3]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl and seccomp")


def test_secrets_stay_here(monkeypatch, tmp_path):
    secrets = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SSH_AUTH_SOCK")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jinja2.py").write_text("raise SystemExit")
    found = child_environment()
    assert not set(secrets) & set(found) and found["PATH"] == "/usr/bin"
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    if sys.platform.startswith("linux"):
        seen = Path(f"/proc/{template._worker._process.pid}/environ").read_bytes()
        assert b"secret" not in seen


@LINUX
def test_it_starts_no_process():
    code = """
import os, sys, importlib.util
spec = importlib.util.spec_from_file_location("worker", "engine/text/sandbox/template_worker.py")
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.confine(1 << 30, os.getppid())
for call in (os.fork, lambda: os.execv(sys.executable, ["python"]),
             lambda: os.posix_spawn(sys.executable, ["python"], {})):
    try:
        call()
    except OSError as error:
        print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1", "1"], done.stderr


@LINUX
def test_it_ends_with_a_parent_that_is_killed():
    code = """
import sys, threading
from engine.text.sandbox import template
template.RENDER_SECONDS = 60
often = "{% for i in range(99999) %}", "{% endfor %}"
loop = template.ChatTemplate(often[0] * 3 + often[1] * 3)
threading.Thread(target=loop.render, args=([],)).start()
while loop._worker is None or not loop._worker.alive:
    pass
print(loop._worker._process.pid, flush=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    os.kill(child, 0)  # it runs
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end and running(child):
        time.sleep(0.05)
    assert not running(child)


def running(process):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
