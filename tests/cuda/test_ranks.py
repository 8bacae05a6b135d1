"""A rank on each of two GPUs: NCCL inside a captured step, one-shot sums, and a rank that is killed
while the others wait for it on their cards. Skipped where there are fewer than two;
tests/engine/ranks/test_processes.py runs the first body on cores.

A rank that is killed may take the process of rank 0 with it (engine/ranks/collectives/watch.py), so
that test runs in a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.cuda.ranks_checks import check_answers

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize("one_shot", ["1", "0"])
def test_ranks_on_two_gpus_write_one_gpu_s_tokens_in_captured_steps(one_shot, monkeypatch):
    monkeypatch.setenv("OMNIKV_ONE_SHOT", one_shot)
    assert check_answers(1e-3, dict(device="cuda:0"), gpus=2)


def test_ranks_on_two_gpus_step_without_graphs():
    assert not check_answers(1e-3, dict(device="cuda:0", compile=False), gpus=2, compile=False)


def test_a_rank_that_is_killed_ends_the_others_with_a_line():
    code = "from tests.cuda.ranks_checks import check_loss; check_loss(gpus=2)"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ)
    # the call left its card and the error came, or the process ended with the same words
    assert done.returncode == 0 or "was ended by signal 9" in done.stderr.splitlines()[-1]
