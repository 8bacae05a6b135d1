"""The controls of a comparison: which columns run, when a claim counts as tested, what layers left
dense change, and a run that may not go on with other controls.

Stops: a claim printed as true that OmniKV without its choice satisfies as well, a claim dropped
that a model did test, a kept layer that is not full attention or whose bytes are not counted.
"""

import json
import re

import pytest
import torch

from engine import A2SF, H2O, LLM, Full, InfLLM, MInference, OmniKV, Quest, SnapKV, StreamingLLM
from engine.base.errors import SettingError
from engine.methods.controls.ablations import OmniKVPerLayer
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.tools.test_compare import full, read, record, run
from tools.compare import bytes as compare_bytes
from tools.compare import claims, headline, stats
from tools.compare.build import Facts
from tools.compare.kept import KeepsDense, without
from tools.compare.methods import (
    CONTROLS,
    EVICTION_CONTROL,
    PROMPT_KEPT,
    REGISTRY,
    spans,
    variants,
    wanted,
)

LAYERS = 7
CONFIG = tiny_config(layers=LAYERS, heads=4, kv_heads=2)
TOLERANCE = dict(atol=5e-5, rtol=5e-5)
RANDOM, NEWEST, ONE = CONTROLS


# ---------------------------------------------------------------- columns


def test_controls_run_beside_omnikv_at_its_budgets():
    found = wanted(["omnikv@3,m75", "h2o@30"], [10], [], controls=True)
    beside = [budget for budget in found if budget[0] in CONTROLS]
    assert beside == [
        *(
            (name, *budget)
            for name in (RANDOM, NEWEST)
            for budget in (("share", 3.0), ("mem", 75.0))
        ),
        (ONE, "none", 100.0),
    ]
    assert not {name for name, _, _ in wanted(["h2o@30"], [10], [], controls=True)} & {*CONTROLS}
    assert not {name for name, _, _ in wanted(["omnikv@3"], [10], [])} & {*CONTROLS}


def test_eviction_by_chance_runs_beside_what_evicts_at_its_budgets():
    names = ["omnikv@3", "h2o@30", "snapkv@30,m75", "quest@5"]
    beside = [key for key in wanted(names, [10], [], controls=True) if key[0] == EVICTION_CONTROL]
    assert beside == [(EVICTION_CONTROL, "share", 30.0), (EVICTION_CONTROL, "mem", 75.0)]
    kept = [key for key in wanted(names, [10], [], controls=True) if key[0] == PROMPT_KEPT]
    assert kept == [(PROMPT_KEPT, "none", 100.0)]
    both = {EVICTION_CONTROL, PROMPT_KEPT}
    assert not both & {name for name, _, _ in wanted(names, [10], [])}
    assert not both & {name for name, _, _ in wanted(["quest@5"], [10], [], controls=True)}
    assert REGISTRY[EVICTION_CONTROL].group == REGISTRY[PROMPT_KEPT].group == "controls"


def test_they_read_what_omnikv_reads(tiny):
    """Or less: the one with one token."""
    llm = LLM(str(tiny), dtype="float32", threads=1, method=Full())
    found = variants(Facts(llm, 464, (2,), 1, 64), wanted(["omnikv@10"], [], [], controls=True))
    rows = {}
    for variant in found:
        with llm.session(variant.method) as session:
            session.prefill(list(range(5, 405)))
            session.decode(7)
            rows[variant.name] = session.runtime.rows_read(len(session))
    assert rows["omnikv"] == rows[RANDOM] == rows[NEWEST] != rows["full"]
    assert rows["omnikv"][-1] - 39 == rows[ONE][-1] < rows["full"][-1]


# ---------------------------------------------------------------- verdicts


def point(omnikv, controls, count=400):
    """Records: of `count` questions full attention answers all, OmniKV and each control so many."""
    made = [full(1, s) for s in range(count)]
    for name, right in {"omnikv": omnikv, **controls}.items():
        kind, budget = ("none", 100.0) if name == ONE else ("share", 6.67)
        made += [record(name, s < right, s, kind=kind, budget=budget) for s in range(count)]
    return made


