"""tools/compare/cli.py: documents in fair order, resuming, bytes as allocated, both turns, the
findings on made records, bad input.

The model is random, the tokenizer the shipped one.
"""

import json
import random
import re
from dataclasses import replace

import pytest
import torch

from engine import LLM, Full
from engine.base.errors import SettingError, UsageError
from tests.builders import tiny_llm
from tools.compare import bytes as compare_bytes
from tools.compare import claims
from tools.compare import cli as compare
from tools.compare import stats as compare_stats
from tools.compare.build import NEAR, Facts, infllm
from tools.compare.comparison import key_of
from tools.compare.distance import nearer_to_the_oracle
from tools.compare.methods import REGISTRY, Variant, entry_of, variants, wanted
from tools.compare.report import rows_of, write
from tools.compare.resident import beside_eviction
from tools.compare.run import Job, Paper, Reader, Reference, Rules, run_document
from tools.compare.work import Clock, Outside, jobs

TASKS = ["passkey", "kv"]


def record(
    name,
    right,
    seed,
    *,
    kind="share",
    budget=10.0,
    task="kv",
    length=1000,
    question=0,
    turn=1,
    **more,
):
    """A made answer."""
    variant = Variant(name, kind, budget).label
    asked = {
        "variant": variant,
        "name": name,
        "kind": kind,
        "budget": budget,
        "kept": [],
        "task": task,
        "length": length,
        "seed": seed,
        "question": question,
        "turn": turn,
        "depth": 0.5,
        "right": int(right),
    }
    costs = {
        "steps": 10,
        "prompt_seconds": 1.0,
        "decode_seconds": 0.1,
        "bytes_read": 1000,
        "bytes_link": 0,
        "rows": 1110.0,
        "context": 10200,
        "chosen": 31,
    }
    return (
        asked
        | costs
        | {"compared": 8, "same": 7, "kl": 0.8, "tokens": [1], "text": "", "expected": ""}
        | more
    )


def full(right, seed, **more):
    """A made answer of full attention."""
    return record("full", right, seed, kind="none", budget=100.0, **more)


# ---------------------------------------------------------------- order and what is asked for


@pytest.mark.parametrize("answers, questions", [(1, 1), (7, 2), (100, 4)])
def test_documents_go_round_the_cells(answers, questions):
    """However early a run stops, no cell is more than a document ahead of another."""
    found = jobs(["passkey", "number_string", "kv"], [4096, 1024], answers, questions)
    counts = {
        (task, length): 0 for task in ("passkey", "number_string", "kv") for length in (1024, 4096)
    }
    numbers = dict.fromkeys(counts, 0)
    for job in found:
        assert job.number == numbers[job.task, job.length] and 1 <= job.conversations <= questions
        numbers[job.task, job.length] += 1
        counts[job.task, job.length] += job.conversations
        alive = [numbers[cell] for cell in numbers if counts[cell] < answers]
        assert not alive or max(alive) - min(alive) <= 1
    assert set(counts.values()) == {answers}


def test_methods_and_budgets_that_are_asked_for():
    found = wanted(["t1"], [3, 10, 30], [75])
    assert found[0] == ("full", "none", 100.0) and found.count(("full", "none", 100.0)) == 1
    assert (
        ("omnikv", "share", 6.67) in found
        and ("omnikv", "mem", 75.0) in found
        and ("brutal_offload", "none", 100.0) in found
    )
    assert {name for name, _, _ in found} == {
        name for name, entry in REGISTRY.items() if entry.group == "t1"
    }
    assert wanted(["omnikv@5,m50"], [3], [75]) == [
        ("full", "none", 100.0),
        ("omnikv", "share", 5.0),
        ("omnikv", "mem", 50.0),
    ]
    assert wanted(["quest@r20"], [3], [75])[1:] == [("quest", "read", 20.0)]
    assert wanted(["omnikv@t128"], [3], [75])[1:] == [("omnikv", "tokens", 128.0)]
    for words in (
        ["omnikv@t"],
        ["omnikv@t0"],
        ["omnikv@t1.5"],
        ["omnikv@tnan"],
        ["nothing"],
        ["omnikv@"],
        ["omnikv@x"],
        ["omnikv@0"],
        ["omnikv@101"],
        ["omnikv@nan"],
        ["omnikv@m-1"],
        ["omnikv@r"],
    ):
        with pytest.raises(UsageError):
            wanted(words, [3], [])


