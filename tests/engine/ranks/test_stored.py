"""Checkpoints that come quantised, over ranks: each rank reads what it holds and no more, what it
holds are the matrices of one process, and together they say what one process says. Ranks are
threads here.

Stops: a cut through a word, a block or a group; a scale of a neighbour; a row of q that was left
interleaved; columns in another order than what brings them; a rank that reads the whole file.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import LLM, Full
from engine.base.errors import BadCheckpoint, SettingError
from engine.load.files import model_files, packed_of
from engine.load.gguf.config import checkpoint as checkpoint_of
from engine.load.gguf.config import stored_name
from engine.model.config.share import Packed
from engine.model.share.divide import share_of
from engine.model.tensors import targets
from kernels.quant.matrix import Quantised
from kernels.quant.native import usable
from tests.builders import tiny_config, tiny_weights
from tests.engine.ranks.model import model_folder
from tests.engine.ranks.threads import Together
from tests.no_compiler import no_compiler
from tests.tools.gguf_files import llama_config, write_llama
from tests.weights.quantised_files import FORMATS, write
from weights.checkpoint import Cut, Mapped, Rows, Target
from weights.gguf.blocks import SIZES as BLOCK_SIZES
from weights.gguf.checkpoint import GGUFCheckpoint, Place
from weights.gguf.header import GGUF, KINDS, StoredTensor, read_header
from weights.quantised.checkpoint import STORED, QuantisedCheckpoint
from weights.quantised.format import Part
from weights.quantised.formats import format_of
from weights.quantised.stored import Stored
from weights.safetensors_file import TensorInfo

SIZES = dict(layers=2, heads=8, kv_heads=4, intermediate_size=256)
GIVEN = dict(dtype="float32", device="cpu", threads=1, method=Full())
CLOSE = 1e-4  # of float32 logits
READ = ("gptq", "gptq, 8 bits", "awq", "w4a16, asymmetric", "w8a8, one scale", "nf4, nested")
SAID = ("gptq", "gptq, 8 bits", "gptq, act-order", "awq", "w4a16, channels", "w8a16", "nf4")
SAID += ("bitsandbytes int8",)


def dense(part):
    return Quantised(*part).dense(torch.float32) if isinstance(part, Stored) else part


def near(found, want):
    return float((found - want).abs().max()) <= 1e-6 * float(want.abs().max())


@pytest.fixture
def counted(monkeypatch):
    """[bytes that were taken from files], apart from headers."""
    read = []
    take, raw = Mapped.take, QuantisedCheckpoint._raw

    def counting(self, *given):
        found = take(self, *given)
        read.append(found.numel())
        return found

    def all_of(self, info):
        read.append(info.nbytes)
        return raw(self, info)

    monkeypatch.setattr(Mapped, "take", counting)
    monkeypatch.setattr(QuantisedCheckpoint, "_raw", all_of)
    return read


def streamed(checkpoint, listed, **given):
    """({target: its parts}, bytes that it says it has read)."""
    seen = []
    found = dict(checkpoint.stream(listed, progress=seen.append, **given))
    assert seen[-1].bytes_done == seen[-1].bytes_total
    return found, seen[-1].bytes_done


def cuts_of(draw, rows, columns, group, count=6):
    """Hostile rows and whole groups of columns of a matrix."""
    for number in range(count):
        first, stop = sorted(draw.sample(range(rows + 1), 2)) if number else (0, 1)
        left, right = sorted(draw.sample(range(columns // group + 1), 2))
        yield Cut((rows, columns), first, stop)
        yield Cut((rows, columns), 0, rows, left * group, right * group)
        yield Cut((rows, columns), first, stop, left * group, right * group)


@pytest.mark.parametrize("name", FORMATS)
def test_some_rows_and_columns_are_those_of_the_matrix(tmp_path, counted, name):
    shape, (settings, pack) = (96, 192), FORMATS[name]
    stored, meant = pack(torch.randn(shape), 3)
    save_file(
        {"m" + end: t.contiguous() for end, t in stored.items()}, tmp_path / "model.safetensors"
    )
    format = format_of({"quantization_config": settings}, "here")
    checkpoint, draw = QuantisedCheckpoint(tmp_path, format), random.Random(name)
    form, order = format.form(shape), torch.arange(shape[1])
    if form.permuted:
        order = torch.argsort(stored[".g_idx"].long(), stable=True)
    group = 2 if form.group >= shape[1] else form.group
    whole = sum(t.numel() * t.element_size() for t in stored.values())
    for cut in cuts_of(draw, *shape, group):
        target = Target("0.down", (("m.weight", cut.shape),), cuts=(cut,))
        counted.clear()
        (parts,), read = streamed(checkpoint, [target])[0].values(), sum(counted)
        want = meant[cut.first : cut.stop]
        some = cut.right is not None and cut.right - cut.left < shape[1]
        if some:
            want = want[:, order[cut.left : cut.right]]
        assert near(dense(parts[0]), want)
        spoken = streamed(checkpoint, [target])[1]
        # an order of columns is looked at once more
        assert spoken == read - (4 * shape[1] if form.permuted and some else 0)
        assert spoken <= whole
    for some in (Rows(4, 24, 5, 17), Rows(6, 16, 0, 16, 8), Rows(1, 96, 95, 96)):
        count = len(some.numbers)
        target = Target("0.qkv", (("m.weight", (count, shape[1])),), rows=(some,))
        (parts,) = streamed(checkpoint, [target])[0].values()
        assert near(dense(parts[0]), meant[some.numbers])
        if not some.pairs and count > 2:
            cut = Cut((count, shape[1]), 1, count - 1)
            target = Target("0.qkv", (("m.weight", cut.shape),), rows=(some,), cuts=(cut,))
            (parts,) = streamed(checkpoint, [target])[0].values()
            assert near(dense(parts[0]), meant[some.numbers[1:-1]])


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_and_columns_of_blocks_are_those_of_the_matrix(tmp_path, counted, kind):
    pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
    config = llama_config(layers=1, heads=8, intermediate_size=1024, head_dim=32)
    meant = write_llama(tmp_path / "m.gguf", config, tiny_weights(config), kind)
    file, draw = read_header(tmp_path / "m.gguf"), random.Random(kind)
    group = {"Q6_K": 16, "F32": 1, "F16": 1, "BF16": 1}.get(kind, 32)
    order = (3, 0, 2, 1)
    at = "model.layers.0."
    places = {
        f"{at}self_attn.q_proj.weight": Place("blk.0.attn_q.weight", config.num_heads),
        f"{at}mlp.up_proj.weight": Place("blk.0.ffn_up.weight", rows=slice(32, 500)),
        f"{at}mlp.down_proj.weight": Place("blk.0.ffn_down.weight"),
        f"{at}mlp.gate_proj.weight": Place("blk.0.ffn_gate.weight", columns=order),
    }
    checkpoint = GGUFCheckpoint(file, places, "Llama")
    for name, place in places.items():
        want = torch.from_numpy(meant[name])
        if isinstance(place.rows, slice):
            want = want[place.rows]
        if place.columns:
            want = want.view(len(want), len(order), -1)[:, list(order)].flatten(1)
        for cut in cuts_of(draw, *want.shape, group, 3):
            counted.clear()
            target = Target("0.x", ((name, cut.shape),), cuts=(cut,))
            found, spoken = streamed(checkpoint, [target])
            mine = want[cut.first : cut.stop, cut.left : cut.right]
            assert near(dense(found["0.x"][0]), mine)
            assert spoken == sum(counted) <= file.tensors[place.name].nbytes
            if kind == "Q8_0" and not place.heads:  # not a byte beside the blocks
                assert spoken == mine.numel() // 32 * 34


def shares(path, ranks):
    """(bytes that one process reads, those of each rank, those that all ranks need)."""
    files = model_files(path)
    config = files.config(None)
    tensors = files.tensors(config)
    _, whole = streamed(tensors, targets(config))
    found, read = [], []
    for rank in range(ranks):
        own = share_of(config, rank, ranks)
        assert own.packed == config.packed
        parts, size = streamed(files.tensors(own), targets(own))
        held = sum(part.shape[0] for part in parts["embed"] if torch.is_tensor(part))
        assert held in (0, own.share.vocab.size)
        found.append(parts)
        read.append(size)
    ends = (".g_idx", "norm.weight", "quant_map", "nested_absmax", "bitsandbytes__nf4")
    stored = tensors.file.tensors if isinstance(tensors, GGUFCheckpoint) else tensors.tensors
    common = sum(info.nbytes for name, info in stored.items() if name.endswith(ends))
    return whole, read, common


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_its_share_of_a_checkpoint(tmp_path, counted, name, ranks):
    write(tmp_path / "m", name, **SIZES)
    whole, read, common = shares(tmp_path / "m", ranks)
    assert max(read) <= common + 1.05 * (whole - common) / ranks
    assert sum(counted) == whole + sum(read)


@pytest.mark.parametrize("kind, ranks", [("Q8_0", 2), ("Q4_0", 4), ("Q4_K", 2), ("Q6_K", 2)])
def test_a_rank_reads_its_share_of_a_file(tmp_path, counted, kind, ranks):
    """Of K-quants the blocks that a cut falls into are read by both: here none."""
    pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
    config = llama_config(heads=8, kv_heads=4, head_dim=64, intermediate_size=512)
    keys = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    write_llama(tmp_path / "m.gguf", config, tiny_weights(config), kind, keys=keys)
    whole, read, common = shares(tmp_path / "m.gguf", ranks)
    assert max(read) <= common + 1.05 * (whole - common) / ranks
    assert sum(counted) == whole + sum(read)


def wide(ranks, packed):
    """Two layers of the widths of Llama-3-8B: the whole's configuration, and each rank's."""
    sizes = dict(heads=32, kv_heads=8, hidden=4096, intermediate_size=14336, vocab_size=128256)
    config = replace(tiny_config(layers=2, **sizes), packed=packed)
    return config, [share_of(config, rank, ranks) for rank in range(ranks)]


def headers_of(name, config):
    """The headers of a checkpoint of such widths, and no file."""
    format, infos = format_of({"quantization_config": FORMATS[name][0]}, "here"), {}
    for target in targets(config):
        for part, shape in target.stored:
            base, found = part, {"": Part(("F32",), shape)}
            if "proj" in part:
                base = part.removesuffix(".weight")
                found = format.parts(base, shape, lambda name: not name.endswith("weight_g_idx"))
            for end, one in found.items():
                entries = [abs(size) for size in one.shape]
                size = math.prod(entries) * torch.empty(0, dtype=STORED[one.dtypes[0]]).itemsize
                infos[base + end] = TensorInfo(Path("none"), one.dtypes[0], one.shape, 0, size)
    checkpoint = QuantisedCheckpoint.__new__(QuantisedCheckpoint)
    checkpoint.folder, checkpoint.format, checkpoint.tensors = Path("none"), format, infos
    return checkpoint


@pytest.mark.parametrize("name", [name for name in FORMATS if "act-order" not in name])
def test_shares_of_wide_checkpoints_are_even(name):
    """By their headers. Blocks of fp8 that a cut of rows falls into are read by both ranks."""
    format = format_of({"quantization_config": FORMATS[name][0]}, "here")
    for ranks in (2, 4):
        config, own = wide(ranks, packed_of(format))
        assert (own[0].share.output is None) == ("ragged" not in name)
        checkpoint = headers_of(name, config)
        whole = checkpoint.bytes_of(targets(config))
        assert whole <= sum(info.nbytes for info in checkpoint.tensors.values())
        for config in own:
            assert checkpoint.bytes_of(targets(config)) <= 1.05 * whole / ranks


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q4_0", "Q6_K")])
def test_shares_of_wide_files_are_even(kinds):
    """By their headers: most matrices of one type, and v, down and the head of another."""
    for ranks in (2, 4, 8):
        config, own = wide(ranks, Packed(32, 256))
        found = {}
        for target in targets(config):
            for name, shape in target.stored:
                other = name.endswith(("v_proj.weight", "down_proj.weight", "lm_head.weight"))
                kind = "F32" if len(shape) == 1 else kinds[other]
                block, size = BLOCK_SIZES[kind]
                stored = stored_name(name)
                nbytes = math.prod(shape) // block * size
                found[stored] = StoredTensor(stored, shape, kind, 0, nbytes)
        file = GGUF(Path("none"), 1 << 40, {"general.architecture": "llama"}, found)
        whole = checkpoint_of(file, config).bytes_of(targets(config))
        assert whole == sum(tensor.nbytes for tensor in found.values())
        for config in own:
            assert checkpoint_of(file, config).bytes_of(targets(config)) <= 1.05 * whole / ranks


def said(llm, ids):
    """Logits of a prompt, and of a step."""
    with llm.session() as session:
        return torch.stack([session.prefill(ids), session.decode(7)])


def require_alike(path, ranks, **settings):
    """Require ranks to be as near the floats as one process is, to be planned to the byte, and to
    hold as much together, but for what several hold.
    """
    given = GIVEN | settings
    one = LLM(path, **given)
    most = min(67, one.config.max_positions - 1)
    ids = [3 + place % (one.config.vocab_size - 4) for place in range(most)]
    want = said(one, ids)
    exact = (
        want
        if given.get("weights") == "float"
        else said(LLM(path, **given | dict(weights="float")), ids)
    )
    off = float((want - exact).abs().max())
    together = Together(path, ranks, **given)
    for llm, found in zip(together.llms, together.each(said, ids), strict=True):
        assert float((found - exact).abs().max()) <= 2 * off + CLOSE
        assert not usable() or float((found - want).abs().max()) < CLOSE
        assert torch.equal(found.argmax(-1), want.argmax(-1))
        assert llm.plan().bytes_of("weights") == llm.model.nbytes
    return together


@pytest.mark.parametrize("name", SAID)
def test_quantised_checkpoints_are_as_near_their_floats_as_in_one_process(tmp_path, name):
    """Without C++ kernels products of few bits round their inputs, by what is in a row."""
    write(tmp_path / "m", name, **SIZES | dict(kv_heads=2))
    if name == "w4a16, channels" and not usable():  # held as int8 that is rounded by the row
        with pytest.raises(SettingError, match="a scale for a row, which a cut at columns"):
            Together(tmp_path / "m", 2, **GIVEN)
        return
    require_alike(tmp_path / "m", 2)
    require_alike(tmp_path / "m", 4, weights="float")


@pytest.mark.parametrize("kind, ranks", [("Q8_0", 4), ("Q4_K", 2), ("Q6_K", 4), ("Q4_1", 3)])
def test_gguf_files_say_what_one_process_says(tmp_path, kind, ranks):
    """Three ranks cut 512 columns between blocks; a layer's v and down are of other types there."""
    pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
    tied = kind == "Q8_0"
    config = llama_config(
        heads=8, kv_heads=4, head_dim=32, intermediate_size=512, tie_word_embeddings=tied
    )
    weights = tiny_weights(config)
    kinds = {"blk.1.attn_v.weight": "F16", "blk.0.ffn_down.weight": "Q5_0"} if ranks == 3 else {}
    without = ("output.weight",) if tied else ()
    write_llama(tmp_path / "m.gguf", config, weights, kind, kinds=kinds, without=without)
    require_alike(tmp_path / "m.gguf", ranks)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_files_of_hybrids_say_what_one_process_says(tmp_path, name):
    """Their value heads and experts lie in another order, or in one tensor."""
    hybrids = pytest.importorskip("tests.engine.model.test_gguf_hybrids")
    wide = {} if name == "qwen3.5" else dict(moe_intermediate_size=64)
    config, weights, _ = hybrids.made(tmp_path / "folder", name, **wide)
    hybrids.write(tmp_path / "m.gguf", hybrids.KINDS[name], config, weights, "Q8_0")
    require_alike(tmp_path / "m.gguf", 2)


