"""tools.speed.cards: predictions that stand on the formula of docs/PARALLEL.md and on those for one
card.

Stops: a term that is counted twice or on every card, a gain larger than the cards are many, a bank
that a card is said to hold and does not, bytes that are not those which ranks count.
"""

import itertools
import json

import pytest

from engine import Full, OmniKV
from tools.bench.shapes import shape_config, shape_filters
from tools.speed import cards

CONFIG = shape_config("llama-3-8b")
PLANS = {
    "full": Full().plan(CONFIG),
    "omnikv": OmniKV(filter_layers=(2, 8, 18), wait_layers=1, tokens=2048).plan(CONFIG),
}


def predicted(name, n, count=1, split="heads", config=CONFIG):
    return cards.step(config, PLANS[name], 2048, n, count, split)


@pytest.mark.parametrize(
    ("name", "n", "ms"),
    [
        ("full", 8192, 4.46),
        ("full", 131072, 8.49),
        ("omnikv", 131072, 5.36),
        ("omnikv", 450000, 8.08),
    ],
)
def test_one_card_is_as_predicted_for_one_card(name, n, ms, monkeypatch):
    """benchmarks/results/predicted-llama-3-8b.md, from compiled kernels, at the rate of an H200."""
    monkeypatch.setattr(cards, "READ", 4.3e12)
    assert predicted(name, n).seconds * 1000 == pytest.approx(ms, rel=0.03)


def test_heads_divide_bytes_and_nothing_else():
    for name, n, count in itertools.product(PLANS, (8192, 131072, 1 << 20), (2, 4, 8)):
        one, many = predicted(name, n), predicted(name, n, count)
        assert 1 < one.seconds / many.seconds < count
        assert many.held == pytest.approx(one.held / count) and many.collectives > 0
        assert one.collectives == one.sent == 0
    shared = predicted("full", 1 << 20, 16)  # 8 K/V heads: two ranks hold the same
    eight = predicted("full", 1 << 20, 8)
    bank = (1 << 20) * CONFIG.num_layers * CONFIG.kv_bytes(2)
    assert shared.held > bank / 8 and shared.attention == eight.attention


def test_layers_and_context_gain_room():
    for name, count in itertools.product(PLANS, (2, 4)):
        one = predicted(name, 131072)
        layers, context = (predicted(name, 131072, count, split) for split in ("layers", "context"))
        assert layers.held == pytest.approx(one.held / count)
        assert layers.seconds == pytest.approx(one.seconds + (count - 1) * cards.HOP)
        assert layers.sent == CONFIG.hidden_size * 2
        assert context.weights == one.weights and context.attention < one.attention
        assert one.held / count < context.held < one.held


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_the_page(count):
    """h b (1 + 2 L) + v b + 8 k F, in 2 + 2 L + F collectives."""
    hidden, layers, vocabulary = CONFIG.hidden_size, CONFIG.num_layers, CONFIG.vocab_size
    plain = hidden * 2 * (1 + 2 * layers) + vocabulary * 2 / count
    assert predicted("full", 131072, count).sent == plain
    assert predicted("omnikv", 131072, count).sent == plain + 8 * 2048 * 3
    assert predicted("omnikv", 1000, count).sent == plain  # all is read: nothing is chosen
    crossing = cards._crossing(CONFIG, PLANS["omnikv"], 2048, count, "heads")
    assert sum(times for times, _ in crossing) == 2 + 2 * layers + 3


def test_the_table_says_that_it_is_predicted_and_what_does_not_fit(tmp_path, capsys):
    flags = f"--context 128K,1M --cards 1,2,4 --json {tmp_path}/r.json".split()
    assert cards.main(flags) == 0
    page = capsys.readouterr().out
    assert page.startswith("Predicted, not measured: llama-3-8b")
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    fits = {
        (r["context"], r["split"], r["cards"]): r["fits"] for r in rows if r["method"] == "full"
    }
    assert fits[131072, "heads", 1] and not fits[1 << 20, "heads", 1]
    assert fits[1 << 20, "heads", 2] and not fits[1 << 20, "context", 2]
    assert page.count("does not fit") == sum(not row["fits"] for row in rows)
    assert cards.main(["--cards", "0"]) == cards.main(["--cards", "two"]) == 2
    assert cards.main(["--tokens", "0"]) == 2


def test_every_shape_has_a_prediction(capsys):
    for shape in ("yi-9b", "llama-3.1-70b", "160m"):
        assert len(shape_filters(shape)) > 0
        assert cards.main(["--shape", shape, "--context", "32K", "--cards", "1,2"]) == 0
    assert capsys.readouterr().out.count("| 32K | omnikv w1 | heads | 2 |") == 3
