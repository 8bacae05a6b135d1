"""Sessions of a model that ranks hold give one process's logits and selections, method by method,
through truncates, forks and changes of method. Ranks are threads here; test_processes.py has real
ones, and tests/programs/ranks.py every method and family.
"""

from dataclasses import replace

import pytest
import torch

from engine import LLM, Exact, Full, OmniKV
from engine.base.errors import SettingError
from engine.methods.names import NAMES
from engine.ranks.methods import MERGED, OWN_HEADS, REFUSED, why_not
from tests.engine.methods.method_table import ROWS
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.ranks.threads import Together

SAMPLED = ("full", "omnikv", "official", "h2o", "snapkv", "streaming_llm", "sirllm", "quest")
SPARSE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
CLOSE = 1e-4  # of float32 logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder."""
    return model_folder(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def one(folder):
    """One process."""
    return LLM(folder, method=Full(), **SETTINGS)


@pytest.fixture(scope="module")
def pair(folder):
    """Two ranks, of four query heads and a K/V head each."""
    return Together(folder, 2, method=Full(), **SETTINGS)


def answered(llm, method, prompt=300, steps=8):
    """(logits, selections of every step, figures) of a prompt and forced steps."""
    with llm.session(method=method) as session:
        found, chosen = [session.prefill(ids_of(prompt))], []
        for token in ids_of(steps, seed=9):
            found.append(session.decode(token))
            chosen.append({k: v.clone() for k, v in session.selections.items()})
        stats = session.stats
        return torch.stack(found), chosen, (stats.sparse_steps, stats.rows_read_sparse)


def same(ranks, alone, selections=True):
    """Require that every rank found what one process did."""
    logits, chosen, figures = alone
    for theirs, lists, counted in ranks:
        assert float((theirs - logits).abs().max()) < CLOSE
        assert counted == figures
        if selections:
            assert all(
                mine.keys() == own.keys() and all(torch.equal(mine[k], own[k]) for k in own)
                for mine, own in zip(lists, chosen, strict=True)
            )
    first = ranks[0][0]
    assert all(torch.equal(theirs, first) for theirs, _, _ in ranks)  # bit for bit


def settings_of(name):
    """The sparse settings of a row of the methods' table that ranks run."""
    rows = {row.name: row for row in ROWS}
    found = rows[name].sparse or (rows[name].neutral,)
    return [method for method in found if not why_not(method)][:1]


@pytest.mark.parametrize("name", SAMPLED)
def test_methods_give_one_process_s_logits(one, pair, name):
    for method in settings_of(name):
        alone = answered(one, method)
        same(pair.each(answered, method), alone, name in ("omnikv", "official"))
        if name != "full":
            assert alone[2][0] == 8  # every step was sparse


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_launchers_agree(one, pair, backend):
    def run(llm):
        with llm.session(method=OmniKV(**SPARSE)) as session:
            session.set_backend(backend)
            session.prefill(ids_of(200))
            return torch.stack([session.decode(token) for token in ids_of(4, seed=9)])

    for found in pair.each(run):
        assert float((found - run(one)).abs().max()) < CLOSE


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_ranks_beyond_the_kv_heads_hold_some_twice(folder, one, ranks):
    together = Together(folder, ranks, method=OmniKV(**SPARSE), **SETTINGS)
    same(together.each(answered, None, 150, 3), answered(one, OmniKV(**SPARSE), 150, 3))
    assert {llm.config.num_kv_heads for llm in together.llms} == {1}


@pytest.mark.parametrize("name", ["h2o", "snapkv", "quest", "omnikv_heads", "fastgen"])
def test_methods_that_choose_by_a_group_are_refused_where_ranks_divide_it(folder, pair, name):
    (method,) = settings_of(name)
    pair.llms[0].session(method=method).close()
    with pytest.raises(SettingError, match="with 4 ranks, but it looks at all query heads of a"):
        Together(folder, 4, method=method, **SETTINGS)


def test_methods_that_look_at_a_query_head_run_where_ranks_divide_a_group(folder, one):
    many = Together(folder, 4, method=Full(), **SETTINGS)
    for name in ("streaming_llm", "sirllm"):
        (method,) = settings_of(name)
        same(many.each(answered, method, 150, 3), answered(one, method, 150, 3), False)


def test_uneven_shares_turn_sparse_at_the_same_length(tmp_path):
    """Three K/V heads over two ranks are one and two: own byte counts would differ."""
    sizes = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    folder = model_folder(tmp_path, **sizes)
    given = {**SETTINGS, "method": OmniKV(filter_layers=(1, 4), tokens=20)}
    together = Together(folder, 2, **given)
    turns = [llm.session().runner.dense_below for llm in together.llms]
    assert turns == [LLM(folder, **given).session().runner.dense_below] * 2
    plans = [llm.plan().dense_below for llm in together.llms]
    assert plans == turns
    shares = [llm.config for llm in together.llms]
    method, layers = together.llms[0].resolve_method(given["method"])
    own = [method.dense_below_tokens(layers, config, 4, "cpu", 512) for config in shares]
    assert own[0] != own[1]  # what it would be by each share


def test_each_rank_may_choose_by_its_own_heads(folder, one):
    together = Together(folder, 2, "per_rank", method=OmniKV(**SPARSE), **SETTINGS)
    found = together.each(answered, None)
    first, second = (chosen for _, chosen, _ in found)
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][0], answered(one, OmniKV(**SPARSE))[0])
    # an embedding, two sums a layer and the logits; chunks before the last need no output
    assert together.ranks[0].sent.calls == 9 * (1 + 2 * 7 + 1) + 4 * (1 + 2 * 6)
    windowed = OmniKV(**SPARSE, selector="uniform")
    together.each(lambda llm: llm.session(method=windowed).close())


