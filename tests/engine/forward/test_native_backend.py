"""The C++ kernels as a backend that has a name: the bits of "auto", or one line.

Stops: a name that runs something else, a launcher that asks twice, a reference that runs C++.
"""

import pytest
import torch

from engine import Full, OmniKV
from engine.base.errors import SettingError
from kernels.attention import dense
from kernels.launch.dispatch import choose
from kernels.native import library
from tests.builders import random_ids, tiny_llm

METHODS = {"full": Full(), "omnikv": OmniKV(tokens=24, filter_layers=(1, 4), dense_below=0)}


def found(method, backend, other=None):
    with tiny_llm(method, backend=backend, max_context=1024).session() as session:
        session.prefill(random_ids(300, seed=1))
        if other:
            session.set_backend(other)
        return torch.stack([session.decode(t).clone() for t in random_ids(5, seed=2)])


@pytest.mark.parametrize("name", METHODS)
def test_native_is_what_auto_runs_where_it_can(name):
    if library.native() is None:
        pytest.skip(library.missing())
    expected = found(METHODS[name], "auto")
    assert torch.equal(found(METHODS[name], "native"), expected)
    assert torch.equal(found(METHODS[name], "auto", "native"), expected)


def test_where_it_cannot_run_its_name_is_an_error(monkeypatch):
    monkeypatch.setattr(library, "_reason", "no C++ compiler (c++)")
    monkeypatch.setattr(library, "_library", None)
    with pytest.raises(
        SettingError, match=r"'native', but no C\+\+ compiler \(c\+\+\); use 'auto'"
    ):
        tiny_llm(Full(), backend="native", max_context=1024)
    with tiny_llm(Full(), backend="auto", max_context=1024).session() as session:
        session.prefill(random_ids(30, seed=1))
        with pytest.raises(SettingError, match="'native', but no"):
            session.set_backend("native")
        session.decode(3)


def test_a_launcher_asks_once():
    asked = []
    x = torch.zeros(1)

    def takes():
        asked.append(1)
        return True

    assert choose("auto", x, takes) == choose("native", x, takes) == "native" and len(asked) == 2
    assert choose("reference", x, takes) == "reference"
    assert len(asked) == 2 and choose("native", x, lambda: False) == "cpu"


def test_the_reference_runs_no_cpp(monkeypatch):
    monkeypatch.setattr(dense, "decode_dense_native", None)
    monkeypatch.setattr(dense, "attend_everything", None)
    found(METHODS["full"], "reference")
