"""tools/suites from local files in the official formats, offline: rows, cuts, runs that are killed,
what is refused; and GraphWalks and InfiniteBench, made here.

Stops: a row that is skipped in silence, a cut at the wrong place or that nobody hears of, a chat
template where the benchmark has none, a question that is cut off, answers of another file or
setting taken for a run's own, answers lost with a killed process.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tests.builders import POCKET
from tools.common.records import AnswerFile
from tools.compare.run import Job
from tools.suites import cli
from tools.suites.local import leval, longbench, longbench2, longbench_e
from tools.suites.local.rows import TEXT, TEXTS, read
from tools.suites.made import graphwalks, infinitebench
from tools.suites.pace import Pace
from tools.suites.prompts.cutting import halves, head_kept, ids_of, middle_out, tail_kept, within
from tools.suites.registry import chosen
from tools.suites.run import Suite
from tools.tasks.words import filler

LONG = " ".join(filler(Random(3)) for _ in range(90))
ROW = {
    "input": "Who was it?",
    "context": LONG,
    "answers": ["Alice", "the cat"],
    "length": 9,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
CHOICE = {
    "_id": "1",
    "domain": "d",
    "sub_domain": "s",
    "difficulty": "easy",
    "length": "short",
    "question": " What? ",
    "choice_A": "one",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "B",
    "context": LONG,
}
EXAM = {
    "instructions": ["First?\nA. x\nB. y", "Second?\nA. x\nB. y"],
    "outputs": ["A", "B"],
    "input": LONG,
    "source": "quality",
    "evaluation": "exam",
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET)


@pytest.fixture
def data(tmp_path):
    """A folder with files of all three, as their archives unpack."""
    folder = tmp_path / "data"
    parts = {
        "longbench/qasper.jsonl": [ROW, {**ROW, "context": LONG[:3000]}],
        "longbench/trec.jsonl": [
            {**ROW, "answers": ["Date"], "all_classes": ["Date", "City"], "context": LONG[:3000]}
        ],
        "LEval-data/Closed-ended-tasks/quality.jsonl": [EXAM, {**EXAM, "evaluation": "human"}],
    }
    for name, rows in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (folder / name).write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    (folder / "longbench2").mkdir()
    hard = {**CHOICE, "difficulty": "hard", "context": LONG[:3000]}
    (folder / "longbench2" / "data.json").write_text(json.dumps([hard, CHOICE]))
    return folder


# ------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "text, line",
    [
        (
            '{"a": "x", "b": ["y"]}\n\n{"a": "x"}',
            "f.jsonl, line 3: found no field 'b', expected a l",
        ),
        (
            '{"a": "x", "b": []}',
            r"line 1: field 'b': found \[\] \(list\), expected a list of texts",
        ),
        ('{"a": 7, "b": ["y"]}', r"line 1: field 'a': found 7 \(int\), expected a text"),
        ('{"a": "x", "b": ["y", 1]}', "line 1: field 'b'"),
        ('{"a": "x", "b"', "line 1: found no JSON .*is the file whole"),
        ('{"a": "x", "b": ["y"]}\n7', "line 2: found int, expected an object with fields"),
        ('[{"a": "x", "b": ["y"]}, {"b": ["y"]}]', "f.jsonl, row 2: found no field 'a'"),
        ("[{", "found no JSON"),
        ('{"a": "x", "b": ["y"]}\n[7]', "line 2: found list, expected an object with fields"),
        ('\n\n[{"a": "x", "b": ["y"]},\n{"b": ["y"]}]', "f.jsonl, row 2: found no field 'a'"),
        ("\n\n", "found no row, expected at least one"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_field(tmp_path, text, line):
    path = tmp_path / "f.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=line):
        read(path, {"a": TEXT, "b": TEXTS})


def test_rows_are_read_as_they_are(tmp_path):
    path = tmp_path / "f.jsonl"
    rows = [{"a": "x\u2028y\n"}, {"a": ""}]  # a line ends at a line feed alone
    path.write_text(
        "\ufeff" + "\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows), "utf-8"
    )
    first = read(path, {"a": TEXT})
    assert first.rows == rows
    path.write_bytes(json.dumps(rows).encode())
    assert read(path, {"a": TEXT}).rows == rows != first.digest != read(path, {"a": TEXT}).digest
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"f.jsonl: .*expected a file of JSON lines in UTF-8"):
        read(path, {"a": TEXT})


def test_what_is_not_there_is_said(data, capsys):
    found = chosen(["longbench", "longbench2/hard", "bfs"[:0] or "vt"], 0, {}, data)
    assert list(found) == ["longbench/qasper", "longbench/trec", "longbench2/hard", "vt"]
    assert re.search(r"longbench: no file of narrativeqa, .*: left out", capsys.readouterr().err)
    assert found["longbench/qasper"].sizes == (len(LONG), 3000)
    for words, folder, line in (
        (["longbench/lcc"], data, "found no lcc.jsonl in "),
        (["leval/tpo"], data, "found no tpo.jsonl in "),
        (["longbench"], None, "longbench is read from local files: give --data FOLDER"),
        (["longbench2"], data / "none", "found no folder .*none, expected one with files of longb"),
        (["longbench2"], data / "longbench", "found no file of longbench2 in "),
        (["longbench/x"], data, "unknown task 'longbench/x': one of ruler, "),
        (["graphwalks/x"], data, "unknown task 'graphwalks/x'"),
    ):
        with pytest.raises(UsageError, match=line):
            chosen(words, 0, {}, folder)
    path = data / "longbench" / "trec.jsonl"
    path.write_text(json.dumps({**ROW, "all_classes": None}))
    with pytest.raises(UsageError, match="trec.jsonl, line 1: field 'all_classes': found null"):
        chosen(["longbench"], 0, {}, data)


# ------------------------------------------------------------------- cuts and prompts


def test_cuts_keep_what_the_benchmarks_keep(tokenizer):
    ids = tokenizer.encode(LONG)
    plain = tokenizer.encode(LONG, special=False)
    for most in (2, 3, 64, 101, len(ids) - 1):
        half = most // 2
        ends = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[len(ids) - half :])
        assert halves(tokenizer, LONG, most) == (ends, len(ids) - 2 * half)
        kept = [i for n, i in enumerate(ids) if n < most // 2 or n >= len(ids) - (most + 1) // 2]
        assert len(kept) == most
        assert middle_out(tokenizer, LONG, most) == (tokenizer.decode(kept), len(ids) - most)
        left = len(plain) - most
        assert head_kept(tokenizer, LONG, most) == (tokenizer.decode(plain[:most]), left)
        assert tail_kept(tokenizer, LONG, most) == (tokenizer.decode(plain[left:]), left)
    for cut in (halves, middle_out, head_kept, tail_kept):
        for most in (len(ids), len(ids) + 1):
            assert cut(tokenizer, LONG, most) == (LONG, 0)


def test_a_prompt_is_cut_once_more_where_the_model_holds_less(tokenizer):
    question = "\n\nWho was it?"
    text = LONG + question
    for most, room in ((100, 4000), (4000, 300), (4000, 4000)):
        found = within(tokenizer, text, question, True, halves, most, room)
        said = tokenizer.decode(found.ids)
        assert len(found.ids) <= room and "Who was it?" in said
        assert "Who was it?" not in tokenizer.decode(found.ids[: found.shared])
        assert said.startswith(tokenizer.decode(ids_of(tokenizer, LONG, True)[:20]))
        assert (found.cut > 0) == (min(most, room) < 4000)
    assert 200 < len(within(tokenizer, text, question, True, halves, 4000, 300).ids) <= 300
    with pytest.raises(UsageError, match="found 3 tokens of room for a prompt"):
        within(tokenizer, text, question, True, halves, 4000, 3)


def test_prompts_are_the_benchmarks_own(tokenizer, data):
    """The chat template is left out where LongBench leaves it out; an answer's first line counts
    where it does, and the nearest reference.
    """
    tasks = chosen(["longbench", "longbench2", "leval"], 0, {}, data)
    read_as = {name: task.make(tokenizer, 4000, 0, 4000) for name, task in tasks.items()}
    said = {k: tokenizer.decode(p.shared + p.own[0]) for k, p in read_as.items()}
    qasper, trec, hard = (
        read_as[k] for k in ("longbench/qasper", "longbench/trec", "longbench2/hard")
    )
    text = said["longbench/trec"]
    assert text.strip() == (
        "Please determine the type of the question below. Here are some examples of questions."
        f"\n\n{LONG[:3000]}\nWho was it?"
    )
    assert tokenizer.encode(text.strip()) == trec.shared + trec.own[0]
    assert trec.scores[0]("\n\nDate\nCity") == 1 and trec.scores[0]("x\nDate") == 0
    assert "\n\nArticle: " + LONG in said["longbench/qasper"]
    assert qasper.shared + qasper.own[0] == ids_of(
        tokenizer,
        longbench.KINDS["qasper"]
        .prompt.replace("{context}", LONG)
        .replace("{input}", "Who was it?"),
        True,
    )
    assert qasper.scores[0]("A cat") == qasper.scores[0]("alice!") == 1
    written = (
        f"Please read the following text and answer the question below.\n\n<text>\n{LONG[:3000]}\n"
        "</text>\n\nWhat is the correct answer to this question: What?\nChoices:\n(A) one\n(B) two"
        '\n(C) three\n(D) four\n\nFormat your response as follows: "The correct answer is (insert '
        'answer here)".'
    )
    assert hard.shared + hard.own[0] == ids_of(tokenizer, written, True)
    assert "(D) four" in tokenizer.decode(hard.own[0])
    assert hard.scores[0](" The correct answer is (B).") == 1 and hard.expected == [["B"]]
    exam = read_as["leval/quality"]
    assert len(exam.own) == 2 and tasks["leval/quality"].asked == (2,)  # one row is people's
    assert any("1 documents of quality" in line for line in tasks["leval/quality"].differs)
    assert "Second?" in tokenizer.decode(exam.own[1]) and "Second?" not in said["leval/quality"]
    assert [score("B") for score in exam.scores] == [0, 1]
    short = tasks["leval/quality"].make(tokenizer, 120, 0, 4000)
    assert short.cut > 0 and len(short.shared) < 260 and "Second?" in tokenizer.decode(short.own[1])
    again = tasks["leval/quality"].make(tokenizer, 4000, 0, 300)
    assert max(map(len, again.own)) + len(again.shared) <= 300 and again.cut > short.cut / 2


def write_e(folder):
    """qasper_e.jsonl: five rows in three classes of length, not in their order; trec_e.jsonl."""
    lengths = (8000, 3999, 4000, 9000, 7999)
    rows = [{**ROW, "length": n, "input": f"Who of {n}?", "context": LONG[:3000]} for n in lengths]
    for name, found in (("qasper", rows), ("trec", [{**rows[1], "all_classes": ["Date"]}])):
        path = folder / "longbench" / f"{name}_e.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in found))
    return path


def test_longbench_e_has_longbenchs_prompts_by_class_of_length(tokenizer, data):
    path = write_e(data)
    tasks = chosen(["longbench_e", "longbench/qasper"], 0, {}, data)
    assert list(tasks) == ["longbench_e/qasper", "longbench_e/trec", "longbench/qasper"]
    assert len(longbench_e.NAMES) == 13 and set(longbench_e.NAMES) < set(longbench.KINDS)
    task, plain = tasks["longbench_e/qasper"], tasks["longbench/qasper"]
    assert (task.written, task.suite) == (plain.written, "longbench_e") and task.data != plain.data
    found = [task.make(tokenizer, 4000, number, 4000) for number in range(5)]
    asked = [re.search(r"Who of (\d+)", tokenizer.decode(p.own[0]))[1] for p in found]
    # in turn of each class, in the file's order
    assert asked == ["3999", "4000", "8000", "7999", "9000"]
    assert [p.part[:4].strip() for p in found] == ["0-4k", "4-8k", "8k+", "4-8k", "8k+"]
    text = longbench.KINDS["qasper"].prompt.replace("{context}", LONG[:3000])
    whole = ids_of(tokenizer, text.replace("{input}", "Who of 3999?"), True)
    assert found[0].shared + found[0].own[0] == whole and found[0].scores[0]("a cat") == 1
    path.write_text(json.dumps({**ROW, "all_classes": ["Date"], "length": "9"}))
    with pytest.raises(
        UsageError, match="trec_e.jsonl, line 1: field 'length': found .*a whole num"
    ):
        chosen(["longbench_e/trec"], 0, {}, data)
    with pytest.raises(UsageError, match="found no lcc_e.jsonl in "):
        chosen(["longbench_e/lcc"], 0, {}, data)


def test_levals_open_rows_are_judged_as_they_say(tokenizer, data):
    """F1, or ROUGE-L, however it is spelled; the answer's length is asked for in words."""
    rows = [
        {**EXAM, "evaluation": kind, "outputs": ["The cat sat.", "cat of the house"]}
        for kind in ("f1", "F1", "rouge", "LLM", "human")
    ]
    path = data / "LEval-data" / "Closed-ended-tasks" / "legal_contract_qa.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    (task,) = chosen(["leval/legal_contract_qa"], 0, {}, data).values()
    assert task.asked == (2, 2, 2) and any("2 documents of legal" in line for line in task.differs)
    found = [task.make(tokenizer, 4000, number, 4000) for number in range(3)]
    scores = [[score("sat cat, the") for score in prompt.scores] for prompt in found]
    # F1 in any order without the article; ROUGE-L with it: 1 word of 3 and 3, 2 words of 3 and 4
    assert scores[:2] == [[1, pytest.approx(2 / 5)]] * 2
    assert scores[2] == pytest.approx([1 / 3, 4 / 7])
    assert "Answer in about 3 words." in tokenizer.decode(found[0].own[0])
    assert "Answer in about 4 words." in tokenizer.decode(found[0].own[1])