@pytest.mark.parametrize(
    "omnikv, controls, outcome, verdict, tested",
    [
        # a model that needs the choice
        (400, (200, 210, 190), "holds", "holds", True),
        # the shipped model: whatever is chosen, it answers
        (
            400,
            (400, 400, 400),
            "holds",
            f"{claims.UNTESTED} (it holds, .*{RANDOM}, {NEWEST}",
            False,
        ),
        # one control is enough
        (400, (200, 400, 190), "holds", f"{claims.UNTESTED} (it holds, .*: {NEWEST})", False),
        # a control that may be within a point: its interval reaches there
        (
            400,
            (396, 200, 190),
            "holds",
            f"{claims.UNTESTED} (it holds, .*may pass: {RANDOM})",
            False,
        ),
        # what does not hold needs no control
        (360, (400, 400, 400), "does not hold", "does not hold", False),
        (360, (100, 100, 100), "does not hold", "does not hold", True),
    ],
)
def test_a_point_is_tested_only_where_controls_lose_it(omnikv, controls, outcome, verdict, tested):
    found = claims.within_a_point(point(omnikv, dict(zip(CONTROLS, controls))))
    assert (found.outcome, found.tested) == (outcome, tested)
    assert re.fullmatch(
        re.sub(r"([()])", r"\\\1", verdict).replace(r"\\", "\\") + ".*", found.verdict
    )
    assert len(found.controls) == 3 and found.lines()[0].endswith(found.verdict)
    said = [line for line in found.lines() if "control " in line]
    assert len(said) == 3 and all("points [" in line for line in said)


def test_a_claim_without_controls_is_not_tested():
    for made in (point(400, {}), point(400, {RANDOM: 10, NEWEST: 10})):
        found = claims.within_a_point(made)
        assert found.outcome == "holds" and not found.tested
        assert found.verdict == "not tested (it holds, but its controls were not run)"


def test_controls_answer_the_questions_that_omnikv_answered():
    """200 more questions, all wrong, that OmniKV was not asked: they say nothing."""
    made = point(400, dict.fromkeys(CONTROLS, 400))
    made += [full(1, s) for s in range(400, 600)]
    made += [record(RANDOM, 0, s, budget=6.67) for s in range(400, 600)]
    assert claims.within_a_point(made).controls[0].outcome == "holds"


def second(name, first, then, **more):
    """100 questions in both turns, of which so many are right."""
    made = full if name == "full" else lambda right, seed, **m: record(name, right, seed, **m)
    return [
        made(s < n, s, turn=turn, **more) for turn, n in ((1, first), (2, then)) for s in range(100)
    ]


@pytest.mark.parametrize(
    "control, kept, verdict",
    [
        (40, 20, "holds"),
        (40, None, "holds"),
        (90, 20, claims.UNTESTED + " (it holds, and controls pass"),
        (40, 90, claims.UNTESTED + " (it holds, but not for sure of methods that evict"),
    ],
)
def test_second_turns_and_their_controls(control, kept, verdict):
    """kept: right second answers of H2O with layers left dense."""
    records = second("full", 90, 90) + second("omnikv", 90, 90) + second("h2o", 80, 10)
    for name in CONTROLS:
        more = dict(kind="none", budget=100.0) if name == ONE else {}
        records += second(name, 90, control, **more)
    if kept is not None:
        records += second("h2o", 90, kept, kept=[0, 2], variant="h2o 10% +dense 0,2")
    found = claims.findings(records, {"h2o"})[2]
    assert found.outcome == "holds" and found.verdict.startswith(verdict)
    # layers left dense are no column of the published method
    assert "loses +80.0 points" in next(n for n in found.numbers if n.startswith("h2o"))


@pytest.mark.parametrize(
    "control, kept, verdict",
    [
        (95, 15, "holds"),
        (20, 15, claims.UNTESTED + " (it holds, and controls pass"),
        (95, 95, claims.UNTESTED + " (it holds, but not for sure of h2o with layers left dense"),
    ],
)
def test_two_stage_and_its_controls(control, kept, verdict):
    asked = dict(task="two_stage")
    records = [full(s < 98, s, **asked) for s in range(100)]
    records += [record("h2o", s < 15, s, budget=30.0, **asked) for s in range(100)]
    for name in CONTROLS:
        budget = dict(kind="none", budget=100.0) if name == ONE else dict(budget=30.0)
        records += [record(name, s < control, s, **budget, **asked) for s in range(100)]
    more = dict(budget=30.0, kept=[0], variant="h2o 30% +dense 0", **asked)
    records += [record("h2o", s < kept, s, **more) for s in range(100)]
    found = claims.findings(records, {"h2o"})[1]
    assert found.outcome == "holds" and found.verdict.startswith(verdict)
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == found.verdict


# ---------------------------------------------------------------- the page


