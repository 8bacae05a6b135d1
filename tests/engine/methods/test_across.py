"""Methods in which few layers choose for all: choices index by index against float64, what the
layers behind read of them, and where the methods meet.

Stops: a head that reads another head's list, or its own where the map leads elsewhere; a sum that
is a maximum; an order of naming that is not the paper's; a map of another model.
"""

import shutil
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    Delta,
    HShare,
    Kascade,
    LessIsMore,
    OmniKV,
    OmniKVHeads,
    OmniKVTopP,
    OracleTopK,
    TidalDecode,
)
from engine.base.errors import SettingError
from engine.methods.select.across.head_map import map_text, read_npy
from engine.methods.select.across.sharing import sharing_text
from engine.plan.layers import Role, tail_start
from tests.builders import GROUPS, POCKET, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods import across_simulation as simulation
from tests.engine.methods.method_table import crossed_heads
from tests.kernels.support.kernel_checks import check_attention

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 47, 64, 97, 127))
BEYOND = st.sampled_from((64, 128, 129, 191, 192, 257, 299))  # with tokens before a tail of 64
CAPACITY = 303
BACKENDS = pytest.mark.parametrize("backend", ["reference", "auto"])
SHAPES, QUICK = st.sampled_from(GROUPS), settings(max_examples=15, derandomize=True)


def filled(method, shape, lengths, backend, seed, layers=5, dtype=torch.float32):
    """A World whose layers 2 to 4 hold random rows."""
    world = World(method, shape, CAPACITY, len(lengths), backend, dtype, seed, layers=layers)
    for b, n in enumerate(lengths):
        for layer in range(2, layers):
            world.fill(layer, 0, n, b)
    world.runtime.end_prompt(max(lengths))
    return world


def assert_reads(world, layer, q, out, lists, tails):
    """Every head's output is attention over its own list and the tail: lists[b][K/V head]."""
    k, v = world.bank.kv(layer)
    group = q.shape[2] // k.shape[1]
    for b, rows in enumerate(lists):
        for head, own in enumerate(rows):
            n = int(world.lengths[b])
            read = sorted({*own, *range(tails[b], n)})
            chosen = tuple(t[b, head, read][None] for t in (k, v))
            mine = slice(head * group, (head + 1) * group)
            check_attention(out[b, :, mine], q[b, :, mine], chosen, [len(read)], 0.25, f"{b}{head}")


def spoil(world, layer, lists, tails):
    """NaN in every row that a head does not read."""
    for b, rows in enumerate(lists):
        for head, own in enumerate(rows):
            unread = torch.ones(CAPACITY, dtype=torch.bool)
            unread[[*own, *range(tails[b], int(world.lengths[b]))]] = False
            for part in world.bank.kv(layer):
                part[b, head, unread] = float("nan")


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(SHAPES, st.lists(LENGTHS, min_size=1, max_size=2), st.integers(1, 40), st.integers(0, 99))
@QUICK
def test_kascades_anchors_choose_per_head_and_the_map_leads_to_their_lists(
    backend, dtype, shape, lengths, count, seed
):
    """Layer 2, an anchor, attends to what it chose; layer 3 to the lists that the map names, whose
    other rows are NaN.
    """
    table = crossed_heads(5, shape[1])
    method = Kascade(tokens=count, anchors=(0, 2), head_map=table)
    world = filled(method, shape, lengths, backend, seed, dtype=dtype)
    world.lengths, step = lengths, world.step(*lengths)
    asked, q = world.queries(), world.queries()
    keys = world.bank.kv(2)[0]
    lists = [simulation.kascade(asked[b, 0], keys[b, :, :n], count) for b, n in enumerate(lengths)]
    assert_reads(world, 2, asked, world.runtime.attend(2, asked, step), lists, lengths)
    mapped = [[rows[head] for head in table[3]] for rows in lists]
    if max(lengths) > count:
        spoil(world, 3, mapped, lengths)
        assert world.runtime.chosen_rows(2).tolist() == lists[0]
        assert world.runtime.chosen_rows(3).tolist() == mapped[0]
    assert_reads(world, 3, q, world.runtime.attend(3, q, step), mapped, lengths)


