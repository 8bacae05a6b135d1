"""What each evicting method must hold beyond U1 to U8 (method_table.py): the rule of its paper, and
how scores of a group are reduced, exactly.

Also that going back, copies, interruptions and changes of method are exact, or refused in one line.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.base.errors import SettingError
from engine.base.figures import human
from engine.methods.evict.a2sf import A2SF
from engine.methods.evict.ada_snapkv import AdaPyramid, AdaSnapKV, deal
from engine.methods.evict.h2o import H2O
from engine.methods.evict.h2o_plus import H2OPlus, H2OPlusRuntime
from engine.methods.evict.keyformer import Keyformer, gumbel
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.pyramidkv import PyramidKV, pyramid
from engine.methods.evict.scissorhands import Scissorhands
from engine.methods.evict.shared.store import best
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.model.rope import apply_rope
from kernels.select.column_sums import column_sums
from kernels.select.drop import worst
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.method_table import with_bank

TURNS = ((150, 9), (40, 5))
H2O_OF_A2SF = dict(newest=None, gqa_reduce="max", cut="first_step")
H2O_OF_KEYFORMER = dict(noise=False, tau_delta=0.0, recent_share=0.5, every=1, cut="first_step")


def play(session, turns=TURNS, seed=0):
    """All logits, and what every head holds after each step."""
    seen, held = [], []
    for number, (prompt, answer) in enumerate(turns):
        ids = random_ids(prompt + answer, seed=seed + number)
        seen.append(session.prefill(ids[:prompt]))
        for token in ids[prompt:]:
            seen.append(session.decode(token))
            held.append(
                [session.runtime.positions(layer) for layer in range(session.plan.num_layers)]
                if session.runtime.needs.history == "store"
                else None
            )
    return torch.stack(seen), held


REDUCTIONS = {
    "A2SF(1) = H2O": (A2SF(tokens=30, forgetting=1.0, **H2O_OF_A2SF), H2O(tokens=30)),
    "A2SF(1) = H2O, by share": (A2SF(share=0.3, forgetting=1, **H2O_OF_A2SF), H2O(share=0.3)),
    "Keyformer(no noise, tau 1) = H2O": (Keyformer(tokens=30, **H2O_OF_KEYFORMER), H2O(tokens=30)),
    "H2O+(one segment) = H2O cut at the prompt's end": (
        H2OPlus(tokens=30, segment=500),
        H2O(tokens=30, cut="prefill"),
    ),
    "PyramidKV(beta 1) = SnapKV": (PyramidKV(tokens=50, beta=1), SnapKV(tokens=50)),
    "Ada-SnapKV(alpha 0) = SnapKV": (AdaSnapKV(tokens=50, alpha=0), SnapKV(tokens=50)),
    "Ada-Pyramid(alpha 0) = PyramidKV": (AdaPyramid(tokens=60, alpha=0), PyramidKV(tokens=60)),
    "Ada-Pyramid(beta 1) = Ada-SnapKV": (AdaPyramid(tokens=60, beta=1), AdaSnapKV(tokens=60)),
    "StreamingLLM(no sink) = window": (StreamingLLM(tokens=40, sink=0), Window(tokens=40)),
    "LM-Infinite(no sink) = window": (LMInfinite(tokens=40, sink=0), Window(tokens=40)),
}


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_hold_to_the_bit(name, shape):
    one, other = REDUCTIONS[name]
    llm = llm_of(shape)
    with llm.session(one) as a, llm.session(other) as b:
        (logits, held), (expected, kept) = play(a), play(b)
        assert held == kept and torch.equal(logits, expected)
        assert max(a.runtime.rows_read(len(a))) < len(a)


@pytest.mark.filterwarnings("ignore:OmniKV with filter_layers")
def test_omnikv_whose_layers_are_all_filters_is_full_attention():
    llm = llm_of()
    with (
        llm.session(
            OmniKV(filter_layers=tuple(range(SHAPES[0][0])), tokens=8, dense_below=0)
        ) as all_filters,
        llm.session(Full()) as full,
    ):
        assert torch.equal(play(all_filters)[0], play(full)[0])


# ---------------------------------------------------------------- H2O and its kin


def test_h2o_keeps_its_budget_half_of_it_the_newest():
    with llm_of().session(H2O(tokens=30)) as session:
        session.prefill(random_ids(150))
        # the first step of the answer sees everything
        assert all(len(head) == 150 for head in session.runtime.positions(0))
        for n in range(151, 171):
            session.decode(n % 90)
            for layer in range(session.plan.num_layers):
                for head in session.runtime.positions(layer):
                    assert len(head) == 30 and head[-15:] == list(range(n - 15, n))


def test_h2o_plus_never_holds_more_than_budget_and_segment(monkeypatch):
    seen, live = [], H2OPlusRuntime._live

    def counted(self, layer, progress, end):
        k, v = live(self, layer, progress, end)
        seen.append(k.shape[1])
        return k, v

    monkeypatch.setattr(H2OPlusRuntime, "_live", counted)
    with llm_of(chunk=512).session(H2OPlus(tokens=40, segment=25)) as session:
        session.prefill(random_ids(300))
        assert max(seen) == 65 and len(seen) == 12 * session.plan.num_layers
        assert all(len(head) == 40 for head in session.runtime.positions(3))
    assert (
        H2OPlus(segment="auto").segment_of(100_000) == int(128e6 / 100_000**1.05)
        and H2OPlus(segment="auto").segment_of(150_001) == 20
    )
    assert H2OPlus(segment="auto_70b").segment_of(1000) == 200


def test_a2sf_that_forgets_everything_keeps_what_the_last_query_looks_at():
    """forgetting 0: the scores are one query's weights, summed over the group."""
    with llm_of().session(A2SF(tokens=20, forgetting=0.0, newest=0, forget=False)) as session:
        ids = random_ids(120)
        session.prefill(ids)
        k = session.bank.kv(0)[0][0, :, :120]
        at = torch.tensor([[119]])
        q = apply_rope(session.query_ring.read(0, at), *session.loaded.rotary.at(at))[0]
        weights = column_sums(q, k, 119, session.runtime.scale).sum(1)
        for head, mine in zip(weights, session.runtime.positions(0)):
            assert mine == sorted(torch.topk(head, 20).indices.tolist())