def test_every_prompt_has_its_places():
    for name, kind in longbench.KINDS.items():
        assert kind.prompt.count("{context}") == 1 and "{on}" not in kind.prompt, name
        assert ("{input}" in kind.prompt) == (
            name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
        )
    assert len(longbench.KINDS) == 21 and len(leval.NAMES) == 20
    assert longbench2.QUESTION.count("{") == 5


# ------------------------------------------------------------------- what is made here


@pytest.mark.parametrize("name", ["bfs", "parents"])
def test_walks_end_where_a_slow_search_ends(tokenizer, name):
    sizes = set()
    for length, number in ((1200, 0), (1200, 1), (1200, 2), (1700, 3)):
        task = graphwalks.task(name, 42)
        prompt = task.make(tokenizer, length, number, 0)
        assert 0.97 * length <= prompt.tokens + task.written <= length
        said = tokenizer.decode(prompt.shared + prompt.own[0]).split("Here is the graph")[1]
        edges = set(re.findall(r"^(\w+) -> (\w+)$", said, re.M))
        asked = re.search(
            r"Perform a BFS from node (\w+) with depth (\d)|parents of node (\w+)", said
        )
        if name == "parents":
            found = {a for a, b in edges if b == asked[3]}
        else:
            away = {asked[1]: 0}  # shortest ways by relaxing every edge
            for _ in edges:
                for a, b in edges:
                    if a in away:
                        away[b] = min(away.get(b, 99), away[a] + 1)
            found = {node for node, steps in away.items() if steps == int(asked[2])}
        assert sorted(found) == prompt.expected[0] and 1 <= len(found) <= graphwalks.MOST
        nodes = {node for edge in edges for node in edge}
        assert len(edges) == said.count(" -> ") and not any(a == b for a, b in edges)
        assert 1.8 <= len(edges) / len(nodes) <= 2.2
        assert prompt.scores[0](f"Final Answer: [{', '.join(found)}]") == 1
        sizes.add(len(found))
    again = task.make(tokenizer, length, number, 0)
    assert len(sizes) > 1 and (prompt.own, prompt.shared) == (again.own, again.shared)