@BACKENDS
@given(
    SHAPES,
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.integers(1, 60),
    st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    st.integers(0, 6),
    st.integers(0, 99),
)
@QUICK
def test_the_heads_of_less_is_more_name_tokens_in_turn(
    backend, shape, lengths, count, recent, sinks, seed
):
    """Layer 2 attends to everything, layer 3 to the list and the newest tokens."""
    method = LessIsMore(tokens=count, layers=(2,), recent=recent, sinks=sinks)
    world = filled(method, shape, lengths, backend, seed)
    world.lengths, step = lengths, world.step(*lengths)
    asked, q, whole = world.queries(), world.queries(), [[[]] * shape[1]] * len(lengths)
    keys = world.bank.kv(2)[0]
    rules = [
        simulation.less_is_more(asked[b, 0], keys[b, :, :n], count, recent, sinks)
        if n > count
        else (list(range(n)), n)
        for b, n in enumerate(lengths)
    ]
    everything = world.runtime.attend(2, asked, step)
    assert_reads(world, 2, asked, everything, whole, [0] * len(lengths))
    lists, tails = [[rows] * shape[1] for rows, _ in rules], [tail for _, tail in rules]
    if max(lengths) > count:
        spoil(world, 3, lists, tails)
        if lengths[0] > count:
            assert world.runtime.chosen_rows(3).tolist() == [rules[0][0]]
            assert int(world.runtime.tail_start(step)[0]) == rules[0][1]
            assert len(rules[0][0]) + lengths[0] - rules[0][1] == count
    assert_reads(world, 3, q, world.runtime.attend(3, q, step), lists, tails)


@BACKENDS
@given(
    SHAPES,
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.integers(1, 40),
    st.sampled_from((1, 2, 3, 5)),
    st.integers(0, 4),
    st.integers(0, 20),
    st.integers(0, 99),
)
@QUICK
def test_hshares_layers_heads_and_steps_read_the_list_that_they_share(
    backend, shape, lengths, count, steps, sinks, recent, seed
):
    """Layer 3 is its own source and layer 4 reads its lists; of two heads the second reads the
    first's. What chooses is the query of the last length that `steps` divides, over the rows that
    there were; what came since is read, and no other row.
    """
    heads = ((*range(shape[1]),),) * 3 + (tuple(h - h % 2 for h in range(shape[1])),) * 2
    given = dict(tokens=count + sinks + recent, steps=steps, sinks=sinks, recent=recent)
    world = filled(
        HShare(layers=(0, 1, 2, 3, 3), heads=heads, **given), shape, lengths, backend, seed
    )
    world.ring.slots.copy_(world.random(*world.ring.slots.shape))
    world.lengths, step = lengths, world.step(*lengths)
    made_at = [n - n % steps for n in lengths]
    sparse, budget = max(made_at) > given["tokens"], given["tokens"]
    asked, q = world.queries(), world.queries()
    if steps > 1:
        asked = step.window_queries(3, 1)
    made_by = world.step(*(max(1, n) for n in made_at)).window_queries(3, 1)
    made_by, keys = asked if steps == 1 else made_by, world.bank.kv(3)[0]
    rules = [
        simulation.hshare(made_by[b, 0], keys[b, :, :n], budget, sinks, recent) if n else ([[]], 0)
        for b, n in enumerate(made_at)
    ]
    lists = [[rows[h - h % 2] if rows[0] else [] for h in range(shape[1])] for rows, _ in rules]
    tails = [tail for _, tail in rules] if sparse else [0] * len(lengths)
    lists = lists if sparse else [[[]] * shape[1]] * len(lengths)
    assert_reads(world, 3, asked, world.runtime.attend(3, asked, step), lists, tails)
    if sparse:
        spoil(world, 4, lists, tails)
        assert world.runtime.chosen_rows(3).tolist() == lists[0]
        assert world.runtime.tail_start(step).tolist() == tails
        if made_at[0] > budget:
            read = len(lists[0][0]) + lengths[0] - tails[0]
            assert world.runtime.rows_read(lengths[0])[3] == read < lengths[0]
    assert_reads(world, 4, q, world.runtime.attend(4, q, step), lists, tails)