def test_keyformers_noise_is_standard_gumbel_and_its_seeds():
    heads, queries, keys = (
        torch.arange(4).view(2, 2),
        torch.arange(500),
        torch.arange(200).expand(2, -1),
    )
    noise = gumbel(3, 1, heads, queries, keys)
    assert noise.shape == (2, 2, 500, 200)
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.std()) - 1.2825) < 0.01
    flat = noise.flatten(2)
    # heads apart
    assert torch.corrcoef(flat.flatten(0, 1)).fill_diagonal_(0).abs().max() < 0.02
    assert (
        abs(
            float(
                torch.corrcoef(
                    torch.stack([noise[0, 0, :, :-1].flatten(), noise[0, 0, :, 1:].flatten()])
                )[0, 1]
            )
        )
        < 0.02
    )
    part = gumbel(3, 1, heads[1:], queries[40:60], keys[1:, 7:9])
    # whatever else is asked for
    assert torch.equal(part, noise[1:, :, 40:60, 7:9])
    assert not torch.equal(gumbel(4, 1, heads, queries, keys), noise) and not torch.equal(
        gumbel(3, 2, heads, queries, keys), noise
    )
    with (
        llm_of().session(Keyformer(tokens=30)) as one,
        llm_of().session(Keyformer(tokens=30, seed=1)) as other,
    ):
        assert play(one)[1] != play(other)[1]


