"""tools/suites: InfiniteBench's tasks from local files in the official format.

Stops: a prompt that is not the published one, an answer's beginning inside the user's turn, a cut
that loses the question, a letter for the wrong option, a number that only looks right, a row that
asks for nothing, an answer longer than the model, a table that mixes made prompts with a file's.
"""

import json
import re
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tests.builders import POCKET
from tools.suites import cli
from tools.suites.local import infinitebench
from tools.suites.local.rows import numbers, read
from tools.suites.metrics.infinitebench import (
    function_named,
    number_found,
    option_named,
    speaker_named,
    value_last,
    values_begun,
)
from tools.suites.metrics.overlap import character_f1
from tools.suites.metrics.rouge import summary_rouge_l
from tools.suites.prompts.cutting import middle_out
from tools.suites.prompts.task import Task
from tools.suites.registry import chosen
from tools.suites.run import shortened
from tools.tasks.words import filler

BOOK = " ".join(filler(Random(5)) for _ in range(90))
OPTIONS = ["Ada", "Bob", "Cleo", "Dan"]
SEEK = "You should answer with only one number, no other words. The {} of the list is: "
ROWS = {
    "longbook_sum_eng": [{"answer": ["It is a book.\nIt ends."]}],
    "longbook_qa_eng": [{"input": "Who {was} it?", "answer": ["Ada", "Bob B."]}],
    "longbook_choice_eng": [{"input": "Who?", "answer": ["Bob"], "options": OPTIONS}],
    "longbook_qa_chn": [{"input": "谁？", "answer": ["北京人", "上海"]}],
    "longdialogue_qa_eng": [{"answer": ["ACE", "ACE ROTHSTEIN"]}],
    "code_debug": [{"input": "?", "answer": ["f_x", "C"], "options": ["a", "b", "f_x", "d"]}],
    "code_run": [{"input": "Please give me the return value of func_7(-3).", "answer": 4}],
    "math_find": [
        {"input": SEEK.format("Third Largest number"), "answer": [93]},
        {"input": SEEK.format("median number"), "answer": 49.5},
    ],
    "math_calc": [{"answer": [[6, 10, 2]]}],
}
# (metric, answer, expected, score), each worked out by hand from the published rule
HAND = [
    # the last word
    (value_last, "The value is 4", [4], 1),
    (value_last, "4.\n", [4], 1),
    (value_last, "", [4], 0),
    (value_last, " \n.", [4], 0),
    (value_last, "4 or 5", [4], 0),
    (value_last, "`-12`", [-12], 1),
    (value_last, "-12", [12], 0),
    (value_last, "04", [4], 1),
    (value_last, "4.0", [4], 0),  # the last word is 0
    (value_last, "3.4", [4], 1),  # and here 4
    (value_last, "four", [4], 0),
    (value_last, "4)", [4], 0),
    # the first number
    (number_found, "88", [88], 1),
    (number_found, "", [88], 0),
    (number_found, "about 88 or 89", [88], 1),
    (number_found, "89 or 88", [88], 0),
    (number_found, "-88", [88], 1),  # no signs
    (number_found, "088", [88], 1),
    (number_found, "88.0", [88], 0),  # the published script fails on it
    (number_found, "88.", [88], 1),
    (number_found, "49.5", [49.5], 1),
    (number_found, "49.50", [49.5], 1),
    (number_found, "49", [49.5], 0),
    (number_found, "49", [49.0], 1),
    (number_found, "x", [49.5], 0),
    # values behind the expression's own first number
    (values_begun, "[1, 6, 10, 2]", [6, 10, 2], 1),
    (values_begun, "1 6 10 3", [6, 10, 2], 2 / 3),
    (values_begun, "[6, 10, 2]", [6, 10, 2], 0),  # its first one is passed over
    (values_begun, "1 7 10 2", [6, 10, 2], 0),  # nothing counts behind a wrong one
    (values_begun, "", [6, 10, 2], 0),
    (values_begun, "1", [6, 10, 2], 0),
    (values_begun, "1 6 10 2 9 9", [6, 10, 2], 1),
    (values_begun, "1, -6, 10", [6, 10, 2], 2 / 3),  # no signs
    (values_begun, "1 06 10", [6, 10, 2], 2 / 3),
    (values_begun, "1 6.10.2", [6, 10, 2], 1),  # digits alone
    (values_begun, "1 0 000", [0, 0], 1),
    # a function by its letter or its name
    (function_named, "C. f_x", ["f_x", "C"], 1),
    (function_named, " C: because", ["f_x", "C"], 1),
    (function_named, "C", ["f_x", "C"], 0),  # a letter alone
    (function_named, "C)", ["f_x", "C"], 0),
    (function_named, "", ["f_x", "C"], 0),
    (function_named, "B. The answer is: C", ["f_x", "C"], 1),
    (function_named, "The answer is: f_x", ["f_x", "C"], 1),
    (function_named, "The answer is:C", ["f_x", "C"], 0),  # one character is passed over
    (function_named, "The answer is:", ["f_x", "C"], 0),
    (function_named, "It is: B. The answer is: C", ["f_x", "C"], 1),  # phrases in their order
    (function_named, "It is: B. Answer is: C", ["f_x", "C"], 0),  # and in small letters
    (function_named, "It is: B. The answer: C", ["f_x", "C"], 0),  # "is:" comes before "answer:"
    (function_named, "The correct option is: **C**", ["f_x", "C"], 1),
    (function_named, "answer is: `f_x`", ["f_x", "C"], 1),
    (function_named, "The function f_x", ["f_x", "C"], 0),
    (function_named, "answer is: Certainly not", ["f_x", "C"], 1),
    # an option
    (option_named, "B", ["Bob", "B"], 1),
    (option_named, " B. Bob", ["Bob", "B"], 1),
    (option_named, "Bob", ["Bob", "B"], 1),
    (option_named, "Dear me, it is B", ["Bob", "B"], 0),  # D is chosen
    (option_named, "", ["Bob", "B"], 0),
    (option_named, "\n\n", ["Bob", "B"], 0),
    (option_named, "the answer is B", ["Bob", "B"], 1),
    (option_named, "the answer is: Bob", ["Bob", "B"], 1),
    (option_named, "the answer is", ["Bob", "B"], 0),
    (option_named, "the answer is  C, not B", ["Bob", "B"], 0),
    (option_named, "so it is A or B", ["Bob", "B"], 0),
    (option_named, "perhaps (B) then B", ["Bob", "B"], 1),  # "(B)" is no letter
    (option_named, "neither", ["Bob", "B"], 0),
    (option_named, "perhaps BC, then B", ["Bob", "B"], 0),  # "BC" is in "ABCD"
    (option_named, "xyz", ["xyz", "B"], 1),
    # the first name
    (speaker_named, "ACE", ["ACE", "ROTHSTEIN"], 1),
    (speaker_named, "to be ace.", ["ACE", "ROTHSTEIN"], 1),
    (speaker_named, "ROTHSTEIN", ["ACE", "ROTHSTEIN"], 0),
    (speaker_named, "", ["ACE"], 0),
    (speaker_named, "ACES", ["ACE"], 0),
    (speaker_named, "'Ace': hello", ["ACE"], 1),
    (speaker_named, "MR BRAUN", ["MR BRAUN"], 0),  # never of several words
    (speaker_named, "Ace", ["Ace"], 0),  # nor in small letters
    (speaker_named, "ACE-like", ["ACE"], 0),
    (speaker_named, "{ACE}", ["ACE"], 1),
    # characters
    (character_f1, "北京", "北京", 1),
    (character_f1, "", "北京", 0),
    (character_f1, "。 ，", "北京", 0),
    (character_f1, "在北京。", "北京", 4 / 5),
    (character_f1, "京北", "北京", 1),
    (character_f1, "北北京", "北京", 4 / 5),
    (character_f1, "Ａb", "aB", 2 / 4),
    (character_f1, "北 京\n", "北京", 1),
    (character_f1, "上海", "北京", 0),
    (character_f1, "the", "t", 2 / 4),  # articles stay
    # ROUGE-Lsum
    (summary_rouge_l, "the cat sat", "the cat sat", 1),
    (summary_rouge_l, "", "a", 0),
    (summary_rouge_l, "\n\n!", "a", 0),
    (summary_rouge_l, "a", "", 0),
    (summary_rouge_l, "c d\na b", "a b\nc d", 1),  # lines in any order
    (summary_rouge_l, "c d a b", "a b\nc d", 1),
    (summary_rouge_l, "b a", "a b", 1 / 2),
    (summary_rouge_l, "a a a", "a", 1 / 2),  # no word twice that is there once
    (summary_rouge_l, "a", "a\na", 2 / 3),
    (summary_rouge_l, "A-B c", "a b\n\nC!", 1),
    (summary_rouge_l, "a x\ny b", "a b", 2 / 3),  # what two lines share with one
    (summary_rouge_l, "北", "北", 0),
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET)


