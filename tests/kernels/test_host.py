"""Slots and row moves, interpreted: the slot policy against a plain Python model, moved bytes
against a loop over bytes.

Stops: a victim that is in use, ties by chance, a map that disagrees with the slots, rows that land
beside their slot.
"""

import pytest
import torch

from engine.plan.placement import part_bytes
from tests.kernels.support.host_checks import STORES, check_moves, check_slots, check_store


@pytest.mark.parametrize(
    "seed, budget, width, capacity",
    [
        (0, 8, 8, 40),
        (1, 300, 300, 900),
        (3, 257, 1025, 4000),
        (4, 1, 1, 3),
        (5, 700, 2100, 2500),
    ],
)
def test_slots_follow_the_model(seed, budget, width, capacity):
    model = check_slots("cpu", "triton", seed, budget, width, capacity, steps=15)
    assert model.counters[1] > 0 and (budget < 2 or model.counters[0] > 0)


@pytest.mark.parametrize(
    "width, layers, count, programs",
    [
        (64, 1, 7, None),
        (64, 3, 150, 2),
        (512, 2, 65, 4),
        (4096, 2, 9, 3),
        (1024 + 64, 1, 20, 1),
        (24576, 1, 3, 2),
    ],
)
def test_rows_land_where_they_should(width, layers, count, programs):
    check_moves("cpu", "triton", width + layers, width, layers, 4, count, programs)


@pytest.mark.parametrize("shape", STORES)
def test_a_step_stores_its_rows(shape):
    check_store("cpu", "triton", 1, **shape)


def test_a_whole_offloaded_session_on_interpreted_kernels(monkeypatch):
    """Slots, moves and attention by the Triton backend: the same bits as with everything on the
    device, because rows are visited in the same order whatever their slot.
    """
    import engine.runner.prompt
    from engine import OmniKV
    from tests.builders import random_ids, session_config, tiny_llm

    method = OmniKV(filter_layers=(1,), tokens=20, tail=64, dense_below=0)
    monkeypatch.setattr(engine.runner.prompt, "WARM", 2)  # the interpreter takes a second a step
    answers = []
    for offload in ("device", "host"):
        llm = tiny_llm(
            method,
            config=session_config(layers=5),
            offload=offload,
            backend="triton",
            max_context=256,
            chunk=200,
            slots=2,
        )
        session = llm.session()
        session.prefill(random_ids(150))
        answers.append([session.decode(token) for token in (5, 9)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    stats = session.stats
    row = 3 * part_bytes(llm.config, 4)  # layers 2 to 4
    assert stats.misses > 0 and stats.bytes_fetched == stats.misses * row
    session.truncate(100)
    session.close()
    assert llm.load().host_pool.in_use == 0
