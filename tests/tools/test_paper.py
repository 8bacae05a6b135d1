"""tools.paper: names, reasons, the page's differences, a run that goes on, and the meters against
independent computations.

Stops: two tables of one name, a table that neither runs nor says why, a figure that is subtracted
across models or has lost its sign, a run that measures again what it has, choices counted over
generated tokens, column sums of one chunk only.
"""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from engine import LLM, Full
from engine.base.errors import UsageError
from tests.builders import random_ids, tiny_llm
from tests.tools.test_calibrate import all_queries
from tools.common.program import POCKET
from tools.compare.methods import entry_of, wanted
from tools.paper import cli, programs, suites, values
from tools.paper.lines import run as lines
from tools.paper.meters.answers import asked, follow
from tools.paper.meters.heavy import HeavyMeter, Summed
from tools.paper.meters.sets import SetMeter
from tools.paper.papers import TABLES, adakv, infllm, omnikv, pod
from tools.paper.pictures import cli as pictures
from tools.paper.pictures import draw
from tools.paper.programs import argv_of, at_depth
from tools.paper.report import markdown
from tools.paper.table import Command, Table
from tools.paper.values import Value
from tools.tasks import TASKS

PICTURE = "--length 200 --steps 3 --share 10 --layers 1 3 --threads 1 --dtype float32".split()
SMALL = "--length 240 --limit 1 --threads 1 --dtype float32 --device cpu".split()


def main(*words):
    return cli.main(list(map(str, words)))


# ---------------------------------------------------------------- declarations


def test_names_are_unique_and_every_table_runs_or_says_why():
    papers = [table for paper in (omnikv, adakv, pod, infllm) for table in paper.TABLES]
    assert len(papers) == len(TABLES) == len({table.name for table in papers})
    for table in papers:
        assert table.why or table.commands or table.line, table.name
        assert table.why or table.source, table.name
        assert not table.line or table.line in lines.LINES
        for command in table.commands:
            flags = at_depth(command, 8).flags.split()
            words = flags[flags.index("--methods") + 1 :] if "--methods" in flags else []
            words = words[: next((i for i, w in enumerate(words) if w[0] == "-"), None)]
            if command.program in ("compare", "suites"):
                for name, _, _ in wanted(words, [], [], True):
                    assert entry_of(name).note
            if "--tasks" in flags:
                tasks = flags[flags.index("--tasks") + 1 :]
                tasks = tasks[: next((i for i, w in enumerate(tasks) if w[0] == "-"), None)]
                assert tasks and set(tasks) <= set(TASKS)


def test_the_papers_rows_are_methods_that_their_commands_run():
    """A row that no command makes would stand there as not run for ever."""
    for table in TABLES.values():
        made = {"full"}
        for command in table.commands:
            if command.program not in ("compare", "suites"):
                continue
            flags = command.flags.split()
            words = flags[flags.index("--methods") + 1 :]
            words = words[: next((i for i, w in enumerate(words) if w[0] == "-"), None)]
            for name, kind, budget in wanted(words, [], [], False):
                shown = {"share": f"{budget:g}%", "tokens": f"{budget:,.0f} tokens", "none": ""}
                made.add(f"{command.label} {name} {shown[kind]}".strip())
        # of the 70B at Mem 20%, which its users run with other budgets
        large = {row for row in table.figures.get(omnikv.LARGE, {}) if table.name == "table1"}
        if table.commands and table.commands[0].program in ("compare", "suites"):
            rows = {row for model in table.figures.values() for row in model} - large
            assert rows <= made, table.name


@pytest.mark.parametrize(
    ("name", "nearest"), [("tabel2", "table2"), ("Figure 7", "fig7"), ("adakv", "adakv-needle")]
)
def test_a_bad_name_is_refused_with_the_nearest(name, nearest, tmp_path, capsys):
    assert main(name, "--out", tmp_path) == 2
    assert f"nearest: {nearest}" in capsys.readouterr().err


