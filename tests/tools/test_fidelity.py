"""tools/fidelity: full attention is 0 from itself, a choice of everything too, a broken choice is
not; intervals; what the controls say; resuming and refusing.

The model is random with sharper attention, the tokenizer the shipped one.
"""

import json
import math
import random
import re

import pytest
import torch

from engine import LLM, Full
from tools.common import documents
from tools.common.documents import texts
from tools.common.intervals import over_texts, tail_share, wilson
from tools.compare.at_read import share_at, step_share
from tools.compare.build import Facts
from tools.compare.methods import REGISTRY
from tools.fidelity import cli, stats
from tools.fidelity.columns import asked, columns, filter_sets
from tools.fidelity.equal.tables import lines_of, points
from tools.fidelity.follow import Followed, Stream, decoded, until_difference
from tools.fidelity.needles import hidden, says
from tools.fidelity.work import FILE

LENGTH, POSITIONS, ANSWER = 320, 6, 5
SHARP = 4.0  # times the queries of a random model
RUN = "--lengths 320 --positions 6 --answer 5 --threads 1 --dtype float32".split()


@pytest.fixture(scope="module", autouse=True)
def few():
    """Fewer documents than a measurement takes: reading them is what takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PER_SPLIT", 4)
        patch.setattr(documents, "LARGEST", 6_000)
        for made in (documents._all, documents._identifiers):
            made.cache_clear()
        yield
    for made in (documents._all, documents._identifiers):
        made.cache_clear()


@pytest.fixture(scope="module")
def llm(tiny):
    """The tiny model with layers that look alike and at few tokens: a choice is worth reusing."""
    found = LLM(tiny, dtype="float32", threads=1, method=Full())
    found.load()
    first = found.model.layers[0]
    queries, keys = found.config.q_size, found.config.kv_size
    first.qkv.weight[:queries] *= SHARP
    for layer in found.model.layers:
        layer.qkv.weight[: queries + keys] = first.qkv.weight[: queries + keys]
        layer.o.weight *= 0.3
        layer.down.weight *= 0.1
    return found


@pytest.fixture(scope="module")
def measured(llm):
    """{column: records} on one text, each column once."""
    words = ["omnikv@5,100", "controls@5", "snapkv@30", "streaming_llm@30"]
    sets = filter_sets(llm, ["sharp=1"])
    found = columns(llm, LENGTH, asked(words), sets, [0], 64)
    (text,) = texts(llm.tokenizer, "held-out", LENGTH, 1, ("prose",))
    with Followed(llm, text, POSITIONS, ANSWER, mass=True) as followed:
        return {column.label: followed.records(column) for column in found}


# ---------------------------------------------------------------- one text


def test_full_attention_is_exactly_zero_from_itself(measured):
    assert measured["full"]
    for record in measured["full"]:
        assert set(record["kl"]) == {0.0} and set(record["same"]) == {"1"}


def test_a_choice_of_everything_changes_nothing(measured):
    assert measured["omnikv 100% sharp w0"]
    for record in measured["omnikv 100% sharp w0"]:
        assert max(record["kl"]) < 1e-6 and set(record["same"]) == {"1"}
        assert min(record["mass"].values()) > 0.9999


def test_a_broken_choice_is_worse_and_keeps_less(measured):
    """At the same bytes; the controls are what a broken choice looks like."""
    own, broken = (measured[f"{n} 5% sharp w0"] for n in ("omnikv", "omnikv_random"))
    assert sum(own[-1]["kl"]) < 0.5 * sum(broken[-1]["kl"])
    assert own[-1]["bytes"] == broken[-1]["bytes"]
    one, other = (sum(records[-1]["mass"].values()) for records in (own, broken))
    assert one > other


def test_both_streams_of_every_column_say_what_was_read(measured):
    full = measured["full"]
    for label, records in measured.items():
        assert [r["stream"] for r in records] == ["answer", "text"]
        assert [len(r["kl"]) for r in records] == [ANSWER, POSITIONS]
        assert all(r["bytes"] < f["bytes"] for r, f in zip(records, full)) or label in (
            "full",
            "omnikv 100% sharp w0",
        )
    # 2 heads of 64, K and V, 4 bytes: 16 of the head's 314 tokens and the tail of 64 and the step's
    row, head = 2 * 2 * 64 * 4, LENGTH - POSITIONS
    sparse = measured["omnikv 5% sharp w0"][-1]
    assert sparse["chosen"] == int(0.05 * head) == 15
    tails = [n - (n - 64) // 64 * 64 for n in range(head + 1, LENGTH + 1)]
    rows = sum(15 + tail for tail in tails) / len(tails)
    assert sparse["rows"] == pytest.approx(rows, abs=0.1)
    dense = sum(range(head + 1, LENGTH + 1)) / POSITIONS
    assert sparse["bytes"] == pytest.approx(row * (2 * dense + 4 * rows), abs=1)


def test_steps_that_were_not_sparse_are_no_figures(llm):
    with llm.session(Full(), max_context=64) as session:
        session.prefill(range(20, 40))
        stream = Stream([5])
        stream.add(session.last_logits)
        with pytest.raises(AssertionError, match="0 of 1 decode steps were sparse"):
            decoded(session, stream, sparse=True)


def test_the_first_difference():
    assert until_difference({"same": "1101"}) == 2
    assert until_difference({"same": "0111"}) == 0
    assert until_difference({"same": "111"}) == 3


# ---------------------------------------------------------------- equal bytes, two set-ups

CHOOSE = "omnikv omnikv_random kascade less_is_more quest sparq clusterkv oracle_topk".split()
AT = 0.6  # of the bytes: the tiny model's full layers alone read a third


@pytest.mark.parametrize("name", CHOOSE)
def test_a_budget_of_bytes_is_the_largest_that_reads_no_more(llm, name):
    facts = Facts(llm, LENGTH, (1,), 0, 64)
    entry, told = REGISTRY[name], REGISTRY[name].group == "bounds"
    share = share_at(facts, entry, AT)
    if isinstance(share, str):
        assert name == "kascade" and "kascade.json" in share  # the model has no such file
        return
    read, more = (
        step_share(llm, entry.build(facts, tokens / LENGTH), LENGTH, told)
        for tokens in (round(share * LENGTH), round(share * LENGTH) + 16)
    )
    assert AT - 0.1 < read <= AT < more
    # what it bounds has as many tokens, whatever is read to choose them
    if entry.oracle:
        assert share_at(facts, REGISTRY[entry.oracle], AT) == share or name == "omnikv_random"


def test_bytes_that_cannot_be_had_are_said(llm):
    """The full layers 0 and 1 of 6, and a tail of 64 to 127 rows of 320 in the others."""
    why = share_at(Facts(llm, LENGTH, (1,), 0, 64), REGISTRY["omnikv"], 0.3)
    assert isinstance(why, str) and why.startswith("a step reads 5")


@pytest.fixture(scope="module")
def twice(llm):
    """{column: {stream: record}} with a question of 5 tokens that the methods' steps read."""
    words = ["omnikv@r60,r100", "omnikv_random@r60", "oracle_omnikv@r60", "infllm@r60"]
    found = columns(llm, LENGTH, asked(words), filter_sets(llm, ["sharp=1"]), [0], 64)
    (text,) = texts(llm.tokenizer, "held-out", LENGTH, 1, ("prose",))
    with Followed(llm, text, POSITIONS, 0, question=5) as followed:
        made = {c.label: followed.records(c) for c in [*found, found[0]]}
    return {label: {r["stream"]: r for r in records} for label, records in made.items()}


