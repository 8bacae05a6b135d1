"""PoD's grouping: divergence and Algorithm 1 against their definitions, similarity against float64,
and the file that is written.
"""

import itertools
import json
import math

import pytest
import torch

from engine import Full, PodUntrained
from engine.base.errors import BadCheckpoint, UsageError
from engine.model.rope import apply_rope
from tests.builders import random_ids, tiny_llm
from tools.calibrate.pod_groups import (
    divergence,
    greedy_blocks,
    group,
    main,
    read_blocks,
    saving,
    similarity_of,
)


def test_divergence_is_jensen_shannons_in_bits():
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.softmax(4 * torch.randn(7, 53, generator=generator, dtype=torch.float64), -1)
        for _ in range(2)
    )
    for a, b, found in zip(p.tolist(), q.tolist(), divergence(p, q).tolist()):
        middle = [(x + y) / 2 for x, y in zip(a, b)]
        wanted = (
            sum(x * math.log2(x / m) for x, m in zip(a, middle)) / 2
            + sum(y * math.log2(y / m) for y, m in zip(b, middle)) / 2
        )
        assert found == pytest.approx(wanted, abs=1e-12)
    assert float(divergence(p[0], p[0])) == pytest.approx(0, abs=1e-12)
    apart = torch.eye(2, dtype=torch.float64)
    assert float(divergence(apart[0], apart[1])) == 1.0


def test_algorithm_1_by_its_definition():
    """Every layer of a block is like every other; no block could have taken the next layer; delta 1
    and 0 are all apart and all one.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        table = torch.rand(9, 9, generator=generator)
        table = (table + table.t()) / 2
        table.fill_diagonal_(1.0)
        firsts = greedy_blocks(table.tolist(), 0.4)
        blocks = [range(a, b) for a, b in zip(firsts, (*firsts[1:], 9))]
        assert [layer for block in blocks for layer in block] == list(range(9))
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            assert all(table[i, j] >= 0.4 for i in block for j in block)
            assert following is None or any(table[i, following[0]] < 0.4 for i in block)
    assert greedy_blocks(table.tolist(), 1.01) == tuple(range(9)) and greedy_blocks(
        table.tolist(), 0.0
    ) == (0,)


def test_a_wanted_saving_is_reached_by_the_largest_delta():
    generator = torch.Generator().manual_seed(2)
    similarity = torch.rand(8, 8, 3, generator=generator, dtype=torch.float64)
    similarity = (similarity + similarity.transpose(0, 1)) / 2
    blocks, delta = group(similarity, wanted=0.3)
    assert saving(blocks, 8) >= 0.3
    for higher in similarity.flatten().tolist():
        if higher > delta:
            assert saving(group(similarity, higher)[0], 8) < 0.3
    assert saving(((0,), (0, 1)), 4) == (3 + 2) / 16 and saving((tuple(range(4)),), 4) == 0
    with pytest.raises(UsageError, match="at most 0.438"):
        group(similarity, wanted=0.6)


def test_similarity_of_a_model_against_float64():
    """Rows of the last positions, query heads of a K/V head averaged, mean over positions and
    texts.
    """
    llm, texts = (
        tiny_llm(Full(), sharpness=3.0),
        [(str(i), random_ids(90, seed=i)) for i in range(2)],
    )
    found, wanted, count = similarity_of(llm, texts, 2, lambda line: None), 0, 0
    for _, ids in texts:
        with llm.session(Full()) as session:
            session.prefill(ids[:88])
            for n in (89, 90):
                session.decode(ids[n - 1])
                at, rows = torch.tensor([[n - 1]]), []
                for layer in range(llm.config.num_layers):
                    q = apply_rope(session.query_ring.read(layer, at), *llm.rotary.at(at))[
                        0, 0
                    ].double()
                    k = session.bank.kv(layer)[0][0, :, :n].double()
                    logits = (
                        torch.einsum("hgd,hnd->hgn", q.view(len(k), -1, k.shape[2]), k)
                        / k.shape[2] ** 0.5
                    )
                    rows.append(torch.softmax(logits, -1).mean(1))
                wanted, count = (
                    wanted
                    + torch.stack([torch.stack([divergence(a, b) for b in rows]) for a in rows]),
                    count + 1,
                )
    torch.testing.assert_close(found, 1 - wanted / count, atol=1e-4, rtol=0)


def test_the_command_writes_blocks_that_a_session_takes(tiny, tmp_path, capsys):
    out = tmp_path / "pod.json"
    arguments = [
        "--model",
        str(tiny),
        "--dtype",
        "float32",
        "--texts",
        "1",
        "--length",
        "512",
        "--positions",
        "2",
    ]
    assert main([*arguments, "--saving", "0.2", "--out", str(out)]) == 0
    printed, data = capsys.readouterr().out, json.loads(out.read_text())
    assert (
        "need not be stored" in printed
        and f"PodUntrained(blocks={tuple(map(tuple, data['blocks']))})" in printed
    )
    assert saving(data["blocks"], 6) >= 0.2 and PodUntrained(blocks=data["blocks"]).blocks == tuple(
        map(tuple, data["blocks"])
    )
    with pytest.raises(BadCheckpoint, match="tools.calibrate.pod_groups --model"):
        read_blocks(tiny)
    (tiny / "pod.json").write_text(out.read_text())
    try:
        assert read_blocks(tiny) == tuple(map(tuple, data["blocks"]))
        (tiny / "pod.json").write_text(json.dumps(data | {"fingerprint": "0" * 64}))
        with pytest.raises(BadCheckpoint, match="other weights"):
            read_blocks(tiny)
    finally:
        (tiny / "pod.json").unlink()
    assert main([*arguments, "--saving", "0.6", "--dry-run"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --saving: found 0.6")