def test_the_list_and_bad_flags(tmp_path, capsys):
    assert main("--list") == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page for name in TABLES)
    for flags in (["--limit", "0"], ["--length", "0"], ["--data", "/nowhere"], ["--minutes", "0"]):
        assert main("table2", *flags, "--out", tmp_path) == 2
    assert main("--out", tmp_path) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("table1", "LongBench's files"),
        ("table9", "405 billion weights"),
        ("table10", "not measured: needs 4 cards, found 0"),
        ("table11", "not measured: needs 4 cards, found 0"),
        ("table12", "LongBench's files"),
        ("fig4-three-cards", "not measured: needs 3 cards, found 0"),
        ("table13", "not measured: no card here"),
        ("fig4", "not measured: no card here"),
    ],
)
def test_what_cannot_run_says_so_in_a_line(name, why, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(name, "--out", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and why in lines[0] and lines[0].startswith(name)
    assert not (tmp_path / name).exists()


def test_tables_of_several_cards_say_so_and_run_as_ranks_of_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main("table10", "--out", tmp_path) == 1
    assert "not measured: this engine has not run a split over cards" in capsys.readouterr().out
    monkeypatch.setattr(programs, "allowed_cores", lambda: list(range(16)))
    args = cli.arguments(["table10", "--device", "cpu", "--limit", "3"])
    args.card = False
    module, flags = argv_of(args, TABLES["table10"], TABLES["table10"].commands[0], tmp_path)
    given = dict(zip(flags[::2], flags[1::2]))
    assert module == "tools.speed.ranks" and given["--ranks"] == "4" and given["--steps"] == "3"
    (tmp_path / "ranks.json").write_text(
        json.dumps({"rows": [{"method": "omnikv", "context": 2048, "seconds": {"ranks": 0.004}}]})
    )
    for name, column, value in (
        ("table10", "ms at 2K x 1", 4),
        ("table11", "tokens/s at 2K x 1", 250),
    ):
        table = TABLES[name]
        (found,) = values.values_of(table, table.commands[0], tmp_path)
        assert (found.method, found.column, found.value) == ("omnikv", column, value)


# ---------------------------------------------------------------- the page


def test_differences_are_of_one_model_only_and_beside_full():
    table = Table("t", "P", "Table 9", "x", "y", source="s")
    figures = {"full": {"kv": 40.0}, "omnikv 5%": {"kv": 35.5, "sum": 9.0}}
    found = [Value("full", "kv", 30.0), Value("omnikv 5%", "kv", 31.0, 20.0, 42.0, 8)]
    about = {name: "" for name in ("paper model", "settings", "hardware", "command")}
    page = markdown(table, "m", figures, found, about | {"same model": True})
    assert "| kv | full | 30.0 | 40.0 | -10.0 |  |  |" in page
    assert "| kv | omnikv 5% | 31.0 [20.0, 42.0] (8) | 35.5 | -4.5 | +1.0 | -4.5 |" in page
    assert "| omnikv 5% | 9.0 |" in page and "not run here" in page
    other = markdown(table, "m", figures, found, about | {"same model": False})
    assert "| kv | omnikv 5% | 31.0 [20.0, 42.0] (8) | 35.5 |  | +1.0 | -4.5 |" in other
    assert "nobody can lose" not in page
    timed, times = replace(table, unit="seconds"), {"dense": {"x": 4.0}, "r=1": {"x": 1.0}}
    own = [Value("dense", "x", 2.0), Value("r=1", "x", 1.25)]
    apart = markdown(timed, "m", times, own, about | {"same model": True})
    assert "| x | r=1 | 1.25 | 1.00 | +0.25 | -0.75 | -3.00 |" in apart
    several = [Value("{1} full", "kv", 9.0), Value("{1} quest 5%", "kv", 7.0)]
    apart = markdown(table, "m", {"full": {"kv": 1.0}}, several, about | {"same model": False})
    assert "| kv | {1} quest 5% | 7.0 | not at hand |  | -2.0 |  |" in apart
    nothing = markdown(table, "m", {}, [Value("full", "kv", 0.0)], about | {"same model": True})
    assert "Full attention has nothing in kv: nobody can lose there." in nothing
    alone = markdown(table, "m", {}, found, about | {"same model": False})
    assert "not at hand" in alone and "| omnikv 5% | 31.0 [20.0, 42.0] (8) |" in alone


def test_means_have_intervals_by_texts_and_right_or_wrong_by_wilson():
    made = [{"method": "m", "column": "c", "value": v} for v in (0.2, 0.4, 0.6)]
    (found,) = values.means(made)
    assert found.value == pytest.approx(0.4) and found.count == 3
    assert found.high - found.value == pytest.approx(1.96 * 0.2 / 3**0.5)
    (found,) = values.means([{"method": "m", "column": "c", "value": 100.0}] * 4, True)
    assert found.low == pytest.approx(51.0, abs=0.1) and found.high == 100.0
    assert values.means(made[:1])[0].low is None
    (found,) = values.means([{"method": "m", "column": "c", "value": 0.0}] * 6)
    assert (found.low, found.high) == (0.0, 0.0)  # a share, and nobody's score


def test_layers_stand_at_the_same_depth_of_another_model():
    command = Command("compare", "--filters L2 L8 L18 --methods omnikv@6.67", "{2, 8, 18}")
    assert at_depth(command, 32).flags == "--filters 2 8 18 --methods omnikv@6.67"
    assert at_depth(command, 8).flags == "--filters 0 2 4 --methods omnikv@6.67"
    assert at_depth(command, 8).label == command.label


def test_a_commands_own_flags_come_last(tmp_path):
    args = cli.arguments(["table6", "--limit", "3", "--model", "llama-3-8b-262k"])
    args.card = False
    module, flags = argv_of(args, TABLES["table6"], TABLES["table6"].commands[0], tmp_path)
    assert module == "tools.compare"
    assert (
        flags[flags.index("--answers") + 1] == "3" and flags[flags.index("--lengths") + 1] == "739"
    )
    module, flags = argv_of(args, TABLES["table13"], TABLES["table13"].commands[0], tmp_path)
    assert module == "tools.studies.prefill.table" and "--chunk" in flags
    args.length = [300]
    with pytest.raises(UsageError, match="two chunks"):
        argv_of(args, TABLES["table13"], TABLES["table13"].commands[0], tmp_path)
    args.length = None
    args.card = True
    args.estimate = True
    module, flags = argv_of(args, TABLES["table2"], TABLES["table2"].commands[0], tmp_path)
    assert flags[flags.index("--lengths") + 1] == "131072" and "--estimate" in flags


def test_a_suite_says_what_it_lacks_and_its_groups_are_means(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "readable", lambda: {"longbench"})
    assert "no files here; give --data DIR" in suites.missing("longbench", None)
    assert "no .jsonl file below" in suites.missing("longbench", tmp_path)
    assert "does not read L-Eval's files" in suites.missing("leval", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lcc.jsonl").touch()
    assert suites.missing("longbench", tmp_path) == ""
    found = suites.grouped({"longbench/lcc": 40.0, "longbench/repobench-p": 50.0, "qasper": 9.0})
    assert found == {"single-doc": 9.0, "code": 45.0}
    every = {name: 10.0 for names in suites.GROUPS.values() for name in names}
    assert suites.grouped(every)["average"] == 10.0 and len(suites.grouped(every)) == 7
    ten = {name: float(place) for place, name in enumerate(suites.TEN)}
    assert suites.means_of("infinitebench", ten | {"code_run": 99.0}) == {"average": 4.5}
    assert suites.means_of("infinitebench", {"passkey": 1.0}) == suites.means_of("leval", ten) == {}
    columns = ("infinitebench/kv_retrieval", "infinitebench/code_run", "longbench/lcc", "kv_uuid")
    assert [suites.column_of(task) for task in columns] == [
        *("kv_uuid", "code_run", "longbench/lcc", "kv_uuid")
    ]


# ---------------------------------------------------------------- runs


def test_a_table_of_the_comparison_runs_goes_on_and_refuses_other_settings(tmp_path, capsys, tiny):
    """On the tiny model; the answers are those of tools.compare and are not made twice."""
    words = ["table6", "--model", tiny, *SMALL, "--out", tmp_path]
    assert main(*words) == 0
    page = capsys.readouterr().out
    assert "| two_stage_paper | omnikv 13.8% |" in page and "| 14.0 |" in page
    answers = tmp_path / "table6" / "tiny0" / "run" / "answers.jsonl"
    before = answers.read_bytes()
    data = json.loads((answers.parents[1] / "report.json").read_text())
    assert {v["method"] for v in data["ours"]} >= set(omnikv.STEPS_YI)
    assert main(*words) == 0
    assert answers.read_bytes() == before
    again = capsys.readouterr()
    assert "0 documents to do" in again.err and again.out.splitlines()[:1] == page.splitlines()[:1]
    assert main(*words, "--filters", "1") == 1
    assert "other settings" in capsys.readouterr().err and answers.read_bytes() == before


def test_a_suites_table_has_files_and_made_prompts_beside_the_papers(tmp_path, capsys, tiny):
    """InfiniteBench: one file of nine and the three that are made; no average of fewer than ten."""
    row = {"context": "def f_x(): pass\n" * 200, "input": "", "options": ["a", "b", "f_x", "d"]}
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "code_debug.jsonl"
    file.write_text(json.dumps({**row, "answer": ["f_x", "C"]}))
    words = ["table2-files", "--model", tiny, *SMALL, "--out", tmp_path, "--data", file.parent]
    assert main(*words, "--length", "900") == 0  # the shortest key and value of this tokenizer
    page = capsys.readouterr().out
    for column, paper in (("code_debug", "20.8"), ("kv_uuid", "14.4"), ("passkey", "100.0")):
        assert re.search(rf"\| {column} \| full \| .* \(1\) \| {paper} \|", page)
    assert "| average | full" not in page and "longbook_qa_eng" in page.split("not run here")[1]


def test_table14_reads_prompts_by_r_and_all_is_the_uniform_selector(tmp_path, capsys, tiny):
    """With r small what is not chosen is lost; r that covers the prompt reads it as dense prefill
    does, so that its answers are those of r = all.
    """
    data = tmp_path / "data"
    data.mkdir()
    text = " ".join(f"line {n} of {n % 7} has {n * n % 89}." for n in range(250))
    row = {"context": text, "input": "What has line 7?", "answers": ["49"]}
    (data / "qasper.jsonl").write_text(json.dumps(row))
    words = ["table14", "--model", tiny, *SMALL, "--out", tmp_path, "--data", data]
    assert main(*words, "--length", "1400") == 0
    page = capsys.readouterr().out
    for row in ("omnikv_prefill_r1 6.67%", "omnikv_prefill_r8 6.67%", "minference 30%"):
        figure = omnikv.PREFILL_QUALITY[row]["single-doc"]
        assert re.search(rf"\| single-doc \| {re.escape(row)} \| \d.* \| {figure} \|", page), row
    assert "\n| synthetic |" not in page and "Table 14" in page and "256 tokens here" in page
    lines = next(tmp_path.glob("table14/*/run/answers.jsonl")).read_text().splitlines()[1:]
    found = {r["variant"]: r for r in map(json.loads, lines)}
    assert found["full"]["prompt_tokens"] > 1300
    kl = {name.partition(" ")[0]: r["kl"] for name, r in found.items() if "kl" in r}
    assert kl["omnikv_prefill_r8"] == pytest.approx(kl["omnikv_uniform"], rel=1e-3)
    assert abs(kl["omnikv_prefill_r1"] - kl["omnikv_uniform"]) > 0.01 * kl["omnikv_uniform"]
    assert found["omnikv_prefill_r8 6.67%"]["tokens"] == found["omnikv_uniform 6.67%"]["tokens"]


@pytest.mark.parametrize("name", ["fig1c", "fig6a", "fig6b", "fig7", "fig8"])
def test_a_line_runs_on_the_tiny_model_and_goes_on(name, tmp_path, capsys, tiny, monkeypatch):
    words = [name, "--model", tiny, *SMALL, "--out", tmp_path]
    assert main(*words) == 0
    page = capsys.readouterr().out
    records = next(tmp_path.glob(f"{name}/*/records.jsonl"))
    whole = records.read_text()
    records.write_text(whole[:-30])  # killed while it wrote
    assert main(*words) == 0
    assert sorted(records.read_text().splitlines()[1:]) == sorted(whole.splitlines()[1:])
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("| ")] == [
        x for x in page.splitlines() if x.startswith("| ")
    ]
    measure = pytest.fail  # nothing is left to measure
    monkeypatch.setitem(lines.LINES, TABLES[name].line, measure)
    assert main(*words) == 0
    monkeypatch.setattr(lines, "weights_digest", lambda folder: "other")
    assert main(*words) == 2 and "other settings" in capsys.readouterr().err


def test_an_estimate_measures_one_text_and_writes_no_page(tmp_path, capsys, tiny):
    words = ["fig8", "--model", tiny, *SMALL, "--limit", "5", "--estimate", "--out", tmp_path]
    assert main(*words) == 0
    assert "fig8: 4 texts to do, about" in capsys.readouterr().err
    assert not list(tmp_path.glob("fig8/*/report.md"))


# ---------------------------------------------------------------- meters


def test_the_evidence_of_a_prompt_is_where_it_says():
    llm = LLM(POCKET, threads=1, method=Full())
    for number, task in enumerate(("needle", "kv", "chains", "two_stage_paper")):
        prompt = asked(llm, task, 400, number, 0.5)
        for start, stop in prompt.evidence:
            text = llm.tokenizer.decode(prompt.ids[start:stop])
            assert prompt.exact.split(",")[0] in text or task == "chains"
            assert stop - start < 60


def attention(llm, ids, out):
    """Float64 softmax weights and scaled products [layer][position] -> [H, position + 1], of all
    tokens of a prompt and its answer, from queries and keys that a prefill makes.
    """
    whole = [*ids, *out]
    queries = all_queries(llm, whole)
    with llm.session() as session:
        session.prefill(whole)
        keys = [session.bank.kv(layer, len(whole))[0][0].double() for layer in range(8)]

    def logits(layer, n):
        q = queries[layer][n - 1].view(2, 2, 16)
        return (torch.einsum("hgd,hnd->hgn", q, keys[layer][:, :n]) / 4).flatten(0, 1)

    return logits


@pytest.mark.parametrize("scores", ["logits", "heads"])
def test_choices_and_masses_are_an_independent_float64_computation(scores):
    """Of the prompt's tokens only, also where the answer's own tokens would be chosen."""
    llm, ids, k, steps = tiny_llm(Full(), sharpness=9.0), random_ids(211), 13, 4
    prompt = len(ids) - 1
    with llm.session() as session:
        meter = SetMeter(session.dense_runtime, prompt, k, scores)
        out = follow(session, ids, steps, meter)
    logits = attention(llm, ids, out)
    assert len(meter.sets) == steps
    mass, shared = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    beyond, chosen, edges = 0, [], torch.zeros(8, dtype=torch.float64)
    for step in range(steps):
        n, tops, weights = len(ids) + step, [], []
        for layer in range(8):
            found = logits(layer, n)
            highest = torch.softmax(found[:, :prompt].amax(0), -1)
            if scores == "heads":
                highest = torch.softmax(found, -1)[:, :prompt].amax(0)
                highest /= highest.sum()
            beyond += int(torch.softmax(found, -1).amax(0).topk(k).indices.max() >= prompt)
            weights.append(highest)
            edges[layer] += float(highest[:4].sum() + highest[prompt - (k - 4) :].sum())
            tops.append(highest.topk(k).indices.sort().values)
            assert torch.equal(meter.sets[step][layer], tops[-1])
        chosen.append(tops)
        for i in range(8):
            for j in range(8):
                shared[i, j] += len(set(tops[i].tolist()) & set(tops[j].tolist())) / k / steps
                mass[i, j] += float(weights[j][tops[i]].sum()) / steps if j >= i else 0
    assert beyond  # a choice among all tokens would be another one
    torch.testing.assert_close(meter.mean_mass(), mass, rtol=0, atol=1e-5)
    torch.testing.assert_close(meter.between_layers(), shared)
    # a sum over steps, of weights that float32 scores this sharp leave 1e-5 of
    torch.testing.assert_close(meter.edges, edges, rtol=0, atol=steps * 1e-5)
    both = [[len(set(a[3].tolist()) & set(b[3].tolist())) / k for b in chosen] for a in chosen]
    torch.testing.assert_close(meter.between_steps(3), torch.tensor(both, dtype=torch.float64))


@pytest.mark.parametrize("length", [2, 64, 131])
def test_heavy_hitters_are_by_the_sums_of_all_queries(length):
    """Also of a prompt that is read in several chunks."""
    # torch's operators for both: what K is rounded to hangs on how many rows a product has else
    llm, ids = tiny_llm(Full(), sharpness=4.0, chunk=48, backend="cpu"), random_ids(length)
    with llm.session(Summed()) as session:
        meter = HeavyMeter(session.runtime)
        out = follow(session, ids, 2, meter)
        sums = session.runtime.sums
    logits, prompt = attention(llm, ids, out), length - 1
    keep = max(1, prompt // 4)
    for layer in range(8):
        wanted = torch.zeros(prompt, dtype=torch.float64)
        for n in range(1, prompt + 1):
            wanted[:n] += torch.softmax(logits(layer, n), -1).sum(0)
        torch.testing.assert_close(sums[layer], wanted, rtol=1e-4, atol=1e-4)
        for step, found in enumerate(meter.outside):
            weights = torch.softmax(logits(layer, length + step), -1)[:, :prompt]
            weights = weights / weights.sum(-1, keepdim=True)
            rows = wanted.topk(keep).indices
            outside = 1 - float(weights[:, rows].sum(-1).mean())
            assert found[layer][0] == pytest.approx(outside, abs=1e-4)
            assert found[layer][2] <= found[layer][0] + 1e-9  # its own best loses least


# ---------------------------------------------------------------- pictures


def test_pictures_have_their_figures_beside_them(tmp_path, capsys, tiny):
    pytest.importorskip("matplotlib", reason="pictures need it, their JSON does not")
    assert pictures.main(["--model", str(tiny), *PICTURE, "--out", str(tmp_path)]) == 0
    for name in ("layers", "steps", "depth"):
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_the_figures_of_a_picture(tmp_path, capsys, tiny, monkeypatch):
    """Of a file that is longer than asked; without matplotlib it says so and has them all."""
    file = tmp_path / "text.txt"
    file.write_text("The river is long. A boat went down it. " * 90)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["--model", str(tiny), *PICTURE, "--prompt", str(file), "--out", str(tmp_path / "p")]
    assert pictures.main(words) == 0
    assert "matplotlib is not installed" in capsys.readouterr().err
    data = json.loads((tmp_path / "p" / "attention.json").read_text())
    layers, mass = torch.tensor(data["between_layers"]), torch.tensor(data["mass"])
    assert data["tokens"] == 200 and data["chosen"] == 20 and data["layers"] == [1, 3]
    assert torch.equal(layers, layers.T) and torch.allclose(layers.diagonal(), torch.ones(6))
    steps = torch.tensor(data["between_steps"]["3"])
    assert steps.shape == (data["steps"],) * 2 and torch.allclose(steps.diagonal(), torch.ones(1))
    assert torch.equal(mass, mass.triu()) and bool((mass <= 1 + 1e-6).all())
    own = mass.diagonal()  # no choice of as many tokens keeps more of a layer's attention
    assert bool((mass <= own + 1e-6).all()) and bool((own >= data["chance"]).all())


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--share", "0"], "--share"),
        (["--steps", "0"], "--steps"),
        (["--layers", "9"], "--layers"),
        (["--prompt", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_numbers_of_a_picture_are_refused(flags, word, tmp_path, capsys, tiny):
    assert pictures.main(["--model", str(tiny), "--out", str(tmp_path), *flags]) == 2
    assert word in capsys.readouterr().err


def test_labels_at_the_ends_of_lines_keep_apart():
    for heights in ([0.5] * 6, [1.0, 0.99, 0.98, 0.2], [0.0, 0.01, 0.9]):
        places = draw._apart(heights)
        gaps = [b - a for a, b in zip(sorted(places), sorted(places)[1:])]
        assert min(gaps) >= 0.055 - 1e-9 and max(places) <= 1 + 1e-9
        assert sorted(range(len(heights)), key=lambda i: (heights[i], i)) == sorted(
            range(len(heights)), key=lambda i: (places[i], i)
        )
