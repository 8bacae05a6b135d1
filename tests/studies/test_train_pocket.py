"""The trainer: a killed run goes on as if nothing had happened, half a checkpoint is never loaded,
hopeless runs stop.
"""

import argparse

import pytest
import torch

from tools.studies.pocket import data as pocket_data
from tools.studies.pocket import run as pocket_run
from tools.studies.pocket import selector
from tools.studies.pocket.model import Shape
from tools.studies.pocket.schedule import PROFILES, STAGES, Profile


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setitem(PROFILES, "cpu", Profile("cpu", 1, 256, 128, 1000.0, 0))
    monkeypatch.setattr(
        Shape,
        "__init__",
        _small(Shape.__init__),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(out="a", **more):
        settings = {
            "profile": "cpu",
            "minutes": None,
            "stop_after": None,
            "out": tmp_path / out,
            "seed": 1,
            "processes": None,
            "init": None,
            "lr": 0.01,
            "adam_lr": 1e-3,
        }
        return pocket_run.Run(argparse.Namespace(**settings | more), 0)

    yield run
    torch.set_num_threads(threads)


def _small(original):
    def init(self, *args, **more):
        original(
            self,
            *args,
            **{"hidden": 64, "inner": 64, "layers": 5, "heads": 4, "kv_heads": 2} | more,
        )

    return init


def steps(run, count):
    for _ in range(count):
        run.advance()
    return [p.detach().clone() for p in run.model.parameters()]


def test_a_resumed_run_is_the_uninterrupted_one(make):
    whole = make("whole")
    want = steps(whole, 6)
    first = make("cut")
    steps(first, 3)
    first.save()
    second = make("cut")
    second.resume()
    assert second.step == 3 and second.tokens == first.tokens
    assert all(torch.equal(a, b) for a, b in zip(want, steps(second, 3), strict=True))
    assert torch.equal(whole.counts, second.counts)


def test_training_leaves_the_selector_as_it_was(make):
    run = make()
    first = [p.detach().clone() for p in run.model.parameters()]
    last, layer, lane = steps(run, 4), selector.LAYER, selector.LANE
    old, new = (
        dict(zip(dict(run.model.named_parameters()), some, strict=True)) for some in (first, last)
    )
    for name in ("q", "k", "v", "o"):
        assert torch.equal(old[name][layer], new[name][layer])
        assert not torch.equal(old[name][layer + 1], new[name][layer + 1])
    assert torch.equal(old["embed"][:, lane], new["embed"][:, lane])
    assert not torch.equal(old["embed"], new["embed"])
    assert torch.equal(old["norm1"][layer], new["norm1"][layer])
    assert not new["o"][layer].any()
    assert not new["o"][1:, lane].any() and not new["down"][:, lane].any() and new["down"].any()


def test_a_checkpoint_killed_while_written_is_not_loaded(make, monkeypatch):
    run = make()
    steps(run, 1)
    run.save()
    monkeypatch.setattr(torch, "save", _half)
    steps(run, 1)
    with pytest.raises(KeyboardInterrupt):
        run.save()
    again = make()
    again.resume()
    assert again.step == 1


def _half(state, path):
    path.write_bytes(b"half a checkpoint")
    raise KeyboardInterrupt


def test_other_settings_do_not_resume(make):
    run = make()
    run.save()
    with pytest.raises(SystemExit, match="--seed 1"):
        make(seed=2).resume()


def test_stages_move_on_by_accuracy_and_stop_when_hopeless(make, capsys):
    run = make()
    stage = STAGES[0]
    run.step = stage.least
    assert run.next_stage(dict.fromkeys(stage.goal, 0.1)) and run.stage == 0
    assert run.next_stage(dict.fromkeys(stage.goal, 1.0)) and run.stage == 1
    run.stage, run.stage_start, (run.step, kind, least) = 0, 0, stage.check[0]
    assert not run.next_stage({kind: least - 0.1})
    assert "hopeless" in capsys.readouterr().out
    run.stage, run.step, run.elapsed = 0, 20, run.minutes * 60 * (stage.until + 0.01)
    assert run.next_stage({}) and run.stage == 1


def test_rates_warm_up_and_fall(make):
    run = make()
    rates = []
    for step, used in ((0, 0.0), (49, 0.1), (99, 0.12), (500, 0.15), (900, 0.575), (999, 1.0)):
        run.step, run.elapsed = step, used * run.minutes * 60
        rates.append(run.rates())
    assert (
        rates[:3] == [0.01, 0.5, 1.0]
        and rates[3] == 1.0
        and rates[4] == pytest.approx(0.5)
        and rates[5] == pytest.approx(0.03)
    )


def test_worker_batches_are_the_same():
    pocket_run._start_worker()
    asked = (1, 4, 0, 2, 128, 0.4, 32768)
    maker = pocket_data.RowMaker(pocket_run.train_tokenizer())
    one, two = pocket_run._work(asked), pocket_data.batch(maker, *asked)
    assert (
        all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True)) and one[3] == two[3]
    )