@BACKENDS
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_hshares_lists_follow_from_the_length_alone(backend, steps):
    """The same bits after going back to any length as on the straight way, and in a branch."""
    llm = tiny_llm(None, CONFIG, WEIGHTS, max_context=512, backend=backend)
    method = HShare(tokens=40, recent=9, sinks=3, steps=steps, layers=(0, 1, 2, 2, 4, 4, 2, 7))
    ids, lists = random_ids(12, seed=1), []
    with llm.session(method) as session:
        session.prefill(random_ids(121))
        straight = []
        for token in ids:
            straight.append(session.decode(token))
            lists.append(session.runtime.chosen_rows(6).tolist())
            assert session.runtime.chosen_rows(2).tolist() == lists[-1]
        changes = [n for n in range(1, 12) if lists[n] != lists[n - 1]]
        assert changes == [n for n in range(1, 12) if (122 + n) % steps == 0]
        for back in (11, 7, 6, 1):
            session.truncate(121 + back)
            with session.fork() as branch:
                for one in (branch, session):
                    for token, logits in zip(ids[back:], straight[back:]):
                        assert torch.equal(one.decode(token), logits)
        assert session.stats.dense_steps == 0


def test_hshare_that_shares_nothing_is_the_oracle_per_head():
    """One step, no first and no newest tokens: what OracleTopK per K/V head reads."""
    found = []
    for method in (
        HShare(tokens=20, steps=1, sinks=0, recent=0),
        OracleTopK(tokens=20, granularity="kv_head", dense_layers=0),
    ):
        world = filled(method, (8, 2), (97,), "auto", seed=1)
        for layer in (2, 3, 4):
            world.runtime.attend(layer, world.queries(), world.step(97))
        found.append([world.runtime.chosen_rows(layer).tolist() for layer in (2, 3, 4)])
        assert world.runtime.rows_read(97) == [20] * 5
    assert found[0] == found[1] and len(found[0][0][0]) == 20


@BACKENDS
@given(SHAPES, st.lists(BEYOND, min_size=1, max_size=2), st.integers(1, 40), st.integers(0, 99))
@QUICK
def test_omnikvs_heads_choose_by_their_own_group(backend, shape, lengths, count, seed):
    """Layer 2 filters, layer 3 reads each head's list and the tail, the rest of it NaN."""
    method = OmniKVHeads(filter_layers=(2,), tokens=count, tail=64, dense_below=0)
    world = filled(method, shape, lengths, backend, seed)
    world.lengths, step = lengths, world.step(*lengths)
    asked, q = world.queries(), world.queries()
    keys, tails = world.bank.kv(2)[0], [tail_start(n, 64) for n in lengths]
    lists = [
        simulation.omnikv_heads(asked[b, 0], keys[b, :, :n], count, tails[b])
        for b, n in enumerate(lengths)
    ]
    world.runtime.attend(2, asked, step)
    assert world.runtime.chosen_rows(3).tolist() == lists[0]
    assert all(len(rows) == min(count, tails[0]) for rows in lists[0])
    spoil(world, 3, lists, tails)
    assert_reads(world, 3, q, world.runtime.attend(3, q, step), lists, tails)


