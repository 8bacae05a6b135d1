"""Sampling against transformers' logits processors, and what a caller may not ask for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.base.errors import EngineError, SettingError
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import TOP_P_HEAD, Sampler

BAD = [
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("max_tokens", "9"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", -1),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -math.inf),
    ("frequency_penalty", "1"),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop", None),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("ignore_eos", 1),
    ("logprobs", -1),
    ("logprobs", 10**6),
]


@pytest.mark.parametrize("field, value", BAD)
def test_each_field_out_of_range_is_named_with_its_value_and_range(field, value):
    with pytest.raises(SettingError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}: found {value!r}, expected") and "\n" not in message


def test_unknown_fields_raise_and_lists_become_tuples():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1])
    assert params.stop == ("a", "b") and params.stop_token_ids == (1,) and hash(params)
    assert SamplingParams(stop="end").stop == ("end",) and SamplingParams(
        stop_token_ids=7
    ).stop_token_ids == (7,)


def hf_probabilities(logits, params, context):
    """What transformers' generate() would sample from."""
    hf = pytest.importorskip("transformers")
    scores, ids = logits.clone()[None], torch.tensor([context or [0]])
    if params.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    if params.temperature != 1.0:
        scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0.0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores, -1)[0]


@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 7, 64, 500, TOP_P_HEAD + 1, 5000]),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 10**5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
    scale=st.sampled_from([0.1, 2.0, 12.0]),
)
def test_the_distribution_is_that_of_transformers(
    vocabulary, seed, temperature, top_k, top_p, min_p, penalty, scale
):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=random) * scale
    context = torch.randint(0, vocabulary, (9,), generator=random).tolist()
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    found = Sampler(params, vocabulary, context).probabilities(logits)
    expected = hf_probabilities(logits, params, context)
    differ = (found > 0) != (expected > 0)
    # Where a cumulated sum lands on the bound within float32 rounding, one of the two may keep one
    # token more.
    assert differ.sum() <= 1
    if not differ.any():
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.6, 2), (0.85, 3), (0.97, 4)])
def test_the_token_that_reaches_top_p_is_kept(top_p, kept):
    """No sum is near a bound, so that not one token may differ."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    found = Sampler(SamplingParams(temperature=1.0, top_p=top_p), 4).probabilities(logits)
    assert (found > 0).tolist() == [True] * kept + [False] * (4 - kept)


def test_drawn_tokens_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, float("-inf")])
    sampler = Sampler(SamplingParams(temperature=1.0, min_p=0.03, seed=5), 6)
    expected, draws = sampler.probabilities(logits), 20_000
    counts = torch.bincount(
        torch.tensor([sampler.sample(logits)[0] for _ in range(draws)]), minlength=6
    )
    assert counts[(expected == 0)].sum() == 0
    error = (counts / draws - expected).abs()
    # five standard deviations
    assert torch.all(error <= 5 * torch.sqrt(expected * (1 - expected) / draws) + 1e-9)


def test_greedy_is_argmax_and_leaves_the_logits_alone():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampler = Sampler(SamplingParams(top_k=3, top_p=0.1), 1000)
    assert [sampler.sample(logits) for _ in range(3)] == [(int(logits.argmax()), None, [])] * 3
    assert torch.equal(logits, before)


def test_the_penalty_counts_prompt_and_answer_once_each():
    logits = torch.tensor([4.0, 3.5, -1.0, 0.5])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 4, [0, 0, 0, 2, 999])
    # Token 0 falls to 2.0 however often it was seen; 1 is drawn, falls to 1.75 and stays there;
    # then 0 leads again.
    assert [sampler.sample(logits)[0] for _ in range(3)] == [1, 0, 0]
    assert logits.tolist() == [4.0, 3.5, -1.0, 0.5]


def test_presence_and_frequency_count_the_answer_alone():
    """OpenAI's definition: logit - count * frequency - (count > 0) * presence."""
    logits = torch.tensor([4.0, 3.5, -1.0, 3.0])
    params = SamplingParams(presence_penalty=0.75, frequency_penalty=0.5, temperature=1.0)
    sampler = Sampler(params, 4, [0, 0, 2])
    assert torch.equal(sampler.probabilities(logits), torch.softmax(logits, -1))
    for token in (0, 0, 2, 0):
        sampler.took(token)
    expected = logits - torch.tensor([0.75 + 3 * 0.5, 0.0, 0.75 + 0.5, 0.0])
    torch.testing.assert_close(sampler.probabilities(logits), torch.softmax(expected, -1))
    greedy = Sampler(SamplingParams(frequency_penalty=0.3), 4, [0])
    # 4.0, 3.7, then 3.4 < 3.5, then 3.4 > 3.2, ...
    assert [greedy.sample(logits)[0] for _ in range(4)] == [0, 0, 1, 0] and not greedy.greedy
    more = Sampler(SamplingParams(presence_penalty=-2.0), 4)
    more.took(3)
    assert more.sample(logits)[0] == 3


