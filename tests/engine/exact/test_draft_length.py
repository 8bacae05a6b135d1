"""How many tokens exact mode drafts, and that what it writes keeps full attention's distribution.

Stops: drafting that goes on where nothing is accepted, a length that never changes or always does,
an acceptance rule that bends the distribution.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import Exact, Full, OmniKV, SamplingParams
from engine.exact import draft_length
from engine.exact.draft_length import PROBE, Acceptance, DraftLength
from engine.exact.prompt_lookup import PromptLookup
from engine.plan.exact_costs import ExactCosts
from engine.sampling.sampler import Sampler
from tests.builders import session_config, tiny_config, tiny_llm
from tools.bench.shapes import shape_config, shape_filters

VOCAB = 5


def long_context(drafts):
    """Costs at a long context: a draft reads little."""
    return 1.0 + 0.12 * drafts + (0.1 if drafts else 0.0)


def short_context(drafts):
    """Costs where reading the weights is all: a draft costs nearly a step."""
    return 1.0 + 0.9 * drafts + (0.1 if drafts else 0.0)


def after(length, cycles, cost):
    """Feed (accepted, rejected) to a DraftLength; the lengths that it chose."""
    chosen = []
    for accepted in cycles:
        drafts = length.choose(7, cost)
        chosen.append(drafts)
        length.acceptance.learn(min(accepted, drafts), accepted < drafts)
    return chosen


def test_the_length_follows_what_is_accepted():
    assert after(DraftLength(), [7] * 30, long_context)[-1] == 7
    few = after(DraftLength(), [2] * 40, long_context)[-10:]
    assert set(few) <= {2, 3}
    assert after(DraftLength(), [7] * 30, short_context) == [0] * 30


def test_drafting_stops_where_nothing_is_accepted_and_is_tried_again():
    length = DraftLength()
    chosen = after(length, [0] * 400, long_context)
    started = next(i for i, drafts in enumerate(chosen) if drafts == 0)
    assert started < 12, "a bad drafter costs a few cycles"
    rest = chosen[started:]
    assert 3 <= sum(map(bool, rest)) <= 400 // PROBE + 1
    assert set(rest) <= {0, 1}
    # what a bad drafter costs in the long run: under 3%
    spent = sum(map(long_context, chosen))
    assert spent < 1.03 * len(chosen) + 12
    assert after(length, [7] * 400, long_context)[-1] == 7, "and it comes back"


def test_acceptance_that_swings_a_little_moves_the_length_by_one():
    length = DraftLength()
    after(length, [4] * 30, long_context)
    settled = after(length, [4, 3, 4, 5] * 10, long_context)
    assert max(settled) - min(settled) <= 1


def test_of_equal_promises_the_shortest_draft_is_taken():
    """Costs are counted: what a longer draft promises within 2% may be an error of the count."""
    length = DraftLength(prior=0.8)
    tokens = [length.acceptance.tokens(d) for d in range(8)]
    for more, want in ((1.0, 1), (1.015, 1), (1.03, 7)):
        cost = [1.0, *(expected / 1.2 for expected in tokens[1:7]), tokens[7] / (1.2 * more)]
        assert length.choose(7, cost.__getitem__) == want


# costs of a cycle by drafts, of a step: GPUs at a long context, the 1B and the deep shape on a CPU
# at 131,072 tokens (ms measured, docs/LOG.md), and where nothing pays
COSTS = {
    "long": [1.0 + 0.1 * (d > 0) + 0.12 * d for d in range(8)],
    "1b": [c / 235 for c in (235, 361, 516, 649, 831, 972, 1114, 1257)],
    "deep": [c / 178 for c in (178, 213, 250, 268, 335, 360, 430, 463)],
    "short": [1.0 + 0.1 * (d > 0) + 0.9 * d for d in range(8)],
}
RATES = {rate: [rate] * 7 for rate in (0.3, 0.6, 0.8, 0.9, 0.97)} | {
    "falls": [0.95, 0.87, 0.8, 0.7, 0.6, 0.5, 0.4],
    "rises": [0.7, 0.85, 0.9, 0.95, 0.95, 0.95, 0.95],
}


def seconds_a_token(length, cost, rates, tokens, seed):
    """Of an answer whose drafts are accepted by `rates`, one after the other."""
    luck = random.Random(seed)
    spent = written = 0.0
    while written < tokens:
        drafts, accepted = length.choose(7, cost.__getitem__), 0
        while accepted < drafts and luck.random() < rates[accepted]:
            accepted += 1
        length.acceptance.learn(accepted, accepted < drafts)
        spent, written = spent + cost[drafts], written + accepted + 1
    return spent / written


def best_fixed(cost, rates):
    """Seconds a token of the fixed length that pays most."""
    known = Acceptance()
    known.rates = lambda drafts: rates[:drafts]
    return min(cost[d] / known.tokens(d) for d in range(8))


def test_auto_lands_on_the_best_fixed_length():
    """Answers of 200 tokens, their start included: over all costs and rates 3% are lost to the
    length that one would fix knowing the rates, nowhere 10%.
    """
    lost = []
    for cost in COSTS.values():
        for rates in RATES.values():
            took = [seconds_a_token(DraftLength(), cost, rates, 200, seed) for seed in range(12)]
            lost.append(sum(took) / len(took) / best_fixed(cost, rates) - 1)
    assert sum(lost) / len(lost) < 0.03
    assert max(lost) < 0.1


def test_an_estimate_that_never_learns_is_noticed():
    """The bound above is missed by one that keeps its prior, and by one that asks one cycle."""
    for fade, weight in ((0.9, 1e9), (0.0, 2.0)):
        lost = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft_length, "FADE", fade)
            patch.setattr(draft_length, "WEIGHT", weight)
            patch.setattr(draft_length, "LEAN", weight)
            for cost in COSTS.values():
                for rates in RATES.values():
                    took = [seconds_a_token(DraftLength(), cost, rates, 200, s) for s in range(3)]
                    lost.append(sum(took) / len(took) / best_fixed(cost, rates) - 1)
        assert sum(lost) / len(lost) > 0.04


def test_a_fixed_length_is_kept_and_cut_to_the_room():
    length = DraftLength(fixed=4)
    assert length.choose(7, short_context) == 4 and length.choose(2, short_context) == 2


def test_an_unjudged_draft_is_not_counted():
    seen = Acceptance()
    seen.learn(0, False)
    assert seen.tried == [0.0] * 7
    seen.learn(2, True)
    assert seen.tried[:4] == [1.0, 1.0, 1.0, 0.0] and seen.kept[:3] == [1.0, 1.0, 0.0]


def test_costs_grow_with_the_context_and_promise_more():
    """Counted, the deep shape in bfloat16 on a GPU: nothing at 2K, 2x and more at 256K."""
    config = shape_config("deep")
    plan = OmniKV(filter_layers=shape_filters("deep")).plan(config)
    costs = ExactCosts.of(config, plan, 2, "cuda")
    gains = [costs.predicted(n, 2304, 7)[1] for n in (4096, 32768, 262144)]
    assert gains == sorted(gains) and gains[-1] > 2
    far = ExactCosts.of(config, plan, 2, "cuda", offloaded=plan.sparse_layers)
    assert far.alone(262144, 2304) > far.predicted(262144, 2304, 7)[1], "the link decides"


def test_a_sliding_layer_is_counted_by_its_window_and_its_own_row():
    """As Gemma 4: five of six layers slide, with rows of half the bytes."""
    windows = (512,) * 5 + (0,)
    config = replace(
        tiny_config(layers=6, heads=4, kv_heads=2, head_dim=32),
        windows=windows,
        local_heads=(2, 16),
    )
    costs = ExactCosts.of(config, OmniKV(filter_layers=(5,)).plan(config), 2, "cuda")
    assert costs.row == 2 * 2 * 32 * 2
    rows = config.rows_seen(65536)
    read = costs.full(rows) - costs.weights
    assert read == costs.row * 65536 + 5 * 512 * (costs.row // 2)
    # a prediction counts the same rows: the windows are read whatever is chosen
    assert costs.alone(65536, 65536) == pytest.approx(1.0)
    wide = replace(costs, windows=(), local=1.0)
    assert wide.full([65536] * 6) > 5 * costs.full(rows)


def test_the_plan_says_what_to_expect():
    method = Exact(OmniKV(filter_layers=(1,), tokens=64))
    config = session_config(layers=12, hidden=32, max_positions=65536)
    text = str(tiny_llm(method, config, max_context=65536).plan())
    assert "exact     full attention's text" in text and "times as fast" in text
    short = str(tiny_llm(method, config, max_context=128).plan())
    assert "drafts do not pay at 128 tokens" in short


@pytest.mark.parametrize("most", [1, 4])
def test_lookup_finds_the_latest_occurrence(most):
    generator = torch.Generator().manual_seed(most)
    lookup = PromptLookup()
    for n in (2, 3, 50, 700, 300, 1500):
        if n == 300:
            lookup.forget(0)
        ids = torch.randint(4, (n,), generator=generator).tolist()
        lookup.forget(0)
        token = ids[-1]
        text = [*ids, token]
        want = next(
            (text[i + 1 :][:most] for i in range(n - 1, 1, -1) if text[i - 2 : i + 1] == text[-3:]),
            [],
        )
        assert lookup.drafts(ids, token, most) == want


# ------------------------------------------------------------------ the distribution


def tables(seed, far):
    """Logits of full attention and of a drafter after every prefix of three tokens or fewer."""
    generator = torch.Generator().manual_seed(seed)
    full, draft = {}, {}
    prefixes = [()]
    for _ in range(4):
        for prefix in prefixes:
            full[prefix] = torch.randn(VOCAB, generator=generator)
            draft[prefix] = full[prefix] + far * torch.randn(VOCAB, generator=generator)
        prefixes = [(*p, t) for p in prefixes for t in range(VOCAB)]
    return full, draft


class Stub:
    """An exact session's runner whose steps look their logits up."""

    def __init__(self, session, full, draft, sampler):
        self.runner, self.shown, self.given = session.runner, [], []
        session.sampler, self.runner._cycle = sampler, None

        def one(table):
            def step(n):
                self.given[n - 1 :] = [int(self.runner.token)]
                return table[tuple(self.given)].view(1, 1, -1)

            return step

        self.runner._own_draft = self.runner._kept_draft = one(draft)
        self.runner._dense_step = one(full)
        self.runner._verify_step = lambda width, chooses: Wide(
            width, lambda tokens: [full[(*self.shown, *tokens[: j + 1])] for j in range(width)]
        )

    def logits(self, token):
        """Full attention's logits after one more token."""
        self.runner.feed(token, len(self.shown) + 1)
        found = self.runner.run(len(self.shown) + 1, False)
        self.shown.append(token)
        return found


