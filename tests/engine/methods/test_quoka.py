"""QuoKA: the queries that choose, the rows that each K/V head reads, attention over exactly those,
and a whole model against its rule in float64.

Stops: a mean over the wrong queries, the most ordinary queries in place of the least, a dot product
for a cosine, a group's heads under another's list, a block that sees its future.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.prompts import quoka
from engine.methods.prompts.quoka import QuoKA, representatives
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.softmax import Softmax
from kernels.prefill.by_head import prefill_by_head
from kernels.rows.forms import FORMS
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import Model, Shape
from tests.kernels.support.by_head_checks import BY_HEAD, by_rule, check_by_head

SPARSE = QuoKA(tokens=24, queries=4, block=32)
CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=6, sharpness=2.0)


def chosen_by_rule(q, k, method, first, last, kept, group):
    """The rows that the K/V heads read below `first`, by loops over float64: q [C, H, D], k [T,
    Hkv, D] -> one ascending list per K/V head, and the least gap at its end, over the largest.
    """
    lists, gaps = [], []
    for head in range(k.shape[1]):
        pointers = []
        for own in range(head * group, (head + 1) * group):
            queries = [row / row.norm() for row in q[:, own]]
            mean = q[:, own].mean(0)
            order = sorted(
                range(last - first),
                key=lambda i: (float(queries[i] @ mean) / float(mean.norm()), i),
            )
            pointers.append([queries[i] for i in order[: method.queries]])
        rank = [sum(parts) / group for parts in zip(*pointers)]
        scores = [
            max(float(p @ row) for p in rank) / float(row.norm())
            for row in k[: first // method.block * method.block, head]
        ]
        order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
        lists.append(sorted(order[:kept]))
        gaps.append(scores[order[kept - 1]] - scores[order[kept]] if kept < len(order) else 1.0)
    return lists, min(gaps)


@given(
    st.sampled_from(GROUPS),
    st.sampled_from(((32, 32), (64, 31), (64, 96), (96, 1), (97, 40), (159, 2), (100, 101))),
    st.sampled_from((SPARSE, QuoKA(share=0.3, queries=1, block=32), QuoKA(tokens=31, block=31))),
    st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_each_head_chooses_by_the_rule(shape, chunk, method, seed):
    """Index by index against loops in float64, where no gap is a tie to float32."""
    (heads, kv_heads), (start, count) = shape, chunk
    world = World(method, shape, 400, seed=seed)
    world.fill(1, 0, start + count)
    q, k = world.queries(count), world.bank.kv(1)[0]
    blocks = [block for block in method.blocks(start, start + count) if block[3]]
    found = world.runtime.choose(q, k, blocks, start)
    for n, (first, last, local, kept) in enumerate(blocks):
        own = q[0, first - start : last - start].double()
        rows = k[0].transpose(0, 1).double()
        lists, gap = chosen_by_rule(own, rows, method, first, last, kept, heads // kv_heads)
        if gap > 1e-6:
            assert found[0, n, :, :kept].tolist() == lists
        assert (found[0, n, :, :kept] < local).all() and (found[0, n, :, kept:] == -1).all()


@pytest.mark.parametrize("backend", ["reference", "cpu", "auto"])
@given(**BY_HEAD)
@settings(max_examples=20, deadline=None)
def test_attention_over_the_lists_of_heads(backend, **drawn):
    check_by_head(backend, **drawn)


def test_packed_rows_are_attended_to():
    """Rows of int8 give what the rows that they stand for give."""
    draw = torch.Generator().manual_seed(3)
    q, (k, v) = (
        torch.randn(1, 20, 4, 64, generator=draw),
        (torch.randn(1, 2, 90, 64, generator=draw) for _ in range(2)),
    )
    form = FORMS[torch.int8]
    rows = form.keys.pack(k), form.values.pack(v)
    index = torch.arange(0, 30, 2, dtype=torch.int32).expand(1, 1, 2, 15).contiguous()
    given_ = index, [(64, 84, 60, 15)], 64, 0.125
    expected = prefill_by_head(q, *rows, *given_, backend="reference")
    torch.testing.assert_close(prefill_by_head(q, *rows, *given_), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk", [64, 500])
def test_a_whole_model_follows_the_rule(chunk):
    """Three layers in float64, whose last layer reads everything; two prompts, the second from the
    middle of a block. Engine chunks of whole blocks change nothing.
    """
    config = tiny_config(layers=3, heads=4, kv_heads=2)
    weights = tiny_weights(config, seed=6, sharpness=2.0)
    model, ids, keys, values = Model(Shape(3, 4, 2, 16, 1e-5), weights), random_ids(310), [], []
    llm = tiny_llm(Full(), config, weights, max_context=512, chunk=chunk)
    with llm.session(SPARSE) as session:
        for first, stop in ((0, 250), (250, 310)):
            x = model.weights["model.embed_tokens.weight"][ids[first:stop]]
            for layer in range(3):
                normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
                q, k, v = (model.project(layer, part, normed) for part in "qkv")
                q, k = (torch.tensor(model.rotate(p, list(range(first, stop)))) for p in (q, k))
                keys += [k[:0]] if not first else []
                values += [torch.tensor(v)[:0]] if not first else []
                keys[layer] = torch.cat([keys[layer], k])
                values[layer] = torch.cat([values[layer], torch.tensor(v)])
                method = QuoKA(tokens=512) if layer == 2 else SPARSE
                out = simulated(method, q, keys[layer], values[layer], first, stop)
                x = model.rest(layer, x, out.flatten(1).numpy())
            expected = torch.tensor(model.head(x[-1]))
            found = session.prefill(ids[first:stop]).double()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert 0 < session.runtime.past_read < 0.4 * 2 * 310**2 / (2 * 32)


def simulated(method, q, k, v, start, stop):
    """One layer's attention of queries at start .. stop-1, [C, H, D], all float64."""
    outs = []
    for first, last, local, kept in method.blocks(start, stop):
        own = q[first - start : last - start]
        lists = torch.zeros(2, 0, dtype=torch.long)
        if kept:
            lists = torch.tensor(chosen_by_rule(own, k, method, first, last, kept, 2)[0])
        rows = k.transpose(0, 1), v.transpose(0, 1)
        outs.append(by_rule(own, *rows, lists, local, first, Softmax()))
    return torch.cat(outs)


