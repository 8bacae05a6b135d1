"""Models whose later layers read an earlier layer's K and V, with a token's embeddings for each
layer and, in Gemma 3n, several streams: over devices they are one device's to the bit. Layers that
read another's rows lie on its device.
"""

import pytest
import torch

from engine import Full, OmniKV
from engine.base.errors import SettingError
from engine.methods.evict.snapkv import SnapKV
from engine.methods.exact import Exact
from engine.plan.split.cut import boundaries
from tests.engine.ranks.model import ids_of
from tests.engine.split.ownership import Owned, crossings
from tests.engine.split.test_exact import written
from tests.engine.split.test_plan import held
from tests.engine.split.test_sessions import one_of, several, walked
from tools.families.models import make

METHOD = OmniKV(filter_layers=(1, 3), tokens=20, tail=64, dense_below=0)
# 10 layers; the last 4 (5) read rows of layers 4 and 5 (3 and 4)
FIRST = {"gemma3n": 4, "gemma4-shared": 3}


@pytest.fixture(scope="module", params=FIRST)
def family(request, tmp_path_factory):
    """(family, folder of a model)."""
    place = tmp_path_factory.mktemp("shared") / request.param
    make(place, request.param)
    return request.param, place


GIVEN = [
    dict(method=Full()),
    dict(method=METHOD, offload="host"),
    dict(method=METHOD, backend="reference"),
    dict(method=METHOD, dtype="bfloat16"),
    dict(method=METHOD, weights="int8", bank="int8"),
    dict(method=SnapKV(tokens=40, window=8)),
]


@pytest.mark.parametrize("given", GIVEN, ids=range(len(GIVEN)))
def test_parts_are_one_device_s(family, given):
    name, place = family
    first = FIRST[name]
    want = walked(one_of(place, **given))
    for split in ((first, 10 - first), (1, first - 1, 10 - first)):
        llm = several(place, ("cpu",) * len(split), split=split, **given)
        assert llm.planner.cut.starts == (0, *split[:-2], first, 10)
        found = walked(llm)
        assert torch.equal(found[0], want[0]) and found[2] == want[2]
        for mine, theirs in zip(found[1], want[1], strict=True):
            assert all(torch.equal(mine[layer], theirs[layer]) for layer in theirs)


def test_drafts_are_one_device_s(family):
    method = Exact(METHOD, draft=3, lookup=False)
    one, two = (make_llm(family[1], method=method) for make_llm in (one_of, several))
    assert written(two) == written(one)


def test_no_part_begins_between_rows_and_their_readers(family):
    name, place = family
    llm = several(place, method=Full())
    free = boundaries(llm.planner.layers, True, llm.config.row_layers)
    assert free == list(range(1, FIRST[name] + 1))
    for split in ((9, 1), (1, 9)):  # the nearest place
        start = several(place, method=Full(), split=split).planner.cut.starts[1]
        assert start == (FIRST[name] if split[0] == 9 else 1)
    most = FIRST[name] + 1
    with pytest.raises(SettingError, match=rf"at most {most} .* from {most - 1} on read each"):
        several(place, ("cpu",) * (most + 1), method=Full())


@pytest.mark.parametrize("split", [(2, 8), (1, 1, 8)])
def test_each_device_holds_its_weights_and_rows_as_planned(family, split):
    """Embeddings, of every layer too, lie on the first device, and rows that are shared once."""
    llm = several(family[1], ("cpu",) * len(split), split=split, method=Full(), backend="reference")
    model, plans, banks = llm.model, llm.plan().by_device, 0
    with llm.session() as session:
        session.prefill(ids_of(130))
        for number, (plan, part) in enumerate(zip(plans, model.parts, strict=True)):
            ends = number == 0, number == len(split) - 1
            tables = [model.embed] * ends[0] + [model.norm, model.lm_head] * ends[1]
            items = {name: size for name, size, _ in plan.items}
            assert held(part.layers, part.per_layer, part.altup, tables) == items["weights"]
            assert part.nbytes == items["weights"]
            bank = session.bank.parts[number]
            rows = items["context bank"] + items.get("sliding windows", 0)
            assert bank.nbytes == pytest.approx(rows, rel=0.02)
            banks += bank.nbytes
    with one_of(family[1], method=Full()).session() as session:
        assert banks == session.bank.nbytes


def test_streams_and_embeddings_of_later_layers_cross(family):
    """And nothing else does: no operator takes tensors of two parts."""
    name, place = family
    llm = several(place, ("cpu",) * 3, split=(1, 1, 8), method=Full(), backend="reference")
    config, model = llm.config, llm.model
    hidden = max(1, config.block.streams) * config.hidden_size
    with torch.inference_mode(), llm.session() as session:
        owned, runner = Owned(), session.runner
        for number, part in enumerate(model.parts):
            owned.own(number, [part.layers, part.per_layer, part.altup])
            owned.own(number, llm.loaded.rotary.parts[number])
            owned.own(number, [session.bank.parts[number], session.query_ring.parts[number]])
            own = [vars(r.by_part[number]) for r in (runner.runtime, runner.dense_runtime)]
            owned.own(number, own)
        owned.own(0, [model.embed, runner.token, runner.length])
        owned.own(2, [model.norm, model.lm_head])
        with crossings(owned, model) as crossed, owned:
            session.prefill(ids_of(50))
            del crossed[:]
            session.decode(5)
            later = [layers * config.block.per_layer for layers in (9, 8)]
            sent = [hidden + inputs for inputs in later]
            assert crossed == [1, 1, 1, 1, 1, 1, *sent, config.vocab_size]
    assert owned.count > 500 and not owned.mixed, owned.mixed[:3]
