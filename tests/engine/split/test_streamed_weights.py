"""Weights in host memory over devices: each part has a ring of its own, through which its own
layers pass, and gives one device's bits. Plans count what each device holds and what every step
brings over.
"""

import pytest
import torch

from engine import LLM, Full
from engine.base.errors import SettingError
from engine.forward import graphs
from engine.plan.free_memory import HEADROOM
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_plan import cards, held, planned
from tests.engine.split.test_sessions import METHODS, one_of, several, walked
from tools.families.models import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


@pytest.mark.parametrize(
    "split, count, streaming, settings",
    [
        ((3, 4), "all", range(7), {}),
        ((1, 2, 4), 3, (1, 3, 5), dict(dtype="bfloat16")),  # the first device has none
        ((6, 1), 5, (0, 2, 3, 4, 6), dict(offload="host")),  # one layer alone in a ring
    ],
)
def test_streamed_layers_are_one_device_s(folder, split, count, streaming, settings):
    given = dict(method=METHODS["omnikv"], **settings)
    llm = several(folder, ("cpu",) * len(split), split=split, weights_offload=count, **given)
    assert llm.model.streaming == tuple(streaming) == llm.planner.staging.layers
    one = one_of(folder, weights_offload=count, **given)
    want, found = walked(one), walked(llm)
    assert torch.equal(found[0], want[0]) and found[2] == want[2]
    assert torch.equal(want[0], walked(one_of(folder, **given))[0])
    assert llm.loaded.weight_bytes_streamed == one.loaded.weight_bytes_streamed > 0


def test_each_device_s_ring_is_as_planned_and_shared(folder):
    given = dict(split=(3, 4), weights_offload=5, backend="reference", method=Full())
    llm = several(folder, **given)
    for plan, part in zip(llm.plan().by_device, llm.model.parts, strict=True):
        items, ring = {name: size for name, size, _ in plan.items}, part.staged
        assert ring.nbytes == items["weight buffers"] and ring.bytes == items["host weights"]
        found = held(vars(ring)["_memory"], vars(ring)["_buffers"])
        assert found == pytest.approx(ring.nbytes + ring.bytes, rel=0.001)  # whole cache lines
        assert ring.bytes == plan.staged_bytes == plan.staging.bytes
    assert llm.plan().staged_bytes == sum(ring.bytes for ring in llm.model.rings)
    other = LLM.sharing(llm, method=METHODS["omnikv"])
    assert other.model.rings == llm.model.rings
    assert torch.equal(
        walked(other)[0],
        walked(one_of(folder, backend="reference", method=METHODS["omnikv"]))[0],
    )
    before = llm.loaded.weight_bytes_streamed
    with llm.session() as session:
        session.prefill(ids_of(130))  # three chunks
        session.decode(5)
    assert llm.loaded.weight_bytes_streamed - before == 4 * llm.plan().staged_bytes


def test_what_layers_have_beside_their_matrices_stays(tmp_path):
    """Streams and embeddings of each layer."""
    make(tmp_path / "gemma3n", "gemma3n")
    given = dict(method=Full(), weights_offload="all")
    llm = several(tmp_path / "gemma3n", ("cpu",) * 3, split=(1, 2, 7), **given)
    want = walked(one_of(tmp_path / "gemma3n", method=Full()))
    assert torch.equal(walked(llm)[0], want[0]) and len(llm.model.rings) == 3


def test_gpus_stream_the_fewest_layers_that_do_not_fit(monkeypatch):
    cards(monkeypatch, 6, 6)
    planner, plan = planned(context=16384, method=Full())
    assert planner.staging is not None and 10 < len(planner.staging.layers) < 32
    assert all(part.staging is not None for part in plan.by_device) and plan.fits
    assert all(part.total <= part.free * HEADROOM for part in plan.by_device)
    assert plan.staging.layers == planner.staging.layers and "tokens/s" in str(plan)
    cards(monkeypatch, 12, 12)
    planner, plan = planned(context=16384, method=Full())
    assert planner.staging is None and plan.fits


class Idle:
    """A graph whose replay does nothing."""

    def replay(self):
        pass


def test_a_replay_of_parts_counts_what_its_copies_bring(folder, monkeypatch):
    monkeypatch.setattr(graphs, "captured", lambda device, step: (Idle(), step()))
    llm = several(folder, split=(3, 4), weights_offload="all", method=Full())
    with llm.session() as session:
        session.prefill(ids_of(70))
        session.runner.step_of(own=False).captures = True
        session.decode(5)  # captures
        before = llm.loaded.weight_bytes_streamed
        session.decode(6)
    assert llm.loaded.weight_bytes_streamed - before == llm.plan().staged_bytes


def test_more_layers_than_there_are_are_refused(folder):
    with pytest.raises(SettingError, match="weights_offload: found 8, expected at most"):
        several(folder, weights_offload=8, method=Full())
