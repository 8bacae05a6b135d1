"""The self-test of a step's kernels with faults planted: what it finds, what it leaves standing.

Our kernels are stood in for by torch's operators, so that only the self-test itself is judged;
tests/kernels/test_step_kernels.py runs it over the kernels.

Stops: a plain form chosen on a device that takes no more work, a launch attribute that is first
captured in an answer, half a minute of torch.compile for a form that will not run, a kernel that is
wrong for the last columns, for several rows or in the last layer only.
"""

import functools
import warnings
from types import SimpleNamespace

import pytest
import torch

import engine.forward.self_test as self_test
from engine import Full
from engine.base.errors import DeviceFailed
from engine.forward.graphs import compiled_pieces
from engine.forward.layer import TorchLayer
from kernels.launch.tolerance import differs, differs_overall
from tests.builders import session_config, tiny_llm
from tests.fake_gpu import FakeGPU

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Fused(TorchLayer):
    """Stands in for our own kernels; `wrong(rows, layer)` says where they are off by 4%."""

    def __init__(self, model, wrong=lambda rows, layer: False):
        super().__init__(model)
        self._wrong = wrong

    def after(self, number, x, attended):
        found = super().after(number, x, attended)
        return found * (1.04 if self._wrong(x.shape[1], number) else 1.0)


@pytest.fixture
def llm(monkeypatch):
    """A model whose device counts as a GPU, with dependent launch; kernels that are right."""
    made = tiny_llm(
        Full(), session_config(layers=3), max_context=256, backend="reference", dtype="bfloat16"
    )
    monkeypatch.setattr(self_test, "is_tested", lambda device: True)
    monkeypatch.setattr(self_test, "choose_for", lambda backend, device: "triton")
    monkeypatch.setattr(self_test, "FusedLayer", Fused)
    for part in ("_prompt_failure", "_merge_failure"):
        monkeypatch.setattr(self_test, part, lambda *arguments: "")
    return made


@pytest.fixture
def dependent(monkeypatch):
    """Whether kernels are launched dependent: [True] until the self-test refuses that."""
    state = [True]
    monkeypatch.setattr(self_test, "supported", lambda device: state[0])
    monkeypatch.setattr(self_test, "refuse", lambda device: state.__setitem__(0, False))
    return state


def halves(llm, pieces=None):
    return self_test.step_layer(llm.model, llm.rotary, pieces or llm.load().pieces, "auto", "auto")


def test_a_device_that_takes_no_more_work_is_said_before_plain_is_chosen(llm, monkeypatch):
    """An illegal access is a sticky error: torch's operators would fail at their first launch."""

    def broken(*arguments, **named):
        raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(Fused, "after", broken)
    with pytest.warns(UserWarning, match="on torch's operators: a kernel fails"):
        assert not isinstance(halves(llm), Fused)  # the device lives: plain it is
    monkeypatch.setattr(self_test, "synchronize", broken)
    with pytest.raises(DeviceFailed, match="illegal memory access.*start anew with step='plain'"):
        halves(llm)


@pytest.mark.parametrize("fault", ["capture fails", "replay is wrong"])
def test_dependent_launch_is_given_up_before_our_kernels_are(llm, dependent, fault, monkeypatch):
    """Captured under that attribute sm_120 answered "invalid resource handle" elsewhere."""
    FakeGPU(monkeypatch, cards=1)

    def captured(device, step):
        if dependent[0] and fault == "capture fails":
            raise RuntimeError("CUDA error: invalid resource handle")
        results = step()

        def replay():
            for one, other in zip(results, step(), strict=True):
                one.copy_(other * (0.5 if dependent[0] else 1.0))

        return SimpleNamespace(replay=replay), results

    monkeypatch.setattr(self_test, "captured", captured)
    with pytest.warns(UserWarning, match="launched one after the other on this GPU: "):
        assert isinstance(halves(llm), Fused)
    assert dependent == [False]


def test_a_replay_that_is_wrong_either_way_leaves_the_plain_form(llm, dependent, monkeypatch):
    FakeGPU(monkeypatch, cards=1)

    def captured(device, step):
        results = step()
        return SimpleNamespace(replay=lambda: results[0].zero_()), results

    monkeypatch.setattr(self_test, "captured", captured)
    with pytest.warns(UserWarning, match="torch's operators: replayed as a graph, query differs"):
        assert not isinstance(halves(llm), Fused)
    assert dependent == [False]


def test_a_self_test_that_passes_compiles_nothing(llm, monkeypatch):
    """Inductor takes 15 to 30 s (estimated) on a fresh machine, for a form that will not run."""
    calls = []

    def compiled(piece, **named):
        @functools.wraps(piece)
        def run(*arguments):
            calls.append(piece)
            return piece(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(halves(llm, compiled_pieces()), Fused)
    assert calls == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows, layer: rows == 1,
        lambda rows, layer: rows == 3,
        lambda rows, layer: rows == self_test.MOST_ROWS,
        lambda rows, layer: layer == 2,
    ],
    ids=["one row", "three rows", "most rows", "last layer"],
)
def test_several_rows_and_the_last_layer_are_tested(llm, wrong, monkeypatch):
    monkeypatch.setattr(self_test, "FusedLayer", lambda model: Fused(model, wrong))
    with pytest.warns(UserWarning, match=r"is off by 0\.0[34]\d* of its norm"):
        assert type(halves(llm)) is TorchLayer


def test_a_kernel_that_drops_its_last_columns_is_found():
    """The last 64th of 4,096: within a 16th of the largest value in bfloat16, as sums go."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 4096, generator=generator), torch.randn(512, 4096)
    wanted = (x @ weight.T).bfloat16()
    found = (x[:, :-64] @ weight[:, :-64].T).bfloat16()
    rounded = (x.bfloat16() @ weight.T.bfloat16()).bfloat16()
    assert "norm" in differs_overall("product", found, wanted)
    assert differs_overall("product", rounded, wanted) == ""
    nothing = torch.zeros(3)
    assert differs_overall("zeros", nothing, nothing) == ""
    assert differs_overall("NaN", torch.full((3,), float("nan")), nothing)
    assert differs("product", rounded, wanted) == ""