def test_scissorhands_drops_in_bursts_and_never_the_newest():
    """Its budget is cut once: what a prompt's end leaves is what every drop leaves."""
    method = Scissorhands(tokens=40, newest=10, drop=0.5)
    with llm_of().session(method) as session:
        session.prefill(random_ids(150))
        sizes = []
        for n in range(151, 246):
            session.decode(n % 90)
            heads = [
                head
                for layer in range(session.plan.num_layers)
                for head in session.runtime.positions(layer)
            ]
            assert all(head[-10:] == list(range(n - 10, n)) for head in heads)
            sizes.append(len(heads[0]))
            assert all(len(head) == sizes[-1] for head in heads)
        # 81 would be more than twice the budget: half goes at once
        assert method.most(40) == 80 and sizes == [*range(41, 81), *([*range(40, 81)] * 2)][:95]
        needs = session.runtime.needs
        assert session.stats.store_bytes <= needs.store_bytes


def test_scissorhands_keeps_the_young_that_few_queries_have_seen():
    """A prompt whose attention is even but for noise: a count of highs would keep the oldest, which
    most queries have seen; counts against a token keep by how often it was passed over.
    """
    method, length = Scissorhands(tokens=50, newest=1, history=150), 150
    with llm_of().session(method) as session:
        session.prefill(random_ids(length))
        rows = [
            h for layer in range(session.plan.num_layers) for h in session.runtime.positions(layer)
        ]
    ages = torch.tensor([[length - 1 - at for at in head] for head in rows])
    young = ((ages >= 1) & (ages <= 25)).sum(1).float().mean()
    assert young > 20  # of 25; counts of highs keep 2 of them


# ---------------------------------------------------------------- the window methods


@pytest.mark.parametrize(
    "method", [StreamingLLM(tokens=40, sink=4), LMInfinite(tokens=40, sink=4), Window(tokens=40)]
)
def test_sinks_and_window_and_nothing_else(method):
    sink = getattr(method, "sink", 0)
    with llm_of().session(method) as session:
        session.prefill(random_ids(120))
        for n in range(121, 140):
            session.decode(7)
            assert session.runtime.positions(2) == [[*range(sink), *range(n - 40 + sink, n)]] * 2
        store = session.stats.store_bytes
        session.prefill(random_ids(100))
        session.decode(7)
        assert session.stats.store_bytes == store  # whatever comes


def test_distances_of_streaming_llm_and_lm_infinite_are_bounded(monkeypatch):
    """No sink is ever further than the cache (StreamingLLM) or the window (LM-Infinite), at
    whatever position the query stands.
    """
    llm = llm_of()
    for method, most in (
        (StreamingLLM(tokens=40, sink=4), 39),
        (LMInfinite(tokens=40, sink=4), 36),
    ):
        with llm.session(method) as session:
            rotary, moved = session.runtime.rotary, []
            rotate_by = rotary.rotate_by
            monkeypatch.setattr(
                rotary,
                "rotate_by",
                lambda x, by, rotate=rotate_by, moved=moved: (moved.append(by), rotate(x, by))[1],
            )
            session.prefill(random_ids(200))
            for at in range(200, 210):
                moved.clear()
                session.decode(3)
                # the position that the query was turned to
                ends = {int(by[0]) + at for by in moved if len(by) == 1}
                assert ends == {most if isinstance(method, StreamingLLM) else 36 for _ in moved[:1]}


def test_streaming_llm_as_the_papers_baseline():
    """Read by full attention, trimmed once to 1% of sinks and the rest, then nothing is dropped."""
    with llm_of().session(StreamingLLM(official=True)) as session, llm_of().session(Full()) as full:
        ids = random_ids(300)
        assert torch.equal(session.prefill(ids), full.prefill(ids))
        assert session.runtime.positions(1)[0] == [0, 1, 2, *range(300 - 87, 300)]
        for n in range(301, 320):
            session.decode(5)
            assert session.runtime.positions(1)[0] == [0, 1, 2, *range(300 - 87, n)]