def test_hidden_keys_and_pairs(tokenizer):
    for name, kind in infinitebench.KINDS.items():
        depths = []
        for number in range(6):
            prompt = infinitebench.task(name, 42).make(tokenizer, 700, number, 0)
            assert 0.9 * 700 <= prompt.tokens + kind.written <= 700
            said = tokenizer.decode(prompt.shared + prompt.own[0])
            (key,) = prompt.expected[0]
            depths.append(prompt.depth)
            assert prompt.scores[0](f" {key}.") == 1 and prompt.scores[0]("") == 0
            if name == "kv_retrieval":
                pairs = json.loads(re.search(r"\{.*\}", said)[0])
                assert pairs[re.search(r'Key: "(.*)"', said)[1]] == key
                assert said.endswith("The value associated with the specified key is:") or (
                    "specified key is: " in said
                )
            else:
                assert said.count(key) == 2 and len(key) == (10 if "number" in name else 5)
                assert "is" in said.split()[-1]
                if "number" in name:
                    assert len(re.sub(r"(.)\1+", r"\1", key)) <= 5  # digits are doubled in place
        assert max(depths) > 0.5 > min(depths) and len(set(depths)) > 3


# ------------------------------------------------------------------- runs


def run(out, data, *more):
    return cli.main(
        ["--out", str(out), "--dtype", "float32", "--threads", "1", "--data", str(data)]
        + ["--lengths", "512", "--max-length", "700", "--no-controls", *more]
    )


