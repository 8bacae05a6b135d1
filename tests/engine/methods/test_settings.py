"""Settings of OmniKV: bad ones are refused in one line at the earliest moment, good ones mean what
the paper says.

Stops: a typo that silently runs full attention, a budget off by the dense layers' share, a filter
layer that the model has not.
"""

import dataclasses
import json
import warnings
from dataclasses import replace

import pytest

from engine.base.errors import SettingError, UsageError
from engine.llm import LLM
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.cpu_costs import CpuCosts, cpu_costs
from engine.plan.layers import (
    Role,
    budget_from_mem,
    layer_plan,
    mem_from_budget,
    spread_filter_layers,
)
from kernels.launch.isa import SETS
from tests.builders import random_ids, stream_of, tiny_config, tiny_llm, tiny_weights

BAD = [
    (dict(filter_layers=(-1, 4)), ["filter_layers", "-1", "ascending"]),
    (dict(filter_layers=(2, 2, 4)), ["filter_layers", "(2, 2, 4)", "distinct"]),
    (dict(filter_layers=(4, 2)), ["filter_layers", "(4, 2)", "ascending"]),
    (dict(filter_layers=()), ["filter_layers", "()", "non-empty"]),
    (dict(filter_layers=3), ["filter_layers", "3"]),
    (dict(filter_layers="2,8"), ["filter_layers", "2,8"]),
    (dict(filter_layers=(2, 8.0)), ["filter_layers", "8.0"]),
    (dict(filter_layers=(True, 4)), ["filter_layers", "True"]),
    (dict(tokens=0), ["tokens", "found 0", ">= 1"]),
    (dict(tokens=-5), ["tokens", "-5", ">= 1"]),
    (dict(tokens=12.5), ["tokens", "12.5", "int"]),
    (dict(tokens=True), ["tokens", "True"]),
    (dict(tokens=-1, official=True), ["tokens", "-1", ">= 0"]),
    (dict(share=0), ["share", "found 0", "(0, 1]"]),
    (dict(share=-0.1), ["share", "-0.1", "(0, 1]"]),
    (dict(share=1.01), ["share", "1.01", "(0, 1]"]),
    (dict(share=float("nan")), ["share", "nan", "(0, 1]"]),
    (dict(share="0.1"), ["share", "'0.1'", "(0, 1]"]),
    (dict(share=0.0, official=True), ["share", "0.0", "(0, 1]"]),
    (dict(mem=0.0), ["mem", "0.0", "(0, 1]"]),
    (dict(mem=1.5), ["mem", "1.5", "(0, 1]"]),
    (dict(mem=-0.3), ["mem", "-0.3", "(0, 1]"]),
    (dict(tokens=64, share=0.1), ["tokens=64", "share=0.1", "one of"]),
    (dict(share=0.1, mem=0.3), ["share=0.1", "mem=0.3", "one of"]),
    (dict(tokens=64, mem=0.3), ["tokens=64", "mem=0.3", "one of"]),
    (dict(tokens=64, share=0.1, mem=0.3), ["tokens=64", "share=0.1", "mem=0.3"]),
    (dict(selector="first"), ["selector", "'first'", "last", "uniform", "exponential"]),
    (dict(selector="exp"), ["selector", "'exp'", "exponential"]),
    (dict(scores="logits"), ["scores", "'logits'", "softmax", "raw"]),
    (dict(window=0), ["window", "found 0", "1 to 64"]),
    (dict(window=65), ["window", "65", "1 to 64"]),
    (dict(wait_layers=-1), ["wait_layers", "-1", ">= 0"]),
    (dict(tail=63), ["tail", "63", ">= 64"]),
    (dict(sink=-1), ["sink", "-1", ">= 0"]),
    (dict(sink=65, tokens=64), ["sink", "65", "64"]),
    (dict(dense_below=-1), ["dense_below", "-1", ">= 0"]),
    (dict(dense_below="never"), ["dense_below", "'never'"]),
    (dict(dense_below=None), ["dense_below", "None"]),
    (dict(official="yes"), ["official", "'yes'"]),
    (dict(official=True, mem=0.3), ["official", "mem"]),
    (dict(official=True, sink=4), ["official", "sink"]),
    (dict(official=True, selector="uniform", scores="raw"), ["scores", "'raw'"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_settings_are_refused_at_construction_by_name_value_and_range(fields, words):
    with pytest.raises(SettingError) as caught:
        OmniKV(**fields)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert (
        "\n" not in message and isinstance(caught.value, UsageError) and caught.value.exit_code == 2
    )


@pytest.mark.parametrize("name", ["token", "k", "filters", "wait", "mem_percent"])
def test_unknown_fields_raise(name):
    with pytest.raises(TypeError, match=name):
        OmniKV(**{name: 1})
    with pytest.raises(TypeError, match=name):
        Full(**{name: 1})


def test_methods_are_frozen_values():
    method = OmniKV(filter_layers=[2, 8, 18])
    assert method == OmniKV(filter_layers=(2, 8, 18)) and hash(method) == hash(
        OmniKV(filter_layers=(2, 8, 18))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.tokens = 5
    assert (
        OmniKV(tokens=0, official=True).dense_below == 0
        and OmniKV(share=1.0)
        and OmniKV(mem=1)
        and OmniKV(window=64)
    )


def forbidden(config, dtype, device):
    """A stream of weights that must not be asked for."""
    raise AssertionError("weights were read")
    yield


CONFIG = tiny_config(layers=8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(filter_layers=(2, 8)), ["filter_layers", "found 8", "0 to 7", "8 layers"]),
        (dict(filter_layers=(100,)), ["filter_layers", "100", "0 to 7"]),
        # 1 full, 2 filters, 2 wait of 8 layers
        (dict(filter_layers=(1, 4), mem=0.5, wait_layers=1), ["mem", "0.5", "0.625"]),
        (dict(filter_layers=(1, 4), mem=0.625, wait_layers=1), ["mem", "0.625"]),
        (dict(filter_layers=(1, 4), mem=0.01, wait_layers=0), ["mem", "0.01", "0.375"]),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_weights_load(fields, words, tmp_path):
    """From LLM(...), out of config.json alone: the folder has no weights, the stream of weights is
    never started.
    """
    with pytest.raises(SettingError) as caught:
        LLM.from_stream(CONFIG, forbidden, device="cpu", max_context=256, method=OmniKV(**fields))
    assert all(word in str(caught.value) for word in words), caught.value
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(SettingError) as caught:
        LLM(tmp_path, device="cpu", max_context=256, method=OmniKV(**fields))
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_same_for_a_change_of_method_in_mid_conversation():
    with tiny_llm(Full(), CONFIG, tiny_weights(CONFIG), max_context=256).session() as session:
        session.prefill(random_ids(50))
        for method in (OmniKV(filter_layers=(9,)), OmniKV(filter_layers=(1, 4), mem=0.2), "omnikv"):
            with pytest.raises(SettingError):
                session.set_method(method)
        # it goes on as it was
        assert session.method == Full() and session.decode(3).isfinite().all()


def test_a_plan_without_sparse_layers_warns_and_runs():
    weights = tiny_weights(CONFIG)
    for filters, wait in (((7,), 1), ((6,), 1), ((1, 3, 5), 9)):
        with pytest.warns(UserWarning, match="no sparse layer"):
            llm = tiny_llm(
                OmniKV(filter_layers=filters, wait_layers=wait, dense_below=0),
                CONFIG,
                weights,
                max_context=256,
            )
        with llm.session() as session, llm.session(Full()) as full:
            assert (session.prefill(random_ids(100)) == full.prefill(random_ids(100))).all()
            assert (session.decode(3) == full.decode(3)).all()
            assert (
                session.selections == {}
                and session.stats.sparse_steps == 0
                and session.stats.dense_steps == 1
            )
    with pytest.raises(SettingError, match="mem.*no sparse layer"):
        tiny_llm(OmniKV(filter_layers=(7,), mem=0.9), CONFIG, weights, max_context=256)


def test_nothing_waits_unless_asked_and_the_published_code_always_does():
    """A wait layer costs a layer that reads everything, and repairs nothing; the paper's form stays
    reachable by name.
    """
    filters = dict(filter_layers=(1, 4))
    plain, paper, official = (
        OmniKV(**filters),
        OmniKV(wait_layers=1, **filters),
        OmniKV(official=True, **filters),
    )
    assert plain.plan(CONFIG) == layer_plan(8, (1, 4), 0) and plain.wait_layers == 0
    assert paper.plan(CONFIG) == official.plan(CONFIG) == layer_plan(8, (1, 4), 1)
    assert plain.plan(CONFIG) != paper.plan(CONFIG) and official.wait_layers == 1
    assert OmniKV(official=True, wait_layers=0, **filters).plan(CONFIG) == plain.plan(CONFIG)


def test_the_last_layer_may_be_a_filter():
    """Its group is empty: nothing to choose for, nothing warned about."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = tiny_llm(
            OmniKV(filter_layers=(1, 7), tokens=8, tail=64, dense_below=0),
            CONFIG,
            tiny_weights(CONFIG),
            max_context=256,
        )
    with llm.session() as session:
        session.prefill(random_ids(200))
        session.decode(3)
        assert list(session.selections) == [1] and session.stats.sparse_steps == 1
        assert session.plan.roles[7] is Role.FILTER and session.plan.groups[1].layers == ()


# ------------------------------------------------------------------ layer plan


@pytest.mark.parametrize(
    ("layers", "filters", "dense"),
    [
        # the paper's Figure 4: full below the first filter, filters, and one wait layer after each
        (32, (2, 8, 18), {0, 1, 2, 3, 8, 9, 18, 19}),
        (48, (6, 11, 30), {*range(8), 11, 12, 30, 31}),
        (80, (4, 19, 41), {*range(6), 19, 20, 41, 42}),
        # a filter inside another's wait range
        (12, (2, 3, 8), {0, 1, 2, 3, 4, 8, 9}),
    ],
)
def test_layer_plan_worked_examples(layers, filters, dense):
    plan = layer_plan(layers, filters, 1)
    assert {i for i, role in enumerate(plan.roles) if role is not Role.SPARSE} == dense
    assert set(plan.sparse_layers) == set(range(layers)) - dense and plan.num_layers == layers
    assert [g.filter_layer for g in plan.groups] == list(filters)
    assert sorted(i for g in plan.groups for i in g.layers) == list(plan.sparse_layers)
    for number, group in enumerate(plan.groups):
        assert all(
            plan.group_of[layer] == number and layer > group.filter_layer for layer in group.layers
        )
        assert plan.group_of[group.filter_layer] == number
    assert plan.dense_share == pytest.approx(len(dense) / layers)


def test_layer_plan_roles_by_wait_layers():
    full, chosen, wait, sparse = Role.FULL, Role.FILTER, Role.WAIT, Role.SPARSE
    assert layer_plan(6, (1,), 0).roles == (full, chosen, sparse, sparse, sparse, sparse)
    assert layer_plan(6, (1,), 2).roles == (full, chosen, wait, wait, sparse, sparse)
    assert layer_plan(6, (0, 4), 2).roles == (chosen, wait, wait, sparse, chosen, wait)
    assert layer_plan(6, (1, 2), 3).roles == (full, chosen, chosen, wait, wait, wait)
    assert layer_plan(12, (2, 3, 8), 1).groups[0].layers == () and layer_plan(
        12, (2, 3, 8), 1
    ).groups[1].layers == (5, 6, 7)
    assert layer_plan(4).roles == (full,) * 4 and layer_plan(4).groups == ()


@pytest.mark.parametrize("layers", range(1, 130))
def test_the_default_of_an_unknown_model_leaves_sparse_layers(layers):
    """As many layers read everything as under a set of the published form, and every filter has
    sparse layers to choose for.
    """
    filters = spread_filter_layers(layers)
    assert len(filters) <= 6 and list(filters) == sorted(set(filters))
    if layers >= 4:
        plan = layer_plan(layers, filters, 0)
        assert 0 < filters[0] and all(group.layers for group in plan.groups)
        published = {max(1, round(layers * share)) for share in (0.0625, 0.25, 0.5625)}
        if layers < 12:
            published = {1} if layers < 6 else {2}
        before = layer_plan(layers, sorted(published), 1)
        assert len(plan.sparse_layers) == len(before.sparse_layers)
    assert spread_filter_layers(32) == (2, 5, 8, 13, 18, 25)


def test_an_unknown_model_gets_the_default_and_a_hint():
    llm = tiny_llm(OmniKV(tokens=8, dense_below=0), CONFIG, tiny_weights(CONFIG), max_context=512)
    assert llm.method.filter_layers == spread_filter_layers(8) == (2, 5)
    assert llm.method.wait_layers == 0 and "calibrate" in str(llm.plan())
    with llm.session() as session:
        session.prefill(random_ids(400))
        session.decode(1)
        assert session.stats.sparse_steps == 1 and len(session.selections[5]) == 8


# ------------------------------------------------------------------ budgets


@pytest.mark.parametrize(
    ("layers", "filters", "mem", "share"),
    [
        # Mem% = a + b (1 - a), the paper's formula
        (32, (2, 8, 18), 0.30, 0.0667),
        (48, (6, 11, 30), 0.30, 0.0667),
        (48, (3, 11, 30), 0.30, 0.138),
        (48, (3, 11, 30), 0.40, 0.262),
        (48, (3, 11, 30), 0.50, 0.385),
        (80, (4, 19, 41), 0.20, 0.086),
        (80, (4, 19, 41), 0.30, 0.200),
        (80, (4, 19, 41), 0.40, 0.314),
    ],
)
def test_mem_formula_in_both_directions(layers, filters, mem, share):
    plan = layer_plan(layers, filters, 1)
    found = budget_from_mem(mem, plan.dense_share)
    assert found == pytest.approx(share, abs=6e-4)
    assert mem_from_budget(found * 131072, 131072, plan.dense_share) == pytest.approx(mem)
    assert OmniKV(filter_layers=filters, mem=mem).budget(plan, 131072) == int(found * 131072)


def test_dense_shares_of_the_published_plans():
    shares = [
        layer_plan(n, f, 1).dense_share
        for n, f in ((32, (2, 8, 18)), (48, (6, 11, 30)), (48, (3, 11, 30)), (80, (4, 19, 41)))
    ]
    assert shares == [0.25, 0.25, 0.1875, 0.125]
    # without wait layers
    assert layer_plan(32, (2, 8, 18), 0).dense_share == 5 / 32


def test_mem_of_a_budget_is_never_more_than_all():
    assert mem_from_budget(8540, 128_100, 0.25) == pytest.approx(0.30, abs=1e-3)
    assert mem_from_budget(4096, 100, 0.25) == 1.0 and mem_from_budget(1, 0, 0.25) == 1.0
    with pytest.raises(SettingError, match="mem: found 0.25, expected more than 0.25"):
        budget_from_mem(0.25, 0.25)
    assert budget_from_mem(1.0, 0.25) == 1.0


def test_budgets_of_a_session():
    """tokens as given; share and mem of the bank's length when the prompt was read; at least one;
    2048 where none is given.
    """
    weights = tiny_weights(CONFIG)
    for fields, k in (
        (dict(tokens=17), 17),
        (dict(share=0.1), 40),
        (dict(share=0.0001), 1),
        (dict(share=1.0), 400),
        (dict(mem=0.7), 80),
        (dict(mem=1.0), 400),
        ({}, 2048),
    ):
        method = OmniKV(filter_layers=(1, 4), wait_layers=1, tail=64, dense_below=0, **fields)
        with tiny_llm(method, CONFIG, weights, max_context=1024).session() as session:
            session.prefill(random_ids(400))
            for token in random_ids(4):
                session.decode(token)
            assert all(len(chosen) == min(k, 320) for chosen in session.selections.values()), fields
            assert session.stats.sparse_steps == 4


# ------------------------------------------------------------------ dense_below


def bytes_of_a_step(config, plan, method, n, costs):
    """Bytes that decide (full, sparse): the sparse layers' rows against the chosen ones, the tail
    and the scoring, each as a CPU with these costs feels them.
    """
    row, sparse = 2 * config.num_kv_heads * config.head_dim * 4, len(plan.sparse_layers)
    again = (costs.filter - 1) * row
    scoring = plan.count(Role.FILTER) * n * (4 * config.num_heads * 2 + 12 + again)
    choice = plan.count(Role.FILTER) * costs.choice
    if method.residual != "none":  # a number, a chance written, and both passes of a top-k over it
        scoring += plan.count(Role.FILTER) * n * (4 + 4 + 8)
        choice *= 2
    k = method.budget(plan, n)
    return sparse * n * row, sparse * (k + method.tail) * costs.row * row + scoring + choice


@pytest.mark.parametrize(
    "fields",
    [
        dict(tokens=64),
        dict(tokens=500),
        dict(share=0.1),
        dict(mem=0.7),
        dict(tokens=64, tail=1024),
        dict(tokens=64, residual="sample"),
        dict(share=0.1, residual="unweighted"),
    ],
)
@pytest.mark.parametrize("found", [*SETS, "cuda"])
def test_automatic_crossover_is_where_the_bytes_cross(fields, found, monkeypatch):
    monkeypatch.setattr("engine.plan.cpu_costs.isa", lambda: found)
    device = "cuda" if found == "cuda" else "cpu"
    costs = CpuCosts(1, 1) if found == "cuda" else cpu_costs(4, found)
    config = tiny_config(layers=8, heads=4, kv_heads=2, hidden=256, max_positions=100_000)
    method = OmniKV(filter_layers=(1, 4), wait_layers=1, **fields)
    plan = method.plan(config)
    below = method.dense_below_tokens(plan, config, 4, device, 100_000)
    assert 0 < below < 100_000
    full, sparse = bytes_of_a_step(config, plan, method, below + 32, costs)
    assert sparse <= full
    full, sparse = bytes_of_a_step(config, plan, method, below - 32, costs)
    # a share is rounded down to whole tokens
    token = len(plan.sparse_layers) * costs.row * config.kv_bytes(4)
    assert sparse + token >= full
    if method.residual != "none":  # what chooses twice pays later
        once = replace(method, residual="none")
        assert once.dense_below_tokens(plan, config, 4, device, 100_000) < below


def test_automatic_crossover_is_printed_obeyed_and_can_be_set(monkeypatch):
    # beside C++ attention choosing never pays in a model this small
    monkeypatch.setattr("engine.plan.cpu_costs.missing", lambda: "no compiler")
    weights = tiny_weights(CONFIG)
    for setting in ("auto", 250, 0):
        method = OmniKV(filter_layers=(1, 4), tokens=8, tail=64, dense_below=setting)
        llm = tiny_llm(method, CONFIG, weights, max_context=512)
        below = llm.plan().dense_below
        assert below == setting or (setting == "auto" and 0 < below < 512)
        assert (f"from {below} tokens on" if below else "at every length") in str(llm.plan())
        with llm.session() as session:
            session.prefill(random_ids(max(1, below - 3)))
            for token in random_ids(5):
                session.decode(token)
                sparse = len(session) >= below
                assert (session.stats.sparse_steps > 0) == sparse and bool(
                    session.selections
                ) == sparse
    # on a CPU a gather of 90% costs more than it saves
    hopeless = OmniKV(filter_layers=(1, 4), share=0.9, tail=64)
    llm = tiny_llm(hopeless, CONFIG, weights, max_context=512)
    assert llm.plan().dense_below > 512
    monkeypatch.setattr("engine.plan.cpu_costs.missing", lambda: "")
    method = OmniKV(filter_layers=(1, 4), tokens=8, tail=64)
    assert tiny_llm(method, CONFIG, weights, max_context=512).plan().dense_below > 512


def test_stream_of_weights_serves_all_settings():
    """The helper itself: two LLMs over the same weights give the same logits."""
    config, weights = CONFIG, tiny_weights(CONFIG)
    a = LLM.from_stream(
        config, stream_of(weights), device="cpu", max_context=64, backend="reference"
    )
    b = tiny_llm(Full(), config, weights, max_context=64)
    with a.session() as first, b.session() as second:
        assert (first.prefill([1, 2, 3]) == second.prefill([1, 2, 3])).all()
