"""What a model split by context holds otherwise: rows in host memory or in fewer bits, windows,
states, latents, sinks; other ways to choose, and exact mode over it. Ranks are threads.
"""

from dataclasses import replace

import pytest
import torch

from engine import LLM, Exact, Full, OmniKV, OracleTopK, RandomTopK, SamplingParams
from engine.base.errors import OutOfHostMemory
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.mass_meter import Watch
from engine.methods.split import context_attention
from engine.model.config.share import BLOCK
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.ranks.test_context import CLOSE, SPARSE, answered, require_same
from tests.engine.ranks.threads import Together
from tools.families.models import make

SIZES = dict(hidden_size=64, head_dim=32, intermediate_size=128, num_attention_heads=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: heads of 32, which every packed form takes."""
    return model_folder(tmp_path_factory.mktemp("kinds") / "model", **SIZES)


def walked(llm, method, offload):
    """Logits, and the selections of the last steps, of a session that goes back, forks and goes on
    over its rows; bytes on the device and in host memory.
    """
    with llm.session(method=method, offload=offload) as session:
        found = [session.prefill(ids_of(90), more=True), session.prefill(ids_of(91, seed=3))]
        found += [session.decode(token) for token in ids_of(14, seed=9)]
        chosen = {layer: rows.clone() for layer, rows in session.selections.items()}
        stats, host = session.stats, session.bank.host_nbytes
        session.truncate(129)
        found.append(session.decode(8))
        with session.fork() as other:
            found.append(other.decode(9))
            other.set_method(Full())
            found += [other.decode(10), other.prefill(ids_of(BLOCK + 3, seed=4))]
        session.set_backend("reference")
        found.append(session.decode(12))
        return torch.stack(found), chosen, (stats, host)


KINDS = [("model", 3), ("int8", 2)]


@pytest.mark.parametrize("bank, ranks", KINDS)
def test_ranks_hold_their_rows_in_both_tiers_and_every_form(folder, bank, ranks):
    """A value of a packed row may round to its neighbour in the ranks' bank, as it may in one
    process's on other launchers.
    """
    settings = dict(SETTINGS, bank=bank, method=SPARSE)
    one, many = LLM(folder, **settings), Together(folder, ranks, split_by="context", **settings)
    packed = bank != "model"
    backends = ("cpu", "reference") if packed else ()
    others = [LLM(folder, backend=backend, **settings) for backend in backends]
    for method, offload in ((SPARSE, "device"), (SPARSE, "host"), (Full(), "host"))[packed:]:
        want, chosen, (_, host) = walked(one, method, offload)
        close, held = CLOSE, 0
        for other in others:
            close = max(close, 3 * apart(walked(other, method, offload)[0], want))
        for llm, (found, theirs, (stats, mine)) in zip(
            many.llms, many.each(walked, method, offload), strict=True
        ):
            assert apart(found, want) < close < 0.5
            assert theirs.keys() == chosen.keys()
            same = (torch.equal(theirs[layer], chosen[layer]) for layer in chosen)
            assert packed or all(same)
            plan = llm.plan(method, offload=offload)
            parts = "context bank", "working sets", "streaming"
            assert stats.bank_bytes == sum(plan_bytes(plan, name) for name in parts)
            assert (offload == "host") == (mine > 0) and mine <= plan_bytes(plan, "host tier")
            held += mine
        # whole blocks of 64 rows: those of one process, as blocks go round whole
        assert held == host


def apart(found, want):
    """The greatest difference."""
    return float((found - want).abs().max())


@pytest.mark.parametrize("bank", ["int4", "fp8"])
def test_packed_rows_of_ranks_are_one_process_s(tmp_path, bank):
    """Rows of the first layer depend on no attention, so that a model of one has the same bits."""
    folder = model_folder(tmp_path, num_hidden_layers=1, **SIZES)
    settings = dict(SETTINGS, bank=bank, method=Full())
    one, many = LLM(folder, **settings), Together(folder, 2, split_by="context", **settings)
    for offload in ("device", "host"):
        want, _, _ = walked(one, Full(), offload)
        for found, _, _ in many.each(walked, Full(), offload):
            assert apart(found, want) < CLOSE


def plan_names(plan):
    return [name for name, _, _ in plan.items]


def plan_bytes(plan, name):
    return plan.bytes_of(name) if name in plan_names(plan) else 0


def test_a_rank_fetches_its_part_of_a_selection(folder):
    """Over all ranks as many hits and misses as there are tokens selected."""
    settings = dict(SETTINGS, method=SPARSE, offload="host")

    def run(llm):
        with llm.session() as session:
            session.prefill(ids_of(420))
            before = session.stats
            for token in ids_of(9, seed=9):
                session.decode(token)
            after = session.stats
            fetched = after.hits + after.misses - before.hits - before.misses
            return fetched, after.bytes_fetched

    many = Together(folder, 3, split_by="context", **settings)
    each = many.each(run)
    whole, _ = run(LLM(folder, **settings))
    assert sum(fetched for fetched, _ in each) == whole > 0
    assert all(0 < fetched < whole and moved > 0 for fetched, moved in each)


def test_host_memory_that_ends_on_one_rank_ends_a_call_on_all(folder):
    settings = dict(SETTINGS, method=SPARSE, offload="host")
    many = Together(folder, 2, split_by="context", **settings)

    def refused(*wanted):
        raise OutOfHostMemory("nothing is left")

    def run(llm):
        with llm.session() as session, llm.session() as other:
            session.prefill(ids_of(2 * BLOCK))
            pool, errors = llm.loaded.host_pool, []
            if llm.place[0]:
                pool.take = refused
            for work in (lambda: other.prefill(ids_of(3 * BLOCK)), lambda: session.decode(5)):
                try:
                    work()
                except OutOfHostMemory as error:
                    errors.append(str(error))
            vars(pool).pop("take", None)
            return errors, session.decode(6)

    (first, logits), (second, others) = many.each(run)
    assert (first, second) == (["another rank's host memory is full"], ["nothing is left"])
    assert torch.equal(logits, others)


METHODS = [
    replace(SPARSE, selector="uniform", window=5),
    replace(SPARSE, selector="exponential", window=16, scores="raw", sink=3),
    OmniKVOne(filter_layers=(1, 4), tail=64, dense_below=0),
    OmniKVUnpacked(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0),
    OmniKVPerLayer(filter_layers=(1,), tokens=20, tail=64, dense_below=0),
    OmniKVPerLayer(filter_layers=(2,), tokens=9, tail=64, dense_below=0, scores="raw", sink=2),
    OmniKVNewest(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0),
    OmniKVRandom(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0, seed=4),
    OracleTopK(tokens=20),
    OracleTopK(tokens=11, tail=64, dense_layers=0),
    RandomTopK(tokens=20, tail=64, seed=2),
]


@pytest.mark.parametrize("length", [BLOCK + 1, 203])
def test_other_choices_are_one_process_s(both, length):
    one, many = both
    for method in METHODS:
        alone = answered(one, method, length)
        require_same(many.each(answered, method, length), alone)
        assert length < 200 or alone[2].sparse_steps == 4


@pytest.fixture(scope="module")
def both(folder):
    """(one process, three ranks)."""
    given = folder, dict(SETTINGS, method=SPARSE)
    return LLM(given[0], **given[1]), Together(given[0], 3, split_by="context", **given[1])


def test_choices_over_host_memory(both):
    one, many = both
    for method in (METHODS[4], METHODS[9]):
        want, chosen, _ = walked(one, method, "host")
        for found, theirs, _ in many.each(walked, method, "host"):
            assert float((found - want).abs().max()) < CLOSE
            assert all(torch.equal(theirs[layer], chosen[layer]) for layer in chosen)


@pytest.mark.parametrize("draft, offload", [("auto", "device"), (7, "host")])
def test_exact_mode_writes_full_attention_s_text(both, draft, offload):
    method = Exact(SPARSE, draft=draft)

    def run(llm, how):
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=5)
        with llm.session(method=how, offload=offload) as session:
            text = [piece.token_id for piece in session.generate(ids_of(190), params)]
            session.truncate(len(session) - 3)
            text += [piece.token_id for piece in session.generate([7, 8], params)]
            stats = session.stats
            return text, (stats.cycles, stats.drafted, stats.accepted)

    one, many = both
    want, counted = run(one, method)
    assert run(one, Full())[0] == want
    assert many.each(run, method) == [(want, counted)] * 3
    assert draft == "auto" or 0 < counted[2] < counted[1]


@pytest.mark.parametrize("below", [None, 0.999])
def test_checks_and_watches_see_the_rows_of_all_ranks(both, below):
    def run(llm, offload="device"):
        watch = Watch(every=3, exact_below=below)
        method = replace(SPARSE, tokens=8)
        with llm.session(method=method, offload=offload) as session:
            session.watch_with(watch)
            session.prefill(ids_of(280))
            for token in ids_of(8):
                logits = session.decode(token)
            report = session.check(6)
            assert torch.equal(session.last_logits, logits)
            after = session.decode(5)
        return report.steps, (watch.mass, watch.exact_steps, watch.steps), after

    one, many = both
    want, watched, logits = run(one)
    assert (watched[1] > 0) == (below is not None)
    for steps, seen, after in [*many.each(run), *many.each(run, "host")]:
        for a, b in zip(want, steps, strict=True):
            assert (a.full_token, a.sparse_token) == (b.full_token, b.sparse_token)
            assert b.kl == pytest.approx(a.kl, abs=1e-5)
            assert b.mass == pytest.approx(a.mass, abs=1e-5)
            assert any(0 < kept < 0.999 for kept in b.mass.values())
        assert seen == pytest.approx(watched, abs=1e-5)
        assert float((after - logits).abs().max()) < CLOSE


FAMILIES = ["mistral-window", "gemma4-shared", "gpt-oss", "deepseek-v3", "qwen3-next"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_token_s_lies_whole_on_every_rank(tmp_path, name):
    """Rings of windows, states of recurrent layers, sinks; rows of latents and of other layers."""
    make(tmp_path / "m", name)
    settings = dict(SETTINGS, max_context=400, method=Full())
    one = LLM(tmp_path / "m", **settings)
    seeing = one.config.seeing_layers
    sparse = OmniKV(filter_layers=seeing[:1] or (0,), tokens=20, tail=64, dense_below=0)
    many = Together(tmp_path / "m", 3, split_by="context", **settings)

    def run(llm, method):
        with llm.session(method=method) as session:
            found = [session.prefill(ids_of(131, seed=7)), session.decode(9)]
            session.truncate(120)
            found += [session.decode(token) for token in (8, 7)]
            with session.fork() as other:
                found.append(other.decode(5))
            text = [piece.token_id for piece in session.generate([3, 4], greedy)]
            return torch.stack(found), text, session.stats.bank_bytes

    greedy = SamplingParams(max_tokens=9, ignore_eos=True)
    for method in (Full(), *([sparse, Exact(sparse, draft=3)] if len(seeing) > 1 else [])):
        want, text, _ = run(one, method)
        for llm, (found, theirs, held) in zip(many.llms, many.each(run, method), strict=True):
            assert float((found - want).abs().max()) < CLOSE and theirs == text
            plan, names = llm.plan(method), ("context bank", "sliding windows", "recurrent state")
            assert held == sum(plan_bytes(plan, name) for name in names)


def test_sinks_that_every_rank_counts_are_not_attention(tmp_path, monkeypatch):
    """The control: sinks in every rank's part give other answers."""
    make(tmp_path / "m", "gpt-oss")
    settings = dict(SETTINGS, max_context=400, method=Full())
    one = LLM(tmp_path / "m", **settings)
    many = Together(tmp_path / "m", 2, split_by="context", **settings)
    want = answered(one, Full(), 131)[0]
    monkeypatch.setattr(context_attention, "bare", lambda softmax: softmax)
    (found, _, _), *_ = many.each(answered, Full(), 131)
    assert float((found - want).abs().max()) > 10 * CLOSE
