"""The read audit beyond the method table's U3: 16 bits, a bank that was never cleared, and that
nothing is ever evicted.

A row is proved unread by NaN: it changes no bit of the logits. Stops: a kernel that reads rows it
then masks, a selection left over from the last step, a row of the bank overwritten or dropped.
"""

import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.layers import Role, tail_start
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

LAYERS, CAPACITY, PROMPT, TAIL = 9, 512, 300, 64
CONFIG = tiny_config(layers=LAYERS, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=1)
SELECTORS = ("last", "uniform", "exponential")


def make(backend, dtype="float32", **changes):
    """A session of OmniKV after a prompt and 3 steps: filters 1 and 5, sparse 3, 4, 7 and 8."""
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=CAPACITY, backend=backend, dtype=dtype)
    settings = dict(filter_layers=(1, 5), tokens=20, tail=TAIL, dense_below=0)
    session = llm.session(OmniKV(**{**settings, **changes}))
    session.prefill(random_ids(PROMPT))
    for token in (3, 1, 4):
        session.decode(token)
    return session


def again(session, token):
    """The last step once more, after whatever was done to the bank."""
    session.truncate(len(session) - 1)
    return session.decode(token)


def read_sets(session):
    """{sparse layer: sorted positions that the last step must have read}."""
    n = len(session)
    tail = list(range(tail_start(n, TAIL), n))
    return {
        layer: session.selections[group.filter_layer].tolist() + tail
        for group in session.plan.groups
        for layer in group.layers
    }


class Poisoned:
    """Rows of one layer set to a value while the context lasts."""

    def __init__(self, session, layer, rows, value=float("nan"), head=slice(None)):
        self.parts = session.bank.kv(layer)
        self.rows, self.value, self.head = torch.tensor(rows), value, head

    def __enter__(self):
        self.kept = [part[:, self.head, self.rows].clone() for part in self.parts]
        for part in self.parts:
            part[:, self.head, self.rows] = self.value

    def __exit__(self, *_):
        for part, kept in zip(self.parts, self.kept):
            part[:, self.head, self.rows] = kept


@pytest.mark.parametrize("selector", SELECTORS)
def test_nothing_but_selection_and_tail_is_read_in_16_bits(selector):
    session = make("auto", "bfloat16", selector=selector)
    expected, n = session.decode(5), len(session)
    sets = read_sets(session)
    assert sorted(sets) == list(session.plan.sparse_layers) == [2, 3, 4, 6, 7, 8]
    for rows in sets.values():
        assert len(rows) == len(set(rows)) < n and rows == sorted(rows)
    poisons = [
        Poisoned(session, layer, sorted(set(range(CAPACITY)) - set(rows)))
        for layer, rows in sets.items()
    ]
    for poison in poisons:
        poison.__enter__()
    assert torch.equal(again(session, 5), expected)
    assert read_sets(session) == sets
    assert session.stats.sparse_steps == 5 and session.stats.dense_steps == 0


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", "float32"), ("auto", "float32"), ("auto", "bfloat16")]
)
def test_rows_beyond_the_length_are_never_looked_at(backend, dtype):
    """The bank is reserved, not cleared: what lies beyond the length may be anything, in every
    layer and under every method.
    """
    for method in (
        Full(),
        OmniKV(filter_layers=(1, 5), tokens=20, tail=TAIL, dense_below=0, selector="uniform"),
    ):
        llm = tiny_llm(method, CONFIG, WEIGHTS, max_context=CAPACITY, backend=backend, dtype=dtype)
        with llm.session() as clean, llm.session() as dirty:
            for layer in range(LAYERS):
                for part in dirty.bank.kv(layer):
                    part.fill_(float("nan"))
                for part in clean.bank.kv(layer):
                    part.zero_()
            for ids in (random_ids(PROMPT), random_ids(37, seed=1)):
                assert torch.equal(clean.prefill(ids), dirty.prefill(ids))
                for token in (3, 1, 4):
                    assert torch.equal(clean.decode(token), dirty.decode(token))


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_selection_is_made_anew_in_every_step(selector):
    """Another token from the same state chooses other rows, and so do later steps; between two
    steps nothing is carried over.
    """
    session = make("reference", selector=selector)
    seen = set()
    for token in (5, 6, 7):
        session.decode(token)
        seen.add(tuple(session.selections[1].tolist()))
        session.truncate(len(session) - 1)
        assert session.selections == {}
    assert len(seen) == 3
    # a fork has no selection buffers of the past
    with session.fork() as fresh:
        for token in (8, 9, 10):
            assert torch.equal(session.decode(token), fresh.decode(token))
            assert all(
                torch.equal(a, b)
                for a, b in zip(session.selections.values(), fresh.selections.values())
            )


def rows_of(session):
    """A copy of every row of every layer."""
    return [
        tuple(part[:, :, : len(session)].clone() for part in session.bank.kv(layer))
        for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_nothing_is_ever_evicted(backend):
    """After 150 sparse steps and a second turn every row of every layer is still the bits that were
    written.
    """
    session = make(backend)
    written = rows_of(session)
    for number, token in enumerate(random_ids(150, seed=5)):
        if number == 90:
            session.prefill(random_ids(40, seed=6))
        else:
            session.decode(token)
        now = rows_of(session)
        for old, new in zip(written, now):
            assert all(torch.equal(a, b[:, :, : a.shape[2]]) for a, b in zip(old, new)), (
                f"step {number}"
            )
        written = now
    assert len(session) == PROMPT + 3 + 149 + 40 and session.stats.dense_steps == 0
    assert all(torch.isfinite(part).all() for pair in written for part in pair)


def test_full_attention_finds_everything_after_a_sparse_answer():
    """A bank left by OmniKV serves Full: one Full step on it equals attention over all its rows,
    poison anywhere shows.
    """
    session = make("reference")
    session.set_method(Full())
    expected = session.decode(5)
    for layer in range(LAYERS):
        assert session.plan.roles[layer] is Role.FULL
        for row in (0, 17, PROMPT - 1, PROMPT + 2):
            with Poisoned(session, layer, [row]):
                assert again(session, 5).isnan().any()
    assert torch.equal(again(session, 5), expected)