def test_a_budget_in_tokens_is_the_same_at_every_length():
    """Also of those who choose and of those who evict; one as long as the session is refused."""
    llm = tiny_llm(Full())
    names = wanted(["omnikv@t40,t2048", "h2o@t40", "snapkv@t40"], [3], [], controls=True)
    for length in (300, 901):
        found = {v.label: v for v in variants(Facts(llm, length, (1, 4), 0), names)}
        for name in ("omnikv", "omnikv_random", "oracle_omnikv", "h2o", "random_eviction_all"):
            method = found[f"{name} 40 tokens"].method
            assert (method.tokens, method.share) == (40, None)
        assert found["omnikv 2,048 tokens"].method is None
        assert f"a session of {length:,} tokens" in found["omnikv 2,048 tokens"].why


def test_every_method_of_the_engine_can_be_compared():
    from engine.methods.registry import methods

    oracles = {entry.oracle for entry in REGISTRY.values()}  # of a method's own layers
    # of a model's files
    own = {
        "pod_untrained",
        "pod_snapkv",
        "double_sparsity",
        "duo",
        "razor",
        "kascade",
        "kascade_tiles",
        "hshare",
    }
    made = {
        type(REGISTRY[name].build(Facts(None, 1024, (2,)), 0.3))
        for name in REGISTRY
        if name not in own | oracles
    }
    known = {name: cls for name, cls in methods().items() if cls.__module__.startswith("engine.")}
    assert {name for name, cls in known.items() if cls not in made} <= own


def test_a_name_says_at_which_r_prompts_are_read():
    """As Table 14 of the paper has it; no name enters the table, so groups stay what they are."""
    before = list(REGISTRY)
    for ratio in (1, 8, 40):
        name = f"omnikv_prefill_r{ratio}"
        assert wanted([f"{name}@6.67"], [], [])[1:] == [(name, "share", 6.67)]
        entry = entry_of(name)
        made = entry.build(Facts(None, 1024, (2,)), 0.3)
        assert (made.prefill_ratio, made.selector, made.share) == (ratio, "uniform", 0.3)
        assert (entry.reads, entry.head) == ("own", REGISTRY["omnikv_prefill"].head)
    for name in ("omnikv_prefill_r0", "omnikv_prefill_r", "omnikv_prefill_r1x", "omnikv_r1"):
        with pytest.raises(UsageError, match=f"unknown method '{name}'"):
            entry_of(name)
    assert list(REGISTRY) == before


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("capacity", "block"),
    [(1100, 4), (4096, 4), (9000, 8), (33000, 32), (131072, 128), (10**6, 128)],
)
def test_infllm_reads_more_blocks_of_one_size_where_its_budget_grows(capacity, block):
    """A token in a large block has a poor representative: a larger budget must not mean less."""
    built = [infllm(Facts(None, capacity), share) for share in (0.03, 0.1, 0.3, 0.9)]
    assert [m.block for m in built] == [block] * 4
    assert [m.topk for m in built] == sorted({m.topk for m in built})
    for method, share in zip(built, (0.03, 0.1, 0.3, 0.9)):
        read = method.init + method.local + method.topk * method.block
        assert read == max(34, round(share * capacity))
        assert method.local >= method.topk * method.block >= method.local - 2 * block - method.init