@pytest.fixture
def data(tmp_path):
    """A folder with the nine files, as they are downloaded."""
    folder = tmp_path / "data"
    (folder / "InfiniteBench").mkdir(parents=True)
    for name, rows in ROWS.items():
        lines = [json.dumps({"id": 0, "context": BOOK, **row}, ensure_ascii=False) for row in rows]
        (folder / "InfiniteBench" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


# ------------------------------------------------------------------- scores


def test_scores_by_hand():
    wrong = [
        (metric.__name__, answer, expected, value, found)
        for metric, answer, expected, value in HAND
        if abs((found := metric(answer, expected)) - value) > 1e-9
    ]
    assert not wrong
    assert all(sum(row[0] is metric for row in HAND) >= 10 for metric, *_ in HAND)


def shared(one, other):
    """The places in `other` of a longest common subsequence, by recursion from both ends: of equal
    ones the one that gives up words of `other` first.
    """

    @cache
    def size(i, j):
        if not i or not j:
            return 0
        if one[i - 1] == other[j - 1]:
            return 1 + size(i - 1, j - 1)
        return max(size(i - 1, j), size(i, j - 1))

    def walk(i, j):
        if not i or not j:
            return set()
        if one[i - 1] == other[j - 1]:
            return walk(i - 1, j - 1) | {j - 1}
        return walk(i - 1, j) if size(i - 1, j) > size(i, j - 1) else walk(i, j - 1)

    return walk(len(one), len(other))


def slow_summary(answer, expected):
    found, wanted = (
        [re.sub("[^a-z0-9]", " ", line.lower()).split() for line in text.splitlines()]
        for text in (answer, expected)
    )
    bags = [[word for line in lines for word in line] for lines in (found, wanted)]
    sizes, hits = [len(bag) for bag in bags], 0
    for line in wanted:
        for place in sorted(set().union(*(shared(tuple(o), tuple(line)) for o in found))):
            if all(line[place] in bag for bag in bags):
                hits += 1
                for bag in bags:
                    bag.remove(line[place])
    return 2 * hits / sum(sizes) if hits else 0.0


def test_summaries_score_as_by_another_way():
    rng, seen = Random(2), set()
    for _ in range(200):
        answer, expected = (
            " ".join(rng.choices("a b c d E x_y 7 ! \n".split(" "), k=rng.randint(0, 12)))
            for _ in range(2)
        )
        found = summary_rouge_l(answer, expected)
        assert found == pytest.approx(slow_summary(answer, expected)), (answer, expected)
        seen.add(round(found, 3))
    assert len(seen) > 20


def test_numbers_score_as_by_another_way():
    """Character by character, without a pattern."""
    rng, seen = Random(3), {}
    for _ in range(300):
        text = "".join(rng.choices(["7", "07", "7.5", ".", "-", " ", "x", ",", "12"], k=5))
        runs = "".join(c if c.isdigit() else " " for c in text).split()
        first = next((n for n, c in enumerate(text) if c.isdigit()), len(text))
        last = first
        while last < len(text) and text[last].isdigit():
            last += 1
        if text[last : last + 1] == "." and text[last + 1 : last + 2].isdigit():
            last += 1
            while last < len(text) and text[last].isdigit():
                last += 1
        said = text[first:last]
        words = text.replace(".", " ").split()
        whole = words and words[-1].lstrip("-").isdigit() and words[-1].count("-") < 2
        begun = [int(run) for run in runs[1:3]]
        for name, found, wanted in (
            ("found", number_found(text, [7]), "." not in said and said.lstrip("0") == "7"),
            ("half", number_found(text, [7.5]), bool(said) and float(said) == 7.5),
            ("last", value_last(text, [-7]), bool(whole) and int(words[-1]) == -7),
            (
                "begun",
                values_begun(text, [7, 12]),
                0 if begun[:1] != [7] else 1 if begun == [7, 12] else 0.5,
            ),
        ):
            assert found == wanted, (name, text)
            seen.setdefault(name, set()).add(found)
    assert all(len(values) > 1 for values in seen.values()), seen


# ------------------------------------------------------------------- prompts


def test_prompts_are_the_benchmarks_own(tokenizer, data):
    """Letter by letter, the answer's beginning behind the chat template; what answers score."""
    book = BOOK
    published = {
        "longbook_sum_eng": f"Summarize the book below.\n\n{book}\n\nSummary:",
        "longbook_qa_eng": "Read the book and answer the question. Be very concise in your answer."
        f"\n\n{book}\n\nQuestion: Who {{was}} it?\nAnswer:",
        "longbook_choice_eng": f"Read the book and answer the question.\n\n{book}\n\nQuestion: Who?"
        "\nA. Ada\nB. Bob\nC. Cleo\nD. Dan\n\nThe letter of the correct answer is",
        "longbook_qa_chn": f"阅读以下书籍然后回答问题。\n\n{book}\n\n问题：谁？\n答案：",
        "longdialogue_qa_eng": "Below is a dialogue script where one random occurrence of a "
        'character name is replaced with "$$MASK$$", and you should try to guess who that character'
        f" is.\n\n{book}\n\nThe name that has been replaced with $$MASK$$ is likely",
        "code_debug": "Following is a Python code where exactly one of the functions/methods has a "
        f"deliberate error that makes it crash.\n\n{book}\n\nOptions:\nA. a\nB. b\nC. f_x\nD. d"
        "\n\nThe correct option is:",
        "code_run": f"There is a function called func_7 in the following Python code.\n\n{book}\n\n"
        "Please compute the exact value of func_7(-3). The value of func_7(-3) is",
        "math_find": f"What is the third largest number in the following list?\n\n{book}\n\nYou "
        "should answer with only one number, no other words. The Third Largest number of the list "
        "is: ",
        "math_calc": "Let us calculate the intermediate values of an expression.\n\nExpression: 1 "
        "+ 3 + 4\nValues: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\n"
        f"Expression: {book}\nValues:",
    }
    right = {
        "longbook_sum_eng": "It is a book.\nIt ends.",
        "longbook_qa_eng": "Bob, the b",
        "longbook_choice_eng": "B",
        "longbook_qa_chn": "上海。",
        "longdialogue_qa_eng": "Ace",
        "code_debug": "C.",
        "code_run": " 4.",
        "math_find": "93",
        "math_calc": "[1, 6, 10, 2]",
    }
    written = dict(zip(published, (1200, 40, 40, 40, 40, 5, 5, 3, 30000)))
    tasks = chosen(["infinitebench"], 0, {}, data)
    assert len(tasks) == 12 and {t.suite for t in tasks.values()} == {"infinitebench"}
    base = Tokenizer(POCKET)
    base.template = None
    for name, text in published.items():
        task = tasks[f"infinitebench/{name}"]
        assert (task.written, task.sizes) == (written[name], (len(BOOK),) * len(ROWS[name]))
        plain = task.make(base, 4000, 0, 4000)
        assert plain.shared + plain.own[0] == base.encode(text), name
        prompt = task.make(tokenizer, 4000, 0, 4000)
        prefix = infinitebench.KINDS[name].prefix.replace("{func_call}", "func_7(-3)")
        turn = tokenizer.render([{"role": "user", "content": text.removesuffix(prefix)}])
        ids = tokenizer.encode(turn + prefix.lstrip("\n "), special=False)
        assert prompt.shared + prompt.own[0] == ids, name
        assert len(prompt.own[0]) > len(tokenizer.encode(prefix.lstrip("\n "), special=False))
        assert prompt.scores[0](right[name]) == 1 and prompt.scores[0]("E") == 0, name
        assert prompt.cut == 0 and all(isinstance(each, str) for each in prompt.expected[0])
    half = tasks["infinitebench/math_find"].make(tokenizer, 4000, 1, 4000)
    assert half.scores[0]("49.5") == 1 and half.expected == [["49.5"]]


def test_a_cut_keeps_both_ends_and_the_answers_beginning(tokenizer, data):
    """As published: of the whole prompt with the answer's beginning, before the chat template."""
    task = chosen(["infinitebench/longbook_choice_eng"], 0, {}, data)[
        "infinitebench/longbook_choice_eng"
    ]
    kind = infinitebench.KINDS["longbook_choice_eng"]
    fields = dict(zip(("option_A", "option_B", "option_C", "option_D"), OPTIONS), input="Who?")
    text = kind.before + BOOK + kind.after.format(**fields)
    for most in (200, 301):
        kept, lost = middle_out(tokenizer, text + kind.prefix, most)
        prompt = task.make(tokenizer, most, 0, 4000)
        user = tokenizer.render([{"role": "user", "content": kept.removesuffix(kind.prefix)}])
        whole = tokenizer.encode(user + kind.prefix.lstrip("\n"), special=False)
        assert (prompt.shared + prompt.own[0], prompt.cut) == (whole, lost) and lost > 100
    again = task.make(tokenizer, 4000, 0, 150)  # where the model holds less
    assert again.tokens <= 150 and again.cut > 0
    said = tokenizer.decode(again.shared + again.own[0])
    assert "Read the book" in said and said.endswith("The letter of the correct answer is")
    tiny = task.make(tokenizer, 8, 0, 4000)  # less than the beginning of the answer
    assert 0 < tiny.tokens < 40


# ------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "name, change, line",
    [
        (
            "code_run",
            {"input": "func_7(x)"},
            "row 1: field 'input': found 'func_7.x.', expected th",
        ),
        (
            "code_run",
            {"answer": "four"},
            r"line 1: field 'answer': found \"four\" \(str\), expected",
        ),
        ("code_run", {"answer": True}, "field 'answer': found true .bool., expected a number or a"),
        (
            "math_find",
            {"input": "Find it"},
            "row 1: field 'input': found 'Find it', expected the n",
        ),
        ("math_find", {"answer": []}, r"field 'answer': found \[\] \(list\), expected a number or"),
        ("math_calc", {"answer": [[1, "x"]]}, "field 'answer'"),
        (
            "code_debug",
            {"options": ["a"]},
            "field 'options': found .*, expected a list of four tex",
        ),
        (
            "code_debug",
            {"answer": "none"},
            r"row 1: field 'answer': found \['none'\], expected one",
        ),
        ("longbook_choice_eng", {"answer": ["Ada", "Bob"]}, "expected one of its four options"),
        ("longbook_qa_eng", {"answer": []}, "expected a text or a list of texts"),
        (
            "longbook_qa_chn",
            {"context": None},
            "field 'context': found null .NoneType., expected a",
        ),
    ],
)
def test_a_row_that_asks_for_nothing_is_named(data, name, change, line):
    path = data / "InfiniteBench" / f"{name}.jsonl"
    path.write_text(json.dumps({"context": BOOK, **ROWS[name][0], **change}))
    with pytest.raises(UsageError, match=rf"{name}.jsonl, .*{line}"):
        chosen([f"infinitebench/{name}"], 0, {}, data)