# ---------------------------------------------------------------- SnapKV and its kin


@pytest.mark.parametrize(
    "method", [SnapKV(tokens=60), PyramidKV(tokens=60), AdaSnapKV(tokens=60), AdaPyramid(tokens=60)]
)
def test_the_prompt_is_read_untouched_and_its_window_kept(method):
    llm, ids = llm_of(), random_ids(200)
    with llm.session(method) as session, llm.session(Full()) as full:
        assert torch.equal(session.prefill(ids), full.prefill(ids))
        budgets = method.budgets(session.plan, 200)
        for layer, budget in enumerate(budgets):
            heads = session.runtime.positions(layer)
            assert sum(map(len, heads)) == budget * len(heads)
            assert all(head[-32:] == list(range(168, 200)) for head in heads)
            if isinstance(method, (AdaSnapKV, AdaPyramid)):
                assert all(len(head) - 32 >= int(0.5 * (budget - 32)) for head in heads)
            else:
                assert all(len(head) == budget for head in heads)


@pytest.mark.parametrize("layers", [2, 7, 32, 80])
def test_the_pyramid_keeps_its_sum_and_falls(layers):
    for budget, length, window, beta in (
        (2048, 100_000, 32, 20),
        (128, 4000, 32, 20),
        (300, 400, 32, 20),
        (97, 331, 8, 3),
        (64, 90, 32, 1),
    ):
        found = pyramid(layers, budget, length, window, beta)
        assert abs(sum(found) - layers * budget) <= layers and all(
            a >= b for a, b in zip(found, found[1:])
        )
        assert max(found) <= length and min(found) >= window
        assert beta > 1 or set(found) == {budget}
    assert pyramid(4, 100, 90, 32, 20) == [100] * 4


def test_head_budgets_keep_their_sum_their_floor_and_more_mass_than_equal_ones():
    """Ada-KV Theorem 4 and its safeguard, on random scores: whatever alpha, no less is retained
    than by equal budgets.
    """
    generator = torch.Generator().manual_seed(0)
    for heads, length, budget in ((2, 50, 7), (8, 33, 20), (5, 17, 16), (3, 4, 4), (4, 100, 1)):
        scores = [torch.rand(length, generator=generator) ** (i + 1) for i in range(heads)]
        equal = sum(float(s.topk(budget).values.sum()) for s in scores)
        for alpha in (0.0, 0.3, 0.5, 1.0):
            counts = deal(scores, budget, alpha)
            assert sum(counts) == heads * budget and all(
                int((1 - alpha) * budget) <= n <= length for n in counts
            )
            assert (
                sum(float(s.topk(n).values.sum()) for s, n in zip(scores, counts)) >= equal - 1e-5
            )
        assert deal(scores, budget, 0.0) == [budget] * heads
        layer = torch.cat(scores).topk(heads * budget).values.sum()
        assert (
            abs(
                sum(
                    float(s.topk(n).values.sum()) for s, n in zip(scores, deal(scores, budget, 1.0))
                )
                - float(layer)
            )
            < 1e-4
        )


def test_the_bound_of_ada_kv_holds():
    """Theorem 2, window 1: |y - y'|_1 <= 2 h C - 2 C sum of the retained weights, C the largest row
    norm of V W^O over heads.
    """
    generator = torch.Generator().manual_seed(1)
    heads, length, dim, width, budget = 4, 60, 8, 16, 12
    weights = torch.softmax(3 * torch.randn(heads, length, generator=generator).double(), -1)
    rows = (
        torch.randn(heads, length, dim, generator=generator).double()
        @ torch.randn(heads, dim, width, generator=generator).double()
    )
    largest = float(rows.abs().sum(-1).max())
    bounds = {}
    for alpha in (0.0, 0.5, 1.0):
        loss, kept = torch.zeros(width).double(), 0.0
        for head, count in enumerate(deal(list(weights), budget, alpha)):
            index = weights[head].topk(count).indices
            mass = float(weights[head, index].sum())
            loss += weights[head] @ rows[head] - weights[head, index] @ rows[head, index] / mass
            kept += mass
        bounds[alpha] = 2 * heads * largest - 2 * largest * kept
        assert float(loss.abs().sum()) <= bounds[alpha]
    assert bounds[1.0] <= bounds[0.5] <= bounds[0.0]