def test_a_paired_difference_is_never_certain_and_knows_documents():
    assert compare_stats.paired([]) is None
    same = compare_stats.paired([(i, 0) for i in range(98)])
    # (0 + 1) ** 0.5 / (N + 2)
    assert same.mean == 0 and same.high == -same.low == pytest.approx(1.96 / 100)
    # Agresti and Min (2005): b = 10 and c = 4 of 100 pairs
    some = compare_stats.paired([(i, v) for i, v in enumerate([1] * 10 + [-1] * 4 + [0] * 86)])
    assert some.high - some.mean == pytest.approx(1.96 * (15 - 36 / 102) ** 0.5 / 102)
    clustered = compare_stats.paired([(i // 20, v) for i, v in enumerate([1] * 20 + [0] * 80)])
    assert (
        clustered.high - clustered.low > 1.5 * (some.high - some.low) and clustered.documents == 5
    )


@pytest.mark.parametrize(
    "wrong, count, outcome",
    [(0, 400, "holds"), (40, 400, "does not hold"), (1, 40, "undecided"), (0, 10, "undecided")],
)
def test_within_a_point(wrong, count, outcome):
    records = [full(1, s) for s in range(count)] + [
        record("omnikv", s >= wrong, s, budget=6.67) for s in range(count)
    ]
    found = claims.within_a_point(records)
    assert found.outcome == outcome and f"over {count} questions" in found.numbers[0]
    assert f"{(count - wrong) / count:.3f} against 1.000" in found.numbers[0]
    assert claims.within_a_point(records[:count]).outcome == "not run"


def test_only_questions_that_both_answered_are_compared():
    records = [full(1, s) for s in range(50)] + [
        record("omnikv", 1, s, budget=6.67) for s in range(40, 90)
    ]
    assert "over 10 questions" in claims.within_a_point(records).numbers[0]
    records = [full(1, 1, turn=2), record("omnikv", 1, 1, budget=6.67)]
    assert claims.within_a_point(records).outcome == "not run"


@pytest.mark.parametrize(
    "right, reach, outcome",
    [(25, 90, "holds"), (35, 90, "holds"), (60, 90, "does not hold"), (10, 20, "undecided")],
)
def test_two_stage_accuracy_against_the_budget(right, reach, outcome):
    """Of 100 at budget 30%: up to noise above it holds; a model that reaches no more itself decides
    nothing.
    """
    records = [full(s < reach, s, task="two_stage") for s in range(100)]
    records += [record("h2o", s < right, s, task="two_stage", budget=30.0) for s in range(100)]
    found = claims.two_stage_bound(records)
    assert (
        found.outcome == outcome
        and f"{right / 100:.3f}" in found.numbers[0]
        and f"full attention {reach / 100:.3f}" in found.numbers[0]
    )
    assert claims.two_stage_bound(records[:100]).outcome == "not run"


def turns(name, first, second, **more):
    """100 questions in both turns; the first `first` and `second` of them right."""
    made = full if name == "full" else lambda right, seed, **m: record(name, right, seed, **m)
    return [
        made(s < n, s, turn=turn, **more)
        for turn, n in ((1, first), (2, second))
        for s in range(100)
    ]


@pytest.mark.parametrize(
    "evictor, omnikv, outcome",
    [
        ((80, 40), (90, 89), "holds"),
        ((90, 90), (90, 90), "undecided"),
        ((80, 40), (90, 50), "does not hold: OmniKV loses too"),
        ((90, 100), (90, 90), "does not hold"),
    ],
)
def test_second_turn_losses(evictor, omnikv, outcome):
    records = turns("full", 90, 90) + turns("h2o", *evictor) + turns("omnikv", *omnikv)
    found = claims.second_turn(records, {"h2o", "snapkv"})
    assert found.outcome == outcome
    line = next(line for line in found.numbers if line.startswith("h2o"))
    assert (
        f"loses {90 - evictor[1]:+.1f} points" in line and f"{90 - evictor[0]:+.1f} points" in line
    )
    assert f"{evictor[0] - evictor[1]:+.1f} points" in line.split(";")[1]
    assert (
        claims.second_turn(turns("full", 90, 90) + turns("omnikv", 90, 90), {"h2o"}).outcome
        == "not run"
    )


def test_resident_cells_do_not_enter_the_findings():
    records = (
        turns("full", 90, 90)
        + turns("omnikv", 90, 90)
        + turns("h2o", 90, 90)
        + turns("h2o", 90, 10, kind="mem", budget=75.0)
    )
    assert "loses +0.0 points" in next(
        n for n in claims.second_turn(records, {"h2o"}).numbers if n.startswith("h2o")
    )


def test_report_tables_json_and_plots(tmp_path):
    random.seed(0)
    records = [
        r
        for task in ("two_stage", "kv")
        for turn in (1, 2)
        for r in (
            *(
                full(random.random() < 0.9, s, task=task, turn=turn, depth=s / 20)
                for s in range(20)
            ),
            *(
                record(
                    name,
                    random.random() < budget / 40 + 0.2,
                    s,
                    task=task,
                    turn=turn,
                    budget=float(budget),
                    depth=s / 20,
                )
                for s in range(20)
                for name in ("h2o", "omnikv")
                for budget in (3, 10, 30)
            ),
        )
    ]
    held = {
        "device": 2_000_000,
        "metadata": 10,
        "buffers": 0,
        "host": 0,
        "peak": 3_000_000,
        "full": 4_000_000,
        "resident": 0.5,
    }
    row = {
        "reads": "shared",
        "evicts": False,
        "control": False,
        "kept": [],
        "group": "t1",
        "held": held,
    }
    by = {
        r["variant"]: {
            "1000": {
                **row,
                "name": r["name"],
                "kind": r["kind"],
                "budget": r["budget"],
                "evicts": r["name"] == "h2o",
            }
        }
        for r in records
    }
    by["h2o Mem 30%"] = {
        "1000": {**row, "name": "h2o", "kind": "mem", "budget": 30.0, "alias": "h2o 30%"}
    }
    by["omnikv Mem 30%"] = {
        "1000": {
            "name": "omnikv",
            "kind": "mem",
            "budget": 30.0,
            "evicts": False,
            "why": "too much",
        }
    }
    runs = [
        {
            "commit": "c",
            "hardware": "h",
            "load": 1.5,
            "processes": 2,
            "threads": 1,
            "packages": {"torch": "2", "triton": None},
            "documents": 40,
            "documents_left": 30,
            "seconds": 1800.0,
            "estimated_seconds": 7200.0,
        }
    ]
    # killed by hand
    runs.append(
        {key: value for key, value in runs[0].items() if key not in ("documents_left", "seconds")}
    )
    config = {
        "model": "m",
        "variants": by,
        "settings": {"judge": "exact"},
        "device": "cpu",
        "dtype": "float32",
        "answers": 20,
        "runs": runs,
    }
    page = write(records, config, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [f["claim"] for f in report["findings"]] == [
        *(f.claim for f in claims.findings(records, {"h2o"})),
        beside_eviction(records, {"h2o"}).claim,
        nearer_to_the_oracle(records).claim,
    ]
    cell = next(
        c
        for c in report["cells"]
        if c["variant"] == "h2o 30%" and c["task"] == "kv" and c["turn"] == 2
    )
    own = [
        r["right"]
        for r in records
        if r["variant"] == "h2o 30%" and r["task"] == "kv" and r["turn"] == 2
    ]
    assert (
        (cell["right"], cell["asked"]) == (sum(own), 20)
        and cell["ms"] == pytest.approx(10.0)
        and cell["read"] == 100
    )
    assert cell["kl"] == pytest.approx(0.1) and (cell["same"], cell["compared"]) == (140, 160)
    first = [
        r["right"]
        for r in records
        if r["variant"] == "h2o 30%" and r["task"] == "two_stage" and r["turn"] == 1
    ]
    assert f"| h2o 30% | 31 + 80 tail = 111 rows, 10.9% | 20 | {sum(first) / 20:.2f} [" in page
    aliases = [c for c in rows_of(records, config) if c["variant"] == "h2o Mem 30%"]
    assert len(aliases) == 4 and {c["right"] for c in aliases} == {
        c["right"] for c in report["cells"] if c["variant"] == "h2o 30%"
    }
    assert "10 of 40 documents in 0.50 hours (all of them estimated at 2.00)" in page
    assert "killed, of 40 documents those it had done (all of them estimated at 2.00)" in page
    assert "- omnikv Mem 30%: too much" in page and "| 2.00 MB | 50.0 |" in page
    pytest.importorskip("matplotlib")
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "first-1000.png",
        "second-1000.png",
        "depth.png",
    }


# ---------------------------------------------------------------- a real (tiny) model


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny), dtype="float32", threads=1, method=Full())


def facts(llm, capacity=464):
    return Facts(llm, capacity, (2,), 1, 64)


def storages(thing, seen, skip):
    """{address: bytes} of all tensors that hang below an object of ours."""
    if id(thing) in seen or isinstance(thing, skip):
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        inside = [*thing, *vars(thing).values()] if hasattr(thing, "__dict__") else thing
    elif type(thing).__module__.startswith(("engine", "kernels")):
        inside = [getattr(thing, name) for name in vars(thing)]
    else:
        return {}
    return {k: v for part in inside for k, v in storages(part, seen, skip).items()}


def every_variant(llm, capacity=464, budgets=(30, "m95")):
    names = [
        (name, "mem" if str(b).startswith("m") else "share", float(str(b).strip("m")))
        for name, e in REGISTRY.items()
        for b in budgets
        if e.budget and (not str(b).startswith("m") or e.at_bytes)
    ] + [(n, "none", 100.0) for n, e in REGISTRY.items() if not e.budget]
    return variants(facts(llm, capacity), names)


def test_bytes_are_what_is_allocated(llm):
    """Walks every tensor of a session's bank and runtime; the parts add up to what they hold, and
    to the plan that chose the budget.
    """
    from engine.bank.base import Bank
    from engine.bank.pool.host_pool import Block, HostPool
    from engine.methods.base import Setup

    ids, reached = list(range(5, 468)), 0
    for variant in every_variant(llm):
        if variant.method is None:
            assert re.search(r"\d", variant.why)
            continue
        with compare_bytes.offloaded(llm, variant.method, 464).session() as session:
            session.prefill(ids)
            session.decode(7)
            held = compare_bytes.held(session)
            bank = sum(storages(session.bank, set(), (HostPool, Block)).values())
            runtime = sum(storages(session.runtime, set(), (Setup, Bank)).values())
            assert held.full == llm.config.num_layers * 464 * llm.config.kv_bytes(4)
            own = (
                session.stats.store_bytes if variant.entry.evicts else session.stats.selection_bytes
            )
            # a few numbers beside them, and FastGen's marks of every id
            marks = 2 * llm.config.vocab_size if variant.name == "fastgen" else 0
            assert own <= runtime <= own + 4096 + marks, variant.label
            assert (held.peak, held.host) == (bank + own, session.stats.host_bytes)
            assert held.device + held.metadata + held.buffers == (
                own if variant.entry.evicts else held.peak
            )
            if variant.entry.evicts:
                rows = [rows for layer in session.runtime.sequences[0].layers for rows in layer]
                assert held.device == sum(storages([(r.k, r.v) for r in rows], set(), ()).values())
            assert (held.host > 0) == session.bank.tiered
        if variant.kind == "mem":
            reached += 1
            assert held.resident <= variant.budget / 100 + (NEAR if variant.entry.evicts else 0)
            assert held.resident == compare_bytes.device_share(llm, variant.method, 464)
    assert reached


def test_a_resident_budget_is_used_up(llm):
    """One token more would not fit; and what cannot fit at all says what takes the room."""
    made = REGISTRY["omnikv"].at_bytes(facts(llm), 0.95)
    assert (
        compare_bytes.device_share(llm, made, 464)
        <= 0.95
        < compare_bytes.device_share(llm, replace(made, tokens=made.tokens + 1), 464)
    )
    assert "dense layers of 6" in REGISTRY["omnikv"].at_bytes(facts(llm), 0.2)


def test_equal_methods_are_run_once(llm):
    found = variants(
        facts(llm), [("omnikv", "share", 30.0), ("omnikv", "mem", 96.0), ("omnikv", "mem", 96.0)]
    )
    assert not found[0].alias and not found[1].alias and found[2].alias == "omnikv Mem 96%"
    # of the same budget, and forgets: another run, whose bytes are held
    found = variants(facts(llm), [("h2o", "share", 50.0), ("h2o", "mem", 50.0)])
    assert not found[1].alias and replace(found[0].method, forget=True) == found[1].method


def test_a_plan_without_sparse_layers_is_refused(llm):
    with pytest.raises(SettingError, match="no sparse layer"), pytest.warns(UserWarning):
        variants(Facts(llm, 464, (4,), 1, 64), [("omnikv", "share", 30.0)])


def test_a_conversation_is_what_the_template_writes(llm):
    paper = Paper(llm, Job("kv", 400, 3, 2), Rules(2))
    words, tokens = llm.tokenizer, llm.tokenizer.encode("the answer is 5.", special=False)
    ids = paper.turns.shared + paper.turns.own[0] + tokens + paper.turns.following(0, 1)
    asked = {
        "role": "user",
        "content": f"{paper.sample.document.rstrip()}\n\n{paper.sample.questions[0]}",
    }
    said, again = (
        {"role": "assistant", "content": "the answer is 5."},
        {"role": "user", "content": paper.sample.questions[1]},
    )
    whole = words.encode(words.render([asked, said, again]), special=False)
    assert "".join(map(words.token, ids)) == "".join(map(words.token, whole))
    assert [paper.second(q) for q in range(2)] == [1, 0]
    assert Paper(llm, Job("kv", 400, 3, 2), Rules(2, turns=1)).second(0) is None


@pytest.mark.parametrize("most", [1, 3, 60])
def test_a_second_question_follows_every_token_of_the_answer(llm, most):
    """Also the last one, which a cut answer leaves out of the bank."""
    paper, variant = (
        Paper(llm, Job("kv", 400, 3, 2), Rules(2, max_tokens=most)),
        Variant("full", "none", 100.0, Full()),
    )
    with Reader(llm, paper, 700) as reader, llm.session(Full(), max_context=700) as session:
        prompt = paper.turns.shared + paper.turns.own[0]
        first, second = reader._converse(session, variant, 0, prompt)
        whole = prompt + first["tokens"] + paper.turns.following(0, 1) + second["tokens"]
        assert session.ids == whole[: len(session.ids)] and len(whole) - len(session.ids) <= 1
        assert first["steps"] == min(most - 1, len(first["tokens"])) and (
            first["question"],
            second["question"],
        ) == (0, 1)


def test_a_base_model_is_asked_in_plain_text(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "template", None)
    paper = Paper(llm, Job("kv", 400, 3, 2), Rules(2))
    text = llm.tokenizer.decode(paper.turns.shared + paper.turns.own[1])
    assert text.endswith(f"Question: {paper.sample.questions[1]}\nAnswer:")
    assert (
        llm.tokenizer.decode(paper.turns.following(0, 1))
        == f"\nQuestion: {paper.sample.questions[1]}\nAnswer:"
    )
    assert paper.text(llm.tokenizer.encode("48213\nQuestion: more", special=False)) == "48213"


def test_agreement_counts_up_to_the_parting_token():
    from tools.compare.run import Answer

    path, answer = Reference(), Answer()
    for token in (1, 2, 3):
        logits = torch.full((5,), -1.0)
        logits[token] = 4.0
        path.add(logits, token)
        keep = logits
    assert path.compare(
        answer, torch.tensor([-1.0, 4, -1, -1, -1]), 1
    ) and answer.kl == pytest.approx(0, abs=1e-7)
    other = torch.tensor([-1.0, -1, -1, 4, -1])
    assert not path.compare(answer, other, 3)
    assert (answer.compared, answer.same) == (2, 1)
    p, q = (
        torch.log_softmax(torch.tensor([-1.0, -1, 4, -1, -1]).double(), 0),
        torch.log_softmax(other.double(), 0),
    )
    assert answer.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-5)
    # nothing is compared beyond full attention's end
    assert path.compare(answer, keep, 3) and not path.compare(answer, keep, 3)


