"""A layer whose heads hold different numbers of tokens, in one run of rows.

Stops: a step that differs from one which attends head by head, a store that is copied for each
token, a head that writes into the next one's room, a copy that shares memory, heads visited one
after the other in a step.
"""

import pytest
import torch

from engine.methods.evict.ada_snapkv import AdaPyramid, AdaSnapKV
from engine.methods.evict.duo import Duo
from engine.methods.evict.shared import ragged, runtime
from engine.methods.evict.shared.ragged import Ragged, copied, joined
from engine.methods.evict.shared.store import ROOM, Rows, reserved
from engine.methods.evict.snapkv import SnapKV
from kernels.launch.softmax import PLAIN, Softmax
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights

METHODS = [AdaSnapKV(tokens=50, alpha=1.0), AdaPyramid(tokens=60, forget=True)]
CONFIG = tiny_config(layers=4, heads=8, kv_heads=4, head_dim=32)


def llm_of(backend="reference", bank="auto"):
    weights = tiny_weights(CONFIG, seed=4)
    return tiny_llm(
        SnapKV(), CONFIG, weights, max_context=512, chunk=64, backend=backend, bank=bank
    )


def played(llm, method, steps=40):
    """Logits of two turns, and a session at their end."""
    session, seen = llm.session(method), []
    for number, (prompt, answer) in enumerate(((150, steps), (30, 5))):
        ids = random_ids(prompt + answer, seed=number)
        seen.append(session.prefill(ids[:prompt]))
        seen += [session.decode(token) for token in ids[prompt:]]
    return torch.stack(seen), session


@pytest.mark.parametrize(
    ("backend", "bank"),
    [("reference", "auto"), ("auto", "auto"), ("cpu", "auto"), ("auto", "int8"), ("auto", "fp8")],
)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_step_is_one_that_attends_head_by_head_to_the_bit(method, backend, bank, monkeypatch):
    llm = llm_of(backend, bank)
    found, session = played(llm, method)
    layers = session.runtime.sequences[0].layers
    assert all(isinstance(parts, Ragged) for parts in layers)
    assert any(len({rows.held for rows in parts}) > 1 for parts in layers)
    monkeypatch.setattr(runtime, "joined", lambda method, parts, softmax: parts)
    expected, apart = played(llm, method)
    assert not any(isinstance(parts, Ragged) for parts in apart.runtime.sequences[0].layers)
    assert torch.equal(found, expected)
    for layer in range(CONFIG.num_layers):
        assert session.runtime.positions(layer) == apart.runtime.positions(layer)
    assert session.runtime.kv_bytes == apart.runtime.kv_bytes
    assert session.runtime.nbytes - apart.runtime.nbytes == 8 * 3 * 4 * CONFIG.num_layers
    session.close()
    apart.close()


def test_heads_attend_in_one_call_and_the_store_is_copied_once_in_many_steps(monkeypatch):
    calls, made = [], []
    attend, init = ragged.decode_ragged, Ragged.__init__
    with llm_of().session(METHODS[0]) as session:
        session.prefill(random_ids(150))
        monkeypatch.setattr(
            ragged, "decode_ragged", lambda *a, **more: calls.append(1) or attend(*a, **more)
        )
        monkeypatch.setattr(Ragged, "__init__", lambda *a: made.append(1) or init(*a))
        monkeypatch.setattr(runtime, "decode_dense", None)
        for token in random_ids(3 * ROOM):
            session.decode(token)
    assert len(calls) == 3 * ROOM * CONFIG.num_layers
    assert len(made) == 3 * CONFIG.num_layers


def parts_of(counts, dim=8):
    """Rows of one head each that hold these counts, of values that tell where they came from."""
    found = []
    for head, count in enumerate(counts):
        room = reserved(count, count)
        k = torch.full((1, room, dim), float("nan"))
        k[0, :count] = torch.arange(count)[:, None] + 1000.0 * head
        positions = torch.arange(room, dtype=torch.int32)[None]
        found.append(Rows(slice(head, head + 1), k, -k, positions, None, count))
    return found


@pytest.mark.parametrize("counts", [[0, 1], [16, 1, 17], [5, 5, 5, 5], [101, 0, 31]])
def test_rows_are_put_behind_each_heads_others(counts):
    parts = joined(AdaSnapKV(), parts_of(counts))
    for step in range(2 * ROOM + 1):
        new = torch.arange(len(counts))[:, None] * 1000.0 + 500 + step + torch.zeros(8)
        parts.put(new, -new, 900 + step)
        assert [rows.held for rows in parts] == [count + step for count in counts]
        parts = parts.counted()
    at = 0
    for head, (rows, count) in enumerate(zip(parts, counts)):
        held = count + 2 * ROOM + 1
        assert rows.held == held and rows.k.shape[1] == reserved(count, held)
        assert rows.k.data_ptr() == parts.k[at].data_ptr()  # a view of the run
        assert parts.table[:, head].tolist() == [at, held + 1, at + held]
        first = torch.cat([torch.arange(count), torch.arange(500, 501 + 2 * ROOM)]) + 1000.0 * head
        k, v = rows.kv()
        assert torch.equal(k[0, :, 3], first) and torch.equal(v, -k)
        assert rows.positions[0, count:held].tolist() == list(range(900, 901 + 2 * ROOM))
        at += rows.k.shape[1]
    assert len(parts.k) == len(parts.v) == len(parts.positions) == at
    assert parts.most == max(counts) + 2 * ROOM + 2


def test_a_copy_shares_nothing():
    parts = joined(AdaSnapKV(), parts_of([3, 9]))
    other = copied(parts)
    new = torch.ones(2, 8)
    other.put(new, new, 7)
    other.counted()
    assert [rows.held for rows in parts] == [3, 9] and parts.most == 10
    assert parts.table[1].tolist() == [4, 10] and other.table[1].tolist() == [5, 11]
    assert torch.equal(parts[0].kv()[0], parts_of([3])[0].kv()[0])
    for one, two in ((parts.k, other.k), (parts.v, other.v), (parts.table, other.table)):
        assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def test_parts_that_hold_what_a_run_does_not_stay_apart():
    """Under a method that drops tokens of answers, one head alone, a cap on logits."""
    for method, counts, softmax in (
        (Duo(), [3, 4], PLAIN),
        (AdaSnapKV(), [3], PLAIN),
        (AdaSnapKV(), [3, 4], Softmax(50.0)),
    ):
        parts = parts_of(counts)
        assert joined(method, parts, softmax) is parts
