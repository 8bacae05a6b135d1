"""A model over several devices gives one device's logits, tokens and selections to the bit: in both
tiers, with packed banks, through prompts in chunks, truncates, forks, changes of method, batches
and saved sessions. The devices are CPUs; ownership.py shows what would fail between GPUs.
"""

import pytest
import torch

from engine import LLM, Full, OmniKV, SamplingParams
from engine.base.errors import SettingError
from engine.methods.mass_meter import Watch
from engine.methods.names import NAMES
from engine.methods.select.across.delta import Delta
from engine.methods.select.across.less_is_more import LessIsMore
from engine.methods.select.across.omnikv_heads import OmniKVHeads
from engine.methods.select.quest import Quest
from engine.methods.select.tidaldecode import TidalDecode
from engine.methods.split.allowed import EVICT, RUN, why_not
from engine.saved.cache import BlockCache
from tests.engine.methods.method_table import ROWS
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.split.ownership import Owned, crossings

SETTINGS = {name: value for name, value in SETTINGS.items() if name != "device"}
SPARSE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
METHODS = {
    "full": Full(),
    "omnikv": OmniKV(**SPARSE),
    "share": OmniKV(**{**SPARSE, "tokens": None, "share": 0.1}),
    "mem": OmniKV(**{**SPARSE, "tokens": None, "mem": 0.6}),
    "window": OmniKV(**SPARSE, selector="exponential", window=8, sink=2),
    "wait": OmniKV(**SPARSE, wait_layers=1),
    "official": OmniKV(**SPARSE, official=True),
}
TWO = ("cpu", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder: 7 layers."""
    return model_folder(tmp_path_factory.mktemp("split") / "model", head_dim=32)


def one_of(folder, **settings):
    """One device's LLM."""
    return LLM(folder, device="cpu", **{**SETTINGS, **settings})


def several(folder, devices=TWO, **settings):
    """An LLM over several."""
    return LLM(folder, devices=devices, **{**SETTINGS, **settings})


def walked(llm, **opened):
    """Logits and selections of a session that reads, writes, goes back, reads on and forks."""
    found, chosen = [], []

    def note(session, logits):
        found.append(logits)
        chosen.append({layer: rows.clone() for layer, rows in session.selections.items()})

    with llm.session(**opened) as session:
        note(session, session.prefill(ids_of(200)))
        for token in ids_of(5, seed=9):
            note(session, session.decode(token))
        session.truncate(201)
        note(session, session.decode(7))
        if not getattr(session.method, "official", False):
            note(session, session.prefill(ids_of(90, seed=3)))  # begins within a block
            session.truncate(150)
            session.refresh_logits()
            found.append(session.last_logits)
        with session.fork() as other:
            note(other, other.decode(8))
        note(session, session.decode(9))
        stats = session.stats
        counters = session.bank.counters()
    assert stats.sparse_steps >= 6 or not session_sparse(llm, opened)
    return torch.stack(found), chosen, (stats.sparse_steps, stats.rows_read_sparse), counters


def session_sparse(llm, opened):
    """Whether sessions have sparse layers."""
    method = opened.get("method", llm.method)
    return bool(llm.resolve_method(method)[1].sparse_layers)


def same(found, want):
    """Require the same bits, selections and counts. A group that is cut has a working set on each
    of its devices: all with the hits of one device's, and its bytes between them.
    """
    assert torch.equal(found[0], want[0])
    assert found[2] == want[2]
    for mine, theirs in zip(found[1], want[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[layer], theirs[layer]) for layer in mine)
    moved = dict.fromkeys(want[3], 0)
    for layer, (*counts, size) in found[3].items():
        own = max(first for first in want[3] if first <= layer)
        assert counts == list(want[3][own][:4])
        moved[own] += size
    assert moved == {layer: row[4] for layer, row in want[3].items()}


@pytest.mark.parametrize("name", METHODS)
def test_both_tiers_give_one_device_s_bits(folder, name):
    method = METHODS[name]
    one, two = (make(folder, method=method) for make in (one_of, several))
    for offload in ("device", "host"):
        if offload == "host" and name == "official":
            continue  # fetches nothing
        want = walked(one, offload=offload)
        same(walked(two, offload=offload), want)
        hits = sum(row[0] for row in want[3].values())
        assert (hits > 0) == (offload == "host" and name != "full")


SPLITS = [(1, 3), (3, 1), (6, 1), (1, 2, 2, 2)]
# of the methods whose groups are cut, one for each way that a selection crosses
CROSSING = {
    "window": METHODS["window"],
    "sample": OmniKV(**SPARSE, residual="sample"),
    "heads": OmniKVHeads(**SPARSE),
    "tidaldecode": TidalDecode(tokens=20, select_layer=1, correction_layer=4),
    "less_is_more": LessIsMore(tokens=20, layers=(1, 4)),
    "delta": Delta(tokens=64, layers=(1, 4), page=8),
}


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: ":".join(map(str, split)))
def test_uneven_splits_give_one_device_s_bits(folder, split):
    devices = ("cpu",) * len(split)
    for method in (METHODS["full"], METHODS["window"]):
        llm = several(folder, devices, split=split, method=method)
        starts = llm.planner.cut.starts
        assert len(starts) == len(devices) + 1
        if split == (1, 3):
            assert starts == (0, 2, 7)
        same(walked(llm), walked(one_of(folder, method=method)))


