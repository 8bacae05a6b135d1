"""Stops: numbers and token ids that are taken for others (3.7 for 3, "123" for 1, 2, 3), or end in
an error without a type or of 4,000 digits.
"""

import argparse

import numpy
import pytest
import torch

from engine import LLM
from engine.base.checks import MOST, checked_ids, fraction, integer, listed_ids
from engine.base.errors import EngineError, SessionClosed, SettingError
from engine.cli.model_flags import gigabytes, scaled
from engine.load.options import Options
from engine.methods.omnikv.method import OmniKV
from engine.sampling.params import SamplingParams
from tests.builders import tiny_llm
from tests.engine.chat.chat_model import chat_model

HUGE = 10**5000
NO_INTS = ["5", b"5", 5.0, 3.7, float("nan"), float("inf"), True, None, [5], HUGE, -1]


@pytest.mark.parametrize("value", NO_INTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["max_context", "chunk", "threads", "vram_budget", "ram_budget"])
def test_an_argument_that_is_no_count_is_one_short_typed_line(name, value):
    if value is None:
        return  # the default
    with pytest.raises(SettingError, match=f"^{name}: found ") as caught:
        Options(**{name: value})
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [*NO_INTS[:-2], HUGE], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("field", ["max_tokens", "top_k", "logprobs", "seed"])
def test_so_is_a_field_of_sampling_params(field, value):
    if value is None and field == "seed":
        return
    with pytest.raises(SettingError, match=f"^{field}: found ") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize(
    "value",
    [HUGE, -HUGE, float("nan"), float("inf"), True, "1", None],
    ids=lambda value: type(value).__name__,
)
def test_so_is_a_number(field, value):
    with pytest.raises(SettingError, match=f"^{field}: found ") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


def test_bounds_and_their_neighbours():
    assert integer("n", MOST, 1) == MOST and integer("n", 1, 1) == 1
    for value in (MOST + 1, 0):
        with pytest.raises(SettingError):
            integer("n", value, 1)
    assert Options(threads=64).threads == 64
    with pytest.raises(SettingError, match="threads: found 1000000"):
        Options(threads=1_000_000)
    with pytest.raises(SettingError):
        fraction("share", HUGE)
    with pytest.raises(SettingError):
        Options(slots=float("inf"))


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "K", "1e9", "\u00b2", "\u0663", "nan"])
def test_flags_take_numbers_that_can_be(text):
    for kind in (scaled, gigabytes):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


IDS = [1, 2, 3]


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        numpy.array(IDS),
        numpy.array(IDS, dtype=numpy.uint8),
        torch.tensor(IDS),
        [numpy.int64(1), torch.tensor(2), 3],
        range(1, 4),
    ],
    ids=lambda given: type(given).__name__,
)
def test_ids_of_every_whole_kind_are_the_same_ids(given):
    found = listed_ids(given)
    assert found == IDS and all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "given",
    [
        "123",
        b"123",
        ["1", "2"],
        [3.7],
        [3.0],
        [True],
        [None],
        [[1, 2]],
        None,
        5,
        numpy.array([1.0, 2.0]),
        numpy.array([True]),
        numpy.array([[1, 2]]),
        numpy.array(5),
        torch.tensor([1.0]),
        torch.tensor([[1]]),
        [numpy.bool_(True)],
        [torch.tensor(True)],
        [HUGE],
        [-1],
        [],
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_sequence_of_ids_is_refused(given):
    with pytest.raises(SettingError) as caught:
        checked_ids(given, 100)
    assert len(str(caught.value)) < 200


def test_the_library_takes_and_refuses_the_same_everywhere():
    llm = tiny_llm(max_context=64)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    want = llm.generate(IDS, params).token_ids
    for given in (tuple(IDS), numpy.array(IDS), torch.tensor(IDS), [numpy.int64(i) for i in IDS]):
        assert llm.generate(given, params).token_ids == want
    several = llm.generate([IDS, torch.tensor(IDS)], params)
    assert [one.token_ids for one in several] == [want, want]
    for given in ([1.5], [[1.5]], torch.tensor([1.5]), None, 5, torch.tensor([[1.0]])):
        with pytest.raises(EngineError):
            llm.generate(given, params)
    with llm.session() as session:
        for call in (session.prefill, session.adopt, session.generate):
            with pytest.raises(SettingError):
                call("123")
        with pytest.raises(SettingError, match="params: found"):
            list(session.generate(IDS, {}))
        for n in ("1", 1.0, True, None, HUGE):
            with pytest.raises(SettingError, match="truncate: found"):
                session.truncate(n)


@pytest.mark.parametrize("setting", [{"compile": "yes"}, {"compile": 5}, {"host_pool": 5}])
def test_settings_of_another_kind_are_refused(setting):
    with pytest.raises(SettingError, match=f"{next(iter(setting))}: found"):
        tiny_llm(**setting)


def test_the_parts_of_a_closed_session_say_that_it_was_closed():
    session = tiny_llm(max_context=64).session()
    session.close()
    for look in (
        lambda: session.runtime,
        lambda: session.bank.length,
        lambda: session.query_ring.low,
        lambda: session.dense_runtime,
    ):
        with pytest.raises(SessionClosed, match="was closed"):
            look()


@pytest.mark.parametrize("change", ["truncate", "close"])
def test_a_session_changed_inside_its_own_answer_says_so(change):
    session = tiny_llm(max_context=64).session()
    answer = session.generate(IDS, SamplingParams(max_tokens=9, ignore_eos=True))
    next(answer)
    session.truncate(2) if change == "truncate" else session.close()
    with pytest.raises(SettingError if change == "truncate" else SessionClosed, match="answer"):
        next(answer)


@pytest.mark.parametrize("positions", [1, 3, 64, 100])
def test_a_session_never_holds_more_than_the_models_positions(positions, tmp_path):
    model = chat_model(tmp_path / "m", max_position_embeddings=positions)
    assert LLM(model, device="cpu", load=False).max_context == positions


@pytest.mark.parametrize("given", [5, "yes", True, [print]])
def test_a_progress_that_cannot_be_called_is_refused_before_anything_runs(given, tmp_path):
    llm = tiny_llm(max_context=64)
    file = tmp_path / "kept.session"
    with llm.session() as session:
        session.prefill(IDS)
        session.decode(3)
        session.save(file)
        for call in (
            lambda: LLM("no-such-model", progress=given),
            lambda: LLM("no-such-model", download_progress=given),
            lambda: session.prefill(IDS, given),
            lambda: list(session.generate(IDS, progress=given)),
            lambda: session.set_method(OmniKV(filter_layers=(2, 4)), given),
            lambda: session.check(1, given),
            lambda: session.save(file, progress=given),
            lambda: session.refresh_logits(given),
            lambda: llm.restore(file, progress=given),
            lambda: list(llm.stream(IDS, progress=given)),
        ):
            with pytest.raises(SettingError, match="progress: found .*, expected a function"):
                call()
        with pytest.raises(SettingError, match="should_stop: found"):
            list(session.generate(IDS, should_stop=given))
        assert len(session) == len(IDS) + 1