# ---------------------------------------------------------------- going back, copies, changes

SOME = [
    H2O(tokens=30),
    Keyformer(tokens=30),
    Scissorhands(tokens=30),
    SnapKV(tokens=50),
    AdaSnapKV(share=0.4),
    StreamingLLM(tokens=40),
    H2OPlus(tokens=30, segment=40),
    LMInfinite(share=0.2),
]


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
@pytest.mark.parametrize("back", [1, 6, 20, 33, 80])
def test_truncate_is_never_having_been_there(method, back):
    """To the bit, in an answer, at a prompt's end, inside a prompt, and in the turn before;
    counters are those of what was asked.
    """
    llm, ids = llm_of(), random_ids(160, seed=3)
    cuts = ((0, 90), (90, 95), (95, 120), (120, 126))  # prompt, answer, prompt, answer

    def read(session, stop):
        logits = None
        for number, (first, last) in enumerate(cuts):
            last = min(last, stop)
            if first < last and number % 2 == 0:
                logits = session.prefill(ids[first:last])
            for token in ids[first:last] if number % 2 else ():
                logits = session.decode(token)
        return logits

    with llm.session(method) as session, llm.session(method) as fresh:
        read(session, 126)
        for token in (9, 8, 7):
            session.decode(token)
        steps = session.stats.decode_steps
        session.truncate(126 - back)
        assert len(session) == 126 - back and session.stats.decode_steps == steps
        expected = read(fresh, 126 - back)
        assert torch.equal(session.last_logits, expected)
        for token in (11, 12, 13):
            assert torch.equal(session.decode(token), fresh.decode(token))
        assert torch.equal(session.prefill(ids[130:150]), fresh.prefill(ids[130:150]))
        assert torch.equal(session.decode(1), fresh.decode(1))


def test_a_long_answer_taken_back_leaves_the_windows_queries():
    """140 steps: the query ring has lost the prompt's last queries, which a short second prompt
    still chooses by.
    """
    ids = random_ids(300, seed=4)
    for method in (SnapKV(tokens=50), AdaSnapKV(tokens=50)):
        with llm_of().session(method) as session, llm_of().session(method) as fresh:
            session.prefill(ids[:100])
            fresh.prefill(ids[:100])
            for token in ids[100:240]:
                session.decode(token)
            session.truncate(102)
            for token in ids[100:102]:
                fresh.decode(token)
            assert torch.equal(session.prefill(ids[250:255]), fresh.prefill(ids[250:255]))
            assert [session.runtime.positions(layer) for layer in range(7)] == [
                fresh.runtime.positions(layer) for layer in range(7)
            ]


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
def test_a_fork_goes_its_own_way(method):
    with llm_of().session(with_bank(method)) as session:
        play(session)
        with session.fork() as twin:
            first = [session.decode(token) for token in (5, 6, 7)]
            for layer in range(session.plan.num_layers):
                for part in session.bank.kv(layer):
                    part.fill_(float("nan"))
            assert all(torch.equal(a, twin.decode(token)) for a, token in zip(first, (5, 6, 7)))
            twin.truncate(len(twin) - 2)
            assert torch.equal(twin.decode(6), first[1])


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
def test_an_interrupted_prompt_keeps_its_whole_chunks(method):
    class Stop(Exception):
        pass

    def stop(progress):
        if progress.done >= 64:
            raise Stop

    llm, ids = llm_of(chunk=32), random_ids(150)
    with llm.session(method) as session, llm.session(method) as fresh:
        with pytest.raises(Stop):
            session.prefill(ids, progress=stop)
        assert len(session) == 64
        # a share was the whole prompt's while it was read
        if method.tokens is not None:
            fresh.prefill(ids[:64])
            assert torch.equal(session.decode(3), fresh.decode(3))
        session.truncate(0)
        assert torch.equal(session.prefill(ids), llm.session(method).prefill(ids))


