"""Quest: bounds that no logit passes, extremes that follow the bank, and steps that read the best
pages, against float64.

Stops: a page whose extremes miss a row (appended, rewritten after a truncate, in a second turn), a
bound reduced in the wrong order, a page list of another head or layer, a budget that leaves the
newest rows out.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.quest import Quest, page_bounds
from engine.methods.select.tidaldecode import TidalDecode
from engine.model.rope import apply_rope
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.method_checks import everything_happened
from tests.engine.methods.method_table import Length
from tests.kernels.support.kernel_checks import check_attention

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 47, 64, 97, 127))


@given(st.sampled_from(GROUPS), LENGTHS, st.sampled_from((1, 7, 16)), st.integers(0, 99))
@settings(max_examples=40)
def test_no_logit_of_a_page_passes_its_bound(shape, n, size, seed):
    """In float64, where rounding cannot hide a wrong bound; a page of one row is met exactly."""
    world = World(Quest(page=size), shape, 130, seed=seed)
    world.fill(2, 0, n)
    k, q = world.bank.kv(2)[0], world.queries()[0, 0].double()
    extremes = world.runtime
    extremes.learn(0, 2, world.bank, [n])
    pages = -(-n // size)
    low, high = (t[0, 0, :, :pages].double() for t in (extremes.low, extremes.high))
    bounds = {reduce: page_bounds(q, low, high, reduce) for reduce in ("max", "mean", "sum")}
    kv_heads = shape[1]
    logits = torch.einsum("hgd,hnd->hgn", q.view(kv_heads, -1, 16), k[0, :, :n].double())
    for page in range(pages):
        best = logits[:, :, page * size : (page + 1) * size].amax(2)
        for reduce, value in (("max", best.amax(1)), ("mean", best.mean(1)), ("sum", best.sum(1))):
            found = bounds[reduce][:, page]
            assert (found >= value - 1e-12).all(), (page, reduce)
            if size == 1:
                torch.testing.assert_close(found, value)


@given(
    st.sampled_from((1, 7, 16)),
    st.lists(st.tuples(st.integers(1, 120), st.floats(0, 1)), min_size=1, max_size=8),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_extremes_follow_the_bank_wherever_it_goes(size, moves, seed):
    """Truncates and prompts of any length in any order; steps that go back without a truncate
    rewrite their own row only.
    """
    world, before = World(Quest(page=size), (4, 2), 130, batch=2, seed=seed), 0
    extremes = world.runtime
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        if kept < n - 1:
            extremes.truncate(kept)
        for at, layer in enumerate((2, 3)):
            world.fill(layer, kept, 130)
            extremes.learn(at, layer, world.bank, [n, max(1, n - 3)])
        for at, layer in enumerate((2, 3)):
            for b, length in enumerate((n, max(1, n - 3))):
                for page, rows in enumerate(
                    world.bank.kv(layer)[0][b, :, :length].split(size, dim=1)
                ):
                    assert torch.equal(extremes.low[at, b, :, page], rows.amin(1))
                    assert torch.equal(extremes.high[at, b, :, page], rows.amax(1))
        before = n


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((1, 7, 16)),
    st.sampled_from(("max", "mean", "sum")),
    st.integers(0, 99),
)
@settings(max_examples=25, derandomize=True)
def test_a_step_reads_the_best_pages_and_the_newest(
    backend, dtype, shape, lengths, size, reduce, seed
):
    """A ragged batch: pages by bounds from float64, attention over their rows by the kernel rule;
    nothing else may be read (NaN).
    """
    method = Quest(tokens=3 * size, page=size, gqa_reduce=reduce)
    world = World(method, shape, 131, batch=2, backend=backend, dtype=dtype, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    expected = []
    for b, n in enumerate(lengths):
        pages = k[b, :, :n].double().split(size, dim=1)
        low, high = (
            torch.stack([getattr(page, name)(1) for page in pages], 1) for name in ("amin", "amax")
        )
        bounds = page_bounds(q[b, 0].double(), low, high, reduce)[:, :-1]
        gap = bounds.sort(1, descending=True).values.diff(dim=1)[:, 1:2]
        # a tie would be a coin's business
        assert not len(gap) or not gap.numel() or gap.abs().min() > 1e-6
        chosen = bounds.topk(min(2, bounds.shape[1]), dim=1).indices.sort(1).values
        expected.append(
            [
                [
                    row
                    for page in (*row_pages, len(pages) - 1)
                    for row in range(page * size, min(n, (page + 1) * size))
                ]
                for row_pages in chosen.tolist()
            ]
        )
    world.runtime.end_prompt(max(lengths))
    out = world.runtime.attend(3, q, world.step(*lengths))
    for b, n in enumerate(lengths):
        rows = torch.tensor(expected[b]).unsqueeze(-1).expand(-1, -1, 16)
        check_attention(
            out[b],
            q[b],
            (k[b].gather(1, rows), v[b].gather(1, rows)),
            [rows.shape[1]],
            0.25,
            f"sequence {b} of {n}",
        )
        assert world.runtime.rows_read(n)[3] == len(expected[b][0])
    assert world.runtime.rows_read(max(lengths))[:2] == [max(lengths)] * 2
    found = [
        [*rows, *range((lengths[0] - 1) // size * size, lengths[0])]
        for rows in world.runtime.chosen_rows(3).expand(len(expected[0]), -1).tolist()
    ]
    assert found == expected[0]


def test_metadata_is_two_sixteenths_of_k():
    """And the budget is in whole pages, three at least, the newest among them."""
    config, method = (
        tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512),
        Quest(tokens=1),
    )
    # 4 sparse layers, bfloat16
    keys = 4 * 1600 * 2 * 64 * 2
    buffers = method.buffers(method.plan(config), config, 1600)
    extremes = sum(buffers[name].nbytes(2) for name in ("low", "high", "bounds"))
    # and a float32 bound per page and K/V head
    assert extremes == keys * 2 // 16 + 4 * 100 * 2
    needs = method.needs(method.plan(config), config, 1600, 2)
    assert needs.device_bytes == extremes + 4 * 4 * 2 * 2
    pages = [Quest(tokens=n).budget(9999) // 16 for n in (1, 47, 48, 63, 64, 2048)]
    assert pages == [3, 3, 3, 3, 4, 128]
    assert Quest(share=0.1).budget(1600) == 160 and Quest().budget(10**6) == 2048


CONFIG = tiny_config(layers=6, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=2)


def test_turns_truncates_forks_and_other_methods_change_nothing():
    """One session with everything that can happen to it, against a fresh one that read the same
    tokens in the same order.
    """
    method = Quest(tokens=48)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320, chunk=50)
    with everything_happened(llm, method) as (one, other):
        assert one.runtime.rows_read(260)[3] == 32 + 4
        chosen = [other.runtime.chosen_rows(layer) for layer in (2, 3, 4, 5)]
        # every layer and K/V head chooses for itself
        assert len({tuple(rows.flatten().tolist()) for rows in chosen}) == 4
        assert all(rows[0].tolist() != rows[1].tolist() for rows in chosen)


@pytest.mark.parametrize(
    ("whole", "part"),
    [(Quest(tokens=320), Quest(tokens=48)), (TidalDecode(tokens=320), TidalDecode(tokens=20))],
)
def test_check_measures_the_mass_that_every_head_keeps(whole, part):
    """The mean over heads of what each one's own rows hold: everything where everything is read,
    else what a sum over them says.
    """
    llm, ids = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=320), random_ids(210, seed=4)
    for method in (whole, part):
        with llm.session(method) as session:
            session.prefill(ids[:200])
            for token in ids[200:]:
                session.decode(token)
            masses = session.check(3).steps[-1].mass
            if method is whole:
                assert all(abs(mass - 1) < 1e-5 for mass in masses.values())
                continue
            at = torch.tensor([[209]])
            for layer, mass in masses.items():
                q = apply_rope(session.query_ring.read(layer, at), *llm.rotary.at(at))[
                    0, 0
                ].double()
                k = session.bank.kv(layer)[0][0, :, :210].double()
                weights = torch.softmax(
                    torch.einsum("hgd,hnd->hgn", q.view(2, 4, -1), k) / k.shape[2] ** 0.5, -1
                ).flatten(0, 1)
                rows = session.runtime.chosen_rows(layer)
                tail = int(session.runtime.tail_start(Length(210))[0])
                kept = [
                    weights[head, own.tolist() + list(range(tail, 210))].sum()
                    for head, own in enumerate(rows.repeat_interleave(8 // len(rows), 0))
                ]
                assert abs(float(sum(kept)) / 8 - mass) < 1e-5 and mass < 0.999


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(tokens=10, share=0.5), "at most one"),
        (dict(tokens=0), "tokens"),
        (dict(share=1.5), "share"),
        (dict(page=0), "page"),
        (dict(gqa_reduce="last"), "max, mean, sum"),
        (dict(dense_layers=-1), "dense_layers"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        Quest(**bad)
