"""The search by loss finds the best sets, goes on where it stopped, and refuses a state that is not
its own.

Stops: a layer before the first filter that is not counted, a move that is never tried, a resumed
search that finds something else, figures of another model.
"""

import contextlib
import io
import itertools
import json

import pytest
import torch

from engine.calibration.search import Search, even, filters_of, full_layers, plan_of
from engine.plan.filter_layers import read
from engine.plan.layers import layer_plan
from tools.calibrate import by_loss
from tools.calibrate.by_loss import Row, bytes_share, knee
from tools.calibrate.cli import main

LAYERS = 9


def silent(done, total, what):
    pass


def test_a_set_of_full_layers_is_a_plan_with_exactly_these():
    """All 2 ** 8 sets of 9 layers that hold layer 0."""
    for bits in itertools.product([0, 1], repeat=LAYERS - 1):
        full = (0, *(i + 1 for i, bit in enumerate(bits) if bit))
        plan = plan_of(full, LAYERS)
        assert full_layers(plan) == full
        assert plan.dense_share == pytest.approx(len(full) / LAYERS)
    assert filters_of((0, 1, 2, 5, 6, 8)) == (2, 5, 6, 8)
    assert filters_of((0,)) == (0,)
    assert full_layers(layer_plan(8, (2, 5), 1)) == (0, 1, 2, 3, 5, 6)


def test_even_sets_have_their_size():
    for layers in (4, 9, 30, 32):
        for count in range(1, layers):
            full = even(layers, count)
            assert len(full) == count and full[0] == 0 and full[-1] < layers
    assert even(30, 6) == (0, 5, 10, 15, 20, 25)


class Distances:
    """A sparse layer loses what lies between it and its filter: made up, so that sets interact."""

    def __init__(self, seed, texts=4):
        generator = torch.Generator().manual_seed(seed)
        shape = texts, LAYERS, LAYERS
        self.loss = torch.rand(shape, generator=generator, dtype=torch.float64).cumsum(2)
        self.texts, self.calls = texts, []

    def __call__(self, full, parent, texts):
        self.calls.append((full, texts.start, texts.stop))
        found = []
        for number in range(*texts.indices(self.texts)):
            pairs = ((max(f for f in full if f < i), i) for i in range(LAYERS) if i not in full)
            found.append(float(sum(self.loss[number, f, i - f] for f, i in pairs)))
        return found


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_near_brute_force(seed):
    """On losses that interact at random: both ways together within 8% of the best set of each
    size, most of them it; sets as found have the cost that they are said to have.
    """
    score = Distances(seed)
    search = Search(LAYERS, score, 4, silent)
    for found in (search.down(5), search.up(5)):
        assert sorted(found) == [2, 3, 4, 5]
    hits = 0
    for count, best in search.known(5).items():
        assert len(best.full) == count and best.full[0] == 0
        everything = {
            (0, *rest): sum(score((0, *rest), None, slice(0, 4))) / 4
            for rest in itertools.combinations(range(1, LAYERS), count - 1)
        }
        assert best.cost == pytest.approx(everything[best.full])
        assert best.cost <= 1.08 * min(everything.values()) < max(everything.values()) / 1.3
        hits += best.cost == min(everything.values())
    assert hits >= 3


def test_a_layer_that_must_be_full_is_found():
    """Made so: layers 2 and 6 lose nothing when they are full and much when they are not, all else
    loses a little.
    """

    def score(full, parent, texts):
        lost = 5.0 * (2 not in full) + 3.0 * (6 not in full) + 0.1 * (LAYERS - len(full))
        return [lost] * len(range(*texts.indices(4)))

    for way in ("down", "up"):
        found = getattr(Search(LAYERS, score, 4, silent), way)(4)
        assert found[3].full == (0, 2, 6) and found[2].full == (0, 2)


def test_moves_reach_every_neighbour():
    search = Search(8, None, 4, silent)
    assert search.moved((0, 4, 6), 1) == [(0, 1, 6), (0, 2, 6), (0, 3, 6), (0, 5, 6)]
    assert search.moved((0, 4, 6), 2) == [(0, 4, 5)]  # the last layer lends to none
    assert search.removed((0, 4, 6)) == [(0, 6), (0, 4)]
    assert search.added((0, 4, 6)) == [tuple(sorted((0, 4, 6, i))) for i in (1, 2, 3, 5)]


def test_most_candidates_are_measured_on_half_of_the_texts():
    score = Distances(0)
    search = Search(LAYERS, score, 4, silent)
    search.best(search.added((0, 4)), (0, 4), "")
    halves = [call for call in score.calls if call[1:] == (0, 2)]
    assert len(halves) == 6 and len(score.calls) == 8  # 6 candidates, the best 2 on the rest