def test_full_attention_says_the_same_whoever_reads_the_question(twice):
    """Last of all, too: the rows that other columns' steps have left are made anew."""
    assert set(twice["full"]["text"]["kl"]) == {0.0}
    for label in ("full", "omnikv Read 100% sharp w0"):
        assert max(twice[label]["question"]["kl"]) < 1e-6


def test_a_question_that_is_read_sparsely_is_not_the_same(twice):
    for label in ("omnikv Read 60% sharp w0", "omnikv_random Read 60% sharp w0"):
        dense, sparse = (twice[label][stream] for stream in ("text", "question"))
        assert dense["kl"] != sparse["kl"] and len(dense["kl"]) == len(sparse["kl"]) == POSITIONS
        assert dense["bytes"] == sparse["bytes"]


def test_equal_bytes_are_read(twice):
    full = twice["full"]["text"]["bytes"]
    for label, streams in twice.items():
        if "Read 60%" in label:
            for found in streams.values():
                choosing = 0 if label.startswith("oracle") else found["choosing"]
                assert 0.5 < (found["bytes"] + choosing) / full < 0.61
    assert twice["infllm Read 60%"]["text"]["choosing"] > 0  # its blocks' mean keys


def test_wilson_intervals():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(95, 100)
    assert abs(low - 0.8882) < 1e-3 and abs(high - 0.9785) < 1e-3  # published example values
    assert wilson(100, 100)[1] > 0.9999 and wilson(100, 100)[0] > 0.96
    assert wilson(0, 100)[0] == 0.0


