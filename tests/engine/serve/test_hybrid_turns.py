"""Conversations over a server whose model has recurrent layers (tests/programs/hybrid_turns.py).

Stops: a turn that reads an edited conversation from its beginning, a slot that takes rows of
another session without the state that goes with them.
"""

import pytest

pytest.importorskip("transformers")

from engine import Full, OmniKV
from engine.batch.slots import Slots
from tests.builders import hybrid_config, random_ids, tiny_llm
from tests.programs.hybrid_turns import bound, checkpoint, run

SPARSE = OmniKV(filter_layers=(3,), tokens=24, tail=64, dense_below=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("kind, method", [("edited", "full"), ("stripped", "omnikv")])
def test_20_turns_read_at_most_one_savepoint_distance_again(folder, kind, method):
    turns = run(folder, kind, 12, method, 20, 1, 30)
    assert len(turns) == 20 and turns[-1].prompt > 500
    assert max(turn.again for turn in turns) <= bound()
    # with nothing kept every turn reads all that it has read before
    without = run(folder, kind, 0, method, 4, 1, 30)
    # unless the edit lies within the tokens that stand apart from the state
    assert all(turn.again in (0, turn.prompt - turn.new) for turn in without)
    assert max(t.again for t in without) > 4 * max(t.again for t in turns)


@pytest.mark.parametrize("method", [Full(), SPARSE])
def test_another_slot_gets_rows_and_the_state_that_goes_with_them(method):
    config = hybrid_config(max_positions=1024)
    llm = tiny_llm(method, config, max_context=1024, chunk=64)
    ids, turn = random_ids(300, seed=1), random_ids(40, seed=2)
    with llm.batch(slots=2) as batch, llm.session() as fresh:
        slots = Slots(batch)
        one, held = slots.take(ids)
        one.session.prefill(ids[held:])
        for token in random_ids(30, seed=3):
            one.session.decode(token)
        other, held = slots.take([*ids[:290], *turn])
        # a savepoint at the end of the chunk before, or the tail of the one at the prompt's end
        assert other is not one and 256 <= held <= 290
        session = other.session
        assert session.bank.recurrent.length == held == len(session)
        found = [session.prefill([*ids[held:290], *turn]), session.decode(5)]
        fresh.prefill(ids[:held])
        wanted = [fresh.prefill([*ids[held:290], *turn]), fresh.decode(5)]
        for mine, theirs in zip(found, wanted):
            assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-4
        assert session.stats.tokens_again == 0
        # and goes back by itself
        session.truncate(held - 3)
        assert session.stats.tokens_again == 0