HOST = "window", "heads", "less_is_more"


@pytest.mark.parametrize(
    "name, offload",
    [*((name, "device") for name in CROSSING), *((name, "host") for name in HOST)],
)
def test_cut_groups_give_one_device_s_bits(folder, name, offload):
    """Four devices hold layers 0-1, 2, 3-4 and 5-6, so that the filter layers 1 and 4 choose for
    layers of two others, or one, and for none of their own.
    """
    method = CROSSING[name]
    llm = several(folder, ("cpu",) * 4, split=(2, 1, 2, 2), method=method, offload=offload)
    assert llm.planner.cut.starts == (0, 2, 3, 5, 7)
    same(walked(llm), walked(one_of(folder, method=method, offload=offload)))


@pytest.mark.parametrize(
    "settings",
    [
        dict(bank="int8"),
        dict(bank="int4", offload="host"),
        dict(backend="reference"),
        dict(weights="int8"),
        dict(weights="int8", dtype="bfloat16"),
        dict(threads=None, dtype="bfloat16", rope="yarn:2"),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_forms_of_weights_and_bank_give_one_device_s_bits(folder, settings):
    for method in (METHODS["full"], METHODS["omnikv"]):
        given = dict(settings, method=method)
        same(walked(several(folder, **given)), walked(one_of(folder, **given)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_gives_one_device_s_bits(tmp_path, dtype):
    place = model_folder(tmp_path / "tied", tie_word_embeddings=True)
    given = dict(method=METHODS["omnikv"], dtype=dtype)
    one, two = one_of(place, **given), several(place, **given)
    same(walked(two), walked(one))
    head = two.model.lm_head.weight
    assert head.is_mkldnn or head.data_ptr() != two.model.embed.data_ptr()


def test_answers_changes_of_method_and_score_are_one_device_s(folder):
    one, two = (make(folder, method=METHODS["omnikv"]) for make in (one_of, several))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, ignore_eos=True)
    assert (
        one.generate(ids_of(150), params).token_ids == two.generate(ids_of(150), params).token_ids
    )
    assert one.score(ids_of(80)).logprobs == two.score(ids_of(80)).logprobs

    def changed(llm):
        found = []
        with llm.session(offload="host") as session:
            session.prefill(ids_of(150))
            for method in (Quest(tokens=64), Full(), METHODS["window"]):
                session.set_method(method)
                found += [session.decode(token) for token in (5, 6)]
            session.set_backend("reference")
            found.append(session.decode(7))
            return torch.stack(found), session.check(3).steps

    (mine, checked), (theirs, wanted) = changed(two), changed(one)
    assert torch.equal(mine, theirs) and checked == wanted


def test_batches_and_saved_sessions_go_on(folder, tmp_path):
    one, two = (make(folder, method=METHODS["window"]) for make in (one_of, several))

    def batched(llm):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        with llm.batch(slots=2) as batch:
            sessions = [batch.session() for _ in range(2)]
            for number, session in enumerate(sessions):
                batch.write(session, ids_of(70 + 60 * number, seed=number), params)
            for _ in batch.run():
                pass
            return [list(session.ids) for session in sessions]

    assert batched(one) == batched(two)
    for source, target in ((one, two), (two, one), (two, two)):
        with source.session() as session:
            session.prefill(ids_of(180))
            session.decode(4)
            session.save(tmp_path / "saved")
            want = session.decode(5)
        again, _ = target.restore(tmp_path / "saved")
        with again:
            assert torch.equal(again.decode(5), want)
            again.truncate(180)
            assert torch.equal(again.decode(4), session_again(source))


def test_models_that_share_weights_share_the_cut(folder):
    two = several(folder, method=METHODS["omnikv"])
    other = LLM.sharing(two, method=Full(), bank="int8")
    assert (
        other.planner.cut == two.planner.cut
        and other.model.parts[0].layers[0] is (two.model.parts[0].layers[0])
    )
    same(walked(other), walked(one_of(folder, method=Full(), bank="int8")))
    with pytest.raises(SettingError, match="devices: found in sharing"):
        LLM.sharing(two, devices=("cpu",) * 3)


def test_a_watch_and_cached_blocks_are_one_device_s(folder, tmp_path):
    one, two = (make(folder, method=METHODS["omnikv"]) for make in (one_of, several))

    def watched(llm):
        with llm.session() as session:
            session.watch_with(Watch(every=2))
            session.prefill(ids_of(200))
            found = torch.stack([session.decode(token) for token in ids_of(5, seed=3)])
            return found, (session.watch.sampled, session.watch.mass, session.watch.lowest)

    (mine, seen), (theirs, wanted) = watched(two), watched(one)
    assert torch.equal(mine, theirs) and seen == wanted and seen[0] == 3 and 0 < seen[1] < 1
    cache, ids = BlockCache(tmp_path), ids_of(300)
    with one.session() as session:
        session.prefill(ids)
        assert cache.store(session) == 1  # a whole block of 256 tokens
        want = session.decode(5)
    with two.session(offload="host") as session:
        assert cache.fill(session, ids) == 256
        session.prefill(ids[256:])
        assert float((session.decode(5) - want).abs().max()) < 1e-4  # other chunks


def session_again(llm):
    """The logits behind the token that the saved session wrote."""
    with llm.session() as session:
        session.prefill(ids_of(180))
        return session.decode(4)


@pytest.mark.parametrize("name", ["full", "omnikv", *CROSSING])
def test_nothing_but_hidden_vectors_and_lists_crosses(folder, name):
    """Layers 0-2 and 3-6: the first group is cut, the second is not."""
    method = {**METHODS, **CROSSING}[name]
    llm = several(folder, backend="reference", method=method, split=(3, 4))
    hidden, vocab, parts = llm.config.hidden_size, llm.config.vocab_size, llm.model.parts
    assert llm.planner.cut.starts == (0, 3, 7)
    with torch.inference_mode(), llm.session() as session:
        owned = Owned()
        runner = session.runner
        for number, part in enumerate(parts):
            owned.own(number, part.layers)
            owned.own(number, llm.loaded.rotary.parts[number])
            owned.own(number, [session.bank.parts[number], session.query_ring.parts[number]])
            owned.own(
                number, [vars(r.by_part[number]) for r in (runner.runtime, runner.dense_runtime)]
            )
        owned.own(0, [llm.model.embed, session.runner.token, session.runner.length])
        owned.own(len(parts) - 1, [llm.model.norm, llm.model.lm_head])
        with crossings(owned, llm.model) as crossed, owned:
            session.prefill(ids_of(130))
            # of each of three chunks the hidden vectors of its tokens, then the logits; positions
            # and lengths of both parts, for what ends the prompt
            assert crossed == [64 * hidden, 64 * hidden, 2 * hidden, vocab, 1, 1, 1, 1]
            del crossed[:]
            for token in ids_of(3, seed=2):
                session.decode(token)
        # positions and lengths of both parts, what the cut group reads, the hidden vector
        k, lists = 20, {"full": [], "delta": [6, 1, 1], "sample": [20, 1, 20]}
        lists |= {"heads": [llm.config.num_kv_heads * k, 1], "less_is_more": [k, 1, 1]}
        lists["tidaldecode"] = [llm.config.num_heads * k, 1, 1]
        step = [1, 1, 1, 1, *lists.get(name, [k, 1]), hidden, vocab]
        assert crossed == 3 * step
        assert session.stats.sparse_steps == 3 * (name != "full")
    assert owned.count > 1000 and not owned.mixed, owned.mixed[:3]


@pytest.mark.parametrize("name", sorted(RUN))
def test_methods_that_run_give_one_device_s_bits(folder, name):
    rows = [m for row in ROWS for m in row.sparse or (row.neutral,) if m.name == name]
    method = next(m for m in rows if not why_not(m))
    one, two = (make(folder, method=method) for make in (one_of, several))

    def short(llm):
        with llm.session() as session:
            found = [session.prefill(ids_of(170)), session.decode(5), session.decode(6)]
            session.truncate(171)
            return torch.stack([*found, session.decode(9)]), session.stats.rows_read_sparse

    want, mine = short(one), short(two)
    assert torch.equal(mine[0], want[0]) and mine[1] == want[1]


def test_every_other_method_is_refused_in_one_line(folder):
    refused = {row.name: row.neutral for row in ROWS if why_not(row.neutral)}
    tried = {method.name for method in refused.values()} | {*RUN, *EVICT}
    assert set(NAMES) == tried, "neither runs nor is refused"
    llm = several(folder, method=Full())
    for method in (refused["zigzagkv"], refused["kascade"], refused["minference"]):
        with pytest.raises(SettingError, match="several devices, but it") as raised:
            llm.session(method=method)
        assert "\n" not in str(raised.value)


def test_prompts_that_choose_keep_groups_whole(folder):
    """Blocks of a prompt choose for the layers of a group, which stays on one device."""
    settings = dict(prefill_ratio=2, prefill_block=64, prefill_dense_end=64)
    method = OmniKV(**SPARSE, **settings)
    llm = several(folder, split=(3, 4), method=method)
    assert llm.planner.cut.starts[1] in (1, 4)
    one = one_of(folder, method=method)
    for offload in ("device", "host"):
        found = []
        for model in (llm, one):
            with model.session(offload=offload) as session:
                logits = [session.prefill(ids_of(200)), session.decode(5), session.decode(6)]
                found.append(torch.stack(logits))
        assert torch.equal(*found)
    cut = several(folder, split=(3, 4), method=METHODS["omnikv"])
    with cut.session() as session, pytest.raises(SettingError, match="layer 3 begins a device"):
        session.prefill(ids_of(100))
        session.set_method(method)
