"""The published code's form of a step, as a contestant: the same numbers and the same choices as
OmniKV(official=True), whose choices other tests hold to the published code's.

Stops: a head-to-head with something that computes less, or other things, than it is said to.
"""

import pytest
import torch

from engine import OmniKV
from tests.builders import random_ids, session_config, tiny_llm
from tools.bench.run import Missing
from tools.gpu.published import PublishedStep, published_peers

PROMPT = random_ids(200, seed=4)
FED = (5, 80, 3, 3, 41, 96)


def official(filters=(1, 5), tokens=23, wait=1):
    return OmniKV(filter_layers=filters, tokens=tokens, wait_layers=wait, official=True)


def opened(method, **shape):
    session = tiny_llm(method, session_config(**shape), max_context=512).session()
    session.prefill(PROMPT)
    rows = [[part.clone() for part in session.bank.kv(i, len(PROMPT))] for i in range(8)]
    return session, rows


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(
    ("settings", "shape"),
    [(dict(), {}), (dict(filters=(0, 3), tokens=1, wait=0), dict(kv_heads=1))],
    ids=["waits", "no waits"],
)
def test_it_computes_what_the_official_mode_computes(settings, shape, offloaded):
    """Logits of every step within float32's rounding, selections to the index; again after a
    rewind.
    """
    method = official(**settings)
    session, rows = opened(method, **shape)
    peer = PublishedStep(session.loaded, method, rows, offloaded)
    first = []
    for number, token in enumerate(FED):
        want, found = session.decode(token), peer.forward(token)
        assert (found - want).abs().max() < 1e-4 * want.std(), number
        assert session.stats.sparse_steps == number + 1
        assert peer.chosen.keys() == session.selections.keys() != set()
        for layer, chosen in session.selections.items():
            assert torch.equal(chosen, peer.chosen[layer].cpu()) and len(chosen) == method.tokens
        first.append(found)
    peer.rewind()
    assert all(torch.equal(peer.forward(token), logits) for token, logits in zip(FED, first))


def test_the_rows_that_it_says_it_offloads_are_gathered_on_the_host():
    """Of the sparse layers alone; a step reads as many as the budget."""
    session, rows = opened(official())
    peer = PublishedStep(session.loaded, official(), rows, True)
    peer.step()
    assert sorted(peer._picked) == [i for i, apart in enumerate(peer._sparse) if apart] == [3, 4, 7]
    assert all(k.shape[2] == v.shape[2] == 23 for k, v in peer._picked.values())
    assert all(len(grown[0][0, 0]) == 1 for i, grown in enumerate(peer._grown) if peer._sparse[i])


def test_a_peer_makes_contestants_at_a_depth_and_counts_their_bytes():
    llm = tiny_llm(None, session_config(), max_context=512)
    inside, away = (make(llm) for make in published_peers((1, 5), 32))
    assert away.bytes_at(100) < inside.bytes_at(100) and inside.host_bytes_at(100) == 0
    assert away.host_bytes_at(100) == 3 * 100 * llm.config.kv_bytes(4)
    for peer in (inside, away):
        contestant = peer.at(100, 64)()
        assert isinstance(contestant.step(), int) and contestant.name == peer.name
        assert contestant.length == 101
        contestant.close()
    with pytest.raises(Missing, match="full attention"):
        inside.prefill([1])


def test_what_the_published_code_has_not_is_refused():
    llm = tiny_llm(None, session_config(), max_context=512)
    for method in (OmniKV(filter_layers=(1,)), OmniKV(filter_layers=(1,), selector="uniform")):
        with pytest.raises(Missing, match="official=True"):
            PublishedStep(llm, method, [], False)
    windowed = OmniKV(filter_layers=(1,), selector="uniform", official=True)
    with pytest.raises(Missing, match="selector"):
        PublishedStep(llm, windowed, [], False)