@pytest.fixture
def quick(monkeypatch):
    """Short answers."""
    for name in ("qasper", "trec"):
        monkeypatch.setitem(longbench.KINDS, name, replace(longbench.KINDS[name], written=3))
    for module in (longbench2, leval):
        monkeypatch.setattr(module, "WRITTEN", 3)


def lines_of(out):
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()[1:]]


def test_rows_of_both_longbenches_go_end_to_end(quick, data, tmp_path, capsys):
    out = tmp_path / "out"
    asked = ("--tasks", "longbench", "longbench2", "--methods", "omnikv@10")
    assert run(out, data, *asked, "--estimate") == 0
    assert "3 prompts to do, about " in capsys.readouterr().err
    assert run(out, data, *asked) == 0
    page, rows = capsys.readouterr().out, lines_of(out)
    count = {"longbench/qasper": 2, "longbench/trec": 1, "longbench2/easy": 1, "longbench2/hard": 1}
    assert Counter(r["task"] for r in rows) == {task: 2 * n for task, n in count.items()}
    sparse = [r for r in rows if r["name"] == "omnikv"]
    assert all(0 < r["rows"] < 0.5 * r["context"] and 0 <= r["right"] <= 1 for r in sparse)
    cut = {(r["task"], r["seed"]): r["cut"] for r in rows}
    assert cut["longbench/qasper", 0] > 300 and {r["setup"] for r in rows} == {"dense"}
    assert all(r["prompt_tokens"] <= 700 + 10 for r in rows)
    number = sum(lost > 0 for (task, _), lost in cut.items() if task.startswith("longbench/"))
    assert (
        f"\nCut: {number} of 3 documents (qasper " in page
        and "# LongBench and LongBench v2" in page
    )
    assert "## LongBench v2, prompts cut to 700 tokens" in page and "temperature 0.1" in page