def apart(llm, paper, variant, capacity):
    """Records of both turns with a session per conversation that reads document and question in one
    call.
    """
    reader, out = Reader(llm, paper, capacity), []
    for first in range(paper.job.conversations):
        with llm.session(
            variant.method, max_context=capacity, offload=variant.entry.place
        ) as session:
            out += reader._converse(
                session, variant, first, paper.turns.shared + paper.turns.own[first]
            )
    return out


def test_the_head_of_a_document_is_read_once_where_its_end_goes_with_the_question(tiny):
    """H2O+, SnapKV+, SirLLM, Scissorhands, OmniKV-prefill, QuoKA, XAttention: the tokens, rows and
    reading times of a session that reads both together.
    """
    llm = LLM(str(tiny), dtype="float32", threads=1, method=Full(), chunk=64)
    found = [
        v
        for v in every_variant(llm, 1300, budgets=(10, 40))
        if v.method is not None and v.entry.head
    ]
    segmented = {"h2o_plus", "snapkv_plus", "sirllm"}
    assert {v.name for v in found} == segmented | {
        "scissorhands",
        "omnikv_prefill",
        "quoka",
        "xattention",
    }
    paper = Paper(llm, Job("kv", 1100, 5, 2), Rules(2, max_tokens=4))
    shared, _, once = run_document(
        llm, paper, [Variant("full", "none", 100.0, Full()), *found], 1300
    )
    length = len(paper.turns.shared)
    for variant in found:
        head = variant.entry.head(llm, variant.method, length)
        whole = 500 if variant.name in ("h2o_plus", "snapkv_plus") else 64
        if variant.name == "sirllm":
            whole = variant.method.parts(variant.method.tokens).segment
        assert length // 3 < head < length and head % whole == 0
        mine = [r for r in shared if r["variant"] == variant.label]
        for record, other in zip(mine, apart(llm, paper, variant, 1300), strict=True):
            assert (record["tokens"], record["bytes_read"]) == (
                other["tokens"],
                other["bytes_read"],
            ), variant.label
    assert 0 < once < sum(r["prompt_seconds"] for r in shared)