def test_the_tables_of_equal_bytes(twice):
    records = [r for streams in twice.values() for r in streams.values()]
    found = points(records, LENGTH)
    assert [p.shown for p in found if p.budget == 60] == [
        p.shown for p in sorted(found, key=lambda p: p.kl["sparse"].mean) if p.budget == 60
    ]
    own = next(p for p in found if p.shown == "omnikv sharp" and p.budget == 60)
    kl = {
        name: sum(twice[f"{name} Read 60%{more}"]["question"]["kl"]) / POSITIONS
        for name, more in (("omnikv", " sharp w0"), ("oracle_omnikv", ""))
    }
    assert own.above.mean == pytest.approx(kl["omnikv"] - kl["oracle_omnikv"])
    page = "\n".join(lines_of(records, LENGTH))
    assert "### 60% of full attention's bytes" in page and "omnikv_random sharp (control)" in page
    assert "oracle_omnikv" not in page and not lines_of(records, LENGTH + 1)


# ---------------------------------------------------------------- figures


def record(name, text, kl, budget=5.0, length=1000, stream="text", filters="even", wait=0):
    label = f"{name} {budget:g}% {filters} w{wait}"
    return {
        "stream": stream,
        "column": label,
        "name": name,
        "budget": budget,
        "filters": filters,
        "wait": wait,
        "text": text,
        "kind": "prose",
        "length": length,
        "kl": kl,
        "same": "1" * len(kl),
    }


@pytest.mark.parametrize("count", [8, 20])
def test_an_interval_covers_the_truth_as_often_as_it_says(count):
    """Texts of 10 positions that differ by text more than by position."""
    rng, covered = random.Random(0), 0
    for _ in range(100):
        values = []
        for text in range(count):
            level = rng.gauss(1.0, 1.0)
            values.append((f"{text}", sum(rng.gauss(level, 0.1) for _ in range(10)), 10))
        found = over_texts(values)
        covered += found.low <= 1.0 <= found.high
    assert 0.91 <= covered / 100 <= 0.99


def test_few_texts_widen_an_interval():
    assert [round(tail_share(n), 4) for n in (6, 10, 1000)] == [0.0024, 0.0086, 0.0248]


def test_more_positions_of_the_same_texts_do_not_narrow_an_interval():
    once = over_texts([(f"{n}", float(n), 1) for n in range(10)])
    often = over_texts([(f"{n}", 50.0 * n, 50) for n in range(10)])
    assert (once.mean, once.low, once.high) == pytest.approx((often.mean, often.low, often.high))
    # a text at two lengths is one text
    both = over_texts([(f"{n}", float(n), 1) for n in range(10) for _ in range(2)])
    assert both.texts == 10 and both.low == pytest.approx(once.low)
    assert over_texts([]) is None
    assert over_texts([("a", 1.0, 1)]).shown() == "1.000 [one text]"


