"""TidalDecode: choices of every query head against float64, attention over them, and where it meets
OmniKV.

Stops: heads that share what they choose apart, a choice from the wrong layer or step, a candidate
missed (generated tokens are some).
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.select.across import by_logits
from engine.methods.select.tidaldecode import TidalDecode
from engine.plan.layers import Role
from kernels.attention.dense import decode_dense
from kernels.native.library import missing
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.kernels.support.kernel_checks import check_attention

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 47, 64, 97, 127))


def expected_rows(q, k, reduce, count):
    """The choices of one query in float64: int64 [choices, count]. q [H, D]; k [Hkv, n, D]."""
    logits = torch.einsum("hgd,hnd->hgn", q.double().view(k.shape[0], -1, 16), k.double())
    logits = {
        "none": lambda: logits.flatten(0, 1),
        "all": lambda: logits.flatten(0, 1).amax(0, keepdim=True),
        "max": lambda: logits.amax(1),
        "mean": lambda: logits.mean(1),
    }[reduce]()
    return logits.topk(min(count, k.shape[1]), dim=1).indices.sort(1).values


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    st.sampled_from(GROUPS),
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.integers(1, 40),
    st.sampled_from(("none", "max", "mean", "all")),
    st.integers(0, 99),
)
@settings(max_examples=25, derandomize=True)
def test_choices_and_attention_of_a_ragged_step(
    backend, dtype, shape, lengths, count, reduce, seed
):
    """Layer 2 chooses, layer 3 reads exactly that, head by head; every row that no head of a K/V
    head chose is NaN there.
    """
    world = World(
        TidalDecode(tokens=count, correction_layer=4, gqa_reduce=reduce),
        shape,
        131,
        len(lengths),
        backend,
        dtype,
        seed,
        layers=5,
    )
    for b, n in enumerate(lengths):
        world.fill(2, 0, n, b)
        world.fill(3, 0, n, b)
    world.runtime.end_prompt(max(lengths))
    asked, q, (heads, kv_heads) = world.queries(), world.queries(), shape
    chosen = [
        expected_rows(asked[b, 0], world.bank.kv(2)[0][b, :, :n], reduce, count)
        for b, n in enumerate(lengths)
    ]
    k, v = world.bank.kv(3)
    for b, rows in enumerate(chosen):
        shared = rows.view(kv_heads, -1) if reduce == "none" else rows.expand(kv_heads, -1)
        for head in range(kv_heads):
            unread = torch.ones(131, dtype=torch.bool)
            unread[shared[head]] = False
            if max(lengths) > count:
                k[b, head, unread] = v[b, head, unread] = float("nan")
    step = world.step(*lengths)
    everything = decode_dense(asked, *world.bank.kv(2), step.visible, 0.25, backend=backend)
    # one sequence in C++: the logits that attention has left are ranked, and K is not read again
    alone = backend == "auto" and len(lengths) == 1 and max(lengths) > count and not missing()
    with mock.patch.object(by_logits, "key_floats", None) if alone else nullcontext():
        found = world.runtime.attend(2, asked, step)
    if backend == "auto" and heads // kv_heads >= 5:
        # attention that leaves no logits has a group's queries in the lanes of a vector
        # (kernels/native/lanes.cpp), and sums in another order
        torch.testing.assert_close(found, everything)
    else:
        assert torch.equal(found, everything)
    out = world.runtime.attend(3, q, step)
    for b, rows in enumerate(chosen):
        apart = (
            rows.expand(heads, -1)
            if len(rows) == 1
            else rows.repeat_interleave(heads // len(rows), 0)
        )
        for head in range(heads):
            own = tuple(t[b, head // (heads // kv_heads)][apart[head]][None] for t in (k, v))
            check_attention(
                out[b, :, head : head + 1],
                q[b, :, head : head + 1],
                own,
                [apart.shape[1]],
                0.25,
                f"{b}, {head}",
            )
    assert torch.equal(world.runtime.chosen_rows(3).expand(len(chosen[0]), -1), chosen[0])


def test_the_plan_is_the_published_one():
    """Layers 0 and 1 dense, 2 and 13 of 32 choose, the rest reuse; shallower models keep the
    proportion.
    """
    roles = TidalDecode().plan(tiny_config(layers=32)).roles
    assert [i for i, role in enumerate(roles) if role is Role.FILTER] == [2, 13] and roles[:2] == (
        Role.FULL,
    ) * 2
    assert all(role is Role.SPARSE for i, role in enumerate(roles) if i > 2 and i != 13)
    assert [g.filter_layer for g in TidalDecode().plan(tiny_config(layers=8)).groups] == [2, 4]
    assert [
        g.filter_layer for g in TidalDecode(correction_layer=7).plan(tiny_config(layers=8)).groups
    ] == [2, 7]
    assert TidalDecode().plan(tiny_config(layers=2)).sparse_layers == ()


CONFIG = tiny_config(layers=8, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=5)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_with_one_choice_for_all_heads_it_is_omnikv_without_a_waiting_layer(backend):
    """Filters 2 and 4, head maxima of raw logits, prompt tokens only (official). There the newest
    token is read beside the k, here it must be among the k + 1: positions where it is are compared,
    and there are many.
    """
    ids, same = random_ids(64, seed=8), 0
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=512, backend=backend)
    omni = OmniKV(filter_layers=(2, 4), tokens=30, wait_layers=0, official=True)
    for length in range(40, 64):
        with (
            llm.session(omni) as one,
            llm.session(TidalDecode(tokens=31, correction_layer=4, gqa_reduce="all")) as two,
        ):
            one.prefill(ids[:length]), two.prefill(ids[:length])
            a, b = one.decode(ids[length]), two.decode(ids[length])
            chosen = {layer: rows.tolist() for layer, rows in two.selections.items()}
            if all(length in rows for rows in chosen.values()):
                same += 1
                assert {
                    layer: [*rows.tolist(), length] for layer, rows in one.selections.items()
                } == chosen
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    assert same > 3


def test_generated_tokens_are_candidates_and_selections_are_made_anew():
    """After a short prompt most of what is chosen was generated; a truncate and another token give
    other choices.
    """
    with tiny_llm(TidalDecode(tokens=16), CONFIG, WEIGHTS, max_context=512).session() as session:
        session.prefill(random_ids(20))
        for token in random_ids(150, seed=3):
            session.decode(token)
        rows = session.selections
        assert list(rows) == [2, 4] and sum((r >= 20).sum() for r in rows.values()) > sum(
            (r < 20).sum() for r in rows.values()
        )
        heads = session.runtime.chosen_rows(3)
        assert heads.shape == (8, 16) and len({tuple(r) for r in heads.tolist()}) == 8
        expected = session.decode(5)
        session.truncate(170)
        session.decode(6)
        assert session.selections[2].tolist() != rows[2].tolist()
        session.truncate(170)
        assert torch.equal(session.decode(5), expected)
        assert session.stats.dense_steps == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=1, share=0.1), "at most one"),
        (dict(correction_layer=2), "correction_layer"),
        (dict(gqa_reduce="min"), "none, max, mean, all"),
        (dict(select_layer=True), "select_layer"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        TidalDecode(**bad)


def test_a_correction_layer_beyond_the_model_is_named():
    with pytest.raises(SettingError, match="the model has 8 layers"):
        TidalDecode(correction_layer=8).plan(CONFIG)
    with pytest.raises(SettingError, match="select_layer: found 8, expected at most 7"):
        TidalDecode(select_layer=8).plan(CONFIG)