def test_an_order_of_columns_is_held_without_one(tmp_path):
    """Of act-order `down` is cut by groups, and gate and up by the rows that bring them; `o` is cut
    by rows, and its product is a collective more.
    """
    config, _ = write(tmp_path / "m", "gptq, act-order", **SIZES)
    together = require_alike(tmp_path / "m", 4)
    for llm in together.llms:
        for layer in llm.model.layers:
            assert layer.down.inner.permutation is None and layer.down.inner.kind == "int4"
            assert layer.o.inner.permutation is not None
            assert layer.o.inner.shape == (config.hidden_size // 4, config.q_size)
            assert layer.gate_up.permutation is not None

    def step(llm):
        with llm.session() as session:
            session.prefill([3, 4, 5])
            before = llm._ranks.sent.calls, llm._ranks.sent.bytes
            session.decode(5)
            sent = llm._ranks.sent
            return sent.calls - before[0], sent.bytes - before[1]

    hidden, layers = config.hidden_size, config.num_layers
    rows = config.q_size // 4 + hidden // 4  # into o, and out of it
    for calls, size in together.each(step):
        assert calls == 2 + 3 * layers
        assert size == 4 * (hidden * (1 + layers) + rows * layers + config.vocab_size // 4)


def test_heads_that_a_group_holds_together_leave_the_output_by_rows(tmp_path):
    """Groups of 64 columns are two heads here, and each of four ranks has one."""
    write(tmp_path / "m", "gptq, version 2", layers=1, intermediate_size=256)
    together = require_alike(tmp_path / "m", 4)
    assert all(llm.config.share.output.size == 32 for llm in together.llms)
    two = Together(tmp_path / "m", 2, **GIVEN)
    assert all(llm.config.share.output is None for llm in two.llms)


@pytest.mark.parametrize("ranks, width", [(4, 224), (8, 256)])
def test_weights_that_are_rounded_to_groups_are_cut_between_them(tmp_path, ranks, width):
    """int4 in groups of 32: 224 columns of an MLP are 7 groups, and a head's 16 half of one."""
    folder = model_folder(tmp_path / "m", hidden_size=64, intermediate_size=width)
    together = require_alike(folder, ranks, weights="int4")
    assert (together.llms[0].config.share.output is None) == (ranks == 4)


@pytest.mark.parametrize(
    "name, ranks, said",
    [
        ("gptq, 8 bits", 8, "at most 4: an MLP's width of 256 is stored in blocks of 64 columns"),
        ("gptq, act-order", 16, "at most 8 for 8 query heads"),
    ],
)
def test_more_ranks_than_groups_are_refused(tmp_path, name, ranks, said):
    write(tmp_path / "m", name, layers=1, heads=8, intermediate_size=256)
    with pytest.raises(SettingError, match=said) as refused:
        Together(tmp_path / "m", ranks, **GIVEN)
    assert "\n" not in str(refused.value)


def test_a_row_of_one_group_is_dealt_out(tmp_path):
    """8 bits with an offset for a whole row have no product: their groups are halved, and torch's
    products, which do not take that, are refused.
    """
    write(tmp_path / "m", "gptq, 8 bits", layers=1, heads=8, intermediate_size=256)
    if usable():
        for llm in require_alike(tmp_path / "m", 4).llms:
            assert llm.model.layers[0].down.inner.group == 32
    with (
        no_compiler(),
        pytest.raises(SettingError, match="0.o would be held as int8 in groups") as no,
    ):
        Together(tmp_path / "m", 4, **GIVEN)
    assert "or groups; use float" in str(no.value) and "\n" not in str(no.value)


def test_more_ranks_than_blocks_of_a_file_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
    config = llama_config(layers=1, heads=8, intermediate_size=96, head_dim=32)
    write_llama(
        tmp_path / "m.gguf", config, tiny_weights(config), "Q8_0", kinds={"down.weight": "Q4_0"}
    )
    with pytest.raises(
        SettingError, match="at most 3: an MLP's width of 96 is stored in blocks of 32"
    ):
        Together(tmp_path / "m.gguf", 4, **GIVEN)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_file_that_was_cut_is_one_line(tmp_path, form):
    """Before its header is read, and after."""
    path = tmp_path / "m.gguf"
    if form == "folder":
        write(tmp_path, "awq", layers=1)
        path = tmp_path / "model.safetensors"
    else:
        pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
        config = llama_config(layers=1)
        write_llama(path, config, tiny_weights(config), "Q8_0")
    where = tmp_path if form == "folder" else path
    files = model_files(where)
    own = share_of(files.config(None), 1, 2)
    tensors, raw = files.tensors(own), path.read_bytes()
    path.write_bytes(raw[:-4000])
    with pytest.raises(BadCheckpoint, match="changed while") as late:
        dict(tensors.stream(targets(own)))
    with pytest.raises(BadCheckpoint) as early:
        Together(where, 2, **GIVEN)
    assert "\n" not in str(late.value) + str(early.value) and path.name in str(early.value)


def test_a_damaged_scale_is_found_by_the_rank_that_reads_it(tmp_path):
    def spoil(stored):
        stored["model.layers.0.mlp.up_proj.scales"][0, -1] = float("nan")

    write(tmp_path / "m", "awq", spoil, layers=1)
    files = model_files(tmp_path / "m")
    first, last = (share_of(files.config(None), rank, 2) for rank in range(2))
    streamed(files.tensors(first), targets(first))
    with pytest.raises(BadCheckpoint, match="up_proj: found NaN or infinity among its scales"):
        streamed(files.tensors(last), targets(last))