@BACKENDS
@given(
    SHAPES,
    st.lists(LENGTHS, min_size=1, max_size=2),
    st.sampled_from((1, 3, 16)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 99),
)
@QUICK
def test_deltas_pages_are_those_of_the_most_attention(
    backend, shape, lengths, page, more, newest, seed
):
    """Layer 2 attends to everything, layer 3 to the pages and the newest ones."""
    pages = newest + more
    method = Delta(tokens=pages * page, layers=(2,), page=page, newest=newest)
    world = filled(method, shape, lengths, backend, seed)
    world.lengths, step = lengths, world.step(*lengths)
    asked, q = world.queries(), world.queries()
    keys = world.bank.kv(2)[0]
    world.runtime.attend(2, asked, step)
    lists = []
    for b, n in enumerate(lengths):
        rule = simulation.delta(asked[b, 0], keys[b, :, :n], page, pages, newest)
        rows = [row for p in rule for row in range(p * page, min(n, (p + 1) * page))]
        lists.append([rows] * shape[1])
        assert len(rows) <= pages * page
    if max(lengths) > pages * page:
        spoil(world, 3, lists, lengths)
        assert world.runtime.tokens_read(lengths[0]) == len(lists[0][0])
    assert_reads(world, 3, q, world.runtime.attend(3, q, step), lists, lengths)


@BACKENDS
@given(SHAPES, BEYOND, st.floats(0.05, 1.0), st.integers(1, 9), st.integers(9, 40))
@QUICK
def test_a_step_takes_as_many_tokens_as_hold_the_mass(backend, shape, n, mass, least, most):
    """Against float64; one score's rounding may move the end by one token."""
    given = dict(filter_layers=(2,), tail=64, dense_below=0)
    method = OmniKVTopP(tokens=most, mass=mass, least=least, **given)
    world = filled(method, shape, (n,), backend, seed=n)
    asked, stop = world.queries(), tail_start(n, 64)
    world.runtime.attend(2, asked, world.step(n))
    weights = simulation.softmax_of(asked[0, 0], world.bank.kv(2)[0][0, :, :n])
    highest = weights.flatten(0, 1).amax(0)[:stop]
    order = highest.argsort(descending=True)
    sums = highest[order].cumsum(0)
    needed = 1 + int((sums < mass * highest.sum()).sum()) if mass < 1 else most
    count = min(max(needed, least), most, stop)
    got = world.runtime.chosen_rows(3).tolist()
    assert got == sorted(order[: len(got)].tolist())
    if len(got) != count:
        assert abs(float(sums[min(len(got), count) - 1] - mass * sums[-1])) < 1e-5


CONFIG = tiny_config(layers=8, heads=8, kv_heads=1)
WEIGHTS = tiny_weights(CONFIG, seed=5)


@BACKENDS
@pytest.mark.parametrize(
    "more", [{}, dict(scores="raw", sink=3), dict(selector="uniform", window=5)], ids=str
)
def test_with_one_head_omnikv_heads_is_omnikv(backend, more):
    llm = tiny_llm(None, CONFIG, WEIGHTS, max_context=512, backend=backend)
    given = dict(filter_layers=(1, 4), tokens=30, tail=64, dense_below=0, **more)
    with llm.session(OmniKV(**given)) as one, llm.session(OmniKVHeads(**given)) as two:
        for session in (one, two):
            session.prefill(random_ids(300))
        for token in random_ids(5, seed=1):
            torch.testing.assert_close(one.decode(token), two.decode(token), atol=2e-5, rtol=2e-5)
            mine, theirs = one.selections, two.selections
            assert {k: v.tolist() for k, v in mine.items()} == {
                k: v.tolist() for k, v in theirs.items()
            }
            assert len(mine[1]) == 30
        assert two.stats.dense_steps == 0
        scores = one.runtime.selection_scores()[4], two.runtime.selection_scores()[4]
        torch.testing.assert_close(*scores)