class Wide(SimpleNamespace):
    """A verification of so many tokens."""

    def __init__(self, width, look):
        super().__init__(token=torch.zeros(1, width, dtype=torch.int64), look=look)

    def __call__(self, n):
        return torch.stack(self.look(self.token[0].tolist()))[None]


def counts(samples, keep_drafts):
    """(how often each continuation of three tokens came, drafts accepted by each one's last
    verification). keep_drafts: the broken rule, by which a draft is kept as it is.
    """
    full, draft = tables(1, far=0.7)
    found, accepted = torch.zeros(VOCAB**3), 0
    config = session_config(layers=2, hidden=32, vocab_size=VOCAB)
    method = Exact(OmniKV(filter_layers=(0,), tokens=1), draft=3, lookup=False)
    session = tiny_llm(Full(), config, max_context=64).session(method)
    for seed in range(samples):
        params = SamplingParams(max_tokens=3, temperature=0.9, seed=seed)
        sampler = Sampler(params, VOCAB)
        stub, logits, number = Stub(session, full, draft, sampler), full[()], 0
        for _ in range(3):
            token, cycle = sampler.sample(logits)[0], stub.runner._cycle
            if keep_drafts and cycle is not None and cycle.accepted < len(cycle.drafts):
                token = cycle.drafts[cycle.accepted]
            number = number * VOCAB + token
            logits = stub.logits(token)
        found[number] += 1
        accepted += stub.runner._cycle.accepted if stub.runner._cycle else 0
    return found, accepted