def test_one_reading_serves_as_well_as_many(llm):
    """Methods that leave prefill alone, or read a document once, answer as they do with a session
    per question, in both turns.
    """
    found = [v for v in every_variant(llm, budgets=(10,)) if v.method is not None]
    assert {v.entry.reads for v in found} == {"shared", "own"} and any(
        v.entry.evicts for v in found
    )
    paper = Paper(llm, Job("kv", 300, 5, 2), Rules(2, max_tokens=4))
    shared, _, _ = run_document(llm, paper, found, 700)
    assert len(shared) == 4 * len(found)
    for variant in found:
        # their pieces end where a reading ends, and document and question are two readings;
        # MInference estimates by the newest queries of each
        if variant.name in ("infllm", "minference"):
            continue
        records = apart(llm, paper, variant, 700)
        assert [r["tokens"] for r in records] == [
            r["tokens"] for r in shared if r["variant"] == variant.label
        ], variant.label
        assert all(r["steps"] and r["decode_seconds"] > 0 and r["bytes_read"] > 0 for r in records)
    by = {v.label: [r for r in shared if r["variant"] == v.label] for v in found}
    less = {
        label: sum(r["bytes_read"] for r in rows) / sum(r["steps"] for r in rows)
        for label, rows in by.items()
    }
    assert all(less[v.label] < less["full"] for v in found if v.entry.sparse)
    assert {(r["question"], r["turn"]) for r in by["full"]} == {(0, 1), (1, 2), (1, 1), (0, 2)}