def test_the_knee_is_where_more_layers_cost_more_than_they_bring():
    kl = {2: 0.8, 3: 0.3, 4: 0.1, 5: 0.09, 6: 0.085}
    rows = [Row(tuple(range(n)), cost, cost, 0.9) for n, cost in kl.items()]
    assert knee(rows, 30, 0.0667) is rows[2]
    assert bytes_share(10, 30, 0.1) == pytest.approx(0.4)


# ------------------------------------------------------------------ the whole program


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Two pieces of 300 tokens to search on and two held out."""
    lines = [
        f"The {n}th house has {n * 7 % 31} windows, and house {n - 3} has more.\n"
        for n in range(400)
    ]
    path = tmp_path_factory.mktemp("words") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def searched(tiny, words, tmp_path_factory):
    """A whole search: (the file it wrote, beside which its state lies; what it printed)."""
    out, said = tmp_path_factory.mktemp("searched") / "one.json", io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(arguments(tiny, words, out)) == 0
    return out, said.getvalue()


def arguments(tiny, words, out, *more):
    return [
        *("--model", str(tiny), "--text", str(words), "--length", "300", "--positions", "12"),
        *("--device", "cpu", "--dtype", "float32", "--most-full", "3", "--out", str(out), *more),
    ]


def test_a_stopped_search_goes_on_and_finds_the_same(
    tiny, words, searched, tmp_path, capsys, monkeypatch
):
    other, (one, whole) = tmp_path / "two.json", searched
    assert "(knee) (chosen)" in whole and "| 2" in whole and "| 3" in whole

    real, budget = by_loss.Passages.__call__, [5]

    def stops(self, full, parent, texts):
        budget[0] -= 1
        if budget[0] < 0:
            raise KeyboardInterrupt
        return real(self, full, parent, texts)

    monkeypatch.setattr(by_loss.Passages, "__call__", stops)
    assert main(arguments(tiny, words, other)) == 130
    assert "goes on" in capsys.readouterr().err and not other.exists()
    kept = json.loads((tmp_path / "two.search.json").read_text())
    assert len(kept["costs"]) >= 3 and not kept["held"]
    budget[0] = 1000
    assert main(arguments(tiny, words, other)) == 0
    assert capsys.readouterr().out.replace(str(other), str(one)) == whole
    used = 1000 - budget[0]
    budget[0] = 0  # nothing is left to measure, and nothing is read
    monkeypatch.delattr(by_loss, "passage_of")
    assert main(arguments(tiny, words, other, "--full-layers", "2")) == 0
    assert used > 0 and "(chosen)" in capsys.readouterr().out
    found = json.loads(other.read_text())
    assert found["wait_layers"] == 0 and found["made_by"].startswith("tools.calibrate")
    assert found["k"] == 20 and found["fingerprint"]
    from engine.model.config.config import ModelConfig

    plan = layer_plan(6, read(other, ModelConfig.from_folder(tiny))["filter_layers"], 0)
    assert len(full_layers(plan)) == 2


def test_a_foreign_or_damaged_state_is_refused_in_one_line(tiny, words, searched, tmp_path, capsys):
    out, path = tmp_path / "found.json", tmp_path / "found.search.json"
    state = searched[0].with_name("one.search.json").read_text()
    path.write_text(state)

    def refused(*more):
        assert main(arguments(tiny, words, out, *more)) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and "--fresh" in error
        return error

    assert "other positions" in refused("--positions", "13")
    assert "other share" in refused("--share", "0.1")
    whole = json.loads(state)
    spoiled = [
        "{",
        "[]",
        json.dumps(whole | {"format": 9}),
        json.dumps(whole | {"costs": []}),
        json.dumps(whole | {"costs": {"0,99": [0.1]}}),
        json.dumps(whole | {"costs": {"1,2": [0.1]}}),
        json.dumps(whole | {"costs": {"0,2": [float("nan")]}}),
        json.dumps(whole | {"held": {"0,2": [0.1, 0.2, 0.3]}}),
        json.dumps(whole | {"settings": whole["settings"] | {"weights": "0" * 64}}),
    ]
    for text in spoiled:
        path.write_text(text)
        refused()
    assert main(arguments(tiny, words, out, "--fresh", "--dry-run")) == 0


@pytest.mark.parametrize(
    "more", [["--most-full", "6"], ["--full-layers", "1"], ["--tail", "3"], ["--length", "9000"]]
)
def test_numbers_that_cannot_be_meant_are_refused(tiny, words, tmp_path, capsys, more):
    assert main(arguments(tiny, words, tmp_path / "found.json", *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "expected" in error
