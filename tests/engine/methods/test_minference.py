"""MInference: the lines a head ranks, the rows its pattern shows, attention over exactly those, and
the search that assigns patterns.

Stops: a diagonal off by one, a block that sees the future, a head under another head's lines, a
count that is not what was read.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tools.calibrate.minference
from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.minference import MInference, causal_pairs
from engine.methods.select.minference_patterns import BLOCK, line_sums, sizes
from engine.plan.prefill_time import PrefillFlops
from kernels.prefill.dense import prefill_dense_lse
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import Model, Shape
from tests.kernels.support.kernel_checks import assert_close
from tools.calibrate.minference import SPACE, search_patterns

KINDS = (
    ("vertical_slash", 30, 100),
    ("vertical_slash", 40, 60),
    ("a_shape", 30, 50),
    ("a_shape", 64, 1),
    ("block_sparse", 2),
    ("block_sparse", 1),
)
CHUNKS = st.sampled_from(
    ((0, 1), (0, 63), (0, 64), (0, 65), (0, 257), (64, 100), (127, 131), (130, 64), (200, 1))
)


def weights_of(q, k, start):
    """Causal attention in float64: [H, C, stop]; q [C, H, D] from `start` on, k [Hkv, T, D]."""
    stop, heads = start + len(q), q.shape[1]
    keys = k[:, :stop].double().repeat_interleave(heads // len(k), 0)
    logits = torch.einsum("chd,hnd->hcn", q.double(), keys) * 0.25
    later = torch.arange(stop) > torch.arange(start, stop).unsqueeze(1)
    return torch.softmax(logits.masked_fill(later, float("-inf")), -1)


def shown(pattern, q, k, start, head, group):
    """bool [C, stop]: what the definition lets each query of one head read, from float64 and loops
    over queries and lines.
    """
    stop, reach = start + len(q), sizes(pattern, start + len(q))
    seen = torch.zeros(len(q), stop, dtype=torch.bool)
    blocks = [
        (max(start, at), min(stop, at + BLOCK)) for at in range(start // BLOCK * BLOCK, stop, BLOCK)
    ]
    if pattern[0] == "block_sparse":
        means = k[head // group].double()
        for first, last in blocks:
            own, mean = first // BLOCK, q[first - start : last - start, head].double().mean(0)
            order = sorted(
                range(own), key=lambda j: -float(means[j * BLOCK : (j + 1) * BLOCK].mean(0) @ mean)
            )
            for j in [own, *order[: reach[0] - 1]]:
                seen[first - start : last - start, j * BLOCK : min(stop, (j + 1) * BLOCK)] = True
    else:
        columns, diagonals = range(min(stop, reach[0])), range(min(stop, reach[1]))
        if pattern[0] == "vertical_slash":
            weights = weights_of(q, k, start)[head, -64:]
            sums = weights.sum(0)
            lines = torch.stack(
                [
                    sum(
                        weights[i, stop - len(weights) + i - d]
                        for i in range(len(weights))
                        if stop - len(weights) + i >= d
                    )
                    for d in range(stop)
                ]
            )
            columns = sorted(
                range(stop), key=lambda j: (j >= 30, -float(sums[j])) if j >= 30 else (False, j)
            )[: reach[0]]
            diagonals = sorted(
                range(stop), key=lambda d: (d >= 100, -float(lines[d])) if d >= 100 else (False, d)
            )[: reach[1]]
        for first, last in blocks:
            rows = slice(first - start, last - start)
            seen[rows, first:last] = True
            seen[rows, torch.tensor(columns)] = True
            for d in diagonals:
                seen[rows, max(0, first - d) : max(0, last - d)] = True
    return seen & (torch.arange(stop) <= torch.arange(start, stop).unsqueeze(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@given(
    st.sampled_from(GROUPS),
    CHUNKS,
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=2),
    st.integers(0, 9),
)
@settings(max_examples=12, derandomize=True)
def test_each_head_reads_what_its_pattern_shows(backend, shape, chunk, kinds, seed):
    """Against a mask built from the definition: attention by the kernel rule, mass kept, pairs
    counted; the future and the rest are NaN.
    """
    (heads, kv_heads), (start, count) = shape, chunk
    table = (tuple(kinds[h % 2] for h in range(heads)),) * 4
    world = World(MInference(table), shape, 400, backend=backend, seed=seed)
    world.fill(1, 0, start + count)
    q, (k, v), group = world.queries(count)[0], world.bank.kv(1), heads // kv_heads
    out, lse = world.runtime.attend_patterns(table[1], q[None], k, v, start)
    exact, pairs = weights_of(q, k[0], start), 0
    for head in range(heads):
        seen = shown(table[1][head], q, k[0], start, head, group)
        pairs += int(seen.sum())
        kept, values = exact[head] * seen, v[0, head // group, : start + count]
        mass = kept.sum(-1, keepdim=True)
        rough = (kept / mass).float() @ values
        assert_close(
            out[0, :, head],
            (kept / mass) @ values.double(),
            rough,
            torch.float16,
            f"head {head}, {table[1][head]}",
        )
        logits = (q[:, head].double() @ k[0, head // group, : start + count].double().t()) * 0.25
        sums = torch.logsumexp(logits.masked_fill(~seen, float("-inf")), -1)
        torch.testing.assert_close(lse[0, :, head].double(), sums, atol=1e-3, rtol=0)
    assert world.runtime.pairs_read == pairs and world.runtime.pairs_causal == heads * causal_pairs(
        start, start + count
    )


@given(st.sampled_from(GROUPS), CHUNKS, st.integers(0, 9))
@settings(max_examples=15)
def test_sums_along_columns_and_diagonals(shape, chunk, seed):
    """Against float64 and loops over pairs; they are shares of the same attention."""
    start, count = chunk
    world = World(MInference(), shape, 400, seed=seed)
    world.fill(0, 0, start + count)
    q, k = world.queries(count)[0], world.bank.kv(0)[0][0]
    columns, diagonals = line_sums(q[-64:], k, start + count, 0.25)
    exact = weights_of(q, k, start)[:, -64:]
    torch.testing.assert_close(columns.double(), exact.sum(1), atol=1e-5, rtol=1e-4)
    along = torch.zeros_like(diagonals, dtype=torch.float64)
    for i in range(exact.shape[1]):
        position = start + count - exact.shape[1] + i
        for j in range(position + 1):
            along[:, position - j] += exact[:, i, j]
    torch.testing.assert_close(diagonals.double(), along, atol=1e-5, rtol=1e-4)


CONFIG = tiny_config(layers=4, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=6, sharpness=2.0)
SPARSE = MInference(("vertical_slash", 30, 100))


def opened(method, chunk=512, backend="auto"):
    return tiny_llm(
        Full(), CONFIG, WEIGHTS, max_context=1024, chunk=chunk, backend=backend
    ).session(method)


def test_decode_is_full_attention_over_whatever_was_read():
    """Another method on the same bank gives the same bits; the mass that was kept is reported for
    every layer and head.
    """
    ids = random_ids(600, seed=1)
    with opened(SPARSE) as session, opened(Full()) as dense:
        session.runtime.meter = seen = []
        a, b = session.prefill(ids), dense.prefill(ids)
        assert (a - b).abs().max() > 1e-3  # it was sparse
        assert 0 < session.runtime.pairs_read < 0.7 * session.runtime.pairs_causal
        assert {(r["layer"], r["start"]) for r in seen} == {(layer, 0) for layer in range(4)}
        assert all(
            r["recall"].shape == (8,) and (r["recall"] > 0.2).all() and (r["recall"] < 1.0001).all()
            for r in seen
        )
        first = [session.decode(token) for token in (3, 1, 4)]
        session.truncate(600)
        session.set_method(Full())
        assert all(
            torch.equal(session.decode(token), logits) for token, logits in zip((3, 1, 4), first)
        )


@pytest.mark.parametrize("chunk", [37, 512])
def test_a_prompt_is_ranked_once_by_its_last_queries(chunk):
    """A whole model in float64, its lines from the prompt's last 64 queries; the engine's chunks
    change nothing, and a second prompt is ranked by its own.
    """
    config = tiny_config(layers=3, heads=4, kv_heads=2)
    weights = tiny_weights(config, seed=6, sharpness=2.0)
    table = (KINDS[:4], KINDS[2:], KINDS[1:5])
    model, ids, keys, values = Model(Shape(3, 4, 2, 16, 1e-5), weights), random_ids(420), [], []
    llm = tiny_llm(Full(), config, weights, max_context=512, chunk=chunk)
    with llm.session(MInference(table)) as session:
        for first, stop in ((0, 330), (330, 420)):
            x, at = model.weights["model.embed_tokens.weight"][ids[first:stop]], range(first, stop)
            for layer in range(3):
                normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
                q, k, v = (model.project(layer, part, normed) for part in "qkv")
                q, k = (torch.tensor(model.rotate(part, list(at))) for part in (q, k))
                if not first:
                    keys.append(k)
                    values.append(torch.tensor(v))
                else:
                    keys[layer] = torch.cat([keys[layer], k])
                    values[layer] = torch.cat([values[layer], torch.tensor(v)])
                rows = keys[layer].transpose(0, 1)
                exact, out = weights_of(q, rows, first), []
                for head in range(4):
                    kept = exact[head] * shown(table[layer][head], q, rows, first, head, 2)
                    out.append(kept / kept.sum(-1, keepdim=True) @ values[layer][:, head // 2])
                x = model.rest(layer, x, torch.stack(out, 1).flatten(1).numpy())
            expected = torch.tensor(model.head(x[-1]))
            torch.testing.assert_close(
                session.prefill(ids[first:stop]).double(), expected, atol=1e-4, rtol=1e-4
            )
        assert session.runtime.pairs_read < 0.8 * session.runtime.pairs_causal


def test_the_last_layers_lines_are_those_of_all_its_queries():
    """Of the last layer the newest query's output counts only; lines ranked by that one query would
    be others.
    """
    ids = random_ids(500, seed=2)
    with opened(SPARSE) as session:
        tables = []
        inner = session.runtime.attend_patterns
        session.runtime.attend_patterns = lambda patterns, q, *rest: (
            tables.append(q.shape[1]) or inner(patterns, q, *rest)
        )
        session.prefill(ids)
        assert tables == [500] * 4


def test_a_share_scales_the_sizes_down_to_the_published_least():
    assert sizes(("vertical_slash", 1000, 6096), 10**6) == (1000, 6096) and sizes(
        ("vertical_slash", 1000, 6096), 500
    ) == (500, 500)
    assert sizes(("vertical_slash", 1000, 3000), 4000, 0.3) == (300, 900) and sizes(
        ("vertical_slash", 1000, 3000), 400, 0.1
    ) == (30, 50)
    assert sizes(("block_sparse", 100), 6400, 0.1) == (10,) and sizes(
        ("block_sparse", 100), 640
    ) == (10,)


def test_work_is_counted():
    """Fewer operations than full attention, more for larger patterns; the neutral setting counts
    full attention's of every layer.
    """
    work = PrefillFlops.of(CONFIG)
    methods = (SPARSE, MInference(("vertical_slash", 80, 300)), MInference())
    small, large, whole = (opened(method).runtime.prompt_flops(work, 0, 1000) for method in methods)
    assert small[0] == whole[0] and small[1] < large[1] < whole[
        1
    ] == work.per_pair * 4 * causal_pairs(0, 1000)
    halves = [
        SPARSE.runtime(opened(SPARSE).runtime.setup).prompt_flops(work, *span)[1]
        for span in ((0, 500), (500, 1000))
    ]
    assert sum(halves) == pytest.approx(small[1], rel=0.01)


def planted(pattern, head, stop=512):
    """One K/V head's queries and keys [stop, 16] whose attention lies on lines of a kind."""
    generator = torch.Generator().manual_seed(head)
    q, k = (0.3 * torch.randn(stop, 16, generator=generator) for _ in range(2))
    if pattern == "columns":
        k[torch.arange(40, stop, 37), 0] = 12.0
        q[:, 0] = 3.0
    elif pattern == "near":
        # falls to a third at a distance of 90
        angle = torch.arange(stop) * 0.0042
        for t in (q, k):
            t[:, 0], t[:, 1] = 8 * torch.cos(angle), 8 * torch.sin(angle)
    else:
        # a block looks at every fourth block
        kind = (torch.arange(stop) // BLOCK) % 4
        q[torch.arange(stop), kind], k[torch.arange(stop), kind] = 6.0, 6.0
    return q, k


def test_the_search_gives_each_head_its_pattern(monkeypatch):
    """Three heads with planted lines, two layers; the prompt is one chunk, and the search changes
    no bit of what is attended.
    """
    space = (("a_shape", 30, 150), ("vertical_slash", 60, 50), ("block_sparse", 2))
    config = tiny_config(layers=2, heads=3, kv_heads=3, hidden=48)
    llm = tiny_llm(Full(), config, tiny_weights(config), max_context=512, chunk=256)
    want = (("near", "columns", "blocks"), ("blocks", "near", "columns"))
    seen = []

    def chunk(model, rotary, runtime, bank, tokens, start, total):
        stop = start + tokens.shape[1]
        for number in range(2):
            parts = [planted(kind, head) for head, kind in enumerate(want[number])]
            k = torch.stack([part[1] for part in parts], 1)[None]
            q = torch.stack([part[0] for part in parts], 1)[None, start:stop]
            bank.write_chunk(number, k[:, start:stop], k[:, start:stop], start)
            seen.append(
                torch.equal(
                    runtime.attend_prompt(number, q, bank, start),
                    prefill_dense_lse(q, *bank.kv(number), start, 0.25)[0],
                )
            )

    monkeypatch.setattr(tools.calibrate.minference, "run_chunk", chunk)
    found = search_patterns(llm, list(range(97))[:97] * 5, space)
    kinds = {"near": "a_shape", "columns": "vertical_slash", "blocks": "block_sparse"}
    assert all(seen) and [[pattern[0] for pattern in row] for row in found] == [
        [kinds[kind] for kind in row] for row in want
    ]


def test_the_search_on_a_model_makes_a_table_that_a_session_takes():
    ids = random_ids(300, seed=3)
    llm = tiny_llm(Full(), CONFIG, WEIGHTS, max_context=512, chunk=128)
    done = []
    table = search_patterns(
        llm, ids, SPACE + (("vertical_slash", 30, 50),), lambda *at: done.append(at)
    )
    assert (
        done == [(1, 4), (2, 4), (3, 4), (4, 4)]
        and len(table) == 4
        and all(len(row) == 8 for row in table)
    )
    with llm.session(MInference(table)) as session:
        session.prefill(ids)


PUBLISHED = [
    {"0": ["vertical_and_slash", 30, 800, 185169], "2": ["stream_llm", 100, 800, 0.5]},
    {"1": ["block_sparse", 8, 1, 3], "2": ["vertical_and_slash", 3500, 100, 14276508]},
]


def test_a_published_table_is_read(tmp_path):
    """The authors' names become ours; heads that a layer does not name have the default."""
    path = tmp_path / "best_pattern.json"
    path.write_text(json.dumps(PUBLISHED))
    default = ("vertical_slash", 1000, 6096)
    expected = (
        (("vertical_slash", 30, 800), default, ("a_shape", 100, 800)),
        (default, ("block_sparse", 100), ("vertical_slash", 3500, 100)),
    )
    assert MInference(str(path)).patterns == MInference(path).patterns == expected
    config = tiny_config(layers=2, heads=3, kv_heads=3, hidden=48)
    assert MInference(path).table(config) == expected
    with pytest.raises(SettingError, match="table of 2 layers with 3 heads, expected 4 layers"):
        MInference(path).plan(CONFIG)
    path.write_text(json.dumps({"format": 1, "patterns": expected}))  # of the search
    assert MInference(path).patterns == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "not valid JSON"),
        ("[]", "expected a list with an object per layer"),
        ("3", "expected a list with an object per layer"),
        ("[{}, {}]", "found no head in any layer"),
        ("[[1, 2]]", "expected an object for layer 0"),
        ('[{"a": ["block_sparse", 1, 1, 1]}]', "found head 'a'"),
        ('[{"4096": ["block_sparse", 1, 1, 1]}]', "found head '4096'"),
        ('[{"0": ["block_sparse"]}]', "expected .kind, size, size, score"),
        ('[{"0": [["x"], 1, 1, 1]}]', "found the kind"),
        ('[{"0": ["flex", 1, 1, 1]}]', "found the kind 'flex'"),
        ('[{"0": ["stream_llm", -1, 800, 1]}]', "a_shape"),
        ('[{"0": ["stream_llm", 1e9, 800, 1]}]', "a_shape"),
        ('{"patterns": [[["x", 3]]]}', "expected .'vertical_slash'"),
        ('{"patterns": [[[]]]}', "expected .'vertical_slash'"),
        ('{"patterns": [[[["a"], 3]]]}', "expected .'vertical_slash'"),
        ('{"layers": 3}', 'expected "patterns"'),
    ],
)
def test_a_file_that_is_no_table_is_one_line(tmp_path, text, words):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=words) as found:
        MInference(path)
    assert "\n" not in str(found.value) and str(found.value).startswith("patterns: ")
    with pytest.raises(SettingError, match="the file is missing"):
        MInference(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(patterns=()), "patterns"),
        (dict(patterns=("diagonal", 3)), "vertical_slash"),
        (dict(patterns=("a_shape", 3)), "a_shape"),
        (dict(patterns=(("a_shape", 0, 3),)), "patterns"),
        (dict(share=0), "share"),
        (dict(patterns=((("block_sparse", 2.5),),)), "block_sparse"),
    ],
)
def test_bad_settings_are_named(bad, words):
    with pytest.raises(SettingError, match=words):
        MInference(**bad)


def test_a_table_of_another_model_is_named():
    with pytest.raises(SettingError, match="4 layers with 8 query heads"):
        MInference(((("a_shape", 30, 50),) * 3,) * 4).plan(CONFIG)
