"""What ranks divide beside heads of attention and MLPs: the state of recurrent layers, norms over
the queries of all heads, gates that are cut at a mean, blocks of MXFP4. Ranks are threads here;
`python -m tests.programs.ranks` runs every variant of every family.
"""

import math
from dataclasses import replace

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import SettingError
from engine.load.files import model_files
from engine.model.share.cut import added_once
from engine.model.share.divide import share_of, whole_of
from engine.model.share.mean import DividedMean, DividedSpread
from engine.model.tensors import targets
from kernels.quant.native import usable
from tests.builders import hybrid_config
from tests.engine.model.test_gpt_oss import packed
from tests.engine.ranks.model import ids_of
from tests.engine.ranks.threads import Together
from tests.programs.hybrid_walks import walks_of
from tools.families.models import make

SETTINGS = dict(max_context=1024, chunk=64, dtype="float32", device="cpu", threads=1)
CLOSE = 1e-4  # of float32 logits
# what a rank of two and of four holds of the state: whole groups, or a part of one
HYBRID = ("qwen3.5", "qwen3-next", "granite-hybrid-dense", "falcon-h1-norm", "nemotron-h")
OTHERS = ("olmo2", "minimax-m2", "gemma3n", "gpt-oss-mxfp4")
# floats that one layer brings beside the formula of docs/PARALLEL.md, with four ranks
MORE = {"granite-hybrid-dense": (1, "recurrent"), "falcon-h1-norm": (2, "recurrent")}
MORE |= {"nemotron-h": (2, "recurrent"), "olmo2": (2, "attention")}
MORE |= {"minimax-m2": (2, "attention"), "gemma3n": (2, "cut")}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a variant's name to its folder, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = place = tmp_path_factory.mktemp("families") / name
            if name == "gpt-oss-mxfp4":
                packed(place, make(place, "gpt-oss", hidden_size=64, intermediate_size=128))
            else:
                make(place, name)
        return made[name]

    return folder


