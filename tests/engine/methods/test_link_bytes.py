"""Bytes that selecting methods bring from host memory, counted by hand from what they chose: in
every step, and in the prompt.

Stops: a layer that comes over whole for a few of its rows, or twice; a row brought once per head;
rows of a ring counted as if they had come over the link; a plan that promises less than comes.
"""

import pytest

from engine import (
    A2ATS,
    ClusterKV,
    Delta,
    DoubleSparsity,
    HShare,
    InfiniGen,
    Kascade,
    LessIsMore,
    MagicPIG,
    MInference,
    OmniKVHeads,
    OracleTopK,
    OracleTopP,
    PQCache,
    Quest,
    RandomTopK,
    RetroInfer,
    SparQ,
    TidalDecode,
)
from engine.bank.host.host_rows import HostRows
from engine.methods.controls.ablations import OmniKVPerLayer
from engine.methods.select.index.base import Indexed
from engine.plan.layers import tail_start
from engine.plan.placement import part_bytes
from tests.builders import random_ids
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.method_table import (
    SPARSE,
    crossed_heads,
    fitted,
    heavy_channels,
    lists_and_tail,
    rows_by_head,
    sharing,
)

BACKENDS = pytest.mark.parametrize("backend", ["reference", "auto"])
CHOOSING = [
    Quest(tokens=80, page=8),
    Quest(share=0.2, page=7, gqa_reduce="sum"),
    TidalDecode(tokens=20),
    TidalDecode(share=0.1, gqa_reduce="all", correction_layer=5),
    TidalDecode(tokens=1, gqa_reduce="max"),
    RandomTopK(tokens=20, granularity="query_head"),
    Kascade(tokens=20, anchors=(0, 2, 5), head_map=crossed_heads()),
    HShare(tokens=40, recent=9, sinks=3, **sharing()),
    LessIsMore(tokens=20, layers=(1, 4)),
    Delta(tokens=100, page=7, layers=(1, 4)),
    OmniKVHeads(**SPARSE),
    PQCache(tokens=40, sink=4, bits=5, train=90, rounds=2),
    SparQ(tokens=80, r=4),
    A2ATS(tokens=60, bits=5, train=90, rounds=2, window=10),
    InfiniGen(tokens=60, columns=4, alpha=0.5),
    MagicPIG(tokens=150, bits=5, tables=12, sink=3, recent=17, train=60, middle=False),
    ClusterKV(tokens=40, sink=4, segment=40, per=4),
    ClusterKV(share=0.2, segment=33, per=3, gqa_reduce="sum"),
    RetroInfer(tokens=48, sink=4, segment=40, per=4),
    RetroInfer(share=0.2, sink=0, segment=33, per=3, estimate=1.0),
    DoubleSparsity(tokens=20, channels=heavy_channels(), count=5),
    DoubleSparsity(share=0.2, channels=heavy_channels(), gqa_reduce="mean"),
    SparQ(share=0.2, r=8, gqa_reduce="max", dense_layers=1),
]
WHOLE = [
    OmniKVPerLayer(**SPARSE),
    OmniKVPerLayer(selector="uniform", window=8, **SPARSE),
    OracleTopK(tokens=20, granularity="kv_head"),
    OracleTopP(tokens=40, p=0.7),
    MInference(("vertical_slash", 30, 100)),
    MInference(("a_shape", 10, 20)),
]
STEPS = 24  # a block of 64 goes home among them


def came(session):
    """Rows of one layer that have come over the link so far."""
    stats = session.stats
    count, rest = divmod(
        stats.bytes_streamed + stats.bytes_fetched, part_bytes(session.loaded.config, 4)
    )
    assert rest == 0
    return count


def waiting(method, begin, stop):
    """Rows before a chunk that its own complete to a page, a segment, or a text for codebooks."""
    if isinstance(method, Indexed):
        return begin - method.since(begin) if method.grows(begin, stop) else 0
    return begin % method.page if isinstance(method, Quest) else 0


def steps(session, count):
    """(rows in host memory, rows that came) of every step. The first one has begun with the tails
    of the rings, which are left out.
    """
    placement = session.bank.placement
    for i, token in enumerate(random_ids(count, seed=1)):
        there, before = session.bank.host_length, came(session)
        session.decode(token)
        tail = there - tail_start(there, placement.ring - 128) if i == 0 else 0
        yield there, came(session) - before - tail * len(placement.layers)