@pytest.mark.parametrize("word", ["full", "omnikv@10", "quest@30", "snapkv@30", "h2o@30"])
def test_questions_that_the_methods_own_steps_read(llm, word):
    """Token by token as in a session by hand; what the question reads is not counted as an
    answer's.
    """
    found = variants(Facts(llm, 364, (2,)), wanted([word], [], []))
    paper = Paper(llm, Job("kv", 300, 5, 2), Rules(2, max_tokens=4))
    records, _, _ = run_document(llm, paper, found, 700, steps=True)
    variant = found[-1]
    mine = [r for r in records if r["variant"] == variant.label and r["turn"] == 1]
    alone = variant.entry.reads == "own"
    for first, record in enumerate(mine):
        with llm.session(variant.method if alone else Full(), max_context=700) as session:
            session.prefill(paper.turns.shared)
            session.set_method(variant.method)
            for token in paper.turns.own[first]:
                logits = session.decode(token)
            before, said = session.stats, []
            while len(said) < 4 and int(logits.argmax()) not in llm.end_token_ids:
                said.append(int(logits.argmax()))
                logits = session.decode(said[-1]) if len(said) < 4 else logits
            after = session.stats
        assert record["tokens"] == said
        read = [s.bytes_read_sparse + s.bytes_read_dense for s in (before, after)]
        assert record["bytes_read"] == read[1] - read[0]
        assert record["steps"] == after.decode_steps - before.decode_steps