@BACKENDS
def test_where_the_choices_meet(backend):
    """Of groups of one head Kascade chooses what TidalDecode does; with one head and no newest
    tokens LessIsMore too; over a group the sum is not TidalDecode's maximum.
    """
    for shape, reduce, equal in (((4, 4), "none", True), ((8, 2), "max", False)):
        found = []
        for method in (
            Kascade(tokens=20, anchors=(2,)),
            TidalDecode(tokens=20, correction_layer=4, gqa_reduce=reduce),
        ):
            world = filled(method, shape, (97,), backend, seed=3)
            world.runtime.attend(2, world.queries(), world.step(97))
            found.append(world.runtime.chosen_rows(3).tolist())
        assert (found[0] == found[1]) == equal
    found = []
    for method in (
        LessIsMore(tokens=20, layers=(2,), recent=0.0),
        TidalDecode(tokens=20, correction_layer=4),
    ):
        world = filled(method, (1, 1), (97,), backend, seed=3)
        world.runtime.attend(2, world.queries(), world.step(97))
        found.append(world.runtime.chosen_rows(3).tolist())
    assert found[0] == found[1] and len(found[0][0]) == 20


def test_with_every_layer_an_anchor_each_reads_its_own_best():
    """The oracle per K/V head: what a layer's own softmax ranks highest."""
    world = filled(Kascade(tokens=20, anchors=(0, 1, 2, 3, 4)), (8, 2), (97,), "auto", seed=1)
    assert world.plan.roles == (Role.FILTER, *(Role.SPARSE,) * 4)
    for layer in (2, 3, 4):
        q = world.queries()
        world.runtime.attend(layer, q, world.step(97))
        expected = simulation.kascade(q[0, 0], world.bank.kv(layer)[0][0, :, :97], 20)
        assert world.runtime.chosen_rows(layer).tolist() == expected
    row = world.config.kv_bytes(4) // 2
    assert world.runtime.choosing_bytes(97) == 4 * 97 * row  # K in layers 1 to 4
    assert world.runtime.choosing_bytes(20) == 0
    assert world.runtime.rows_read(97) == [97, 20, 20, 20, 20]


def test_plans_and_budgets_are_the_published_ones():
    config = tiny_config(layers=32)
    plan = Kascade(anchors=(0, 2, 8, 13, 14)).plan(config)
    assert [group.filter_layer for group in plan.groups] == [0, 2, 8, 13, 14]
    assert plan.roles[0] is Role.FILTER and set(plan.roles[1:]) == {Role.SPARSE}
    assert plan.groups[3].layers == (13,) and plan.groups[1].layers == tuple(range(2, 8))
    assert [Kascade().budget(n) for n in (100, 1280, 1290, 5000)] == [128, 128, 129, 500]
    assert Kascade(share=0.2, least=1).budget(100) == 20
    assert LessIsMore().parts(2048) == (4, 1536, 508)
    assert LessIsMore().parts(12) == (0, 9, 3)
    roles = LessIsMore().plan(config).roles
    assert [i for i, role in enumerate(roles) if role is Role.FILTER] == [2, 13]


# ---------------------------------------------------------------- files of head maps


def npy(table, kind="<i4", turned=False, version=1, header=None):
    """The bytes that numpy.save writes of a table of whole numbers."""
    code = {"<i4": "i", "<i8": "q", "|u1": "B"}[kind]
    rows = list(map(list, zip(*table))) if turned else table
    text = header or (
        f"{{'descr': '{kind}', 'fortran_order': {turned}, "
        f"'shape': ({len(table)}, {len(table[0])}), }}"
    )
    size = 2 if version == 1 else 4
    text = text.ljust(117 - size + 2 - (8 + size) % 2) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    flat = [number for row in rows for number in row]
    numbers = struct.pack(f"<{len(flat)}{code}", *flat)
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + numbers


TABLE = ((0, 1, 2), (2, 0, 1), (1, 1, 0), (0, 0, 0))


