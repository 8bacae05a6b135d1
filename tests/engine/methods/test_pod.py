"""PoD untrained: shared logits, the exact gate, the tau skip, the keys it does without, and the
blocks that Algorithm 1 makes.

Stops: a distant token counted twice or not at all, a head that shares with another head or layer, a
gate that is not a softmax, a key read that is said not to be stored.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.pod import PodUntrained, attend_span, proximal_spans
from kernels.prefill.merge import merge
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.kernels.support.kernel_checks import assert_close, plain

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 47, 64, 97, 127))


# ------------------------------------------------------------------ spans and the gate


@given(st.sampled_from(GROUPS), LENGTHS, st.integers(1, 20), st.integers(0, 9))
@settings(max_examples=25, derandomize=True)
def test_a_span_is_attention_over_its_rows(shape, n, count, seed):
    """Any bounds, empty ones too, against float64; rows that no query sees are NaN."""
    world = World(PodUntrained(), shape, 131, seed=seed)
    world.fill(0, 0, n)
    k, v = (part[0] for part in world.bank.kv(0))
    q = world.queries(count)[0]
    low, high = torch.randint(0, n + 1, (2, count), generator=world.generator)
    for t in (k, v):
        t[:, : int(low.min())] = t[:, max(int(low.min()), int(high.max())) :] = float("nan")
    out, lse = attend_span(q, k, v, low, high, 0.25)
    exact, rough = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape)
    for i in range(count):
        if high[i] <= low[i]:
            assert not out[i].any() and (lse[i] == -math.inf).all()
            continue
        rows = [t[:, low[i] : high[i]] for t in (k, v)]
        exact[i : i + 1], logits = plain(
            q[i : i + 1], *rows, [rows[0].shape[1]], 0.25, torch.float64
        )
        rough[i : i + 1], _ = plain(q[i : i + 1], *rows, [rows[0].shape[1]], 0.25, torch.float32)
        torch.testing.assert_close(
            lse[i].double(), torch.logsumexp(logits[0], -1), atol=1e-5, rtol=1e-5
        )
    assert_close(out, exact, rough, torch.float32, "out")


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (256, 2048)])
def test_tiles_change_nothing(monkeypatch, tile):
    world = World(PodUntrained(), (8, 2), 131)
    world.fill(0, 0, 131)
    q, (k, v) = world.queries(17)[0], world.bank.kv(0)
    low, high = torch.randint(0, 60, (17,)), torch.randint(50, 132, (17,))
    whole = attend_span(q, k[0], v[0], low, high, 0.25)
    monkeypatch.setattr("engine.methods.select.pod.QUERIES", tile[0])
    monkeypatch.setattr("engine.methods.select.pod.ROWS", tile[1])
    for mine, theirs in zip(attend_span(q, k[0], v[0], low, high, 0.25), whole):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 150), st.integers(0, 20), st.integers(1, 140))
def test_every_row_is_proximal_or_distant_once(position, first, recent):
    """Eq. 3: the first and the newest tokens are proximal, what lies between is distant."""
    spans = [
        range(int(low[0]), int(high[0]))
        for low, high in proximal_spans(torch.tensor([position]), first, recent)
    ]
    assert sorted(row for span in spans for row in span) == list(range(position + 1))
    assert set(spans[2]) == {
        row for row in range(position + 1) if row >= first and row <= position - recent
    }


@given(st.integers(1, 9), LENGTHS, st.integers(0, 9))
def test_the_gate_is_the_merge_by_log_sum_exp(cuts, n, seed):
    """Eq. 4: g = sum exp(proximal) / sum exp(all), o = g o_P + (1 - g) o_D; of own logits it is one
    softmax, however rows are parted.
    """
    generator = torch.Generator().manual_seed(seed)
    logits, values = (
        3 * torch.randn(n, generator=generator).double(),
        torch.randn(n, 16, generator=generator).double(),
    )
    owner = torch.randint(0, cuts + 1, (n,), generator=generator)
    parts = []
    for part in range(cuts + 1):
        own = logits.masked_fill(owner != part, -math.inf)
        lse = torch.logsumexp(own, 0)
        weights = torch.exp(own - (0.0 if lse == -math.inf else lse))
        parts.append(((weights @ values).float(), lse.float()))
    out, lse = merge(parts, torch.float32)
    torch.testing.assert_close(
        out.double(), torch.softmax(logits, 0) @ values, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, 0), atol=1e-5, rtol=1e-5)
    if cuts == 1:
        gate = torch.sigmoid(parts[0][1] - parts[1][1])
        torch.testing.assert_close(
            gate * parts[0][0] + (1 - gate) * parts[1][0], out, atol=1e-5, rtol=1e-5
        )


# ------------------------------------------------------------------ layers that share

BLOCKS = ((0, 2), (0, 1, 3))  # of 4 layers: head 0 shares 0-1 and 2-3, head 1 shares 1-2


def expected(world, queries, layer, start, first, recent, lows):
    """Attention of one layer in float64: own logits near, those of each head's lowest layer far,
    own values; and the shares of the near part. queries: per layer q [C, H, D].
    """
    q, (kv_heads, group) = queries[layer], (len(lows), queries[layer].shape[1] // len(lows))
    out, gates = (
        torch.empty(q.shape, dtype=torch.float64),
        torch.empty(q.shape[:2], dtype=torch.float64),
    )
    for head in range(kv_heads):
        near, far = (
            (
                torch.einsum(
                    "cgd,nd->cgn",
                    queries[at][:, head * group : (head + 1) * group].double(),
                    world.bank.kv(at)[0][0, head].double(),
                )
                / 4
            )
            for at in (layer, lows[head])
        )
        for i in range(len(q)):
            n = start + i + 1
            rows = torch.arange(n)
            distant = (rows >= first) & (rows < n - recent)
            weights = torch.softmax(torch.where(distant, far[i, :, :n], near[i, :, :n]), -1)
            out[i, head * group : (head + 1) * group] = (
                weights @ world.bank.kv(layer)[1][0, head, :n].double()
            )
            gates[i, head * group : (head + 1) * group] = weights[:, ~distant].sum(-1)
    return out, gates


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from((1, 4)),
    st.sampled_from(((0, 40), (13, 31), (63, 2), (97, 1))),
    st.sampled_from(((0, 7), (3, 16), (16, 64))),
    st.sampled_from((1.0, 0.6)),
    st.integers(0, 9),
)
@settings(max_examples=12, derandomize=True)
def test_logits_of_the_lowest_layer_and_values_of_its_own(
    backend, group, chunk, proximal, skip, seed
):
    """A chunk through four layers against Eq. 3 and 4 in float64; where tau lets a pair skip, the
    near part alone, exactly there.
    """
    (start, count), (first, recent) = chunk, proximal
    method = PodUntrained(BLOCKS, first, recent, skip)
    world = World(method, (2 * group, 2), 131, backend=backend, seed=seed)
    lows, queries = method.lowest(world.config), [world.queries(count)[0] for _ in range(4)]
    assert lows == [(0, 0), (0, 1), (2, 1), (2, 3)]
    judged = skipped = 0
    for layer in range(4):
        world.fill(layer, 0, start + count)
    for layer in range(4):
        out = world.runtime.attend_prompt(layer, queries[layer][None], world.bank, start)[0]
        exact, gates = expected(world, queries, layer, start, first, recent, lows[layer])
        for head in range(2 * group):
            shared = lows[layer][head // group] < layer
            for i in range(count):
                distant = start + i + 1 - recent > first
                if shared and skip < 1 and distant:
                    judged += 1
                    if abs(float(gates[i, head]) - skip) < 1e-4:
                        continue
                    if gates[i, head] >= skip:
                        skipped += 1
                        n = start + i + 1
                        rows = torch.tensor(
                            [*range(min(first, n)), *range(max(first, n - recent), n)]
                        )
                        k, v = (
                            part[0, head // group, rows].double() for part in world.bank.kv(layer)
                        )
                        exact[i, head] = (
                            torch.softmax(queries[layer][i, head].double() @ k.t() / 4, -1) @ v
                        )
                torch.testing.assert_close(
                    out[i, head].double(), exact[i, head], atol=2e-5, rtol=2e-5
                )
    assert world.runtime.gates == judged and abs(world.runtime.skipped - skipped) <= 1
    assert skip < 1 or world.runtime.skipped == 0


def test_identical_layers_share_exactly():
    """Layers with the same queries and keys: sharing is full attention."""
    world = World(PodUntrained((0,), 2, 9), (8, 2), 131)
    world.fill(0, 0, 90)
    for layer in (1, 2, 3):
        for mine, theirs in zip(world.bank.kv(layer), world.bank.kv(0)):
            mine.copy_(theirs)
    q = world.queries(90)
    first = world.runtime.attend_prompt(0, q, world.bank, 0)
    for layer in (1, 2, 3):
        torch.testing.assert_close(
            world.runtime.attend_prompt(layer, q, world.bank, 0), first, atol=2e-6, rtol=2e-6
        )


CONFIG = tiny_config(layers=7, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=7)
METHOD = PodUntrained(((0, 2, 5), (0, 3)), first=8, recent=64)


def distant_keys(session, n):
    """(layer, head, rows) that are not stored at n tokens: the keys between the first and the
    newest in every layer that shares.
    """
    for layer, lows in enumerate(METHOD.lowest(CONFIG)):
        for head, low in enumerate(lows):
            if low < layer:
                yield layer, head, torch.arange(8, n - 64)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_keys_that_the_map_leaves_out_are_never_read(backend):
    """Every one of them NaN: neither a step nor a second prompt changes by a bit; one of those that
    are stored, and it does.
    """
    llm, ids = (
        tiny_llm(Full(), CONFIG, WEIGHTS, max_context=512, backend=backend, chunk=64),
        random_ids(260, seed=3),
    )

    def turn(session):
        return [session.decode(5), session.prefill(ids[201:240]), session.decode(6)]

    with llm.session(METHOD) as session, llm.session(Full()) as full:
        session.prefill(ids[:200]), full.prefill(ids[:200])
        expected = turn(session)
        assert (expected[0] - full.decode(5)).abs().max() > 1e-3
        stored = sum(map(sum, METHOD.key_rows(CONFIG, 201)))
        session.truncate(200)
        missing = 0
        for layer, head, rows in distant_keys(session, 201):
            session.bank.kv(layer)[0][0, head, rows] = float("nan")
            missing += len(rows)
        assert stored + missing == 201 * 7 * 2 and missing == 9 * (201 - 72)
        assert all(torch.equal(a, b) for a, b in zip(turn(session), expected))
        for layer, row in ((1, 3), (1, 150), (5, 20), (4, 199)):
            session.truncate(200)
            head = next(
                h
                for h in (0, 1)
                if METHOD.lowest(CONFIG)[layer][h] == layer or row < 8 or row >= 137
            )
            kept = session.bank.kv(layer)[0][0, head, row].clone()
            session.bank.kv(layer)[0][0, head, row] = float("nan")
            assert session.decode(5).isnan().any(), (layer, row)
            session.bank.kv(layer)[0][0, head, row] = kept


def test_a_skip_saves_and_one_never_does():
    """The same session: at tau 1 nothing is judged, below it some pairs skip, more of them the
    lower it is.
    """
    llm, ids, counts = (
        tiny_llm(Full(), CONFIG, WEIGHTS, max_context=512),
        random_ids(200, seed=3),
        [],
    )
    for skip in (1.0, 0.9, 0.5):
        with llm.session(PodUntrained(METHOD.blocks, 8, 64, skip)) as session:
            session.prefill(ids)
            session.decode(3)
            counts.append((session.runtime.gates, session.runtime.skipped))
    assert (
        counts[0] == (0, 0) and counts[1][0] == counts[2][0] > 0 and 0 < counts[1][1] < counts[2][1]
    )


@pytest.mark.parametrize(
    "bad", [((1, 2),), ((0, 2, 2),), ((0, 2), ()), (0, True), "022", ((0, 1.5),), ()]
)
def test_bad_blocks_are_named(bad):
    with pytest.raises(SettingError, match="blocks: found"):
        PodUntrained(blocks=bad)


def test_other_bad_settings_are_named():
    for bad, word in (
        (dict(first=-1), "first"),
        (dict(recent=0), "recent"),
        (dict(skip=0.0), "skip"),
        (dict(skip=True), "skip"),
    ):
        with pytest.raises(SettingError, match=word):
            PodUntrained(**bad)
    for blocks in (((0, 2),) * 3, (0, 7)):
        with pytest.raises(SettingError, match="this model"):
            PodUntrained(blocks).plan(CONFIG)