def test_a_step_that_was_not_sparse_is_an_error(llm):
    from engine import OmniKV

    variant = Variant(
        "omnikv", "share", 10.0, OmniKV(filter_layers=(2,), share=0.1, tail=64, dense_below=100_000)
    )
    with pytest.raises(AssertionError, match="not sparse"):
        run_document(
            llm,
            Paper(llm, Job("kv", 400, 5, 1), Rules(2)),
            [Variant("full", "none", 100.0, Full()), variant],
            700,
        )


def test_time_left_follows_what_documents_took():
    clock = Clock.__new__(Clock)
    clock.fixed, clock.token, clock.lengths = (
        {1024: (1.0, 2.0)},
        {1024: 0.5},
        {("kv", 1024): 10, ("facts", 1024): 20},
    )
    clock.took, clock.ratio = {}, []
    one, other = Job("kv", 1024, 0, 2), Job("facts", 1024, 0, 1)
    assert clock.expected(one) == 1 + 2 * (2 + 5) and clock.expected(other) == 1 + 2 + 10
    clock.done(one, 30.0)
    # half as fast as the warm-up said
    assert clock.expected(one) == 30.0 and clock.expected(other) == 2 * 13
    assert clock.left([one, other], 2) == 28.0


def run(tiny, out, *more):
    return compare.main(
        [
            "--model",
            str(tiny),
            "--dtype",
            "float32",
            "--out",
            str(out),
            "--processes",
            "1",
            "--methods",
            "omnikv@10,m95",
            "omnikv_prefill@30",
            "brutal_offload",
            "--tasks",
            *TASKS,
            "--lengths",
            "400",
            "--answers",
            "3",
            "--filters",
            "2",
            "--wait",
            "1",
            "--threads",
            "1",
            "--max-tokens",
            "3",
            "--questions",
            "2",
            *more,
        ]
    )