@pytest.mark.parametrize("kind", ["<i4", "<i8", "|u1"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_published_tables_are_read(tmp_path, kind, turned, version):
    path = tmp_path / "Some-Model_layers_0_2.npy"
    path.write_bytes(npy(TABLE, kind, turned, version))
    method = Kascade(head_map=path)
    assert method.head_map == TABLE and method.anchors == (0, 2)
    with pytest.raises(SettingError, match=r"found \(0, 1\), and a head map .* for \(0, 2\)"):
        Kascade(head_map=str(path), anchors=(0, 1))


GOOD = npy(TABLE)
HUGE = "{'descr': '<i4', 'fortran_order': False, 'shape': (999999999, 999999999), }"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no .npy file"),
        (GOOD[:9], "no .npy file"),
        (GOOD[:60], "header"),
        (GOOD[:-1], "found 47 bytes of numbers, expected 48"),
        (GOOD + b"\0", "found 49 bytes"),
        (b"PK\3\4" + GOOD, "no .npy file"),
        (npy(TABLE, header=HUGE), "999999999 x 999999999 numbers, expected at most 4096"),
        (npy(TABLE, header=HUGE.replace("999999999, 999999999", "0, 3")), "0 x 3"),
        (npy(TABLE, header=HUGE.replace("<i4", "|O")), "header"),
        (npy(TABLE, header=HUGE.replace("<i4", "<f4")), "header"),
        (npy(TABLE, header=HUGE.replace(", 999999999", ",")), "header"),
        (npy(((0, 1), (2, 0))), "found 2 for layer 1, K/V head 0, expected a K/V head from 0 to 1"),
        (npy(((0, 1), (-1, 0))), "found -1 for layer 1"),
    ],
    ids=range(13),
)
def test_what_is_no_table_of_whole_numbers_is_refused(tmp_path, data, words):
    path = tmp_path / "map.npy"
    path.write_bytes(data)
    with pytest.raises(SettingError, match=words) as caught:
        read_npy(path)
    assert "\n" not in str(caught.value)


def test_a_map_of_another_model_is_refused(tmp_path):
    """By its shape, by the model's numbers that its file names, and by the fingerprint where it
    lies beside other weights.
    """
    config = tiny_config(layers=8, heads=8, kv_heads=2)
    table, path = crossed_heads(8), tmp_path / "kascade.json"
    path.write_text(map_text((0, 3), table, config, {"fingerprint": "0" * 64}))
    method = Kascade(head_map=path)
    assert method.anchors == (0, 3) and method.head_map == table
    assert method.plan(config).groups[1].layers == tuple(range(3, 8))
    assert replace(method, tokens=9).head_map == table
    other = tiny_config(layers=8, heads=4, kv_heads=2, head_dim=8)
    with pytest.raises(SettingError, match="found those of a model with heads 8, expected 4"):
        method.plan(other)
    with pytest.raises(SettingError, match="8 layers of 2 K/V heads, expected 7 layers of 2"):
        method.plan(tiny_config(layers=7, heads=8, kv_heads=2))
    pocket = tmp_path / "pocket"
    shutil.copytree(POCKET, pocket)
    (pocket / "kascade.json").write_text(path.read_text())
    with pytest.raises(SettingError, match="made for a model with fingerprint '?0000"):
        Kascade(head_map=pocket / "kascade.json")