def test_the_control_table_has_paired_differences_and_rows():
    table = headline.controls(point(400, {RANDOM: 200, NEWEST: 100, ONE: 400}), 1000)
    assert len(table) == 2 + 4
    own, random, _, one = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:])
    assert own[:4] == ["6.67%", "omnikv 6.67%", "31 + 80 tail = 111 rows, 10.9%", own[3]]
    assert own[3].startswith("1.000 [") and own[5] == ""
    assert random[4].startswith("-50.0 points [") and random[5].startswith("+50.0 points [")
    assert one[1] == ONE and one[5].startswith("+0.0 points [")
    # 7 of 8 tokens and 0.8 of 8 nats, the same in every document
    assert own[6] == "0.875 [0.875, 0.875]" and own[7] == "0.1000 [0.1000, 0.1000]"
    assert not headline.controls(point(400, {}), 1000)


def test_rows_are_printed_with_the_tail():
    row = {"rows": 111.0, "context": 1024.0, "chosen": 31.0}
    assert stats.reads(row) == "31 + 80 tail = 111 rows, 10.8%"
    assert stats.reads(row | {"chosen": 111.0}) == "111 rows, 10.8%"
    assert stats.reads(row | {"chosen": 0}) == "111 rows, 10.8%"
    assert stats.reads(dict.fromkeys(row)) == ""


# ---------------------------------------------------------------- layers left dense


@pytest.fixture(scope="module")
def small():
    return tiny_llm(Full(), CONFIG, tiny_weights(CONFIG, seed=3), max_context=512, chunk=64)


def played(session, prompt=200, steps=5):
    """Logits of a prompt's last token and of the answer's."""
    ids = random_ids(prompt + steps)
    return torch.stack([session.prefill(ids[:prompt]), *map(session.decode, ids[prompt:])])