@pytest.mark.parametrize(
    ("shape", "backend"), [(SHAPES[0], "reference"), (SHAPES[1], "auto"), (SHAPES[2], "auto")]
)
@pytest.mark.parametrize("method", CHOOSING, ids=lambda m: f"{m.name}-{m.tokens}")
def test_a_step_brings_what_any_head_chose_once(method, shape, backend):
    """And no more than the plan promised; the first step after a prompt has the extremes of the
    model's last layer to learn.
    """
    llm, method = llm_of(shape, backend=backend), fitted(method, shape[0], shape[2])
    plan = llm.plan(method, offload="host")
    read = lists_and_tail if isinstance(method, OmniKVHeads) else rows_by_head
    promised = plan.step_link_bytes // part_bytes(llm.config, 4)
    with llm.session(method, offload="host") as session:
        session.prefill(random_ids(301))
        for i, (there, rows) in enumerate(steps(session, STEPS)):
            n = len(session)
            wanted, declared = 0, read(session.runtime, n)
            for layer in plan.placement.layers:
                chosen = {row for rows in declared[layer] for row in rows}
                assert len(chosen) < n  # it really was sparse
                wanted += sum(row < there for row in chosen)
            if i == 0 and isinstance(method, (Quest, Indexed)):
                page = getattr(method, "page", 1)
                wanted += there // page * page
            else:
                assert rows <= promised
            assert rows == wanted


@pytest.mark.parametrize(
    "method",
    [
        LessIsMore(tokens=20, layers=(1, 4)),
        Delta(tokens=100, page=7, layers=(1, 4)),
        OmniKVHeads(**SPARSE),
    ],
    ids=lambda m: m.name,
)
def test_a_list_that_a_group_shares_comes_in_one_copy(method, monkeypatch):
    """Two groups, two and two layers: two reads of host memory in a step, of which each is of a
    group's whole rows.
    """
    read, calls = HostRows.read, []

    def counted(self, layer, tokens, *given, **more):
        calls.append((layer, len(tokens)))
        return read(self, layer, tokens, *given, **more)

    with llm_of(backend="auto").session(method, offload="host") as session:
        session.prefill(random_ids(301))
        session.decode(3)  # the rings are filled before it
        monkeypatch.setattr(HostRows, "read", counted)
        for token in random_ids(5):
            calls.clear()
            session.decode(token)
            rows = lists_and_tail if isinstance(method, OmniKVHeads) else rows_by_head
            wanted = []
            for group in session.plan.groups:
                declared = rows(session.runtime, len(session))[group.layers[0]]
                old = {row for own in declared for row in own} & {*range(session.bank.host_length)}
                wanted.append((group.layers[0], len(old)))
            assert calls == wanted and len(calls) == 2


@BACKENDS
@pytest.mark.parametrize("method", WHOLE, ids=lambda m: m.name)
def test_what_scores_everything_streams_its_layers_once_a_step(method, backend):
    """Per-layer OmniKV in every layer that chooses, MInference in all: what is in host memory,
    once. Rows that still lie in a staging buffer do not come.
    """
    llm = llm_of(backend=backend)
    plan = llm.plan(method, offload="host")
    layers = len(plan.placement.layers)
    assert plan.step_link_bytes == layers * plan.max_context * part_bytes(llm.config, 4)
    with llm.session(method, offload="host") as session:
        session.prefill(random_ids(301))
        for i, (there, rows) in enumerate(steps(session, STEPS)):
            assert rows == layers * there or i == 0 and layers * there - 64 < rows < layers * there


@pytest.mark.parametrize("method", [*CHOOSING, *WHOLE], ids=lambda m: m.name)
def test_a_prompt_brings_what_the_plan_promised(method):
    """Every chunk the past of its layers, the model's last layer once, and Quest the beginning of
    a page that the chunk before left, ClusterKV that of a segment; MInference every layer whole, of
    which its lines are ranked.
    """
    llm, ids = llm_of(backend="auto"), random_ids(301)
    plan = llm.plan(method, offload="host", max_context=len(ids))
    layers = plan.placement.layers
    with llm.session(method, offload="host") as session:
        session.prefill(ids)
        rows = came(session)
        promised = plan.prompt_link_bytes // part_bytes(llm.config, 4)
        if isinstance(method, MInference):
            assert rows == len(layers) * len(ids) <= promised
            return
        last = llm.config.num_layers - 1
        chunks = [(at, min(at + 64, len(ids))) for at in range(0, len(ids), 64)]
        past = sum(at + waiting(method, at, stop) for at, stop in chunks)
        assert last in layers and rows == promised == (len(layers) - 1) * past + 256
