"""A rank on each GPU, as far as it shows without any: who asks for it and is refused, what each
rank plans for, which form and which graphs all take, and whole sessions over the calls of NCCL,
which Gloo carries here.
"""

import argparse
import json

import pytest
import torch
import torch.distributed as dist

from engine import LLM, Exact, Full, OmniKV, RankedLLM
from engine.base.errors import SettingError, UsageError
from engine.chat import cli as chat_cli
from engine.chat import flags as chat_flags
from engine.forward import layer as layer_forms
from engine.forward.layer import FusedLayer, TorchLayer, fusable
from engine.load.options import Options
from engine.ranks.collectives.cards import Asked, require_cards
from engine.ranks.llm import ranks_asked
from engine.ranks.place import places
from engine.ranks.placement import placement_text, placements
from engine.ranks.share_llm import ShareLLM
from engine.serve import flags as serve_flags
from kernels.layer.gemv import multiply_rows_ref
from kernels.layer.norm import normalize_rows_ref
from tests.builders import POCKET
from tests.engine.ranks.cards import ranks_on_cards
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.ranks.threads import Together
from tests.fake_gpu import FakeGPU

GB = 10**9
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model's folder."""
    return model_folder(tmp_path_factory.mktemp("cards") / "model")


@pytest.fixture
def two(monkeypatch):
    """A machine with two GPUs and NCCL."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return FakeGPU(monkeypatch, cards=2)


# ---------------------------------------------------------------- who asks


@pytest.mark.parametrize(
    "cards, nccl, count, said",
    [
        (0, True, 2, "found 2, but torch .* sees 0 GPUs here; use ranks=2 .--ranks 2., which"),
        (1, True, 2, "sees 1 GPU here; use ranks=2"),
        (2, True, 4, r"sees 2 GPUs here; use gpus=2 .--gpus 2., or ranks=4"),
        (2, False, 2, r"has no NCCL, which PyTorch has on Linux alone; devices= .--devices 0,1."),
        (2, True, 1, "gpus: found 1, expected an int from 2 to 64"),
        (2, True, True, "gpus: found True"),
    ],
)
def test_a_machine_that_cannot_is_said_with_the_remedy(monkeypatch, cards, nccl, count, said):
    FakeGPU(monkeypatch, cards=cards)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(SettingError, match=said) as error:
        require_cards(count)
    assert "\n" not in str(error.value)


def test_a_machine_that_can_is_let_through(two):
    require_cards(2)
    assert Asked.of(None, 2, None) == Asked(2, True)
    assert Asked.of(None, 2, None, "cuda") == Asked(2, True)


def test_without_gpus_nothing_is_asked_of_cards(monkeypatch):
    FakeGPU(monkeypatch, cards=0)
    assert Asked.of(None, None, None) == Asked(2, False)
    assert Asked.of(3, None, None) == Asked(3, False)
    assert Asked.of(None, None, 4) == Asked(4, False)  # torchrun's, on the cores
    assert Asked.of(None, 8, None, imagined=True) == Asked(8, True)


def test_torchrun_takes_the_gpus_that_there_are(two):
    assert Asked.of(None, None, 2) == Asked.of(2, 2, 2) == Asked(2, True)
    assert Asked.of(None, None, 4, "cpu") == Asked(4, False)
    with pytest.raises(SettingError, match="found 4, but torch .* sees 2 GPUs"):
        Asked.of(None, None, 4)
    with pytest.raises(SettingError, match="gpus: found 3 under torchrun, which started 2"):
        Asked.of(None, 3, 2)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(ranks=3, gpus=2), "gpus: found 2 beside ranks=3; leave one"),
        (dict(gpus=2, numa=True), "numa: found True beside gpus=2"),
        (dict(gpus=2, device="cpu"), "device: found 'cpu' beside gpus=2, which takes cuda:0 to cu"),
        (dict(gpus=2, device="cuda:1"), "device: found 'cuda:1' beside gpus=2"),
        (dict(gpus=2, devices=["cpu", "cpu"]), "devices: found .* beside gpus=2"),
        (dict(gpus=2), r"gpus: found 2, but torch .* sees 0 GPUs here; use ranks=2"),
    ],
)
def test_settings_that_do_not_go_with_gpus_are_refused_in_a_line(folder, settings, said):
    with pytest.raises(SettingError, match=said) as error:
        RankedLLM(folder, load=False, **settings)
    assert "\n" not in str(error.value)


PLANNED = dict(imagined_gpu=80 * GB, imagined_host=64 * GB)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(method=Exact(OmniKV(filter_layers=(1, 4)))), "method: found exact with a rank on ea"),
        (dict(split_by="context"), "split_by: found 'context' with a rank on each GPU"),
        (dict(weights_offload=3), "weights_offload: found 3 with 2 ranks"),
        (dict(compile=True), "compile: found True with 2 ranks"),
        (dict(forever=True), "forever: found True with 2 ranks"),
    ],
)
def test_what_ranks_on_gpus_do_not_do_is_refused_in_a_line(folder, settings, said):
    with pytest.raises(SettingError, match=said) as error:
        RankedLLM(folder, gpus=2, load=False, **{**PLANNED, **settings})
    assert "\n" not in str(error.value)


def test_more_gpus_than_query_heads_are_refused(folder):
    with pytest.raises(SettingError, match="at most 8 for 8 query heads over 2 K/V heads"):
        RankedLLM(folder, gpus=9, load=False, **PLANNED)


def test_ranks_on_cores_say_how_they_come_to_gpus(folder, two):
    with pytest.raises(SettingError, match=r"device='cpu', or gpus=2 .--gpus 2."):
        RankedLLM(folder, 2, load=False)


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("program", [chat_flags, serve_flags], ids=["chat", "serve"])
@pytest.mark.parametrize(
    "flags, said",
    [
        ("--gpus 2 --ranks 2", "--gpus: found beside --ranks"),
        ("--gpus 2 --numa auto", "--gpus: found beside --numa"),
        ("--gpus 2 --devices 0,1", "--gpus: found beside --devices; layers or heads"),
        ("--gpus 2 --device cpu", "--gpus: found beside --device cpu; it takes the first 2 GPUs"),
        ("--gpus 2 --split-by context", "--split-by: found context"),
        ("--gpus 2 --forever", "--forever: works on one process; leave it or --gpus out"),
    ],
)
def test_wrong_flags_are_said_in_a_line(program, flags, said):
    args = program.parser().parse_args(flags.split())
    with pytest.raises(UsageError) as error:
        program.require_sense(args)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_flags_ask_for_as_many_processes_as_gpus(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMNIKV_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_asked(None, "off", 4) == 4 and ranks_asked(None, "off") == 0


def test_a_chat_without_gpus_ends_with_one_line(capsys):
    assert chat_cli.main(["--gpus", "2", "-p", "a"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --gpus: found 2, but torch ") and "--ranks 2" in line


# ---------------------------------------------------------------- what each rank plans for


def test_a_plan_for_gpus_that_are_not_here_says_what_each_holds(capsys):
    flags = ["--gpus", "2", "--plan", "--json", "--fits", "24+64", "--ctx", "4K"]
    assert chat_cli.main(flags) == 0
    first, second = json.loads(capsys.readouterr().out)["ranks"]
    assert [one["device"] for one in (first, second)] == ["cuda:0", "cuda:1"]
    assert first["heads"][1] == second["heads"][0] and not first["cores"]
    whole = LLM(POCKET, load=False, max_context=4096, device="cpu").plan()
    for name in ("weights", "context bank"):
        key = name.split()[-1]
        total = whole.bytes_of(name)
        assert 0.98 < (first[key] + second[key]) / total < 1.1  # norms lie on both


def test_each_card_s_share_of_host_memory_is_planned(folder):
    plans = {}
    for ranks in (2, 4):
        llm = RankedLLM(folder, gpus=ranks, load=False, **PLANNED, max_context=512)
        plans[ranks] = llm.plan()
        assert llm.options.weights_offload == "off"
        assert f"on cuda:{ranks - 1}" in placement_text(llm)
        assert [one.device for one in placements(llm)] == [f"cuda:{r}" for r in range(ranks)]
    assert plans[2].host_free == 2 * plans[4].host_free
    assert plans[2].free == plans[4].free  # a card each
    alone = LLM(folder, load=False, **PLANNED, max_context=512).plan()
    assert alone.host_free == 2 * plans[2].host_free


def test_the_context_fits_the_largest_share(tmp_path):
    """Of three K/V heads one rank holds one and the other two."""
    heads = dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=1 << 20)
    wide = model_folder(tmp_path / "model", **heads)
    given = dict(imagined_gpu=GB, imagined_host=GB, method=Full(), offload="device")
    llm = RankedLLM(wide, gpus=2, load=False, **given)
    each = [
        ShareLLM(wide, (rank, 2), cards=True, device="cuda:0", **given).max_context
        for rank in range(2)
    ]
    assert llm.max_context == min(each) < max(each)


def test_ranks_on_gpus_have_threads_and_no_cores_of_their_own(monkeypatch):
    monkeypatch.setattr("engine.ranks.place.allowed_cores", lambda: list(range(6)))
    bound, free = places(2, ""), places(2, "", bound=False)
    assert [one.threads for one in bound] == [one.threads for one in free] == [3, 3]
    assert all(one.cores for one in bound) and not any(one.cores for one in free)


# ---------------------------------------------------------------- forms and graphs


def test_steps_of_ranks_are_captured_and_never_compiled(folder):
    alone = LLM(folder, load=False, **SETTINGS).config
    share = ShareLLM(folder, (0, 2), **SETTINGS).config
    for options, captures in ((Options(), True), (Options(compile=False), False)):
        assert options.captures(alone, GPU) == options.compiles(alone, GPU) == captures
        assert options.captures(share, GPU) == captures and not options.compiles(share, GPU)
    assert not Options().captures(share, torch.device("cpu"))
    assert Options(compile=True).compiles(alone, torch.device("cpu"))


@pytest.mark.parametrize("size", [2, 3])
def test_sessions_over_the_calls_of_cards_are_those_of_one_process(folder, size):
    """Whole sessions, whose sums, lists and logits go through what serves a card; every rank gets
    the same bits.
    """
    method = OmniKV(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)

    def run(llm):
        with llm.session(method=method) as session:
            found, chosen = [session.prefill(ids_of(150))], []
            for token in ids_of(4, seed=9):
                found.append(session.decode(token))
                chosen.append({k: v.clone() for k, v in session.selections.items()})
            return torch.stack(found), chosen

    alone, lists = run(LLM(folder, method=Full(), **SETTINGS))
    many = Together(folder, size, ranks=ranks_on_cards(size), method=Full(), **SETTINGS)
    for ranks in many.ranks:
        assert ranks.card.nccl._group.calls == []
    each = many.each(run)
    for logits, chosen in each:
        assert float((logits - alone).abs().max()) < 1e-4
        assert torch.equal(logits, each[0][0])
        for mine, own in zip(chosen, lists, strict=True):
            assert mine.keys() == own.keys()
            assert all(torch.equal(mine[k], own[k]) for k in own)
    told = [[kind for kind, *_ in ranks.card.nccl._group.calls] for ranks in many.ranks]
    assert all(one == told[0] for one in told)  # in one order
    layers, filters = many.llms[0].config.num_layers, 2
    # a step: the embedding and two sums a layer, a list of each filter layer, the logits
    size = 2 + 2 * layers + filters
    step = told[0][-size:]
    assert step == told[0][-2 * size : -size] and step[0] == "add" and step[-1] == "list"
    assert step.count("list") == filters + 1


def test_our_own_form_of_a_layer_joins_what_ranks_multiply(folder, monkeypatch):
    """A residual is added once, to what all ranks have multiplied."""
    monkeypatch.setattr(layer_forms, "multiply_rows", multiply_rows_ref)
    monkeypatch.setattr(layer_forms, "normalize_rows", normalize_rows_ref)
    plain = {**SETTINGS, "method": Full(), "backend": "reference"}  # matrices as they are stored
    one, pair = LLM(folder, **plain), Together(folder, 2, **plain)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, one.config.hidden_size, generator=generator)
    attended = torch.randn(1, 3, one.config.num_heads, one.config.head_dim, generator=generator)
    torchs = TorchLayer(one.model, backend="cpu")
    want = torchs.after(2, x, attended)
    logits = torchs.logits(want)

    def run(llm):
        share, model = llm.config.share.heads, llm.loaded.model
        assert fusable(model)
        form = FusedLayer(model)
        found = form.after(2, x.clone(), attended[:, :, share.first : share.stop])
        return found, form.logits(found)

    for found, said in pair.each(run):
        assert float((found - want).abs().max()) < 1e-4
        assert said.shape == logits.shape and float((said - logits).abs().max()) < 1e-4


def test_all_ranks_capture_or_none(folder):
    pair = Together(folder, 2, method=Full(), **SETTINGS)

    def said(llm):
        loaded = llm.loaded
        return loaded.agreed(True), loaded.agreed(llm.place[0] == 0)

    assert pair.each(said) == [(True, False)] * 2
    runner = pair.each(lambda llm: llm.session())[0].runner
    assert not runner.joint_graphs
    with LLM(folder, method=Full(), **SETTINGS).session() as alone:
        assert alone.runner.joint_graphs


def test_the_form_of_a_step_is_one_for_all_ranks(folder, monkeypatch):
    pair = Together(folder, 2, method=Full(), **SETTINGS)
    for llm in pair.llms:
        monkeypatch.setattr(llm, "cards", True)
    forms = {0: FusedLayer, 1: TorchLayer}

    def form(llm, kinds):
        made = object.__new__(kinds[llm.place[0]])
        loaded = argparse.Namespace(halves=lambda backend: made)
        return llm._step_form(loaded, pair.ranks[llm.place[0]])

    assert pair.each(form, forms) == ["plain", "plain"]
    assert pair.each(form, {0: FusedLayer, 1: FusedLayer}) == ["fused", "fused"]