def test_longbench_e_is_reported_by_class(quick, data, tmp_path, capsys, monkeypatch):
    """Each class has a table of its own rows, whose scores are the means of its answers."""
    write_e(data)
    out, right = tmp_path / "out", iter([1.0, 0.5, 0.0, 1.0, 0.25, 0.0, 0.75] * 2)
    monkeypatch.setattr(longbench, "_score", lambda name, row, answer: next(right))
    asked = ("--tasks", "longbench_e", "longbench/trec", "--methods", "omnikv@10")
    assert run(out, data, *asked) == 0
    page, rows = capsys.readouterr().out, lines_of(out)
    tables = re.findall(r"^## LongBench-E, prompts cut to 700 tokens, (.*)$", page, re.M)
    assert tables == ["0-4k words", "4-8k words", "8k+ words"]
    for part in tables:
        own = [r for r in rows if r.get("part") == part and r["variant"] == "full"]
        table = page.split(f"tokens, {part}\n")[1].split("\n## ")[0]
        line = re.search(r"^\| full \| [^|]*\| (\d) \|.*\*\*(.*)\*\*", table, re.M)
        by_task = {}
        for r in own:
            by_task.setdefault(r["task"], []).append(r["right"])
        mean = sum(sum(v) / len(v) for v in by_task.values()) / len(by_task)
        assert line[1] == str(len(own)) and float(line[2]) == pytest.approx(100 * mean, abs=0.051)
        assert ("trec" in table.split("\n")[1]) == (part == "0-4k words")
    assert Counter(r.get("part") for r in rows if r["variant"] == "full") == {
        **{"0-4k words": 2, "4-8k words": 2, "8k+ words": 2},
        None: 1,
    }
    assert "# LongBench and LongBench-E" in page and "come in turn from its three classes" in page