METHODS = (
    H2O(tokens=30, forget=False),
    A2SF(share=0.2, forget=False),
    SnapKV(tokens=64, forget=False),
    StreamingLLM(tokens=40, forget=False),
    Quest(tokens=48),
    OmniKV(filter_layers=(1, 4), tokens=10, tail=64, dense_below=0),
    OmniKVPerLayer(filter_layers=(1,), tokens=10, tail=64, dense_below=0),
    InfLLM(block=8, init=8, local=64, topk=2, representatives=2, cached=12, chunk=32),
    MInference(("a_shape", 30, 50)),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_kept_layers_are_neither_the_method_nor_full_attention(small, method):
    """Some layers kept: other logits than either, the rows that this means, and a step run again
    gives the same.
    """
    sessions = Full(), method, KeepsDense(method, (0, 2, 3))
    logits, rows = [], []
    for one in sessions:
        with small.session(one) as session:
            logits.append(played(session))
            rows.append(session.runtime.rows_read(len(session)))
            session.truncate(200)
            again = torch.stack([*map(session.decode, random_ids(205)[200:])])
            assert torch.equal(again, logits[-1][1:])
    whole, alone, got = logits
    assert not torch.allclose(got, whole, **TOLERANCE)
    assert not torch.allclose(got, alone, **TOLERANCE)
    assert rows[2] == [205 if layer in (0, 2, 3) else n for layer, n in enumerate(rows[1])]


@pytest.mark.filterwarnings("ignore:OmniKV with filter_layers")
@pytest.mark.parametrize("method", METHODS[2:], ids=lambda m: m.name)
def test_all_layers_kept_is_full_attention(small, method):
    """In prompts too; of methods that sum no attention in answers, which no column runs so."""
    with small.session(KeepsDense(method, tuple(range(LAYERS)))) as one, small.session() as full:
        torch.testing.assert_close(played(one), played(full), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("method", METHODS[:4], ids=lambda m: m.name)
def test_a_kept_layer_reads_the_bank_and_no_store(small, method):
    """NaN in its store changes nothing, NaN in its oldest row of the bank is seen."""
    with small.session(KeepsDense(method, (0, 2))) as session, torch.inference_mode():
        expected = played(session)[-1]
        token = random_ids(205)[-1]
        for layer in (0, 2):
            for rows in session.runtime.sequences[0].layers[layer]:
                rows.v.fill_(float("nan"))
        with session.fork() as twin:
            assert not twin.decode(3).isnan().any()
        session.truncate(204)
        assert torch.equal(session.decode(token), expected)
        session.bank.kv(2)[1][:, :, 0] = float("nan")
        assert session.decode(3).isnan().any()


@pytest.mark.parametrize(
    "method", [H2O(tokens=30, forget=False), Quest(tokens=48)], ids=lambda m: m.name
)
def test_kept_layers_count_whole(small, method):
    """In what is resident and in what a step reads."""
    held = {}
    for one in (method, KeepsDense(method, (0, 2))):
        held[one] = compare_bytes.measure(small, one, 400, random_ids(300))
    alone, kept = held.values()
    whole = alone.full // LAYERS
    if isinstance(method, H2O):
        assert kept.device == 2 * whole + 5 * alone.device // 7
    else:
        assert kept.device == alone.device == alone.full
    with small.session(method) as a, small.session(KeepsDense(method, (0, 2))) as b:
        for session in (a, b):
            played(session)
        one, other = (s.stats.bytes_read_dense + s.stats.bytes_read_sparse for s in (a, b))
        assert other > one


def test_a_group_whose_own_layer_is_kept_is_gone():
    plan = OmniKVPerLayer(filter_layers=(1,)).plan(CONFIG)
    left = without(plan, (2, 6))
    assert left.sparse_layers == (1, 3, 4, 5) and [g.layers for g in left.groups] == [
        (1,),
        (3,),
        (4,),
        (5,),
    ]
    assert [left.group_of[layer] for layer in (1, 2, 3, 6)] == [0, None, 1, None]
    shared = OmniKV(filter_layers=(1, 4), wait_layers=1).plan(CONFIG)
    assert without(shared, (0, 1, 2)) == shared
    assert [g.layers for g in without(shared, (3, 6)).groups] == [(), ()]


def test_columns_with_layers_left_dense(tiny):
    llm = LLM(str(tiny), dtype="float32", threads=1, method=Full())
    names = wanted(["omnikv@10", "h2o@30,m60", "minference@30"], [], [], controls=True)
    found = variants(Facts(llm, 464, (2,), 1, 64, "omnikv"), names)
    labels = [variant.label for variant in found]
    # OmniKV and its controls leave these layers dense anyway
    assert [label for label in labels if "dense" in label] == [
        "h2o 30% +dense 0-3",
        "minference 30% +dense 0-3",
        "random_eviction_all 30% +dense 0-3",
    ]
    assert labels[labels.index("h2o 30%") + 1] == "h2o 30% +dense 0-3"
    with pytest.raises(SettingError, match="found 9, expected numbers from 0 to 5"):
        variants(Facts(llm, 464, (2,), 1, 64, (0, 9)), names)
    whole = variants(Facts(llm, 464, (2,), 1, 64, tuple(range(6))), [("h2o", "share", 30.0)])
    assert whole[1].method is None and "no sparse layer is left" in whole[1].why
    assert found[labels.index("h2o 30%")].at(464) == "h2o 30% (139 tokens)"
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert REGISTRY[ONE].group == "controls"


# ---------------------------------------------------------------- a run


FEW = ("--turns", "1", "--answers", "1", "--tasks", "kv", "--methods", "omnikv@10")


def test_a_run_goes_on_with_its_own_controls_and_model_only(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(tiny, out, *FEW, "h2o@30", "--dense-layers-kept", "0", "2") == 0
    page = capsys.readouterr().out
    records = read(out)[1:]
    assert {r["name"] for r in records} == {
        *("full", "omnikv", "h2o", "oracle_omnikv", *CONTROLS),
        *(EVICTION_CONTROL, PROMPT_KEPT),
    }
    assert {tuple(r["kept"]) for r in records if r["name"] == "h2o"} == {(), (0, 2)}
    assert "| omnikv_one (control) | 1 + " in page and "| h2o 30% +dense 0,2 |" in page
    sparse = [r for r in records if r["name"] == "omnikv"]
    assert all(0 < r["chosen"] <= 0.1 * 400 + 10 < r["rows"] / r["steps"] for r in sparse)

    def refused(*more):
        assert run(tiny, out, *FEW, "h2o@30", *more) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: ") and "--fresh" in said
        return said

    kept = ("--dense-layers-kept", "0", "2")
    assert "controls was True and is False now" in refused("--no-controls", *kept)
    assert "kept was [0, 2] and is [] now" in refused()
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    spoiled = bytearray((other / "model.safetensors").read_bytes())
    spoiled[-1] ^= 1
    (other / "model.safetensors").write_bytes(spoiled)
    assert "weights was " in refused("--model", str(other), *kept)
    assert read(out)[1:] == records


def test_words_that_are_no_layers(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path, *FEW, "--dense-layers-kept", "first") == 2
    assert "found 'first', expected layer numbers" in capsys.readouterr().err