def test_sessions_go_back_fork_and_change_their_method(one, pair):
    def walk(llm):
        found = []
        with llm.session(method=OmniKV(**SPARSE)) as session:
            session.prefill(ids_of(180))
            found += [session.decode(token) for token in (5, 6, 7)]
            session.truncate(150)
            found.append(session.decode(8))
            with session.fork() as other:
                found.append(other.decode(9))
                other.set_method(Full())
                found.append(other.decode(10))
            found.append(session.prefill(ids_of(70, seed=11)))
            session.set_method(settings_of("snapkv")[0])
            session.truncate(200)
            session.refresh_logits()
            found += [session.last_logits, session.decode(12)]
        return torch.stack(found)

    want = walk(one)
    for found in pair.each(walk):
        assert float((found - want).abs().max()) < CLOSE


@pytest.mark.parametrize("offload", ["device", "host"])
def test_both_tiers(one, pair, offload):
    def run(llm):
        with llm.session(method=OmniKV(**SPARSE), offload=offload) as session:
            session.prefill(ids_of(300))
            found = torch.stack([session.decode(token) for token in ids_of(4, seed=9)])
            assert session.stats.sparse_steps == 4
            assert (session.stats.bytes_fetched > 0) == (offload == "host")
            return found

    want = run(one)
    for found in pair.each(run):
        assert float((found - want).abs().max()) < CLOSE


@pytest.mark.parametrize(
    "settings",
    [dict(bank="int8"), dict(bank="int4"), dict(weights="int8"), dict(weights="int4")],
    ids=str,
)
def test_few_bits(tmp_path, settings):
    sizes = dict(hidden_size=64, head_dim=32, intermediate_size=128, num_attention_heads=4)
    folder = model_folder(tmp_path, num_hidden_layers=5, **sizes)
    given = {**SETTINGS, **settings, "method": OmniKV(**SPARSE)}
    want = answered(LLM(folder, **given), None, 100, 3)
    # in four bits a row's last bit of rounding is a step of its values
    close = 5e-3 if settings.get("bank") == "int4" else CLOSE
    for found, _, figures in Together(folder, 2, **given).each(answered, None, 100, 3):
        assert float((found - want[0]).abs().max()) < close
        assert figures == want[2]


def test_groups_that_a_cut_divides_are_refused(folder):
    with pytest.raises(SettingError, match="int8' with 2 ranks, but .* which a cut at columns"):
        Together(folder, 2, **{**SETTINGS, "weights": "int8", "method": Full()})


def test_what_a_step_sends_is_what_the_page_says(pair):
    config, ranks = pair.llms[0].config, pair.ranks[0]

    def run(llm):
        with llm.session(method=OmniKV(**SPARSE)) as session:
            session.prefill(ids_of(200))
            before = replace(llm._ranks.sent)
            session.decode(5)
            return before, replace(llm._ranks.sent)

    for rank, (before, after) in enumerate(pair.each(run)):
        own = pair.llms[rank].config.share.vocab.size
        hidden = config.hidden_size * 4
        formula = hidden * (1 + 2 * config.num_layers) + own * 4 + 2 * 20 * 8
        assert after.bytes - before.bytes == formula
        assert after.calls - before.calls == 1 + 2 * config.num_layers + 1 + 2
    assert ranks.size == 2


def test_every_method_runs_or_is_refused():
    assert sorted([*OWN_HEADS, *MERGED, *REFUSED]) == sorted(NAMES)


@pytest.mark.parametrize(
    "method, said",
    [
        (OmniKV(**SPARSE, selector="uniform"), "use selector='last'"),
        (OmniKV(**SPARSE, prefill_ratio=8), "chooses for prompts"),
        (Exact(OmniKV(**SPARSE, selector="uniform")), "use selector='last'"),
        *(
            (row.neutral, "ranks, but it")
            for row in ROWS
            if row.name in ("infllm", "duo", "ada_snapkv")
        ),
    ],
)
def test_methods_across_heads_are_refused_by_name(folder, pair, method, said):
    with pytest.raises(SettingError, match=said):
        pair.llms[0].session(method=method)
    with pytest.raises(SettingError, match=f"found {method.name} with 2 ranks"):
        Together(folder, 2, method=method, **SETTINGS)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(compile=True), "compile"),
        (dict(forever=True, max_context=None), "forever"),
    ],
)
def test_settings_of_one_process_are_refused(folder, settings, said):
    with pytest.raises(SettingError, match=said):
        Together(folder, 2, **{**SETTINGS, **settings})