def read(out):
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def test_a_run_stops_in_time_and_goes_on(tiny, tmp_path, capsys):
    other = "--seed", "9"  # an estimate of other settings binds nobody
    assert run(tiny, tmp_path, "--estimate", "--methods", "omnikv@10", *other) == 0
    said = capsys.readouterr()
    assert (
        "4 documents to do, estimated" in said.err
        and "hours" in said.err
        and not said.out
        and len(read(tmp_path)) == 1
    )
    assert run(tiny, tmp_path, "--minutes", "0.001", "--methods", "omnikv@10") == 0
    assert (
        "stopped after 0.001 minutes with 4 of 4 documents to do" in capsys.readouterr().err
        and len(read(tmp_path)) == 1
    )
    assert run(tiny, tmp_path) == 0
    page = capsys.readouterr().out
    header, *records = read(tmp_path)
    per_document = {(r["task"], r["seed"]): 0 for r in records}
    for r in records:
        per_document[r["task"], r["seed"]] += 1
    assert per_document == {
        (task, seed): 11 * 2 * conversations
        for task in TASKS
        for seed, conversations in ((0, 2), (1, 1))
    }
    order = [(r["seed"], TASKS.index(r["task"])) for r in records]
    assert order == sorted(order)
    keys = [key_of(r) for r in records]
    assert len(set(keys)) == len(keys)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (
        "share=0.1" in config["variants"]["omnikv 10%"]["400"]["method"]
        and "dense_below=0" in header["methods"]["omnikv 10% @ 400"]
    )
    assert config["variants"]["omnikv Mem 95%"]["400"]["held"]["resident"] <= 0.95
    assert (config["runs"][0]["documents"], config["runs"][0]["documents_left"]) == (
        4,
        0,
    ) and config["runs"][0]["seconds"] > 0
    assert (
        [run["processes"] for run in config["runs"]] == [1]
        and config["runs"][0]["commit"]
        and config["runs"][0]["hardware"]
    )
    assert (
        re.search(r"\| omnikv Mem 95% \| [^|]* rows, [^|]* \| 3 \|", page)
        and (tmp_path / "report.md").read_text() == page[: page.index("\nreport, answers")]
    )

    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    # killed in the middle of a line, in the last document but one
    half = '\n{"variant": "omni'
    (tmp_path / "answers.jsonl").write_text("\n".join(lines[: -len(lines) // 4]) + half)
    assert run(tiny, tmp_path) == 0
    again = {key_of(r): r["tokens"] for r in read(tmp_path)[1:]}
    assert again == {key_of(r): r["tokens"] for r in records}
    assert len(json.loads((tmp_path / "config.json").read_text())["runs"]) == 2
    capsys.readouterr()
    # more columns beside those that are there
    assert run(tiny, tmp_path, "--methods", "quest@30") == 0
    page = capsys.readouterr().out
    assert re.search(r"\| quest 30% \| [^|]* \| 3 \|", page) and "| omnikv Mem 95% |" in page
    assert run(tiny, tmp_path, "--seed", "5") == 2
    assert "--fresh" in capsys.readouterr().err


def test_two_processes_answer_what_one_does(tiny, tmp_path, capsys):
    few = ("--methods", "omnikv@10")
    assert (
        run(tiny, tmp_path / "one", *few) == 0
        and run(tiny, tmp_path / "two", *few, "--processes", "2") == 0
    )
    one, two = (
        {key_of(r): (r["tokens"], r["compared"], r["same"]) for r in read(tmp_path / name)[1:]}
        for name in ("one", "two")
    )
    assert one == two and "; 2 process(es) of 1 thread(s)" in capsys.readouterr().out


def test_a_worker_that_fails_ends_the_run_in_one_line(tiny, tmp_path, capsys, monkeypatch):
    class Failing(Outside):
        def __init__(self, order, processes):
            from dataclasses import replace

            super().__init__(replace(order, model="/nowhere/at/all"), 1)

    monkeypatch.setattr(compare, "Outside", Failing)
    assert run(tiny, tmp_path, "--processes", "2", "--methods", "omnikv@10") != 0
    assert "nowhere" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "more, said",
    [
        (("--tasks", "nothing"), "unknown task"),
        (("--methods", "nothing"), "unknown method"),
        (("--methods", "omnikv@0"), "per cent above 0"),
        (("--shares", "130", "--methods", "omnikv"), "at most 100"),
        (("--lengths", "100000"), "do not fit"),
        (("--lengths", "30"), "needs at least"),
        (("--answers", "0"), "at least 1"),
        (("--minutes", "0"), "above 0"),
        (("--processes", "0"), "at least 1"),
        (("--filters", "9"), "filter_layers"),
        (("--model", "/nowhere/at/all"), "nowhere"),
    ],
)
def test_bad_input_is_one_line(tiny, tmp_path, capsys, more, said):
    assert run(tiny, tmp_path, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_help_names_every_method(capsys):
    with pytest.raises(SystemExit) as stop:
        compare.arguments(["--help"])
    shown = capsys.readouterr().out
    assert (
        stop.value.code == 0
        and all(name in shown for name in REGISTRY)
        and "python -m tools.compare" in shown
    )


def test_a_template_gets_time_and_is_asked_little(llm, monkeypatch):
    """A busy machine may stop the template's process; and one document's dialogues are rendered
    once, however many methods answer.
    """
    from engine.base.errors import TemplateError

    asked, render = [], llm.tokenizer.render

    def slow(messages):
        asked.append(messages)
        if len(asked) % 3:
            raise TemplateError("did not end within 2 s")
        return render(messages)

    monkeypatch.setattr(llm.tokenizer, "render", slow)
    turns = Paper(llm, Job("kv", 400, 3, 2), Rules(2)).turns
    assert [turns.following(0, 1) for _ in range(5)] and len(asked) == 3 * 3
    monkeypatch.setattr(llm.tokenizer, "render", lambda messages: asked[10**6])
    with pytest.raises(IndexError):
        turns.following(1, 0)


def test_a_template_that_rewrites_history_is_refused(llm, monkeypatch):
    render = llm.tokenizer.render
    monkeypatch.setattr(
        llm.tokenizer,
        "render",
        lambda messages: ("new " if len(messages) > 1 else "") + render(messages),
    )
    with pytest.raises(UsageError, match="--turns 1"):
        Paper(llm, Job("kv", 400, 3, 2), Rules(2)).turns.following(0, 1)
