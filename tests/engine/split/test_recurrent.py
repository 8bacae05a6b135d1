"""Recurrent layers over devices: each part's state lies with its layers; a session goes back, forks
and is saved as one of one device, and its files are the same.
"""

import pytest
import torch

from engine import LLM, Full
from engine.plan.layers import LayerPlan, Role
from engine.plan.split.cut import choose_cut
from tests.engine.ranks.model import ids_of
from tools.families.models import make

CPU = torch.device("cpu")
GIVEN = dict(max_context=512, chunk=64, dtype="float32", method=Full(), threads=1)
FAMILIES = ["qwen3.5", "falcon-h1", "nemotron-h"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(a model on one device, over two)."""
    place = tmp_path_factory.mktemp("recurrent") / request.param
    make(place, request.param)
    return LLM(place, device="cpu", **GIVEN), LLM(place, devices=("cpu", "cpu"), **GIVEN)


def walked(llm, path):
    """Logits of a session that reads, writes, goes back near and far, forks, and is saved."""
    with llm.session() as session:
        found = [session.prefill(ids_of(150))]
        found += [session.decode(token) for token in ids_of(30, seed=9)]
        session.truncate(177)
        found.append(session.decode(7))
        session.truncate(90)
        found += [session.decode(8), session.prefill(ids_of(40, seed=3)), session.decode(9)]
        with session.fork() as other:
            found.append(other.decode(4))
        found.append(session.decode(4))
        session.save(path)
        found.append(session.decode(6))
        counters = session.counters
        return torch.stack(found), (counters.tokens_again, session.stats.state_bytes)


def test_a_session_s_state_is_one_device_s(pair, tmp_path):
    one, two = pair
    (want, counted), (found, mine) = walked(one, tmp_path / "one"), walked(two, tmp_path / "two")
    assert torch.equal(found, want)
    assert mine[0] == counted[0] and mine[1] - counted[1] in (0, 8)  # a base for each part
    with two.session() as session:
        states = [part.recurrent for part in session.bank.parts]
    assert sum(len(s.sizes.layers) for s in states if s) == len(two.config.recurrent.layers)
    for state, plan in zip(states, two.plan().by_device, strict=True):
        planned = {name: size for name, size, _ in plan.items}.get("recurrent state", 0)
        assert planned == (state.nbytes if state else 0)
    for source, target in (("one", two), ("two", one)):
        again, _ = target.restore(tmp_path / source)
        with again:
            assert torch.equal(again.decode(6), want[-1])


@pytest.mark.parametrize("seed", range(6))
def test_every_part_has_a_layer_that_attends(seed):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(4, 20, (), generator=generator))
    roles = [
        Role.RECURRENT if x < 0.7 else Role.FULL for x in torch.rand(count, generator=generator)
    ]
    roles[seed % count] = Role.FULL
    plan = LayerPlan(tuple(roles), (), (None,) * count)
    most = roles.count(Role.FULL)
    for parts in range(1, most + 1):
        sizes = torch.rand(count, generator=generator).tolist()
        for split in (None, (1,) * parts, (5, *(1,) * (parts - 1)), (*(1,) * (parts - 1), 5)):
            given = (CPU,) * parts, sizes, [1.0] * parts, split, True
            starts = choose_cut("full", plan, *given).starts
            assert len(starts) == parts + 1 and starts[-1] == count
            for first, stop in zip(starts, starts[1:]):
                assert Role.FULL in roles[first:stop]