def answered(llm, method=None, prompt=130, steps=4):
    """Logits of a prompt in two parts, of steps, and after two truncates: into what rings hold, and
    further back than S.
    """
    with llm.session(method=method) as session:
        session.prefill(ids_of(prompt // 2))
        found = [session.prefill(ids_of(prompt - prompt // 2, seed=6))]
        found += [session.decode(token) for token in ids_of(steps, seed=9)]
        for back in (2, 40):
            session.truncate(len(session) - back)
            found.append(session.decode(7))
        with session.fork() as other:
            found.append(other.decode(8))
        return torch.stack(found)


@pytest.mark.parametrize("name", (*HYBRID, *OTHERS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_say_what_one_process_says(folder_of, name, ranks):
    given = dict(SETTINGS, method=Full())
    if name == "gpt-oss-mxfp4" and not usable():  # torch's product in groups rounds its inputs
        given["weights"] = "float"
    together = Together(folder_of(name), ranks, **given)
    want = answered(LLM(folder_of(name), **given))
    found = together.each(answered)
    assert float((found[0] - want).abs().max()) < CLOSE
    assert torch.equal(found[0].argmax(-1), want.argmax(-1))
    assert all(torch.equal(theirs, found[0]) for theirs in found)
    sent(together, name)


def sent(together, name):
    """Require that a step brings what docs/PARALLEL.md says."""

    def step(llm):
        with llm.session() as session:
            session.prefill(ids_of(20))
            before = replace(llm._ranks.sent)
            session.decode(5)
            return llm._ranks.sent.bytes - before.bytes, llm._ranks.sent.calls - before.calls

    for llm, (size, calls) in zip(together.llms, together.each(step), strict=True):
        whole, ranks = whole_of(llm.config), together.ranks[0].size
        experts = whole.experts
        mixed = experts is not None and bool(experts.shared or experts.beside)
        halves = 2 * whole.num_layers - len(whole.bare)
        halves += mixed * sum(whole.experts_of(i) is not None for i in range(whole.num_layers))
        floats, where = MORE.get(name, (0, ""))
        if where == "recurrent" and ranks <= whole.recurrent.key_heads:
            floats = 0
        count = {
            "recurrent": whole.recurrent and len(whole.recurrent.layers),
            "attention": len(whole.attending_layers),
            "cut": sum(cut is not None for cut in whole.block.cuts),
            "": 0,
        }[where]
        formula = 4 * (whole.hidden_size * (1 + halves) + llm.config.share.vocab.size)
        assert size == formula + 4 * floats * count
        assert calls == 2 + halves + bool(floats) * count


@pytest.mark.parametrize("name", ["qwen3.5", "granite-hybrid-dense"])
def test_walks_over_ranks_end_where_a_fresh_session_does(folder_of, tmp_path, name):
    """Read, decode, truncate, fork, interrupt, save, restore, check; savepoints are few."""
    method = OmniKV(
        filter_layers=(3 if name == "qwen3.5" else 1,), tokens=24, tail=64, dense_below=0
    )
    settings = SETTINGS | dict(savepoints=3)
    together = Together(folder_of(name), 2, method=method, **settings)
    found = together.each(walks_of, tmp_path, 3, 0, method, None)
    assert all(each.walks == 3 and each.sparse > 0 and each.again > 0 for each in found)
    assert len({(each.worst, each.again, each.back) for each in found}) == 1


@pytest.mark.parametrize("name", [*HYBRID, "olmo2", "gpt-oss-mxfp4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_are_the_model(folder_of, name, ranks):
    """Each weight is on a rank, and what a rank reads is what its configuration counts."""
    files = model_files(folder_of(name))
    config, found, read = files.config(None), [], []
    whole = dict(files.tensors(config).stream(targets(config)))
    for rank in range(ranks):
        own, seen = share_of(config, rank, ranks), []
        assert whole_of(own) == config
        stream = files.tensors(own).stream(targets(own), progress=seen.append)
        found.append(dict(stream))
        read.append(seen[-1].bytes_done)
        held = sum(tensor.numel() for tensor in found[-1].values())
        assert held == own.parameters
        assert read[-1] == 4 * held or name == "gpt-oss-mxfp4"
    for target, tensor in whole.items():
        parts = [share[target] for share in found]
        rows = [part.shape[0] for part in parts]
        if all(part.shape == tensor.shape for part in parts) or added_once(target):
            assert all(torch.equal(part, tensor) for part in parts)
        elif tensor.dim() == 2 and set(rows) == {tensor.shape[0]}:
            assert torch.equal(torch.cat(parts, 1), tensor)
        else:  # rows of several sections, some of them on several ranks
            held = {tuple(row.flatten().tolist()) for part in parts for row in part}
            assert held == {tuple(row.flatten().tolist()) for row in tensor}
    if ranks == 2:
        assert max(read) <= 1.05 * sum(read) / ranks


@pytest.mark.parametrize("family, groups", [("qwen3.5", 16), ("granite", 1), ("falcon", 1)])
def test_ranks_hold_their_share_of_wide_models(family, groups):
    """B and C of one group lie on every rank, and are few where a model is wide."""
    tiny = hybrid_config(family=family)
    sizes = dict(value_heads=48, key_heads=groups, key_dim=128, value_dim=64)
    wide = dict(hidden_size=2048, intermediate_size=8192, num_heads=16, num_kv_heads=4)
    config = replace(tiny, **wide, head_dim=128, recurrent=replace(tiny.recurrent, **sizes))
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, width=512, shared=1024))
    for ranks in (2, 4):
        own = [share_of(config, rank, ranks).parameters for rank in range(ranks)]
        assert max(own) <= 1.05 * config.parameters / ranks


@pytest.mark.parametrize(
    "family, ranks, changes, said",
    [
        ("qwen3.5", 5, dict(heads=8), "at most 4 for 4 value heads over 2 key heads"),
        ("granite", 7, dict(heads=8), "at most 6 for 6 recurrent heads over 2 groups"),
    ],
)
def test_more_ranks_than_heads_of_the_state_are_refused(family, ranks, changes, said):
    with pytest.raises(SettingError, match=said):
        share_of(hybrid_config(family=family, **changes), 0, ranks)


def test_blocks_of_mxfp4_are_not_cut(folder_of):
    """128 columns are four blocks of 32; six ranks would cut some."""
    with pytest.raises(SettingError, match="at most 4: an expert's width of 128 is stored in bl"):
        share_of(replace(model_files(folder_of("gpt-oss-mxfp4")).config(None), num_heads=8), 0, 6)


@pytest.mark.parametrize("widths", [(1, 1), (7, 64), (65, 1, 3), (31, 32, 33, 1)])
@pytest.mark.parametrize("rows", [1, 13])
def test_means_over_ranks_are_those_of_the_whole(widths, rows):
    """Against float64, beside plain torch over the whole width."""
    draw = torch.Generator().manual_seed(sum(widths) + rows)
    x = torch.randn(1, rows, sum(widths), generator=draw) * 3 + 100
    parts = x.split(widths, -1)
    left = torch.stack([torch.stack(torch.var_mean(p, -1, correction=0)[::-1]) for p in parts])
    exact = x.double()
    for part in parts:
        mean, spread = DividedSpread(lambda own: left, widths)(part)
        wrong = (mean - exact.mean(-1, keepdim=True)).abs().max()
        assert (
            wrong
            <= 2 * (x.mean(-1, keepdim=True) - exact.mean(-1, keepdim=True)).abs().max() + 1e-5
        )
        deviation = exact.std(-1, keepdim=True, correction=0)
        assert torch.allclose(spread.double(), deviation, rtol=1e-5, atol=1e-6)
    # two norms, of which every rank has a part of the first and all ranks but one repeat the other
    squares = torch.stack([p.square().sum(-1) for p in parts])
    brought = []
    for number in range(len(parts)):
        own = torch.stack([squares[number], squares[0]], -1)
        norms = DividedMean(brought.append, (sum(widths), 5), (0, 1), (True, number == 0))
        with pytest.raises(TypeError):  # `append` returns nothing to go on with
            norms(own)
    norms = DividedMean(lambda own: sum(brought), (sum(widths), 5), (0, 1), (True, False))
    found = norms(torch.stack([squares[0], squares[0]], -1))
    want = torch.stack([exact.square().mean(-1), parts[0].double().square().sum(-1) / 5], -1)
    assert torch.allclose(found.double(), want, rtol=1e-6)
    assert math.prod(found.shape) == 2 * rows
