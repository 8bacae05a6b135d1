"""Exact mode: what a sparse method drafts and full attention verifies is what Full() writes.

Stops: a draft that sees its future or is kept unverified, rows of a draft left in the bank, a
sampler that a draft has moved, a rejected draft that shows.
"""

from dataclasses import replace

import pytest
import torch

from engine import (
    H2O,
    Exact,
    Full,
    HShare,
    InfLLM,
    Kascade,
    MInference,
    OmniKV,
    OmniKVHeads,
    Quest,
    RocketKV,
    SamplingParams,
    ShadowKV,
    TidalDecode,
)
from engine.base.errors import SettingError
from engine.methods.select.pod import PodUntrained
from engine.plan.exact_costs import ExactCosts
from engine.plan.layers import Role
from engine.session.generate import generate
from tests.builders import hybrid_config, random_ids, session_config, tiny_llm

LAYERS = 4
CONFIG = session_config(layers=LAYERS, hidden=32, vocab_size=23)
OMNIKV = OmniKV(filter_layers=(1,), tokens=24, tail=64, dense_below=0)
METHODS = {
    "omnikv": OMNIKV,
    "window": OmniKV(
        filter_layers=(0, 2), tokens=40, tail=64, dense_below=0, selector="uniform", window=5
    ),
    "quest": Quest(tokens=48, dense_layers=1),
    "tidal": TidalDecode(tokens=24, select_layer=1),
    "tidal-all": TidalDecode(tokens=24, select_layer=1, gqa_reduce="all"),
    "hshare": HShare(tokens=24, recent=4, sinks=2, layers=(0, 1, 1, 3)),
    "kascade": Kascade(tokens=24, anchors=(0, 2)),
    "residual": replace(OMNIKV, residual="sample"),
    "rocket": RocketKV(tokens=24, page=4, window=8, answer=12),
    "shadow": ShadowKV(tokens=24, chunk=4, outliers=2, recent=8, answer=12, dense_layers=1),
    "heads": OmniKVHeads(filter_layers=(1,), tokens=24, tail=64, dense_below=0),
    "pod": PodUntrained(blocks=(0, 2), first=4, recent=64, forget=False),
}
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(
    max_tokens=80,
    temperature=0.7,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    seed=5,
    logprobs=2,
)


def model(method=None, backend="reference", **settings):
    """A random model with peaky attention and a small vocabulary, so that some drafts are right."""
    settings = {"max_context": 512, "backend": backend, "sharpness": 2.0, **settings}
    return tiny_llm(method or Full(), CONFIG, **settings)


def assert_same_state(one, other):
    """Tokens, logits, the bank's rows and the query ring, bit for bit."""
    n = len(one)
    assert one.ids == other.ids
    assert torch.equal(one.last_logits, other.last_logits)
    ring = one.query_ring
    assert (ring.low, ring.high) == (other.query_ring.low, other.query_ring.high)
    held = torch.arange(ring.low, ring.high)[None]
    for layer in range(LAYERS):
        assert torch.equal(ring.read(layer, held), other.query_ring.read(layer, held))
        rows = (torch.cat([k for _, k, _ in s.bank.blocks(layer, 0, n)], 2) for s in (one, other))
        assert torch.equal(*(r[:, :, :n].clone() for r in rows))
        for mine, theirs in zip(one.bank.kv(layer, n), other.bank.kv(layer, n)):
            assert torch.equal(mine[:, :, :n], theirs[:, :, :n])


def assert_drafts_were_judged(session, rejects=True):
    """Drafts were made by sparse layers that read a part; some were right, and some wrong."""
    counters, runtime, n = session.counters, session.runtime, len(session)
    read = runtime.drafter.rows_read(n)
    assert min(read[i] for i, r in enumerate(session.plan.roles) if r is Role.SPARSE) < n
    assert counters.accepted > 0
    if rejects:
        assert counters.drafted > counters.accepted + 7  # one cycle may still be open