def groups(count=8, **levels):
    """Made columns whose texts differ by far more than the columns do."""
    names = {name: f"omnikv_{name}" if name != "own" else "omnikv" for name in levels}
    found = {}
    for name, level in levels.items():
        some = [record(names[name], f"{n}", [5.0 * n + level] * 4) for n in range(count)]
        found[some[0]["column"]] = some
    return found


def test_controls_that_lose_on_the_same_texts_confirm_a_claim():
    found = stats.verdict(groups(own=0.1, random=0.2, one=0.3, newest=0.2), "omnikv 5% even w0")
    assert found.words == "random, one and newest are clearly worse than OmniKV at the same bytes"
    assert found.differences["random"].low > 0.09


def test_a_control_that_does_as_well_takes_the_claim_away():
    made = groups(own=0.1, random=0.2, one=0.3, newest=0.1)
    found = stats.verdict(made, "omnikv 5% even w0")
    assert found.words == "not tested by this model: newest not clearly worse"


def test_a_control_that_is_worse_on_some_texts_only_takes_the_claim_away_too():
    made = groups(own=0.1, random=0.2, one=0.3, newest=0.1)
    for number, one in enumerate(made["omnikv_newest 5% even w0"]):
        one["kl"] = [level + (0.5 if number % 2 else -0.4) for level in one["kl"]]
    found = stats.verdict(made, "omnikv 5% even w0")
    assert found.differences["newest"].mean == pytest.approx(0.05)
    assert found.words == "not tested by this model: newest not clearly worse"


def test_few_texts_judge_nothing():
    made = groups(5, own=0.1, random=0.2, one=0.3, newest=0.2)
    assert stats.verdict(made, "omnikv 5% even w0").words == "not judged: fewer than 6 texts"


def test_kl_and_agreement_of_known_distributions():
    stream = Stream([7])
    stream.add(torch.tensor([1.0, 1.0]))
    far, same = stream.compare(0, torch.tensor([9.0, 1.0]).log())
    assert far == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)) and same
    assert not stream.compare(0, torch.tensor([0.0, 1.0]))[1]


@pytest.mark.parametrize("field, value", [("wait", 1), ("filters", "spread"), ("budget", 10.0)])
def test_a_control_at_other_settings_says_nothing(field, value):
    made = groups(own=0.1, random=0.2, one=0.3, newest=0.2)
    for one in made["omnikv_random 5% even w0"]:
        one[field] = value
    found = stats.verdict(made, "omnikv 5% even w0")
    assert found.words == "not judged: of the controls, newest, one ran"


# ---------------------------------------------------------------- facts


def test_sentences_lie_at_their_depths_and_are_recognised():
    text = "\n".join(f"line {n:03}" for n in range(100))
    lines = hidden(text, ["first", "last"], [0.25, 0.75]).split("\n")
    assert len(lines) == 102
    assert lines[25] == "first" and lines[76] == "last"
    assert says("The key is 66160.", "66160") and not says("The key is 661601.", "66160")
    assert says("she lives in lisbon", "Lisbon") and not says("Lisbonne", "Lisbon")


# ---------------------------------------------------------------- the program


def run(tiny, out, *more):
    return cli.main(["--model", str(tiny), "--out", str(out), *RUN, *more])


