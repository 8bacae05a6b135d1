"""The C++ kernels as a backend that has a name: the bits of "auto", or one line.

Stops: a name that runs something else, a launcher that asks twice, a reference that runs C++, a
session that changes the kernels of another one's step.
"""

import threading
from collections import Counter

import pytest
import torch

from engine import Full, OmniKV
from engine.base.errors import SettingError
from kernels.experts import native_experts
from kernels.launch.dispatch import choose
from kernels.layer import native_product, native_step
from kernels.native import library
from kernels.prefill.dense import attend_chunk, attend_past, attend_rows, prefill_dense
from kernels.prefill.native import attends_prompt
from kernels.prefill.sparse import prefill_sparse
from kernels.prefill.tiled import attend_tiles
from kernels.prefill.window import prefill_window
from tests.builders import random_ids, session_config, tiny_llm

SPARSE = OmniKV(tokens=24, filter_layers=(1, 4), dense_below=0)
PROMPT = OmniKV(
    tokens=24, filter_layers=(1, 4), dense_below=0, prefill_ratio=2, prefill_block=64,
    prefill_dense_end=64,
)  # fmt: skip
METHODS = {"full": Full(), "omnikv": SPARSE}
MIXTURE = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=7,
    num_experts_per_tok=3, moe_intermediate_size=20,
)  # fmt: skip
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=40)


class Function:
    """A function of the library that is counted, by the thread that calls it."""

    def __init__(self, held, calls):
        self.__dict__.update(held=held, calls=calls)

    def __call__(self, *given):
        self.calls[threading.get_ident()] += 1
        return self.held(*given)

    def __setattr__(self, name, value):
        setattr(self.held, name, value)


class Counted:
    """The library with its calls counted. calls: {thread: calls}."""

    def __init__(self, held):
        self.held, self.calls = held, Counter()

    def __getattr__(self, name):
        return Function(getattr(self.held, name), self.calls)


@pytest.fixture
def counted(monkeypatch):
    """The calls into the library."""
    if library.native() is None:
        pytest.skip(library.missing())
    proxy = Counted(library._library)
    cached = native_product._function, native_step._functions, native_experts._function
    monkeypatch.setattr(library, "_library", proxy)
    for function in cached:
        function.cache_clear()
    library.try_all()
    proxy.calls.clear()
    yield proxy.calls
    for function in cached:
        function.cache_clear()


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


def test_the_question_is_asked_once_and_only_where_the_answer_counts():
    asked = []
    x = torch.zeros(1)

    def takes():
        asked.append(1)
        return True

    assert choose("auto", x, takes) == choose("native", x, takes) == "native" and len(asked) == 2
    assert choose("reference", x, takes) == "reference" and choose("cpu", x, takes) == "cpu"
    assert choose("auto", torch.zeros(1, device="meta"), takes) == "reference"
    assert len(asked) == 2 and choose("native", x, lambda: False) == "cpu"


@pytest.mark.parametrize("backend, asked", [("auto", 1), ("cpu", 0), ("reference", 0)])
def test_a_launcher_of_prompts_asks_once(monkeypatch, backend, asked):
    """However many sequences, blocks and parts a call has."""
    q, k, v = (torch.randn(2, *size) for size in ((40, 4, 32), (2, 340, 32), (2, 340, 32)))
    if library.native() is None or not attends_prompt(q, k, v):
        pytest.skip(library.missing() or "torch attends to prompts here")
    index = torch.arange(0, 200, 2, dtype=torch.int32).expand(2, 2, -1)
    blocks = [(300, 320, 250, 100), (320, 340, 250, 90)]
    launchers = {
        "dense": lambda: prefill_dense(q, k, v, 300, 0.2, backend),
        "past": lambda: attend_past(q, k, v, 0.2, None, backend=backend),
        "rows": lambda: attend_rows(q, k, v, 0.2, backend=backend),
        "chunk": lambda: attend_chunk(q, k, v, 300, 0.2, backend=backend),
        "tiles": lambda: attend_tiles(q, k, v, 0.2, first=300, backend=backend),
        "window": lambda: prefill_window(q, k, v, 300, 50, 0.2, backend),
        "sparse": lambda: prefill_sparse(q, k, v, index, blocks, 300, 0.2, backend),
    }
    usable, count = library.Binding.usable, []
    monkeypatch.setattr(library.Binding, "usable", lambda one: count.append(1) or usable(one))
    for name, launch in launchers.items():
        count.clear()
        launch()
        assert len(count) == asked, name


def test_a_step_asks_for_no_product(monkeypatch):
    """Weights know whether C++ multiplies them since they were packed, and a chain of layers asks
    when it is made: a step asks nothing.
    """
    if library.native() is None:
        pytest.skip(library.missing())
    count, usable = [], library.Binding.usable
    with tiny_llm(Full(), max_context=1024).session() as session:
        session.prefill(random_ids(30, seed=1))
        monkeypatch.setattr(library.Binding, "usable", lambda one: count.append(1) or usable(one))
        session.decode(3)
        assert count
        count.clear()
        session.decode(3)
        assert not count


@pytest.mark.parametrize("settings", [{}, {"bank": "int8"}, {"offload": "host"}], ids=str)
@pytest.mark.parametrize(
    "method, fields",
    [(Full(), {}), (SPARSE, {}), (PROMPT, {}), (Full(), MISTRAL), (Full(), MIXTURE)],
    ids=["full", "omnikv", "sparse prompt", "windows", "mixture"],
)
def test_the_reference_and_torchs_operators_run_no_cpp(counted, method, fields, settings):
    """Of weights that C++ multiplies for other sessions, in a long prompt, in one of few tokens,
    whose products are the C++ kernels' first, and in steps.
    """
    llm = tiny_llm(method, session_config(**fields), max_context=1024, chunk=128, **settings)
    for backend in ("reference", "cpu", "auto"):
        with llm.session() as session:
            session.set_backend(backend)
            counted.clear()
            session.prefill(random_ids(300, seed=1))
            read = counted.total()
            session.prefill(random_ids(5, seed=2))
            session.decode(3)
            if backend == "auto":
                assert read and counted.total() > read
            else:
                assert not counted, backend


def test_a_session_of_the_reference_leaves_the_step_of_another_llm_alone(counted):
    """While one is inside a half of a layer, in another thread."""
    inside, leave = threading.Event(), threading.Event()
    oracle = tiny_llm(Full(), backend="reference", max_context=1024).session()
    oracle.prefill(random_ids(30, seed=1))
    half = oracle.runner.halves._pre_attention

    def waits(*given):
        inside.set()
        assert leave.wait(60)
        return half(*given)

    session = tiny_llm(Full(), max_context=1024).session()
    session.prefill(random_ids(30, seed=1))
    alone = session.fork()
    mine = threading.get_ident()
    counted.clear()
    expected, calls = alone.decode(3), counted[mine]
    oracle.runner.halves._pre_attention = waits
    thread = threading.Thread(target=oracle.decode, args=(3,))
    thread.start()
    try:
        assert inside.wait(60)
        counted.clear()
        assert torch.equal(session.decode(3), expected)
        assert counted[mine] == calls > 0 and not counted[thread.ident]
    finally:
        leave.set()
        thread.join()
    assert not counted[thread.ident]
