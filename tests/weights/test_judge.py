"""The shipped model that tells methods apart: it answers, OmniKV answers as it does, controls fail.

Stops: weights under which one token answers as well as a choice, files of other weights, a
comparison that asks another model where none is named.
"""

import json
from collections import Counter

from safetensors import safe_open

from tests.builders import JUDGE
from tools.compare.cli import main
from weights.fingerprint import fingerprint

FILES = ("omnikv", "duo", "double_sparsity", "hshare", "kascade", "pod", "razor")


def test_the_folder_is_complete_and_small():
    assert (JUDGE / "model.safetensors").stat().st_size <= 20_000_000
    for name in FILES:
        data = json.loads((JUDGE / f"{name}.json").read_text())
        assert data["fingerprint"] == fingerprint(JUDGE), name
    data = json.loads((JUDGE / "omnikv.json").read_text())
    assert (data["filter_layers"], data["wait_layers"]) == ([1], 0)


def test_the_filter_layer_carries_nothing():
    """What layer 1 attends to changes no answer but through what the layers behind it read."""
    with safe_open(JUDGE / "model.safetensors", "pt") as file:
        assert not file.get_tensor("model.layers.1.self_attn.o_proj.weight").any()
        assert file.get_tensor("model.layers.2.self_attn.o_proj.weight").any()


def test_answers_hang_on_what_is_chosen(tmp_path):
    """Twelve questions, asked by the comparison where no model is named: OmniKV answers as full
    attention does, one token and random tokens at most half of it.
    """
    flags = "--methods omnikv@6.67 --tasks kv chains --lengths 512 --answers 6 --questions 6"
    more = "--turns 1 --processes 1 --threads 1 --dtype float32 --tail 64"
    assert main([*flags.split(), *more.split(), "--out", str(tmp_path)]) in (0, None)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    right: Counter[str] = Counter()
    for record in map(json.loads, lines[1:]):
        if "right" in record:
            right[record["name"]] += record["right"]
    assert right["full"] >= 10 and right["omnikv"] >= right["full"] - 1, right
    assert max(right["omnikv_one"], right["omnikv_random"]) <= right["full"] / 2, right
