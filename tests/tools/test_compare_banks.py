"""tools/compare over other banks: every answer over rounded rows in both turns, the bytes, the
table.

Stops: a bank that answers from floats, a table that calls a simulation real, a bank among the
paper's findings.
"""

import json

import pytest

from engine.base.errors import UsageError
from tools.compare import cli as compare
from tools.compare.banks import over_banks
from tools.compare.claims import findings
from tools.compare.methods import Variant
from tools.compare.stats import cells

BANKS = ("int8", "kivi16", "sign")


def run(tiny, out, *more):
    return compare.main(
        ["--model", str(tiny), "--dtype", "float32", "--out", str(out), "--processes", "1"]
        + ["--methods", "omnikv@10", "--no-controls", "--tasks", "passkey", "--lengths", "400"]
        + ["--answers", "2", "--questions", "2", "--filters", "2", "--wait", "1", "--threads", "1"]
        + ["--max-tokens", "3", *more]
    )


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """(records by variant, config, the page) of a run over three banks."""
    out = tmp_path_factory.mktemp("banks")
    assert run(tiny, out, "--bank", *BANKS) == 0
    _, *records = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    config = json.loads((out / "config.json").read_text())
    return records, config, (out / "report.md").read_text()


def test_both_turns_are_answered_over_every_bank(made):
    records, _, _ = made
    asked = {}
    for r in records:
        asked.setdefault((r["name"], r["bank"]), []).append(r)
    assert set(asked) == {(name, bank) for name in ("full", "omnikv") for bank in ("", *BANKS)}

    def said(name, bank):
        found = sorted(asked[name, bank], key=lambda r: (r["seed"], r["question"], r["turn"]))
        first = [r for r in found if r["turn"] == 1]
        seen = sum(r["compared"] for r in first) or 1
        return [r["tokens"] for r in found], sum(r["kl"] for r in first) / seen

    assert {len(found) for found in asked.values()} == {len(asked["full", ""])}
    assert {r["turn"] for r in asked["omnikv", "sign"]} == {1, 2}
    for name in ("full", "omnikv"):
        tokens, kl = said(name, "")
        same, near = said(name, "kivi16")
        assert same == tokens and near == pytest.approx(kl, abs=1e-6)
        # the control is told from floats, and further from them than 8 bits
        assert said(name, "sign")[1] > max(kl, said(name, "int8")[1])
    assert said("full", "int8")[1] > 1e-9  # answers come from rounded rows


def test_bytes_say_what_formats_take(made):
    _, config, page = made
    held = {
        label: by["400"]["held"] for label, by in config["variants"].items() if by["400"]["bank"]
    }
    assert set(held) == {
        f"{name} on {bank}"
        for name in ("full", "omnikv 10%")
        for bank in ("int8", "kivi16 (simulated)", "sign (simulated)")
    }
    assert held["full on int8"]["resident"] == pytest.approx(72 / 128)
    assert held["full on kivi16 (simulated)"]["resident"] == 1.0
    # of 464 tokens 416 are rounded, 1 bit and 16 per 64 elements; the rest are floats
    sign = (416 * (1 + 16 / 64) + 48 * 16) / (464 * 16)
    assert held["omnikv 10% on sign (simulated)"]["resident"] == pytest.approx(sign)
    assert "## 400 tokens: full over other banks" in page
    assert "| sign (simulated) | 0.173 |" in page and "| int8 | 0.562 |" in page
    assert "| float32 | 2.000 |" in page and "simulated" not in page.split("## 400 tokens")[0]


def test_banks_are_none_of_the_papers_findings(made):
    records, config, page = made
    plain = [r for r in records if not r["bank"]]
    for finding in findings(plain, set()):
        assert finding.claim in page
    costs = page[page.index("Costs") :]
    assert "on int8" not in costs[: costs.index("## First questions")]
    assert over_banks(plain, cells(plain), {"variants": {}}, 400) == []


def test_labels_and_bad_names(tiny, tmp_path, capsys):
    assert Variant("omnikv", "share", 10.0, bank="kivi2").label == "omnikv 10% on kivi2 (simulated)"
    assert Variant("full", "none", 100.0, bank="int8").label == "full on int8"
    assert run(tiny, tmp_path, "--bank", "kivi2", "nothing") == 2
    assert "--bank: found 'nothing'" in capsys.readouterr().err
    with pytest.raises(UsageError):
        compare.order_of(compare.arguments(["--bank", "int5"]))
