"""Double Sparsity: choices of its rule in float64, index by index, and channels from a file that
names its model.

Stops: channels of another head or layer, labels that do not follow the bank, query heads that share
a choice unasked, a table of another model that is taken.
"""

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.base.errors import SettingError
from engine.methods.select.index.channels import channels_text
from engine.methods.select.index.double_sparsity import DoubleSparsity
from engine.methods.tables.head_table import facts_of
from tests.builders import GROUPS, POCKET, WORLD_LAYERS, World, random_ids, tiny_config
from tests.engine.methods.method_checks import llm_of
from tests.engine.methods.method_table import heavy_channels
from tools.studies import heavy_channels as study

LENGTHS = st.sampled_from((1, 2, 15, 16, 17, 31, 64, 97, 127))


def permuted(kv_heads, seed, layers=WORLD_LAYERS):
    """All 16 channels of every head, in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(tuple(torch.randperm(16, generator=generator).tolist()) for _ in range(kv_heads))
        for _ in range(layers)
    )


def simulate(q, k, channels, budget, how):
    """(rows by choice, gap) of one sequence in float64. q [H, D]; k [Hkv, n, D]."""
    rows, gap = [], float("inf")
    for head, group in enumerate(q.double().view(k.shape[0], -1, q.shape[1])):
        own = list(channels[head])
        logits = group[:, own] @ k[head].double()[:, own].T
        scores = {"none": logits, "max": logits.amax(0)[None], "sum": logits.sum(0)[None]}[how]
        for score in scores:
            order = score.argsort(descending=True, stable=True)
            rows.append(order[:budget].sort().values.tolist())
            if len(order) > budget:
                gap = min(gap, float(score[order[budget - 1]] - score[order[budget]]))
    return rows, gap


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from((1, 5, 16)),
    st.sampled_from(("none", "max", "sum")),
    st.sampled_from((1, 13, 40)),
    st.integers(0, 99),
)
@settings(max_examples=20, derandomize=True)
def test_a_step_reads_what_labels_rank_first(backend, shape, lengths, count, reduce, budget, seed):
    """A ragged batch: choices in float64, and attention over their rows alone; with all channels
    that is the exact top-k.
    """
    channels = permuted(shape[1], seed)
    method = DoubleSparsity(tokens=budget, channels=channels, count=count, gqa_reduce=reduce)
    world = World(method, shape, 131, batch=2, backend=backend, seed=seed)
    for b, n in enumerate(lengths):
        world.fill(3, 0, n, b)
    q, (k, v) = world.queries(), world.bank.kv(3)
    own = [head[:count] for head in channels[3]]
    found = [simulate(q[b, 0], k[b, :, :n], own, budget, reduce) for b, n in enumerate(lengths)]
    assume(min(gap for _, gap in found) > 1e-5)
    world.runtime.end_prompt(max(lengths))
    out = world.runtime.attend(3, q, world.step(*lengths))
    for b, (rows, _) in enumerate(found):
        per = shape[0] // len(rows)
        for number, own in enumerate(rows):
            for head in range(number * per, (number + 1) * per):
                kv = head * shape[1] // shape[0]
                weights = (q[b, 0, head].double() @ k[b, kv, own].double().T / 4).softmax(0)
                expected = weights @ v[b, kv, own].double()
                torch.testing.assert_close(out[b, 0, head].double(), expected, atol=1e-5, rtol=1e-5)
    if max(lengths) > budget:
        chosen = world.runtime.chosen[world.plan.group_of[3]]
        for b, (rows, _) in enumerate(found):
            assert [one[: len(rows[0])].tolist() for one in chosen.index[b]] == rows


@given(st.lists(st.tuples(st.integers(1, 120), st.floats(0, 1)), min_size=1, max_size=8))
@settings(max_examples=20)
def test_labels_follow_the_bank_wherever_it_goes(moves):
    method = DoubleSparsity(channels=permuted(2, 1), count=3)
    world, before = World(method, (4, 2), 130, batch=2), 0
    for n, share in moves:
        kept = round(share * min(before, n - 1))
        if kept < n - 1:
            world.runtime.truncate(kept)
        world.fill(3, kept, 130)
        world.runtime.learn(1, 3, world.bank, [n, max(1, n - 3)])
        for b, length in enumerate((n, max(1, n - 3))):
            for head in range(2):
                rows = world.bank.kv(3)[0][b, head, :length, list(method.channels[3][head][:3])]
                assert torch.equal(world.runtime.held[1, b, head, :, :length], rows.mT)
        before = n


def test_labels_are_a_sixteenth_of_k():
    config = tiny_config(layers=6, heads=8, kv_heads=2, head_dim=64, hidden=512)
    channels = ((tuple(range(64)),) * 2,) * 6
    method = DoubleSparsity(tokens=100, channels=channels)
    found = {n: b.nbytes(2) for n, b in method.buffers(method.plan(config), config, 1600).items()}
    assert found["held"] == 4 * 1600 * 2 * 64 * 2 // 16 and found["heavy"] == 4 * 2 * 4 * 8
    assert sum(found.values()) == method.needs(method.plan(config), config, 1600, 2).device_bytes


def test_channels_come_from_a_file_that_names_its_model(tmp_path):
    channels, llm, path = heavy_channels(), llm_of(), tmp_path / "double_sparsity.json"
    path.write_text(channels_text(channels, llm.config, {"made_by": "a test"}))
    method = DoubleSparsity(channels=path)
    assert method.channels == channels and method.made_for == facts_of(llm.config)
    assert DoubleSparsity(channels=str(path)) == method
    with llm.session(method) as session:
        session.prefill(random_ids(30))
    data = json.loads(path.read_text())
    data["model"]["vocab_size"] = 128256
    path.write_text(json.dumps(data))
    with pytest.raises(SettingError, match="channels: found those of a model with vocab_size 1282"):
        llm.session(DoubleSparsity(channels=path))
    for bad, said in (
        (dict(channels=heavy_channels(32, 8)), "32 layers of 8 K/V heads, expected 7 layers of 2"),
        (dict(), "channels: found none, .*tools.studies.heavy_channels --model"),
        (dict(channels=channels, count=9), "found 8 for each K/V head, expected at least 9"),
        (dict(channels=channels, count=17), "count: found 17, expected at most 16, the head dim"),
        (dict(channels=(((16,), (3,)),) * 7), "channels: found channel 16, expected .* below 16"),
    ):
        with pytest.raises(SettingError, match=said):
            llm.session(DoubleSparsity(**bad))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(channels=5), "channels: found 5, expected a table .layer..K/V head. of lists"),
        (dict(channels=(((1, 1),),)), "layer 0, K/V head 0, expected distinct numbers"),
        (dict(channels=(((-1, 1),),)), "layer 0, K/V head 0, expected distinct numbers"),
        (dict(channels=(((1, True),),)), "layer 0, K/V head 0, expected distinct numbers"),
        (dict(channels=(((1, 2), (3,)),)), "found 1 for layer 0, K/V head 1 and 2 for the first"),
        (dict(channels=(((1,), (2,)), ((3,),))), "layers of 1, 2 K/V heads, expected equally many"),
        (dict(channels="nowhere.json"), "channels: .*nowhere.json.*make them in a clone"),
        (dict(count=0), "count: found 0"),
        (dict(gqa_reduce="all"), "max, mean, sum, none"),
    ],
)
def test_bad_settings_are_named(settings, said):
    with pytest.raises(SettingError, match=said):
        DoubleSparsity(**settings)


def test_the_shipped_channels_are_those_that_the_study_finds():
    """The heaviest four of a head; rounding may swap one or two."""
    method = DoubleSparsity(channels=POCKET / "double_sparsity.json")
    llm = LLM(str(POCKET), device="cpu", dtype="float32", method=method, threads=1)
    ids = llm.encode((POCKET / "welcome.txt").read_text(encoding="utf-8"))
    found = study.ranked(study.weigh(llm, [ids[at : at + 512] for at in range(0, len(ids), 512)]))
    apart = [
        len({*mine[:4]} - {*theirs[:4]})
        for own, others in zip(method.channels, found)
        for mine, theirs in zip(own, others)
    ]
    assert len(apart) == 16 and sum(apart) <= 2


def test_the_study_weighs_a_token_with_itself():
    """Against a session's own queries and keys, in float64, whatever the chunk."""
    ids, found = random_ids(100), []
    for chunk in (64, 512):
        llm = llm_of(chunk=chunk)
        found.append(study.weigh(llm, [ids[:60], ids[60:]]))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)
    with llm.session() as session:
        session.prefill(ids[:60])
        positions = torch.arange(60)[None]
        q = session.query_ring.read(2, positions)[0].double()
        k = session.bank.kv(2)[0][0, :, :60].double()
    cos, sin = (t[0].double() for t in llm.rotary.at(positions))
    first, second = q.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    q = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    weights = (q.view(60, 2, 2, 16) * k.permute(1, 0, 2)[:, :, None]).abs().sum(2).mean(0)
    torch.testing.assert_close(study.weigh(llm, [ids[:60]])[2], weights, atol=1e-5, rtol=1e-5)
