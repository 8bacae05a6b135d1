"""A conversation that goes on is not read again, under every family and method; one that goes back
finds what its session can go back to.

Stops: a held conversation read from its beginning, an answer that a session which went turn by turn
would not give, a session that goes back to rows that a sliding window has forgotten.
"""

from dataclasses import replace

import pytest
import torch

from engine import H2O, LLM, Full, OmniKV, SamplingParams, SnapKV
from engine.bank.row_origins import FULL
from engine.batch.slots import Slots
from engine.methods.evict.h2o_plus import H2OPlus
from engine.methods.evict.scissorhands import Scissorhands
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.select.infllm import InfLLM
from engine.methods.select.minference import MInference
from engine.saved.cache import BlockCache
from engine.serve.worker.worker import HttpWorker
from tests.builders import random_ids, session_config, tiny_llm
from tests.engine.serve.test_worker import Client

OMNI = OmniKV(filter_layers=(0,), tokens=40, tail=64, dense_below=0)
SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
OFFICIAL = OmniKV(filter_layers=(1, 4), tokens=24, official=True)
EVICTING = {
    "snapkv": SnapKV(tokens=96),
    "streaming_llm": StreamingLLM(tokens=64),
    # cut by the first step of an answer, so that no prompt's end has a store to go back to
    "h2o": H2O(tokens=64, forget=False),
    "h2o_plus": H2OPlus(tokens=64, segment=50),
    "infllm": InfLLM(block=8, init=8, local=64, topk=9, representatives=2, cached=12, chunk=32),
}
FAMILIES = {"gemma3": OMNI, "gpt-oss": replace(OMNI, filter_layers=(1,)), "mistral-window": Full()}
IDS, TURN = random_ids(300, seed=1), random_ids(40, seed=2)
_LLMS = {}


def tiny(method):
    if method not in _LLMS:
        _LLMS[method] = tiny_llm(method, backend="reference", max_context=2048)
    return _LLMS[method]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """LLMs of families with sliding windows of 50 to 90 tokens, which keep 750 to 800."""
    pytest.importorskip("transformers")
    from tools.families.models import make

    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            make(folder, name)
            made[name] = LLM(
                str(folder),
                method=FAMILIES[name],
                max_context=2048,
                chunk=64,
                backend="reference",
                dtype="float32",
            )
        return made[name]

    return get


class Talk:
    """One worker, and clients one after the other: (tokens of the answer, tokens held before)."""

    def __init__(self, llm, slots=2, **settings):
        self.worker = HttpWorker(llm, slots=slots, **settings)

    def __enter__(self):
        self.worker.start()
        return self

    def __exit__(self, *_):
        self.worker.stop(5.0)

    def ask(self, ids, tokens=6):
        client = Client(self.worker, ids, tokens)
        return client.answer(), client.cached


def turn_by_turn(llm, *turns, tokens=6):
    """Answers of one session that reads each turn as a prompt, and the tokens it holds at last."""
    answers, params = [], SamplingParams(max_tokens=tokens, ignore_eos=True)
    with llm.session() as session:
        for ids in turns:
            pieces = session.generate(list(ids), params)
            answers.append([p.token_id for p in pieces])
        return answers


