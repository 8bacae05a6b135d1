"""The order of work over several devices: what is issued, what is waited for, which graphs run.
Devices are CPUs here; the order is the engine's own, whatever runs it.
"""

import pytest
import torch

from engine import LLM, Full
from engine.forward import graphs
from engine.forward.split.pace import ChunkPace
from tests.engine.ranks.model import ids_of, model_folder
from tests.engine.split.test_sessions import METHODS, one_of, several


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


@pytest.mark.parametrize("count", [2, 3])
def test_a_chunk_begins_before_the_one_before_it_has_ended(folder, count, monkeypatch):
    """(part, chunk) is noted as its work is issued, and (wait, chunk) as the host waits for it:
    between the last part's chunk i and the first part's chunk i + 1 nobody waits for chunk i.
    """
    llm = several(folder, ("cpu",) * count, method=Full())
    done = []
    with llm.session() as session:

        def mark(device):
            number = sum(what == count - 1 for what, _ in done) - 1  # the chunk just issued
            return lambda: done.append(("wait", number))

        session.runner.pace = ChunkPace([torch.device("cpu")] * count, mark)
        for number, part in enumerate(session.bank.parts):
            written = part.write_chunk

            def noted(layer, k, v, start, backend="auto", number=number, written=written):
                if layer == 0:
                    done.append((number, start // 64))
                written(layer, k, v, start, backend)

            monkeypatch.setattr(part, "write_chunk", noted)
        session.prefill(ids_of(300))
    chunks = 5
    assert [what for what in done if what[0] != "wait"] == [
        (part, chunk) for chunk in range(chunks) for part in range(count)
    ]
    for chunk in range(chunks - 2):  # the last chunk is waited for as one is
        waited = done.index(("wait", chunk))
        assert done.index((0, chunk + 1)) < waited, "the next chunk was not under way"
        assert waited < done.index((0, chunk + 2)), "two chunks in flight at most"


class Fake:
    """A graph whose replay runs the step again and writes what the capture returned."""

    def __init__(self, device, step, replays):
        self.device, self.step, self.out, self.replays = device, step, step().clone(), replays

    def replay(self):
        self.replays.append(self)
        self.out.copy_(self.step())


@pytest.mark.parametrize("name", ["full", "omnikv", "window"])
def test_one_graph_for_each_part_replayed_in_order(folder, name, monkeypatch):
    """Graphs of CUDA have not run over several GPUs; this shows what is captured, what is copied
    between them, and that a replay reads what the step before it left.
    """
    made, replays = [], []

    def captured(device, step):
        fake = Fake(device, step, replays)
        made.append(fake)
        return fake, fake.out

    monkeypatch.setattr(graphs, "captured", captured)
    llm, one = (make(folder, method=METHODS[name]) for make in (several, one_of))

    def run(llm, ask):
        with llm.session() as session:
            session.prefill(ids_of(200))
            for own in (True, False):
                session.runner.step_of(own).captures = ask
            return torch.stack([session.decode(token) for token in ids_of(6, seed=3)])

    assert torch.equal(run(llm, True), run(one, False))
    assert len(made) == 2  # one bucket, two parts
    assert replays == made * 6


def test_models_of_one_device_are_as_they_were(folder):
    llm = one_of(folder, method=Full())
    assert isinstance(llm, LLM) and llm.planner.cut is None and not llm.model.parts
    with llm.session() as session:
        assert not session.bank.parts and not session.runner.runtime.by_part