def test_a_seed_repeats_an_answer_and_no_seed_does_not():
    logits = torch.zeros(10_000)

    def draw(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 10_000)
        return [sampler.sample(logits)[0] for _ in range(8)]

    torch.manual_seed(0)
    first = draw(11)
    torch.manual_seed(1)  # the global generator is neither read nor moved
    state = torch.get_rng_state()
    assert draw(11) == first and draw(12) != first and draw(None) != draw(None)
    assert torch.equal(state, torch.get_rng_state())


def test_drafts_are_what_is_drawn_and_leave_a_sampler_where_it_was():
    random = torch.Generator().manual_seed(3)
    steps = [torch.randn(300, generator=random) for _ in range(12)]
    params = SamplingParams(
        temperature=1.5,
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=2.0,
        seed=2,
    )
    sampler = Sampler(params, 300, [1, 2, 3])
    for logits in steps[:4]:
        sampler.sample(logits)
    with sampler.drafting() as guess:
        once = [guess(logits) for logits in steps[4:]]
    with sampler.drafting() as guess:
        assert [guess(logits) for logits in steps[4:]] == once
    assert [sampler.sample(logits)[0] for logits in steps[4:]] == once
    with sampler.drafting() as guess:
        assert [guess(logits) for logits in steps[4:]] != once


def test_logprobs_are_those_of_the_raw_distribution():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(4))
    sampler = Sampler(
        SamplingParams(temperature=0.3, top_k=2, repetition_penalty=3.0, logprobs=4, seed=1),
        50,
        [0],
    )
    token, logprob, top = sampler.sample(logits)
    expected = torch.log_softmax(logits, -1)
    assert logprob == pytest.approx(float(expected[token]))
    assert [i for i, _ in top] == torch.topk(expected, 4).indices.tolist()
    assert [p for _, p in top] == pytest.approx(torch.topk(expected, 4).values.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_damaged_logits_raise_and_never_pick_a_token(temperature, value):
    logits = torch.zeros(5)
    logits[:] = value if value == -math.inf else 0.0
    logits[3] = value
    with pytest.raises(EngineError, match="logits hold"):
        Sampler(SamplingParams(temperature=temperature, top_k=2, top_p=0.5, seed=0), 5).sample(
            logits
        )


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([1e4, 1e4 + 1.0, -1e4])
    assert Sampler(SamplingParams(temperature=1e-9, seed=0), 3).sample(logits)[0] == 1
    assert Sampler(SamplingParams(temperature=1e-300, seed=0), 3).sample(logits)[0] == 1


def test_wrong_shape_is_refused():
    with pytest.raises(SettingError, match=r"logits: found shape \(2, 3\), expected \(3,\)"):
        Sampler(SamplingParams(), 3).sample(torch.zeros(2, 3))


class Reads(TorchDispatchMode):
    """Operators that make the host wait for a device: a value that is read, a size that depends on
    values, a copy from the host.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "index", "masked_select", "item", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        booleans = (
            any(t is not None and t.dtype == torch.bool for t in args[1])
            if (name == "index")
            else name in self.WAITS
        )
        if booleans:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(top_p=0.9), dict(top_k=40), dict(top_k=40, top_p=0.9, min_p=0.01)],
    ids=["plain", "top_p", "top_k", "all"],
)
def test_a_draw_reads_the_device_once(settings):
    """Eight waits for the device, and 30 operators, were 0.3 ms of a step of 6."""
    sampler = Sampler(SamplingParams(temperature=0.8, seed=1, **settings), 5000)
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(5000, generator=generator)
    lists, real = [], torch.Tensor.tolist
    sampler.sample(logits)
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        patch.setattr(torch.Tensor, "tolist", lambda t: lists.append(len(t)) or real(t))
        patch.setattr(torch.Tensor, "__int__", lambda t: pytest.fail("int() of a tensor"))
        patch.setattr(torch.Tensor, "__float__", lambda t: pytest.fail("float() of a tensor"))
        sampler.sample(logits)
    # the uniform number comes from a generator on the host
    assert lists == [3] and [name for name in reads.seen if name != "_local_scalar_dense"] == []


def test_a_flat_distribution_is_drawn_from_the_whole_vocabulary():
    """Its nucleus is larger than the candidates tried first: those are drawn from a full sort."""
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=3), 5000)
    drawn = {sampler.sample(torch.linspace(0, 0.1, 5000))[0] for _ in range(200)}
    assert len(drawn) > 150 and min(drawn) < 2000


def test_a_draw_that_fails_uses_up_no_random_number():
    params = SamplingParams(temperature=1.0, seed=3)
    one, other = Sampler(params, 50), Sampler(params, 50)
    with pytest.raises(EngineError):
        one.sample(torch.full((50,), float("nan")))
    logits = torch.linspace(0, 1, 50)
    assert [one.sample(logits)[0] for _ in range(5)] == [other.sample(logits)[0] for _ in range(5)]