def two_prompts(llm, first, rest):
    """The answer of a session that read `first` and, with no answer between, `rest`."""
    with llm.session() as session:
        session.prefill(first)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        return [p.token_id for p in session.generate(list(rest), params)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_over_sliding_windows_goes_on(windowed, name):
    llm = windowed(name)
    wanted = turn_by_turn(llm, IDS, TURN)
    with Talk(llm) as talk:
        first, held = talk.ask(IDS)
        assert (first, held) == (wanted[0], 0)
        second, held = talk.ask([*IDS, *first, *TURN])
        assert (second, held) == (wanted[1], 306)
        if isinstance(llm.method, Full):
            assert turn_by_turn(llm, [*IDS, *first, *TURN]) == [second]
        # the last question once more, and the first: the windows still hold what those saw
        assert talk.ask([*IDS, *first, *TURN]) == (second, 346)
        assert talk.ask(IDS) == (first, 300)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_that_goes_back_beyond_the_windows_is_read_anew(windowed, name):
    llm = windowed(name)
    other = [*IDS[:280], *TURN]
    with Talk(llm, slots=1) as talk:
        talk.ask(IDS, tokens=1000)
        assert talk.ask(other) == (turn_by_turn(llm, other)[0], 0)


def test_windows_are_copied_while_they_hold_the_common_beginning(windowed):
    llm = windowed("gemma3")
    with llm.batch(slots=2) as batch:
        slots = Slots(batch)
        (one, held), longer = slots.take(IDS), [*IDS, *TURN]
        one.session.prefill(IDS[held:])
        other, held = slots.take(longer)
        assert other is not one and held == 300
        with llm.session() as fresh:
            fresh.prefill(IDS)
            assert torch.equal(other.session.prefill(longer[300:]), fresh.prefill(longer[300:]))
        for token in random_ids(1000, seed=3):
            one.session.decode(token)
        slots.drop(other)
        other, held = slots.take(longer)
        assert other is not one and held == 0


@pytest.mark.parametrize("name", EVICTING)
def test_a_conversation_goes_on_where_rows_are_dropped(name):
    """As a session that went turn by turn; asked again it goes back to the question's end."""
    llm = tiny(EVICTING[name])
    wanted = turn_by_turn(llm, IDS, TURN)
    with Talk(llm) as talk:
        first, held = talk.ask(IDS)
        assert (first, held) == (wanted[0], 0)
        assert talk.ask([*IDS, *first, *TURN]) == (wanted[1], 306)
        assert talk.ask([*IDS, *first, *TURN]) == (wanted[1], 346)
        # another second question: back to where nothing has to run again
        other = [*IDS, *first, *TURN[:20], *random_ids(30, seed=5)]
        assert talk.ask(other) == (two_prompts(llm, IDS, other[300:]), 300)


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_an_edited_question_goes_on_from_the_last_whole_chunk_before(name):
    """Nothing is dropped before a prompt's end, so that its parts are those of both, where the bank
    still has them.
    """
    llm = tiny(replace(EVICTING[name], forget=False))
    other = [*IDS[:280], *TURN]
    with Talk(llm, slots=1) as talk:
        talk.ask(IDS)
        assert talk.ask(other) == (turn_by_turn(llm, other)[0], 256)


def test_a_prompt_goes_on_only_where_enough_of_it_is_left():
    """Scissorhands notes the last queries of a prompt in one call."""
    llm = tiny(Scissorhands(tokens=64, history=50, forget=False))
    with Talk(llm, slots=1) as talk:
        for other, held in (([*IDS[:150], 5, 6], 64), ([*IDS[:150], *TURN], 128)):
            talk.ask(IDS)
            assert talk.ask(other) == (turn_by_turn(llm, other)[0], held)


def test_a_method_that_reads_one_prompt_reads_it_anew():
    llm = tiny(OFFICIAL)
    with Talk(llm, slots=1) as talk:
        first, _ = talk.ask(IDS)
        assert talk.ask(IDS) == (first, 300)
        longer = [*IDS, *first, *TURN]
        assert talk.ask(longer) == (turn_by_turn(llm, longer)[0], 0)


@pytest.mark.parametrize("method", [SPARSE, MInference(("a_shape", 30, 50))], ids=("omni", "mi"))
def test_methods_that_keep_every_row_go_back_to_any_token(method):
    llm = tiny(method)
    with Talk(llm, slots=1) as talk:
        first, _ = talk.ask(IDS)
        assert talk.ask([*IDS, *first, *TURN]) == (turn_by_turn(llm, IDS, TURN)[1], 306)
        assert talk.ask([*IDS[:280], *TURN])[1] == 280


def test_a_rotation_by_the_prompts_length_goes_on_and_never_back():
    config = session_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_positions=200)
    llm = tiny_llm(Full(), config, backend="reference", max_context=400)
    with Talk(llm) as talk:
        first, _ = talk.ask(IDS)
        assert talk.ask([*IDS, *first, *TURN])[1] == 306
        assert talk.ask([*IDS[:280], *TURN])[1] == 0


def test_what_is_copied_or_found_on_disk_keeps_saying_how_it_came_about(tmp_path):
    """A copy of an answer's rows is kept on disk no more than the answer itself."""
    llm, cache, ids = tiny(SPARSE), BlockCache(tmp_path), random_ids(600, seed=9)
    with llm.batch(slots=3) as batch:
        slots = Slots(batch, cache)
        one, _ = slots.take(ids)
        one.session.prefill(ids)
        for token in random_ids(30, seed=3):
            one.session.decode(token)
        assert cache.store(one.session) == 2
        talk = [*one.session.ids, *random_ids(300, seed=4)]
        other, held = slots.take(talk)
        assert other is not one and held == 630
        other.session.prefill(talk[630:])
        assert cache.store(other.session) == 0
        assert other.session.origins.text(0, 600) == FULL
        assert other.session.origins.text(600, 630) is None