METHODS = ["--methods", "omnikv@30", "omnikv_random@30", "--filters", "sharp=1", "--waits", "0"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A folder in which a run has finished."""
    out = tmp_path_factory.mktemp("fidelity") / "out"
    more = ["--texts", "2", "--kinds", "prose", "code", "--needles", "1", "--questions", "2"]
    assert run(tiny, out, *METHODS, *more) == 0
    return out


def test_a_run_goes_on_where_it_was_stopped(tiny, finished, capsys, monkeypatch):
    whole = (finished / FILE).read_text()
    lines = whole.splitlines()
    assert len(lines) == 1 + 3 * (2 * 2 + 2)
    summary = json.loads((finished / "summary.json").read_text())
    assert {row["column"] for row in summary["rows"]} == {
        "full",
        "omnikv 30% sharp w0",
        "omnikv_random 30% sharp w0",
    }
    (finished / FILE).write_text("\n".join(lines[:4]) + '\n{"stream": "te')
    seen = []
    monkeypatch.setattr(Followed, "records", _seen(Followed.records, seen))
    same = ["--texts", "2", "--kinds", "prose", "code", "--needles", "1", "--questions", "2"]
    assert run(tiny, finished, *METHODS, *same) == 0
    assert len(seen) == 5  # 6 columns of texts, of which one had both its records

    def figures(text):
        found = map(json.loads, text.splitlines()[1:])
        return sorted(json.dumps({k: v for k, v in r.items() if k != "seconds"}) for r in found)

    assert figures((finished / FILE).read_text()) == figures(whole)
    # another column joins those that are there
    assert run(tiny, finished, "--methods", "snapkv@30", "--texts", "1", "--kinds", "prose") == 2
    assert "questions was 2 and is 3 now" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(tiny, tmp_path, capsys, monkeypatch):
    seen, work = [], Followed.records

    def interrupted(self, column):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(column.label)
        return work(self, column)

    monkeypatch.setattr(Followed, "records", interrupted)
    assert run(tiny, tmp_path, *METHODS, "--texts", "1") == 130
    assert "the same command goes on from" in capsys.readouterr().err
    assert len((tmp_path / FILE).read_text().splitlines()) == 1 + 2 * 2
    assert "omnikv 30% sharp w0" in (tmp_path / "report.md").read_text()


def _seen(work, seen):
    def records(self, column):
        seen.append(column.label)
        return work(self, column)

    return records


@pytest.mark.parametrize(
    "more, words",
    [
        (["--positions", "7"], "positions was 6 and is 7 now"),
        (["--dtype", "bfloat16"], "dtype was float32 and is bfloat16 now"),
        (["--split", "search"], "prose 1 @ 320 was"),
        (["--filters", "sharp=2"], "omnikv 30% sharp w0 @ 320 was"),
    ],
)
def test_other_settings_are_refused(tiny, finished, capsys, more, words):
    before = (finished / FILE).read_text()
    same = ["--texts", "2", "--kinds", "prose", "code", "--questions", "2"]
    assert run(tiny, finished, *METHODS, *same, *more) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert (finished / FILE).read_text() == before


def test_the_page_names_controls_and_questions(finished):
    page = (finished / "report.md").read_text()
    assert "| omnikv 30% sharp w0 |" in page
    assert re.search(r"not judged: of the controls, random ran", page)
    assert "## Facts in real text, 320 tokens" in page and "askable" in page
    assert "sharp w0: {1}, 2 full layers" in page


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "--model: found none"),
        (["--positions", "320"], "expected fewer than the shortest text's 320"),
        (["--lengths", "5000"], "found 5000 tokens and 0 for answers, expected at most the 4096"),
        (["--lengths", "200"], "expected at least 256"),
        (["--filters", "deep"], "--filters: found 'deep'"),
        (["--filters", "calibrated"], "has no omnikv.json"),
        (["--methods", "omnikv@m30"], "a budget in bytes"),
        (["--methods", "omnikv@r0"], "budget: found 0"),
        (["--question", "314"], "a question of 314, expected fewer than the shortest text's 320"),
        (["--question", "-1"], "--question: found -1, expected at least 0"),
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--texts", "0"], "nothing to measure"),
        (["--minutes", "0"], "--minutes: found 0"),
    ],
)
def test_nonsense_is_refused_in_one_line(tiny, tmp_path, capsys, flags, words):
    model = ["--model", str(tiny)] if flags else []
    status = cli.main([*model, "--out", str(tmp_path / "out"), *RUN, *flags])
    error = capsys.readouterr().err
    assert status == 2 and words in error and error.count("\n") == 1
    assert not (tmp_path / "out" / FILE).exists()


def test_an_estimate_measures_nothing(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path, *METHODS, "--texts", "1", "--estimate") == 0
    assert "3 columns on 1 texts to do, estimated" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()