def test_a_run_over_files_that_is_killed_gives_the_same_report(
    quick, data, tmp_path, capsys, monkeypatch
):
    """Killed while it writes, four times: the line is lost that was not whole, and no other."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = ("--tasks", "leval", "longbench/trec", "infinitebench/passkey", "--samples", "1")
    asked += ("--max-length", "300")
    asked += ("--methods", "omnikv@10", "--question", "dense", "sparse")
    assert run(whole, data, *asked) == 0
    page = capsys.readouterr().out
    rng, add, kills = Random(1), AnswerFile.add, 0

    def killed(self, records):
        nonlocal kills
        add(self, records)
        if self.path.parent == parts and kills < 4 and rng.random() < 0.4:
            kills += 1
            text = self.path.read_bytes()
            last = len(text) - text[:-1].rfind(b"\n") - 1
            self.path.write_bytes(text[: -rng.randrange(1, last)])  # what a kill leaves of a line
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerFile, "add", killed)
    codes = [run(parts, data, *asked)]
    while codes[-1] == 130:
        codes.append(run(parts, data, *asked))
    assert codes == [130] * 4 + [0]
    pages = [(folder / "report.md").read_text() for folder in (whole, parts)]
    assert pages[0].replace(str(whole), "") == pages[1].replace(str(parts), "")
    rows = lines_of(parts)
    assert Counter((r["variant"], r["setup"]) for r in rows) == {
        (label, setup): 4 for label in ("full", "omnikv 10%")
        for setup in ("dense", "sparse")
    }  # fmt: skip
    apart = {
        setup: [r["kl"] for r in rows if (r["setup"], r["name"]) == (setup, "omnikv")]
        for setup in ("dense", "sparse")
    }
    assert sum(apart["dense"]) < sum(apart["sparse"])  # its own steps read the question
    assert Counter(r["task"] for r in rows if r["question"]) == {"leval/quality": 4}
    assert "## L-Eval, prompts cut to 300 tokens, questions read sparsely" in page
    assert "# InfiniteBench and LongBench and L-Eval" in page and "- 1 documents of quality" in page


def test_answers_of_another_file_or_setting_are_refused(quick, data, tmp_path, capsys):
    out = tmp_path / "out"
    only = ("--tasks", "longbench/trec", "--question", "dense", "--methods", "omnikv@10")
    assert run(out, data, *only) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    path = data / "longbench" / "trec.jsonl"
    text = path.read_text()
    for change, more, line in (
        (text.replace("Who was", "Who is"), (), "answers of other settings .*trec: trec.jsonl"),
        (text, ("--tail", "65"), "answers of other settings .*tail was 64 and is 65 now"),
        (text, ("--seed", "9"), "answers of other settings .*seed was 42 and is 9 now"),
        (text.replace('"context"', '"text"'), (), "line 1: found no field 'context'"),
        (text, ("--max-length", "99999"), "--max-length: found 99999, expected at most the"),
        (text, ("--max-length", "0"), "--max-length: found 0, expected at least 1"),
        (text, ("--data", str(data / "no")), "found no folder"),
    ):
        path.write_text(change)
        capsys.readouterr()
        assert run(out, data, *only, *more) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        assert re.search(line, said)
        assert {each.name: each.read_bytes() for each in out.iterdir()} == before
    # a file that nobody asks about may change, and the limit of before holds
    (data / "longbench" / "qasper.jsonl").write_text("x")
    assert run(out, data, *only, "--tail", "64") == 0


def test_the_time_left_follows_what_is_done():
    tasks = chosen(["vt", "graphwalks"], 0, {}, None)
    pace, missing = Pace(tasks), {"dense": ("full", "a")}
    short, long = Job("vt", 100, 0, 1), Job("graphwalks/bfs", 1000, 0, 1)
    assert pace.expected([(short, missing)]) == 0
    pace.note(short, missing, 2.0)
    assert pace.expected([(short, missing)]) == pytest.approx(2)
    assert pace.expected([(long, missing)]) == pytest.approx(20)  # by tokens
    assert pace.expected([(short, {"dense": ("a",)})]) == pytest.approx(4 / 3)  # by what is missing
    pace.note(long, missing, 50.0)
    assert pace.expected([(long, missing)] * 3 + [(short, missing)]) == pytest.approx(152)
    assert pace.expected([(Job("graphwalks/parents", 1000, 0, 1), missing)]) == pytest.approx(50)
    longer = replace(tasks["graphwalks/bfs"], name="long", written=30 * 1024)
    pace.tasks |= {"long": longer}  # an answer of 30 times 1,024 tokens counts 30 times
    expected = 50 / (1 + 2) * (1 + 2 * 30)
    assert pace.expected([(Job("long", 1000, 0, 1), missing)]) == pytest.approx(expected)


def test_a_budget_that_a_short_document_lacks_is_said_once(
    quick, data, tmp_path, capsys, monkeypatch
):
    """Where a method is another's alias or has no budget at a document's own length, the run ends
    all the same, and a second one has nothing to do.
    """
    at, out = Suite.at, tmp_path / "out"

    def short(self, capacity):
        found = at(self, capacity)
        if capacity in self.lengths:
            return found
        one = next(v for v in found if v.name == "omnikv")
        return [
            replace(v, method=None, why="too short")
            if v.name == "snapkv"
            else replace(v, alias=one.label)
            if v.name == "quest"
            else v
            for v in found
        ]

    monkeypatch.setattr(Suite, "at", short)
    only = ("--tasks", "longbench/trec", "--question", "dense")
    only += ("--methods", "omnikv@10", "snapkv@30", "quest@10")
    assert run(out, data, *only) == 0
    assert "- snapkv 30%: no answer to 1 questions: too short" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()[1:]]
    assert [r["variant"] for r in rows] == ["full", "omnikv 10%", "snapkv 30%", "quest 10%"]
    assert rows[1]["tokens"] == rows[3]["tokens"] and "right" not in rows[2]
    monkeypatch.setattr(Suite, "one", None)  # nothing is left
    assert run(out, data, *only) == 0