# ------------------------------------------------------------------ identity


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("name", METHODS)
def test_the_state_after_every_token_is_that_of_full_attention(name, offload):
    """Reference launchers, to the bit: drafts cross a tail block (n = 192) on the way."""
    llm, ids = model(), random_ids(170, 23, seed=3)
    method = Exact(METHODS[name], draft=3, lookup=False)
    with llm.session(method, offload=offload) as exact, llm.session(Full()) as full:
        pairs = zip(generate(exact, ids, GREEDY), generate(full, ids, GREEDY), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            assert mine.token_id == theirs.token_id
            assert torch.equal(exact.last_logits, full.last_logits)
            if number % 9 == 0:
                assert_same_state(exact, full)
        assert_same_state(exact, full)
        assert exact.counters.drafted > 40
        if name != "pod":
            assert_drafts_were_judged(exact)


@pytest.mark.parametrize("draft", [1, 7, "auto"])
def test_a_seed_writes_the_text_of_full_attention(draft):
    """Temperature, top-p, min-p and a penalty; logprobs are full attention's; any draft length."""
    llm, ids = model(), random_ids(200, 23, seed=4)
    with llm.session(Exact(OMNIKV, draft=draft)) as exact, llm.session(Full()) as full:
        pairs = zip(generate(exact, ids, SAMPLED), generate(full, ids, SAMPLED), strict=True)
        for mine, theirs in pairs:
            assert mine.token_id == theirs.token_id and mine.logprob == theirs.logprob
            assert mine.top_logprobs == theirs.top_logprobs
        assert_same_state(exact, full)
        if draft != "auto":
            assert_drafts_were_judged(exact)


@pytest.mark.parametrize("offload", ["device", "host"])
def test_the_fast_kernels_write_full_attentions_tokens(offload):
    """Products over several rows round otherwise: tokens are equal, in float32 all of them."""
    llm = model(backend="auto")
    for seed in range(3):
        ids = random_ids(150 + 40 * seed, 23, seed=seed)
        with llm.session(Exact(OMNIKV, draft=4), offload=offload) as exact:
            mine = [piece.token_id for piece in generate(exact, ids, GREEDY)]
            assert_drafts_were_judged(exact)
        with llm.session(Full()) as full:
            assert mine == [piece.token_id for piece in generate(full, ids, GREEDY)]


def test_a_verified_token_sees_no_draft_after_it():
    """Drafts planted by hand: right ones, then a wrong one. Each row's logits are those of one
    token at a time.
    """
    llm, ids = model(), random_ids(140, 23, seed=1)
    with llm.session(Full()) as full:
        right = [p.token_id for p in generate(full, ids, GREEDY)][:5]
        truth = []
        full.truncate(140)
        for token in right:
            truth.append(full.decode(token))
    for wrong in range(1, 5):
        drafts = right[1:]
        drafts[wrong - 1] = (right[wrong] + 1) % 23
        with llm.session(Exact(OMNIKV, draft=4)) as exact:
            exact.prefill(ids)
            plant(exact.runner, drafts)
            for token, logits in zip(right[:wrong], truth):
                assert torch.equal(exact.decode(token), logits)
            assert exact.counters.accepted == wrong - 1 and exact.counters.cycles == 1
            plant(exact.runner, [])
            assert torch.equal(exact.decode(right[wrong]), truth[wrong])
            assert exact.counters.cycles == 2


def plant(runner, drafts):
    """Make these the drafts of the next cycle."""
    runner._draft = lambda n: (list(drafts), runner._by_lookup, 1.0)


# ------------------------------------------------------------------ the session's other calls


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("seed", range(3))
def test_any_course_of_a_session_ends_where_full_attentions_does(seed, offload):
    """Streams closed early, truncates, forks, method switches, second prompts, interrupts in a
    draft and in a verification, in random order.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(most):
        return int(torch.randint(most, (1,), generator=generator))

    llm, method, drafted = model(), Exact(OMNIKV, draft=3), 0
    exact, full = llm.session(method, offload=offload), llm.session(Full())
    for session in (exact, full):
        session.prefill(random_ids(150, 23, seed=seed))
    for move in range(8):
        kind, amount = pick(6), 2 + pick(9)
        if kind == 0:
            for session in (exact, full):
                session.truncate(len(session) - 1)
                session.decode(amount)
        elif kind == 1:
            drafted += exact.counters.drafted
            copies = exact.fork(), full.fork()
            exact.close()
            full.close()
            exact, full = copies
        elif kind == 2:
            exact.set_method(Full())
            for session in (exact, full):
                session.decode(amount)
            exact.set_method(method)
        elif kind == 3:
            more = random_ids(amount, 23, seed=move)
            for session in (exact, full):
                session.prefill(more)
        elif kind == 4:
            n = len(exact)
            interrupted(exact, 3 * amount)
            for token in exact.ids[n:]:
                full.decode(token)
            assert_same_state(exact, full)
        for session in (exact, full):
            stream = generate(session, [], SAMPLED if kind % 2 else GREEDY)
            for _ in range(amount):
                next(stream)
            stream.close()
        assert_same_state(exact, full)
    assert drafted + exact.counters.drafted > 10
    exact.close()
    full.close()


def interrupted(session, after):
    """A Ctrl-C in the `after`-th attention of steps that draft and verify leaves the session with
    the tokens that were shown.
    """
    runner, calls = session.runner, []

    def breaking(attend):
        def run(*arguments):
            calls.append(attend)
            if len(calls) == after:
                raise KeyboardInterrupt
            return attend(*arguments)

        return run

    targets = runner.runtime.drafter, runner.dense_runtime
    for target in targets:
        target.attend = breaking(target.attend)
    stream, shown = generate(session, [], SamplingParams(max_tokens=12)), list(session.ids)
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            shown.append(piece.token_id)
    for target in targets:
        del target.attend
    assert session.ids == shown


def test_a_plain_decode_drafts_nothing_and_a_full_session_reports_nothing():
    with model().session(Exact(OMNIKV)) as exact:
        exact.prefill(random_ids(100, 23))
        exact.decode(3)
        assert exact.counters.drafted == 0 and exact.counters.cycles == 1
    with model().session(Full()) as full:
        last = list(generate(full, random_ids(100, 23), GREEDY))[-1]
        assert last.stats.cycles == 0 and last.stats.speedup == 0.0


def test_the_selection_of_a_token_is_what_its_drafts_read():
    """The method's own after the token that the cycle began with, for every token that the cycle
    verified; none where nothing was drafted, or after a truncate.
    """
    llm, ids, cycles, shared = model(), random_ids(200, 23, seed=4), 0, 0
    method = Exact(OMNIKV, draft=4, lookup=False, chooser="drafter")
    with llm.session(method) as exact, llm.session(Full()) as other:
        for piece in generate(exact, ids, SamplingParams(max_tokens=30)):
            if piece.finish_reason is not None:
                break  # the last token is fed without drafts
            chosen, scores = exact.selections, exact.selection_scores
            if exact.counters.cycles > cycles:
                other.set_method(Full())
                other.truncate(0)
                other.prefill(exact.ids[:-1])
                other.set_method(OMNIKV)
                other.decode(piece.token_id)
                want, weights, cycles = other.selections, other.selection_scores, cycles + 1
            else:
                shared += 1
            assert chosen.keys() == want.keys() == {1}
            assert torch.equal(chosen[1], want[1])
            torch.testing.assert_close(scores[1], weights[1])  # its tokens were a prompt
        assert cycles > 5 and shared > 5 and exact.selections == {}
        exact.set_method(method)
        next(generate(exact, [], GREEDY))
        assert exact.selections
        exact.truncate(len(exact) - 1)
        assert exact.selections == exact.selection_scores == {}


def test_an_answer_ends_inside_a_draft():
    """An end token, a length and a full bank in the middle of an accepted draft."""
    llm, ids = model(), random_ids(190, 23, seed=3)
    with llm.session(Full()) as full:
        written = [p.token_id for p in generate(full, ids, GREEDY)]
    for params, context in (
        (SamplingParams(max_tokens=40, stop_token_ids=(written[11],)), 512),
        (SamplingParams(max_tokens=7), 512),
        (GREEDY, 200),
    ):
        ends = []
        for method in (Exact(OMNIKV, draft=5), Full()):
            with llm.session(method, max_context=context) as session:
                last = list(generate(session, ids, params))[-1]
                ends.append((last.finish_reason, last.token_id, session.ids))
        assert ends[0] == ends[1]


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exact(OMNIKV, draft=8), "draft: found 8, expected 'auto' or an int from 0 to 7"),
        (lambda: Exact(OMNIKV, draft=-1), "draft: found -1"),
        (lambda: Exact(OMNIKV, draft=True), "draft: found True"),
        (lambda: Exact(OMNIKV, draft="most"), "draft: found 'most'"),
        (lambda: Exact(H2O()), "method: h2o cannot draft for exact mode: it forgets rows"),
        (lambda: Exact(Full()), "method: full cannot draft"),
        (lambda: Exact(MInference()), "method: minference cannot draft"),
        (lambda: Exact(InfLLM()), "method: infllm cannot draft"),
        (lambda: Exact(Exact(OMNIKV)), "method: found Exact"),
        (lambda: Exact(OmniKV(official=True)), "official=True"),
        (lambda: Exact(OmniKV(prefill_ratio=4)), "prefill_ratio"),
        (lambda: Exact(OMNIKV, lookup=1), "lookup: found 1"),
    ],
)
def test_settings_that_exact_mode_refuses(make, words):
    with pytest.raises(SettingError) as refused:
        make()
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("wait", [0, 1])
def test_filter_layers_that_leave_no_sparse_layer_cannot_draft(wait):
    drafter = OmniKV(filter_layers=(1 - wait,), wait_layers=wait, dense_below=0)
    with pytest.raises(SettingError) as refused:
        tiny_llm(Exact(drafter), session_config(layers=2, hidden=32), max_context=128).session()
    assert "omnikv has no sparse layer among this model's 2" in str(refused.value)


def test_a_model_without_sparse_layers_runs_full_attention():
    llm = tiny_llm(Exact(OmniKV()), session_config(layers=2, hidden=32), max_context=128)
    assert llm.method == Full()


# ------------------------------------------------------------------ drafts of the first layers


def leaving(**settings):
    """A model whose last two layers change little, so that it may be left before them."""
    llm = model(**settings)
    for layer in llm.load().model.layers[2:]:
        layer.o.weight.mul_(0.3)
        layer.down.weight.mul_(0.3)
    return llm


@pytest.mark.parametrize("draft", [3, 7, "auto"])
def test_what_the_first_layers_draft_leaves_the_state_of_full_attention(draft):
    """After every token, to the bit, across going back and a copy; fewer bytes a token than a full
    step where drafts are right.
    """
    llm, ids = leaving(), random_ids(170, 23, seed=3)
    method = Exact(Full(), draft=draft, lookup=False, early_exit=2)
    with llm.session(method) as exact, llm.session(Full()) as full:
        for _ in range(2):
            pairs = zip(generate(exact, ids, GREEDY), generate(full, ids, GREEDY), strict=True)
            for mine, theirs in pairs:
                assert mine.token_id == theirs.token_id
                assert torch.equal(exact.last_logits, full.last_logits)
            assert_same_state(exact, full)
            for session in (exact, full):
                session.truncate(190)
        counters = exact.counters
        if draft == "auto":
            return
        assert counters.accepted > 10 and counters.drafted > counters.accepted + 7
        with exact.fork() as copy, full.fork() as other:
            for mine, theirs in zip(generate(copy, [3], GREEDY), generate(other, [3], GREEDY)):
                assert mine.token_id == theirs.token_id
            assert_same_state(copy, other)


def test_a_seed_writes_the_text_of_full_attention_where_the_first_layers_draft():
    llm, ids = leaving(backend="auto"), random_ids(200, 23, seed=4)
    method = Exact(Full(), draft=4, early_exit=2)
    with llm.session(method) as exact, llm.session(Full()) as full:
        pairs = zip(generate(exact, ids, SAMPLED), generate(full, ids, SAMPLED), strict=True)
        assert all(mine.token_id == theirs.token_id for mine, theirs in pairs)
        assert exact.counters.accepted > 10


def test_a_draft_of_the_first_layers_costs_their_bytes_and_the_heads():
    """By hand, on a GPU's costs: two layers of four, the head, and rows of two layers."""
    plan = Full().plan(CONFIG)
    costs = ExactCosts.of(CONFIG, plan, 4, "cuda", early=2)
    head = 23 * 32
    layers = CONFIG.step_parameters - 2 * head  # the embedding is looked up
    assert costs.draft(costs.drafts([100] * 4), True) == pytest.approx(
        4 * (layers / 2 + head) + 200 * costs.row, rel=1e-3
    )
    assert costs.full([100] * 4) == 4 * (layers + head) + 400 * costs.row


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(method=OMNIKV, early_exit=2), "found method omnikv, expected full"),
        (dict(method=Full(), early_exit=-1), "early_exit: found -1"),
        (dict(method=Full(), early_exit=True), "early_exit: found True"),
        (dict(method=Full(), early_exit=4), "expected fewer than this model's 4 layers"),
        (dict(method=Full()), "full cannot draft"),
    ],
)
def test_an_early_exit_without_sense_is_one_line(given, words):
    with pytest.raises(SettingError, match=words) as error:
        model().session(Exact(**given))
    assert "\n" not in str(error.value)


def test_recurrent_layers_are_not_left_early():
    llm = tiny_llm(Full(), hybrid_config(), max_context=256)
    with pytest.raises(SettingError, match="early_exit: the recurrent layers of this model"):
        llm.session(Exact(Full(), early_exit=4))
