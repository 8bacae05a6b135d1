"""HShare's calibration: how alike lists are, against sets; the greedy rule by its words; and a file
that the engine reads.

Stops: a pair counted twice, a reader that others still read, lists that hold the newest tokens.
"""

import pytest
import torch

from engine import Full, HShare
from tests.builders import POCKET, random_ids, tiny_config, tiny_llm, tiny_weights
from tools.calibrate.sharing.__main__ import main
from tools.calibrate.sharing.greedy import ListMeter, shared
from tools.calibrate.similarity import measure_with


def test_lists_are_as_alike_as_the_tokens_that_they_have_in_common():
    config, ids = tiny_config(layers=4, heads=8, kv_heads=2), random_ids(97)
    llm = tiny_llm(Full(), config, tiny_weights(config, seed=4), max_context=256)
    lists = {}

    class Seeing(ListMeter):
        def attend(self, layer, q, step):
            k = step.bank.kv(layer)[0][0, :, :97].double()
            logits = torch.einsum("hgd,hnd->hgn", q[0, -1].double().view(2, 4, -1), k)
            mass = (logits * config.scale).softmax(-1).sum(1)[:, 3:87]
            lists[layer] = [set(row.topk(9).indices.tolist()) for row in mass]
            return super().attend(layer, q, step)

    with llm.session() as session:
        meter = measure_with(session, ids, 1, Seeing(session.dense_runtime, 9, 3, 10))
    assert meter.steps == 1
    for layer, (first, second) in lists.items():
        assert float(meter.heads[layer, 1, 0]) == pytest.approx(len(first & second) / 9)
        assert not meter.heads[layer].triu().any()
        for below in range(layer):
            pairs = zip(lists[layer], lists[below])
            mean = sum(len(a & b) for a, b in pairs) / 18
            assert float(meter.layers[layer, below]) == pytest.approx(mean)
    assert not meter.layers.triu().any()


def test_the_most_similar_pairs_share_and_a_reader_is_no_source():
    alike = torch.zeros(5, 5)
    alike[1, 0], alike[2, 1], alike[3, 2], alike[4, 3], alike[4, 1] = 0.5, 0.9, 0.8, 0.3, 0.2
    assert shared(alike, 0) == (0, 1, 2, 3, 4)
    assert shared(alike, 1) == (0, 1, 1, 3, 4)
    # 3 with 2 is the next most similar, but 2 is a reader; then 1, which takes 2 along
    assert shared(alike, 2) == (0, 0, 0, 3, 4)
    assert shared(alike, 3) == (0, 0, 0, 3, 3)
    assert shared(alike, 4) == (0, 0, 0, 3, 3)


def test_the_program_writes_what_the_method_reads(tmp_path, capsys):
    out, text = tmp_path / "hshare.json", tmp_path / "text.txt"
    text.write_text((POCKET / "welcome.txt").read_text(encoding="utf-8"), encoding="utf-8")
    given = ["--model", str(POCKET), "--text", str(text), "--length", "200", "--positions", "2"]
    assert main([*given, "--layers", "3", "--heads", "1", "--out", str(out)]) == 0
    method = HShare(sharing=out)
    assert sum(source != layer for layer, source in enumerate(method.layers)) == 3
    assert len(method.heads) == 8 and set(method.heads) <= {(0, 0), (0, 1)}
    assert f"HShare(layers={method.layers})" in capsys.readouterr().out
    assert dict(method.made_for)["layers"] == 8
    assert main([*given, "--layers", "8", "--out", str(out)]) == 2
    assert "--layers: found 8, expected 0 to 7" in capsys.readouterr().err
