"""Kascade's calibration: shares of mass against float64, anchors against all sets, and a file that
the engine reads.

Stops: a share of the wrong head or layer; a search that misses the best set; anchors that the
method refuses.
"""

from itertools import combinations

import pytest
import torch

from engine import Full, Kascade
from tests.builders import POCKET, random_ids, tiny_config, tiny_llm, tiny_weights
from tools.calibrate.anchors.__main__ import main
from tools.calibrate.anchors.meter import HeadMeter, anchors_of, map_of
from tools.calibrate.similarity import measure_with


def test_shares_are_those_of_the_heads_own_best():
    """One position of a text, every pair of layers and heads, from the bank in float64."""
    config = tiny_config(layers=4, heads=8, kv_heads=2)
    llm = tiny_llm(Full(), config, tiny_weights(config, seed=4), max_context=256)
    ids, asked, keys = random_ids(97), {}, {}

    class Seeing(HeadMeter):
        def attend(self, layer, q, step):
            asked[layer], keys[layer] = q[0, -1].clone(), step.bank.kv(layer)[0][0, :, :97].clone()
            return super().attend(layer, q, step)

    with llm.session() as session:
        meter = measure_with(session, ids, 1, Seeing(session.dense_runtime, 9))
    mass = {}
    for layer, k in keys.items():
        q = asked[layer].double().view(2, 4, -1)
        logits = torch.einsum("hgd,hnd->hgn", q, k.double()) * config.scale
        mass[layer] = logits.softmax(-1).sum(1)
    found = meter.shares()
    for i in range(4):
        for j in range(4):
            for h in range(2):
                for a in range(2):
                    want = 0.0
                    if i <= j:
                        rows = mass[i][a].topk(9).indices
                        want = float(mass[j][h][rows].sum() / mass[j][h].topk(9).values.sum())
                    assert float(found[i, j, h, a]) == pytest.approx(want, abs=1e-5)
    assert meter.steps == 1


def test_the_anchors_are_the_best_of_all_sets_and_the_map_is_the_best_head():
    generator = torch.Generator().manual_seed(2)
    shares = torch.rand(9, 9, 3, 3, generator=generator, dtype=torch.float64)
    shares = torch.triu(shares.permute(2, 3, 0, 1)).permute(2, 3, 0, 1)
    best = shares.amax(-1).mean(-1)

    def value(anchors):
        reused = [j for j in range(9) if j not in anchors]
        return sum(float(best[max(a for a in anchors if a <= j), j]) for j in reused) / len(reused)

    for count in (1, 3, 5):
        found = anchors_of(shares, count)
        sets = [(0, *rest) for rest in combinations(range(1, 9), count - 1)]
        assert found in sets and value(found) == pytest.approx(max(map(value, sets)))
    table = map_of(shares, (0, 4))
    assert table[4] == table[0] == (0, 1, 2)
    assert table[6] == tuple(shares[4, 6].argmax(-1).tolist())
    assert table[3] == tuple(shares[0, 3].argmax(-1).tolist())


def test_the_program_writes_what_the_method_reads(tmp_path, capsys):
    out, text = tmp_path / "kascade.json", tmp_path / "text.txt"
    text.write_text((POCKET / "welcome.txt").read_text(encoding="utf-8"), encoding="utf-8")
    given = ["--model", str(POCKET), "--text", str(text), "--length", "200", "--positions", "2"]
    assert main([*given, "--anchors", "3", "--out", str(out)]) == 0
    method = Kascade(head_map=out)
    assert method.anchors[0] == 0 and len(method.anchors) == 3 and len(method.head_map) == 8
    assert f"Kascade(anchors={method.anchors})" in capsys.readouterr().out
    assert dict(method.made_for)["layers"] == 8
    assert main([*given, "--anchors", "8", "--out", str(out)]) == 2
    assert "--anchors: found 8, expected 1 to 7" in capsys.readouterr().err