def expected():
    """The plain loop's probability of every continuation of three tokens."""
    full, _ = tables(1, far=0.7)
    params = SamplingParams(temperature=0.9)
    everything = torch.zeros(VOCAB**3, dtype=torch.float64)
    for number in range(VOCAB**3):
        tokens = (number // VOCAB**2, number // VOCAB % VOCAB, number % VOCAB)
        p = 1.0
        for i, token in enumerate(tokens):
            p *= float(Sampler(params, VOCAB).probabilities(full[tokens[:i]])[token])
        everything[number] = p
    return everything / everything.sum()


def chi_square(found, wanted):
    """Standard deviations by which the statistic exceeds its expectation; cells of fewer than five
    expected samples are one.
    """
    n = found.sum()
    large = wanted * n >= 5
    if found[wanted == 0].any():  # what full attention never says
        return float("inf")
    seen = torch.cat([found[large].double(), found[~large].sum().double()[None]])
    want = torch.cat([wanted[large] * n, (wanted[~large].sum() * n)[None]]).clamp(min=1e-9)
    freedom = len(seen) - 1
    return float((((seen - want) ** 2 / want).sum() - freedom) / (2 * freedom) ** 0.5)


SAMPLES = 500


def test_samples_follow_full_attention_and_a_broken_rule_does_not():
    found, accepted = counts(SAMPLES, False)
    assert abs(chi_square(found, expected())) < 4
    assert 0.2 * SAMPLES < accepted < 1.9 * SAMPLES, "some drafts were right, and some wrong"
    found, _ = counts(SAMPLES, True)
    assert chi_square(found, expected()) > 8
