"""The task generators: exact lengths, unique and present answers, the same document for a seed in
another process, uniform depth.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.tasks import TASKS, make_sample
from tools.tasks.words import COLORS
from weights.errors import EngineError, UsageError

ROOT = Path(__file__).resolve().parents[2]
SPLIT = re.compile(r" ?[^\W\d_]+|\d{1,3}|\n| ?[^\s\w]+|\s|_")
COARSE = re.compile(r"\d{1,3}|[^\W\d_]{1,4}|\s+|[^\s\w]|_")


def words(text: str) -> int:
    """A stand-in tokenizer: words, numbers of three digits, marks."""
    return len(SPLIT.findall(text))


def pieces(text: str) -> int:
    """Another one, which cuts words into fours."""
    return len(COARSE.findall(text))


def least(task: str, questions: int = 1) -> int:
    """A comfortable length for a task."""
    return 700 if TASKS[task].needed(questions) < 40 else 2500


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [words, pieces])
def test_lengths_are_within_two_percent(task, count):
    for length in (least(task), 3001):
        for seed in range(3):
            sample = make_sample(task, length, count, seed)
            assert abs(count(sample.document) - length) <= 0.02 * length
            assert sample.meta["tokens"] == count(sample.document)


@pytest.mark.parametrize("task", TASKS)
def test_answers_rest_on_evidence_that_is_in_the_document(task):
    for seed in range(5):
        questions = min(3, TASKS[task].max_questions)
        sample = make_sample(task, 2500, words, seed, questions)
        assert len(sample.questions) == len(sample.answers) == questions
        for answer, exact, evidence, depth in zip(
            sample.answers,
            sample.meta["exact"],
            sample.meta["evidence"],
            sample.meta["depths"],
            strict=True,
        ):
            assert exact and exact in answer
            assert evidence and all(piece in sample.document for piece in evidence)
            assert 0.0 <= depth <= 1.0


@pytest.mark.parametrize(
    "task", ["passkey", "number_string", "kv", "needle", "needle_multi_key", "facts"]
)
def test_a_looked_up_value_stands_in_its_evidence(task):
    for seed in range(10):
        sample = make_sample(task, 900, words, seed)
        assert sample.meta["exact"][0] in sample.meta["evidence"][0][0]


@pytest.mark.parametrize("task", ["kv", "kv_uuid", "needle_multi_key", "chains"])
def test_keys_are_unique(task):
    for seed in range(5):
        sample = make_sample(task, 3000, words, seed)
        pattern = {
            "kv": r'^"?(\S[^:="]*)"?\s?[:=](?: |")',
            "kv_uuid": r'"([0-9a-f-]{36})": ',
            "needle_multi_key": r"for (\S+) is",
            "chains": r"^VAR (\w+) =",
        }[task]
        keys = [
            k for k in re.findall(pattern, sample.document, re.M) if k not in ("JSON data", "Table")
        ]
        assert len(keys) > 20 and len(keys) == len(set(keys))


def test_two_stage_is_arithmetic_and_a_dictionary():
    for seed in range(20):
        for task in ("two_stage", "two_stage_direct"):
            sample = make_sample(task, 1000, words, seed)
            a, b = map(int, re.match(r"(\d+) \+ (\d+) = \?", sample.questions[0]).groups())
            table = dict(re.findall(r"^(\d+): (\w+)$", sample.document, re.M))
            assert b <= 20 and table[str(a + b)] in COLORS
            assert sample.answers[0].endswith(table[str(a + b)])
            if task == "two_stage":
                assert (
                    sample.answers[0]
                    == f"{a} + {b} = {a + b}, the corresponding color is {table[str(a + b)]}"
                )


def test_two_stage_as_the_paper_makes_it():
    """200 entries at most in a row from 0, addends over the whole of [0, key], not 1 to 20."""
    firsts = []
    for seed in range(60):
        sample = make_sample("two_stage_paper", 3000, words, seed)
        a, b = map(int, re.match(r"(\d+) \+ (\d+) = \?", sample.questions[0]).groups())
        table = re.findall(r"^(\d+): (\w+)$", sample.document, re.M)
        assert [int(key) for key, _ in table] == list(range(200))
        assert sample.answers[0] == f"{a} + {b} = {a + b}, the corresponding color is " + dict(
            table
        ).get(str(a + b), "")
        firsts.append((a, b))
    assert sum(b > 20 for _, b in firsts) > 30
    assert 0.35 < sum(a / max(1, a + b) for a, b in firsts) / 60 < 0.65


def test_chains_walk_down_to_a_number():
    for seed in range(10):
        sample = make_sample("chains", 800, words, seed, 5)
        table = dict(re.findall(r"^VAR (\w+) = (\w+)$", sample.document, re.M))
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            name = re.search(r"of (\w+)\?", question)[1]
            walk = [name]
            while walk[-1] in table:
                walk.append(table[walk[-1]])
            assert answer == " = ".join(walk) and walk[-1].isdigit()


def test_counts_lists_and_winners_are_right():
    for seed in range(10):
        sample = make_sample("counting", 1500, words, seed, 3)
        for answer in sample.answers:
            color, number = answer.split(": ")
            assert len(re.findall(rf"[:,s] {color}\b", sample.document)) == int(number)
        sample = make_sample("listing", 1500, words, seed, 3)
        for answer in sample.answers:
            color, listed = answer.split(": ")
            lines = [
                line for line in sample.document.splitlines() if re.search(rf"\b{color}\.?$", line)
            ]
            items = [re.sub(r"^(- |The )", "", re.split(r": |, | is ", line)[0]) for line in lines]
            assert listed == ", ".join(items)
        sample = make_sample("frequent", 1500, words, seed, 2)
        for answer, evidence in zip(sample.answers, sample.meta["evidence"], strict=True):
            topic, winner = answer.split(": ")
            rivals = [
                line
                for line in sample.document.splitlines()
                if topic in line.split() or line.startswith(topic + ":")
            ]
            assert len(evidence) > len(rivals) / 6 and all(winner in line for line in evidence)
        sample = make_sample("common_words", 600, words, seed)
        body = sample.document[sample.document.index("Words:\n") + 7 :].split()
        first, second, third = (body.count(w) for w in sample.answers[0].split(", "))
        assert (
            first
            > second
            > third
            > max(body.count(w) for w in set(body) - set(sample.answers[0].split(", ")))
        )


def test_the_same_seed_gives_the_same_sample_in_another_process():
    code = (
        "import hashlib, re; from tools.tasks import TASKS, make_sample; "
        "count = lambda s: len(re.findall(r'\\w+|\\W', s)); "
        "print(hashlib.sha256(repr([make_sample(t, 2500, count, 5) for t in "
        "TASKS]).encode()).hexdigest())"
    )
    here = repr([make_sample(t, 2500, lambda s: len(re.findall(r"\w+|\W", s)), 5) for t in TASKS])
    for hash_seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


@pytest.mark.parametrize(
    "task", ["passkey", "kv", "two_stage", "facts", "needle", "needle_multi_key", "chains"]
)
def test_depth_is_uniform_by_default(task):
    depths = sorted(make_sample(task, 700, words, seed).meta["depths"][0] for seed in range(60))
    if task == "chains":  # the mean of two to four places
        assert depths[0] < 0.35 and depths[-1] > 0.65
        return
    # Kolmogorov-Smirnov, p < 0.001
    assert max(abs(d - (i + 0.5) / 60) for i, d in enumerate(depths)) < 0.25


@pytest.mark.parametrize(
    "task", ["passkey", "kv", "two_stage", "facts", "needle", "number_string", "needle_multi_key"]
)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_depth_places_the_evidence(task, depth):
    for seed in range(4):
        assert (
            abs(make_sample(task, 2000, words, seed, depth=depth).meta["depths"][0] - depth) < 0.08
        )


@pytest.mark.parametrize(
    "arguments, words_in_message",
    [
        (("nothing", 500, words, 1), "unknown task"),
        (("kv", 20, words, 1), "needs at least"),
        (("kv", 0, words, 1), "cannot be made"),
        (("kv", 500, words, 1, 0), "questions per document"),
        (("number_string", 500, words, 1, 2), "questions per document"),
        (("kv", 500, words, 1, 1, 1.5), "not in [0, 1]"),
    ],
)
def test_bad_input_is_a_usage_error(arguments, words_in_message):
    with pytest.raises(UsageError) as caught:
        make_sample(*arguments)
    assert words_in_message in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, EngineError)