def test_answers_in_every_form_that_is_around(tokenizer, data):
    """Alone, in a list, in a list of lists; numbers written out, as exports have them; an option by
    its text, or with its letter.
    """
    assert numbers([[1, 2]]) == numbers(["1", "2"]) == [1, 2] and numbers("-4") == [-4]
    assert numbers("49.5") == [49.5] and isinstance(numbers("88")[0], int)
    assert numbers([]) == numbers(["1e3"]) == numbers([[1], [2]]) == numbers(None) == []
    for name, answers in (
        ("code_run", (4, [4], "4", ["4"])),
        ("longbook_choice_eng", ("Bob", ["Bob"], ["Bob", "B"])),
        ("longbook_qa_eng", ("Ada", ["Ada"])),
    ):
        found = []
        for answer in answers:
            path = data / "InfiniteBench" / f"{name}.jsonl"
            path.write_text(json.dumps({"context": "x", **ROWS[name][0], "answer": answer}))
            (task,) = chosen([f"infinitebench/{name}"], 0, {}, data).values()
            found.append(task.make(tokenizer, 4000, 0, 4000).expected)
        assert all(each == found[0] for each in found)


def test_a_book_of_many_questions_is_kept_once(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text("\n".join(json.dumps({"a": BOOK, "b": str(n)}) for n in range(3)))
    rows = read(path, {"a": "a text"}).rows
    assert len(rows) == 3 and len({id(row["a"]) for row in rows}) == 1


def test_made_tasks_need_no_files_and_files_no_made_ones(data, tmp_path, capsys):
    made = ["infinitebench/passkey", "infinitebench/number_string", "infinitebench/kv_retrieval"]
    assert list(chosen(["infinitebench"], 0, {}, None)) == made
    (tmp_path / "none").mkdir()
    assert list(chosen(["infinitebench"], 0, {}, tmp_path / "none")) == made
    assert "infinitebench: no file of longbook_sum_eng, longbook_qa_eng" in capsys.readouterr().err
    assert list(chosen(["infinitebench/code_run"], 0, {}, data)) == ["infinitebench/code_run"]
    for folder, line in (
        (None, "infinitebench is read from local files: give --data FOLDER"),
        (tmp_path / "none", "found no code_run.jsonl in "),
    ):
        with pytest.raises(UsageError, match=line):
            chosen(["infinitebench/code_run"], 0, {}, folder)


# ------------------------------------------------------------------- runs


def test_a_long_answer_takes_half_of_the_model():
    task = Task("s", "s/t", 30000, None, sizes=(9,), data={"f": "x"})
    short = shortened(task, 8192)
    assert short.written == 4096 and "4,096 tokens at most" in short.differs[0]
    assert short.data == {"f": "x", "tokens of an answer": "4096"}
    assert shortened(task, 60000) is task
    assert shortened(replace(task, sizes=None), 10).written == 30000


def test_files_and_made_prompts_go_end_to_end(data, tmp_path, capsys, monkeypatch):
    for name, kind in infinitebench.KINDS.items():
        monkeypatch.setitem(infinitebench.KINDS, name, replace(kind, written=min(3, kind.written)))
    out = tmp_path / "out"
    asked = ["--tasks", "infinitebench/passkey", "infinitebench/code_debug"]
    asked += ["infinitebench/math_find", "infinitebench/longbook_sum_eng", "--samples", "1"]
    asked += ["--methods", "omnikv@10", "--no-controls", "--data", str(data), "--dtype", "float32"]
    asked += ["--threads", "1", "--max-length", "512", "--lengths", "512", "--out", str(out)]
    assert cli.main(asked) == 0
    page = capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()[1:]]
    assert {r["variant"] for r in rows} == {"full", "omnikv 10%"} and len(rows) == 8
    tables = re.findall("^## (.*)$", page, re.M)[:2]
    assert tables == ["InfiniteBench, 512 tokens", "InfiniteBench, prompts cut to 512 tokens"]
    assert "\nCut: 3 of 3 documents (code_debug 1, longbook_sum_eng 1, math_find 1)" in page
    assert "a letter only with a point or a colon" in page and "prompts are those that it" in page
    assert all(r["cut"] > 0 for r in rows if "passkey" not in r["task"])
    assert cli.main(asked) == 0  # nothing is left
    assert len((out / "answers.jsonl").read_text().splitlines()) == 9