def test_a_published_table_of_layers_is_read_and_another_models_is_refused(tmp_path):
    path, config = tmp_path / "sharing_layer_16.json", tiny_config(layers=4, heads=4, kv_heads=2)
    path.write_text('{"layer.share_config": [0, 1, 1, 3]}')
    method = HShare(sharing=path)
    assert method.layers == (0, 1, 1, 3) and method.heads is None
    groups = method.plan(config).groups
    assert [(g.filter_layer, g.layers) for g in groups] == [(0, (0,)), (1, (1, 2)), (3, (3,))]
    path.write_text('{"layer.share_config": [0, 1, 1')
    with pytest.raises(SettingError, match="sharing: .*not valid JSON"):
        HShare(sharing=path)
    own, heads = tmp_path / "hshare.json", ((0, 0),) * 4
    own.write_text(sharing_text((0, 1, 1, 3), heads, config, {}))
    method = HShare(sharing=own)
    assert (method.layers, method.heads) == ((0, 1, 1, 3), heads)
    assert replace(method, tokens=99).plan(config).sparse_layers == (0, 1, 2, 3)
    with pytest.raises(SettingError, match="found those of a model with head"):
        method.plan(tiny_config(layers=4, heads=8, kv_heads=2, head_dim=8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda c: Kascade(anchors=(0, 8)).plan(c), "anchors: found 8, .* 0 to 7 .*8 layers"),
        (lambda c: Kascade(anchors=(2, 1)), "ascending"),
        (lambda c: Kascade(anchors=(-1, 1)), "ascending"),
        (lambda c: Kascade(anchors=5), "found 5, expected layer numbers"),
        (lambda c: Kascade(anchors=(0,), least=0), "least"),
        (lambda c: Kascade(anchors=(0,), tokens=5000).plan(c), "5,000, expected at most 4,096"),
        (lambda c: Kascade(head_map=((0, 2),)), "found 2 for layer 0, K/V head 1"),
        (lambda c: Kascade(head_map="none.npy"), "none.npy"),
        (lambda c: Kascade(head_map="none.json"), "none.json"),
        (lambda c: LessIsMore(layers=(1, 8)).plan(c), "layers: found 8, .* 0 to 7"),
        (lambda c: LessIsMore(recent=1.1), "recent"),
        (lambda c: LessIsMore(sinks=-1), "sinks"),
        (lambda c: LessIsMore(tokens=9999).plan(c), "9,999, expected at most 4,096"),
        (lambda c: Delta(layers=(1, 8)).plan(c), "layers: found 8, .* 0 to 7"),
        (lambda c: Delta(page=0), "page"),
        (lambda c: Delta(newest=0), "newest"),
        (lambda c: HShare(layers=(0, 0, 1)), "layers: found 1 at place 2, .* its own list"),
        (lambda c: HShare(layers=(0, 2, 2)), "found 2 at place 1, expected 1 itself or one before"),
        (lambda c: HShare(layers=(0, 1)).plan(c), "with 2 layers, expected 8"),
        (lambda c: HShare(heads=((0, 0),) * 3).plan(c), "3 layers of 2 K/V heads, expected 8"),
        (lambda c: HShare(heads=((0, 1), (0,))), "found 1 K/V heads in layer 1 and 2"),
        (lambda c: HShare(tokens=40), "tokens: found 40, .* 8 first and 32 newest"),
        (lambda c: HShare(steps=0), "steps: found 0"),
        (lambda c: HShare(sharing="none.json"), "none.json"),
        (lambda c: HShare(sharing="x.json", layers=(0,)), "give either"),
        (lambda c: HShare(tokens=5000).plan(c), "5,000, expected at most 4,096"),
        (lambda c: OmniKVTopP(mass=0.0), "mass"),
        (lambda c: OmniKVTopP(tokens=9, least=10), "found 10, expected at most the budget of 9"),
        (lambda c: OmniKVTopP(scores="raw"), "raw scores"),
        (lambda c: OmniKVHeads(official=True, filter_layers=(1,)), "omnikv_heads: official"),
        (lambda c: OmniKVHeads(prefill_ratio=2, filter_layers=(1,)), "prefill_ratio"),
    ],
    ids=range(31),
)
def test_bad_settings_are_named(make, words):
    with pytest.raises(SettingError, match=words) as caught:
        make(tiny_config(layers=8))
    assert "\n" not in str(caught.value)