def test_the_least_ordinary_queries_choose():
    """Of 30 queries along one direction and two along another those two point; a longer query
    points no more than a short one.
    """
    q = torch.zeros(32, 2, 8)
    q[:, :, 0] = torch.linspace(1, 5, 32).unsqueeze(1)
    q[5, :, 0], q[5, :, 1] = 0.0, 3.0
    q[20, :, 0], q[20, :, 2] = 0.0, -2.0
    found = representatives(q, 1, 2)
    assert found.shape == (1, 2, 8)
    assert {tuple(row.nonzero().flatten().tolist()) for row in found[0]} == {(1,), (2,)}
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(1, 2))


def opened(method, **more):
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=1024, **more).session(method)


def test_a_step_reads_everything_that_a_prompt_left_out():
    """Full attention over the same bank gives the same bits; the prompt itself was sparse."""
    ids = random_ids(600, seed=1)
    with opened(SPARSE, chunk=128) as session, opened(Full(), chunk=128) as dense:
        assert (session.prefill(ids) - dense.prefill(ids)).abs().max() > 1e-3
        first = [session.decode(token) for token in (3, 1, 4)]
        assert session.runtime.rows_read(602) == [602] * 4
        session.truncate(600)
        session.set_method(Full())
        assert all(
            torch.equal(session.decode(token), logits) for token, logits in zip((3, 1, 4), first)
        )


def test_choosing_by_chance_is_another_prompt(monkeypatch):
    """The control: with cosines of chance the answer is further from full attention's."""
    ids, apart, draw = random_ids(500, seed=4), {}, torch.Generator().manual_seed(0)
    with opened(Full()) as dense:
        expected = dense.prefill(ids).log_softmax(-1)
    for name in ("rule", "chance"):
        if name == "chance":
            chance = lambda p, k: torch.rand(k.shape[:2], generator=draw)  # noqa: E731
            monkeypatch.setattr(quoka, "cosines", chance)
        with opened(QuoKA(tokens=64, queries=8, block=32)) as session:
            found = session.prefill(ids).log_softmax(-1)
            apart[name] = float((expected.exp() * (expected - found)).sum())
    assert apart["rule"] < 0.5 * apart["chance"], apart


def test_work_is_counted():
    """Fewer operations than full attention; a larger budget more, and one that covers all its."""
    work = PrefillFlops.of(CONFIG)
    methods = SPARSE, QuoKA(tokens=300, queries=4, block=32), QuoKA(tokens=2048)
    small, large, whole = (opened(method).runtime.prompt_flops(work, 0, 1000) for method in methods)
    assert small[0] == whole[0] and small[1] < large[1] < whole[1]
    assert whole[1] == pytest.approx(work.parts(0, 1000)[1])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=0), "tokens"),
        (dict(tokens=3, share=0.1), "share"),
        (dict(share=1.5), "share"),
        (dict(queries=0), "queries: found 0"),
        (dict(block=0), "block: found 0"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        QuoKA(**bad)
