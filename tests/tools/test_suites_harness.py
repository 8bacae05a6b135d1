"""tools/suites/harness.py: likelihoods against transformers', windows, cuts, answers and arguments.

Stops: choices that score by chance, a context that is off by a token, steps that were not the
method's, a text whose tokens are predicted twice, a cut that nobody hears of.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers

from engine import LLM, Full, OmniKV, SamplingParams
from engine.base.errors import EngineError, UsageError
from tests.builders import POCKET
from tools.suites.harness import Harness, arguments_of, harness_of, main
from tools.suites.likelihood import by_steps, pieces

CONTEXT = "The pass key of Alice is 48213. The grass is green. The pass key of Alice is"
ITEMS = [
    (CONTEXT, " 48213"),
    (CONTEXT, " 71950, or another"),
    ("The grass is green. \n ", "Here we go"),  # its spaces begin the continuation
    ("", "The sky is blue."),
    (CONTEXT, " green"),
]


@pytest.fixture(scope="module")
def theirs():
    found = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    return found.eval()


@pytest.fixture(scope="module")
def full():
    return LLM(POCKET, dtype="float32", method=Full(), max_context=512, threads=1)


def asked(*items):
    return [SimpleNamespace(args=item) for item in items]


def expected(theirs, context, continuation):
    """(sum of log probabilities, greedy) of token ids, by transformers."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    values = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None])
    return float(values.sum()), bool((logits.argmax(-1) == ids).all())


@pytest.mark.parametrize("way", ["steps", "prompt"])
def test_choices_score_as_transformers(full, theirs, way):
    harness = Harness(full, way)
    found = harness.loglikelihood(asked(*ITEMS), disable_tqdm=True)
    for item, (value, greedy) in zip(ITEMS, found, strict=True):
        context, continuation = harness.pair(*item)
        before = [harness.prefix_token_id] if not item[0] else full.encode(item[0].rstrip())
        assert context == before and full.tokenizer.decode(continuation)
        wanted = expected(theirs, context, continuation)
        assert value == pytest.approx(wanted[0], abs=1e-3) and greedy == wanted[1]
    likeliest = full.generate(CONTEXT, SamplingParams(max_tokens=2))
    (greedy,) = by_steps(full, full.encode(CONTEXT), [likeliest.token_ids])
    assert greedy[1] and len({round(value, 3) for value, _ in found}) == len(ITEMS)


def test_steps_are_the_methods_own_and_a_budget_of_everything_changes_nothing(full):
    text, reads = "The grass is green. " * 30, dict(filter_layers=(1, 3), wait_layers=0, tail=64)
    item, quiet = (text, "The sky is blue. The sun is yellow. Here"), dict(disable_tqdm=True)
    wanted = Harness(full).loglikelihood(asked(item), **quiet)[0][0]
    found = {}
    for tokens in (4, 512):
        method = OmniKV(tokens=tokens, dense_below=0, **reads)
        llm = LLM(POCKET, dtype="float32", method=method, max_context=512, threads=1)
        for way in ("steps", "prompt"):
            (found[tokens, way],) = Harness(llm, way).loglikelihood(asked(item), **quiet)
        if tokens == 4:
            harness = Harness(llm, asked=9)
            context, continuation = harness.pair(*item)
            harness._scores(context, [continuation])
            steps = harness.tally
            assert steps["steps"] == steps["sparse"] == 9 + len(continuation) - 1
    assert found[512, "steps"][0] == pytest.approx(wanted, abs=1e-3)
    assert found[4, "prompt"][0] == pytest.approx(wanted, abs=1e-3)  # full attention reads prompts
    assert abs(found[4, "steps"][0] - wanted) > 1e-3


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 13, 14, 15, 23])
def test_each_token_is_predicted_once_behind_as_many_as_fit(count, most=7):
    ids, predicted = list(range(100, 100 + count)), []
    for context, more in pieces(ids, 1, most):
        read = [*context, *more][:-1]
        assert context and len(read) <= most and (len(read) == most or count <= most)
        begin = 0 if context[0] == 1 else ids.index(context[0])
        assert [1, *ids][begin : begin + len(read)] == read or read == ids[begin:][: len(read)]
        predicted += more
    assert predicted == ids


def test_a_texts_likelihood_is_that_of_its_windows(full, theirs):
    text = "The pass key of Alice is 48213. " * 15
    harness = Harness(full, "prompt", max_length=61)
    (found,) = harness.loglikelihood_rolling(asked((text,)), disable_tqdm=True)
    ids, wanted = full.tokenizer.encode(text, special=False), 0.0
    assert len(ids) > 122
    for context, more in pieces(ids, harness.prefix_token_id, 61):
        wanted += expected(theirs, list(context), list(more))[0]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_what_is_too_long_is_cut_and_said(full, theirs, capsys):
    harness = Harness(full, max_length=20)
    items = [("The grass is green. " * 20, "The sky"), ("The", " sky")]
    found = harness.loglikelihood(asked(*items), disable_tqdm=True)
    assert "1 of 2 requests lost their beginning" in capsys.readouterr().err
    context, continuation = harness.pair(*items[0])
    wanted = expected(theirs, context[-(21 - len(continuation)) :], continuation)[0]
    assert found[0][0] == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(UsageError, match="max_length: found 20 for a request of 150 tokens"):
        harness.loglikelihood(asked(("a", "The grass is green. " * 30)))


def test_answers_end_where_they_are_told_to(full):
    harness = Harness(full)
    (whole,) = harness.generate_until(asked((CONTEXT, {"max_gen_toks": 12})), disable_tqdm=True)
    wanted = full.generate(CONTEXT, SamplingParams(max_tokens=12))
    assert whole == wanted.text and len(whole) > 4
    until = {"until": [whole[3:5], ""], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    (part,) = harness.generate_until(asked((CONTEXT, until)), disable_tqdm=True)
    assert part == whole[: whole.index(whole[3:5])]
    drawn = harness.params_of({"do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert (drawn.temperature, drawn.top_p, drawn.max_tokens) == (0.7, 0.9, 256)
    with pytest.raises(UsageError, match="top_q: found 3, expected one of until"):
        harness.params_of({"top_q": 3})


def test_model_arguments_are_methods_tiers_and_budgets(capsys):
    text = f"model={POCKET},method=omnikv,filter_layers=1:3,share=0.25,dense_below=0,wait_layers=0,"
    text += "offload=host,dtype=float32,max_context=256,threads=1,asked=2,add_bos_token=true"
    harness = harness_of(arguments_of(text))
    method = harness.llm.method
    assert (method.filter_layers, method.share, harness.asked) == ((1, 3), 0.25, 2)
    assert harness.llm.options.offload == "host" and harness.max_length == 255
    bos = harness.prefix_token_id
    assert harness.encode("a")[0] == bos and harness.encode("a", start=False)[0] != bos
    for wrong, line in (
        ("method=omnikv,topk=3", "topk: omnikv has no such setting"),
        ("tokens=3", "found tokens; of a method that is not named"),
        ("continuation=both", "continuation: found 'both', expected one of steps, prompt"),
        ("tokens", "found 'tokens', expected KEY=VALUE"),
    ):
        with pytest.raises(EngineError, match=line):
            harness_of({"model": str(POCKET)} | arguments_of(wrong))
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        assert main(["--tasks", "arc_easy", "--model_args", f"model={POCKET},method=full"]) == 2
        assert "pip install '.[benchmarks]'" in capsys.readouterr().err