def test_an_interrupted_last_part_loses_nothing():
    """Too short for a part of its own, its whole chunks are read again with what came before."""

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.done >= 64:
            raise Stop

    method, llm, ids = Scissorhands(tokens=40, history=100), llm_of(chunk=32), random_ids(220)
    with llm.session(method) as session, llm.session(method) as fresh:
        session.prefill(ids[:96], more=True)
        with pytest.raises(Stop):
            session.prefill(ids[96:], progress=stop)
        assert session.ids == ids[:160] and session.last_logits is None
        session.refresh_logits()
        assert session.ids == ids[:160]
        torch.testing.assert_close(session.last_logits, fresh.prefill(ids[:160]))
        torch.testing.assert_close(session.decode(3), fresh.decode(3))
        assert session.runtime.positions(2) == fresh.runtime.positions(2)


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
def test_what_breaks_off_has_not_happened(method, monkeypatch):
    """A prompt's first chunk and a step, each broken in the middle of the model; then both again,
    as if nothing had been.
    """

    class Stop(Exception):
        pass

    llm, ids = llm_of(chunk=32), random_ids(200, seed=2)
    with llm.session(method) as session, llm.session(method) as fresh:
        for one in (session, fresh):
            one.prefill(ids[:100])
            one.decode(5)
        for name, call in (
            ("attend_prompt", lambda: session.prefill(ids[110:150])),
            ("attend", lambda: session.decode(6)),
        ):
            whole = getattr(type(session.runtime), name)

            def broken(self, layer, *rest, whole=whole):
                if layer == 3:
                    raise Stop
                return whole(self, layer, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(type(session.runtime), name, broken)
                with pytest.raises(Stop):
                    call()
            assert len(session) == len(fresh)
            assert torch.equal(session.decode(7), fresh.decode(7))
        assert torch.equal(session.prefill(ids[100:170]), fresh.prefill(ids[100:170]))
        assert torch.equal(session.decode(8), fresh.decode(8))


def test_methods_change_over_one_bank():
    """What full attention has read serves an evicting method as its reading would; and back."""
    llm, ids = llm_of(), random_ids(200)
    for method in (
        H2O(tokens=30),
        A2SF(tokens=30),
        SnapKV(tokens=50),
        AdaSnapKV(tokens=50),
        StreamingLLM(official=True),
    ):
        with (
            llm.session(Full()) as session,
            llm.session(method) as fresh,
            llm.session(Full()) as full,
        ):
            session.prefill(ids)
            session.set_method(method)
            fresh.prefill(ids)
            full.prefill(ids)
            assert torch.equal(session.last_logits, fresh.last_logits)
            for token in (4, 5, 6):
                assert torch.equal(session.decode(token), fresh.decode(token))
                assert session.runtime.positions(3) == fresh.runtime.positions(3)
            session.set_method(Full())
            session.truncate(200)
            # tokens that were forgotten are read again as one prompt, those of the answer with it,
            # and a product's last bits hang on how many rows it has
            full.truncate(0)
            full.prefill([*ids, 4, 5, 6])
            full.truncate(200)
            assert torch.equal(session.decode(4), full.decode(4))


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
def test_other_kernels_go_on_with_what_is_held(method):
    with (
        llm_of(backend="auto").session(method) as session,
        llm_of(backend="auto").session(method) as fresh,
    ):
        expected = play(fresh)
        assert torch.equal(play(session)[0], expected[0])
        session.set_backend("reference")
        assert [session.runtime.positions(layer) for layer in range(7)] == expected[1][-1]
        torch.testing.assert_close(session.decode(3), fresh.decode(3), atol=1e-4, rtol=1e-4)
        session.truncate(len(session) - 2)
        assert [session.runtime.positions(layer) for layer in range(7)] == expected[1][-2]


def test_what_cannot_be_is_refused_in_one_line():
    llm = llm_of()
    with llm.session(Full()) as session:
        session.prefill(random_ids(100))
        for method, name in (
            (StreamingLLM(tokens=40), "streaming_llm"),
            (LMInfinite(tokens=40), "lm_infinite"),
            (Window(tokens=40), "window"),
            (H2OPlus(tokens=40), "h2o_plus"),
        ):
            with pytest.raises(
                SettingError,
                match=f"{name}: reads prompts in its own way, and this session has read 100 tokens",
            ):
                session.set_method(method)
        session.set_method(SnapKV(tokens=50))
        session.decode(3)
        with pytest.raises(SettingError, match="no sparse layer"):
            session.check()
    dynamic = tiny_config(layers=2, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(
        SettingError,
        match="streaming_llm: clips distances, which this model's dynamic rope does not allow",
    ):
        tiny_llm(StreamingLLM(), dynamic, tiny_weights(dynamic))
    tiny_llm(Window(), dynamic, tiny_weights(dynamic))
    for call, message in (
        (lambda: H2O(tokens=3, share=0.1), "budget: found tokens=3 and share=0.1"),
        (lambda: H2O(tokens=0), "tokens: found 0"),
        (lambda: H2O(share=1.5), "share: found 1.5"),
        (lambda: H2O(cut="never"), "cut: found 'never'"),
        (lambda: H2O(gqa_reduce="min"), "gqa_reduce: found 'min'"),
        (lambda: H2O(every=0), "every: found 0"),
        (lambda: H2OPlus(cut="first_step"), "cut: found 'first_step'"),
        (lambda: H2OPlus(segment=0), "segment: found 0"),
        (lambda: A2SF(forgetting=1.1), "forgetting: found 1.1"),
        (lambda: Keyformer(tau_init=0), "tau_init: found 0"),
        (lambda: Keyformer(seed=-1), "seed: found -1"),
        (lambda: Scissorhands(drop=0), "drop: found 0"),
        (lambda: Scissorhands(drop=1), "drop: found 1, expected a share below 1"),
        (lambda: SnapKV(tokens=20), "tokens: found 20, expected at least the window of 32"),
        (lambda: SnapKV(kernel=4), "kernel: found 4"),
        (lambda: SnapKV(window=65), "window: found 65"),
        (lambda: SnapKV(pool="sum"), "pool: found 'sum'"),
        (lambda: PyramidKV(beta=0), "beta: found 0"),
        (lambda: AdaSnapKV(alpha=2), "alpha: found 2"),
        (lambda: StreamingLLM(tokens=4), "sink: found 4, expected fewer than the budget of 4"),
        (lambda: LMInfinite(sink=-1), "sink: found -1"),
    ):
        with pytest.raises(SettingError, match=message.replace("(", r"\(")):
            call()


@settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    st.sampled_from(SOME),
    st.sampled_from(SHAPES),
    st.sampled_from((1, 7, 64)),
    st.lists(
        st.tuples(st.sampled_from((1, 2, 5, 31, 33, 64, 90)), st.integers(0, 9)),
        min_size=1,
        max_size=3,
    ),
)
def test_any_lengths_turns_and_chunks(method, shape, chunk, turns):
    """Prompts shorter than a window, a budget, a segment; answers of no token: held are distinct
    tokens, within the plan's bytes.
    """
    llm, method = llm_of(shape, chunk, "auto"), with_bank(method)
    most = llm.plan(method).bytes_of("retained rows")
    with llm.session(method) as session:
        for number, (prompt, answer) in enumerate(turns):
            ids = random_ids(prompt + answer, seed=number)
            assert session.prefill(ids[:prompt]).isfinite().all()
            for token in ids[prompt:]:
                assert session.decode(token).isfinite().all()
                n = len(session)
                for layer in range(session.plan.num_layers):
                    heads = session.runtime.positions(layer)
                    assert all(
                        head == sorted(set(head)) and head[0] >= 0 and head[-1] == n - 1
                        for head in heads
                    )
                assert 0 < session.stats.store_bytes <= most


def test_an_evicting_method_through_the_public_calls():
    """LLM(method=...): the plan says what is kept beside the bank, generate answers, a second turn
    goes on.
    """
    config = tiny_config(layers=3)
    method = H2O(share=0.3, forget=False)
    llm = tiny_llm(method, config, tiny_weights(config), max_context=256)
    plan = llm.plan()
    assert plan.bytes_of("retained rows") == method.store_bytes(plan.layers, config, 4, 256)
    assert (
        "each reads what it has retained" in str(plan)
        and plan.mem == 76 / 256
        and plan.resident == 77 / 256
    )
    # two numbers: what it keeps, and the bank that stands beside it
    bank, store = plan.bytes_of("context bank"), plan.kept
    assert f"a store of {human(store)} (30.1% of all K and V)" in str(plan)
    assert f"beside it the whole bank ({human(bank)})" in str(plan) and "of the bank is" not in str(
        plan
    )
    assert (plan.to_dict()["store_kv_bytes"], plan.to_dict()["bank_bytes"]) == (store, bank)
    answer = llm.generate(random_ids(100), SamplingParams(max_tokens=5, ignore_eos=True))
    with llm.session() as session:
        pieces = list(
            session.generate(random_ids(100), SamplingParams(max_tokens=5, ignore_eos=True))
        )
        assert [
            piece.token_id for piece in pieces if piece.token_id is not None
        ] == answer.token_ids
        assert (
            len(
                list(
                    session.generate(
                        random_ids(20, seed=1), SamplingParams(max_tokens=5, ignore_eos=True)
                    )
                )
            )
            >= 5
        )
        assert (
            0.29 < session.stats.mem < 0.31
            and session.stats.sparse_steps == session.stats.decode_steps > 5
        )


def test_published_defaults():
    """Those of the papers (docs/METHODS.md), where nothing is given."""
    assert (H2O().share, H2O().recent_share, H2O().cut, H2O().gqa_reduce) == (
        0.2,
        0.5,
        "first_step",
        "max",
    )
    assert (H2OPlus().segment, H2OPlus().cut) == (500, "prefill")
    assert (A2SF().forgetting, A2SF().newest) == (0.95, 16)
    assert (
        Keyformer().share,
        Keyformer().recent_share,
        Keyformer().every,
        Keyformer().tau_delta,
    ) == (0.6, 0.3, 8, 0.01)
    assert (
        SnapKV().tokens,
        SnapKV().window,
        SnapKV().kernel,
        SnapKV().pool,
        SnapKV().gqa_reduce,
    ) == (2048, 32, 7, "max", "mean")
    assert (
        PyramidKV().beta == AdaPyramid().beta == 20
        and AdaSnapKV().alpha == AdaPyramid().alpha == 0.5
    )
    assert (StreamingLLM().tokens, StreamingLLM().sink) == (516, 4) and (
        LMInfinite().tokens,
        LMInfinite().sink,
    ) == (4106, 10)
    assert Window().tokens == 4096


def test_ties_go_to_the_newer_token():
    keys, positions = (
        torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]),
        torch.tensor([[9, 4, 2, 7, 5]], dtype=torch.int32),
    )
    assert positions[0, best(keys, positions, 2)[0]].tolist() == [4, 5]
    assert positions[0, best(keys, positions, 4)[0]].tolist() == [2, 4, 5, 9]
    assert int(worst(keys, positions)) == 3
