"""The checkpoint: found, checked both ways, and streamed exactly, within one tensor's memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model.config.config import ModelConfig
from engine.model.tensors import ignored, targets
from tests.tiny_model import CONFIG, INDEX, SINGLE, joined, packed, sharded, sound, tensors
from weights.checkpoint import CHUNK, Checkpoint, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint

VARIANTS = {
    "plain": {},
    "deep": {"num_hidden_layers": 3},
    "tied": {"tie_word_embeddings": True},
    "head-dim": {"head_dim": 16},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
}
STREAMED = (torch.float32, torch.bfloat16, torch.float16)


def fused(weights, target):
    return torch.cat([weights[name] for name, _ in target.parts])


def opened(folder):
    config = ModelConfig.from_folder(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.require(targets(config), ignored(config))
    return checkpoint, targets(config)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_streams_what_was_stored(tmp_path, variant, shards):
    weights = sound(tmp_path, shards=shards, **VARIANTS[variant])
    checkpoint, wanted = opened(tmp_path)
    assert checkpoint.total_bytes == sum(t.nbytes for t in weights.values())
    found = dict(checkpoint.stream(wanted))
    assert found.keys() == {target.name for target in wanted}
    for target in wanted:
        assert (
            torch.equal(found[target.name], fused(weights, target))
            and found[target.name].is_contiguous()
        )


@pytest.mark.parametrize("stored", STREAMED)
@pytest.mark.parametrize("dtype", STREAMED)
def test_converts(tmp_path, stored, dtype):
    weights = sound(tmp_path, dtype=stored)
    checkpoint, wanted = opened(tmp_path)
    for (name, tensor), target in zip(
        sorted(checkpoint.stream(wanted, dtype=dtype)),
        sorted(wanted, key=lambda t: t.name),
        strict=True,
    ):
        assert name == target.name and tensor.dtype == dtype
        assert torch.equal(tensor, fused(weights, target).to(dtype))


@pytest.mark.parametrize("pad", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stored", STREAMED)
def test_data_off_its_alignment(tmp_path, stored, pad):
    """The format does not align data; a header of odd length must not move or crash anything."""
    weights = sound(tmp_path, dtype=stored)
    header, data = packed(weights)
    (tmp_path / SINGLE).write_bytes(joined(header, data, pad + (-len(json.dumps(header))) % 8))
    checkpoint, wanted = opened(tmp_path)
    for name, tensor in checkpoint.stream(wanted):
        assert torch.equal(
            tensor, fused(weights, next(t for t in wanted if t.name == name)).float()
        )


def test_chunk_borders(tmp_path):
    """Tensors of one chunk, a row less, a row more, and many chunks: each piece is copied once."""
    rows = CHUNK // (4 * 256)
    sizes = {"below": rows - 1, "exact": rows, "above": rows + 1, "many": 3 * rows + 7}
    weights = {
        name: torch.arange(n * 256, dtype=torch.float32).view(n, 256) for name, n in sizes.items()
    }
    (tmp_path / SINGLE).write_bytes(joined(*(_fast_packed(weights))))
    wanted = [Target("all", tuple((name, tuple(t.shape)) for name, t in reversed(weights.items())))]
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.require(wanted)
    ((_, tensor),) = checkpoint.stream(wanted)
    assert torch.equal(tensor, torch.cat(list(reversed(weights.values()))))
    weights["many"][-1, -1] = float("nan")  # in the last, short chunk
    (tmp_path / SINGLE).write_bytes(joined(*(_fast_packed(weights))))
    with pytest.raises(BadCheckpoint, match="tensor many: found NaN"):
        list(Checkpoint.open(tmp_path).stream(wanted))


def _fast_packed(weights):
    header, data = {}, bytearray()
    for name, tensor in weights.items():
        content = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    return header, bytes(data)


def test_handed_out_tensors_are_the_callers_own(tmp_path):
    weights = sound(tmp_path)
    checkpoint, wanted = opened(tmp_path)
    for _, tensor in checkpoint.stream(wanted):
        tensor.zero_()  # must reach neither the file nor a later tensor
    for name, tensor in checkpoint.stream(wanted):
        assert torch.equal(tensor, fused(weights, next(t for t in wanted if t.name == name)))


def test_file_order_whatever_the_order_of_targets(tmp_path):
    sound(tmp_path, shards=3, num_hidden_layers=2)
    checkpoint, wanted = opened(tmp_path)

    def place(name):
        info = checkpoint.tensors[next(t for t in wanted if t.name == name).parts[0][0]]
        return info.file, info.start

    names = [name for name, _ in checkpoint.stream(wanted[::-1])]
    assert names == sorted(names, key=place)


def test_progress_adds_up(tmp_path):
    sound(tmp_path, shards=3)
    checkpoint, wanted = opened(tmp_path)
    seen = []
    list(checkpoint.stream(wanted, progress=seen.append))
    assert len(seen) == 12 and seen[-1].bytes_done == seen[-1].bytes_total == checkpoint.total_bytes
    assert all(
        a.bytes_done < b.bytes_done and a.shard <= b.shard and a.seconds <= b.seconds
        for a, b in zip(seen, seen[1:], strict=False)
    )
    assert seen[0].shard == 1 and seen[-1].shard == seen[-1].shards == 3


def test_leftovers_of_old_exports_are_left_unread(tmp_path):
    """Stored inv_freq buffers and a tied lm_head are neither extra tensors nor part of the bytes to
    read.
    """
    weights = sound(tmp_path, tie_word_embeddings=True)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), float("nan"))
    weights["lm_head.weight"] = torch.zeros(64, 32)
    (tmp_path / SINGLE).write_bytes(joined(*packed(weights)))
    checkpoint, wanted = opened(tmp_path)
    seen = []
    list(checkpoint.stream(wanted, progress=seen.append))
    assert seen[-1].bytes_total == checkpoint.total_bytes - 16 - 64 * 32 * 4
    with pytest.raises(BadCheckpoint, match="inv_freq"):
        checkpoint.require(wanted)


def test_padded_embeddings_are_fine(tmp_path):
    from engine import LLM

    sound(tmp_path, tokens=40)  # 40 ids, 64 rows
    assert LLM(str(tmp_path), device="cpu", max_context=64).tokenizer.vocab_max_id == 39


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), torch.float32, "NaN or infinity"),
        (float("inf"), torch.bfloat16, "NaN or infinity"),
        (float("-inf"), torch.float16, "NaN or infinity"),
        (1e6, torch.float16, "beyond the range of float16"),
    ],
)
def test_finite_check(tmp_path, value, dtype, words):
    weights = sound(tmp_path)
    weights["lm_head.weight"][63, 31] = value
    (tmp_path / SINGLE).write_bytes(joined(*packed(weights)))
    checkpoint, wanted = opened(tmp_path)
    with pytest.raises(BadCheckpoint, match=f"lm_head.weight: found .*{words}, expected finite"):
        list(checkpoint.stream(wanted, dtype=dtype))
    assert len(list(checkpoint.stream(wanted, dtype=dtype, check_finite=False))) == len(wanted)


def test_largest_finite_values_pass(tmp_path):
    for stored in STREAMED:
        weights = sound(tmp_path, dtype=stored)
        weights["lm_head.weight"][:] = torch.finfo(stored).max
        (tmp_path / SINGLE).write_bytes(joined(*packed(weights)))
        checkpoint, wanted = opened(tmp_path)
        list(checkpoint.stream(wanted, dtype=stored))


def test_a_file_that_shrinks_after_the_check_is_refused(tmp_path):
    """A map beyond the end of a file would kill the process with SIGBUS instead."""
    sound(tmp_path)
    checkpoint, wanted = opened(tmp_path)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-4000])
    with pytest.raises(BadCheckpoint, match="changed while loading"):
        list(checkpoint.stream(wanted))


def test_closing_the_stream_early_lets_the_file_go(tmp_path):
    sound(tmp_path)
    checkpoint, wanted = opened(tmp_path)
    stream = checkpoint.stream(wanted)
    next(stream)
    stream.close()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / SINGLE) not in maps.read_text()


def hub_layout(tmp_path, shards=1):
    """A hub cache entry: snapshots/REV/file -> ../../blobs/HASH; returns (snapshot folder,
    weights).
    """
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    weights = sound(snapshot, shards=shards)
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"hash{i}")
        file.symlink_to(Path("..", "..", "blobs", f"hash{i}"))
    return snapshot, weights


@pytest.mark.skipif(os.name == "nt", reason="symlinks")
@pytest.mark.parametrize("shards", [1, 3])
def test_links_of_the_hub_cache_are_followed(tmp_path, shards, monkeypatch):
    snapshot, weights = hub_layout(tmp_path, shards)
    (tmp_path / "alias").symlink_to(snapshot)  # people link to snapshots
    monkeypatch.chdir(snapshot)
    for folder in (snapshot, tmp_path / "alias", Path(".")):
        checkpoint, wanted = opened(folder)
        assert sum(tensor.numel() for _, tensor in checkpoint.stream(wanted)) == sum(
            t.numel() for t in weights.values()
        )


@pytest.mark.skipif(os.name == "nt", reason="symlinks")
def test_links_inside_the_folder_work_and_others_do_not(tmp_path):
    folder = tmp_path / "m"
    sound(folder)
    (folder / "data").mkdir()
    (folder / SINGLE).rename(folder / "data" / "w")
    (folder / SINGLE).symlink_to(Path("data", "w"))
    opened(folder)
    for target in (tmp_path / "outside", Path("..", "outside")):
        (tmp_path / "outside").write_bytes((folder / "data" / "w").read_bytes())
        (folder / SINGLE).unlink()
        (folder / SINGLE).symlink_to(target)
        with pytest.raises(BadCheckpoint, match="expected a file inside the model's folder"):
            Checkpoint.open(folder)


@pytest.mark.skipif(os.name == "nt", reason="symlinks")
def test_a_blob_of_another_repository_is_outside(tmp_path):
    snapshot, _ = hub_layout(tmp_path)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / SINGLE).resolve().rename(other / "w")
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(other / "w")
    with pytest.raises(BadCheckpoint, match="symlink"):
        Checkpoint.open(snapshot)


def test_single_file_wins_over_an_index(tmp_path):
    """As transformers does: a folder with both holds the same model twice, or a stale index."""
    weights = sound(tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert Checkpoint.open(tmp_path).tensors.keys() == weights.keys()


def test_tensors_of_a_shard_that_the_index_forgets_count_as_extra(tmp_path):
    weights = sound(tmp_path)
    index = sharded(tmp_path, {**weights, "model.forgotten": torch.ones(3)}, 2)
    del index["weight_map"]["model.forgotten"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    words = "model.forgotten: found, but config.json describes no such tensor"
    with pytest.raises(BadCheckpoint, match=words):
        opened(tmp_path)


def test_quantised_is_said_before_missing(tmp_path):
    """GPTQ without a quantization_config: qweight instead of weight must not read as "tensor
    missing".
    """
    sound(tmp_path)
    header, data = packed(tensors())
    name = "model.layers.0.self_attn.q_proj."
    header[name + "qweight"] = {**header.pop(name + "weight"), "dtype": "I32"}
    (tmp_path / SINGLE).write_bytes(joined(header, data))
    with pytest.raises(
        UnsupportedCheckpoint,
        match="q_proj.qweight: quantised formats not supported yet: found dtype I32",
    ):
        opened(tmp_path)


PROBE = """
import json, sys
import torch
from pathlib import Path
from weights.checkpoint import Checkpoint, Target

def resident():  # MB of anonymous memory (what the machine cannot take back), and of mapped files
    lines = Path("/proc/self/status").read_text().splitlines()
    held = [line for line in lines if line.startswith(("RssAnon", "RssFile"))]
    return [int(line.split()[1]) / 1024 for line in held]

torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[1])
wanted = [Target(name, ((name, info.shape),)) for name, info in checkpoint.tensors.items()]
# the first use of torch's kernels maps and allocates
list(checkpoint.stream(wanted[:1], dtype=torch.bfloat16))
every = [(dtype, keep) for keep in (False, True) for dtype in (torch.bfloat16, torch.float32)]
for dtype, keep in every:
    before, peak, kept = resident(), resident(), []
    def look(_):
        peak[:] = map(max, peak, resident())
    for name, tensor in checkpoint.stream(wanted, dtype=dtype, progress=look):
        look(None)
        if keep:
            kept.append(tensor)
        del tensor
    print(json.dumps([dtype.itemsize, keep, *(p - b for p, b in zip(peak, before))]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_of_a_load(tmp_path):
    """96 MB of float32 in 6 tensors: one tensor at a time when they are dropped; the weights and no
    more when kept.
    """
    elements, count = 4 << 20, 6
    (tmp_path / SINGLE).write_bytes(
        joined(*_fast_packed({f"t{i}": torch.ones(elements) for i in range(count)}))
    )
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    # the threshold: glibc would keep up to 64 MB of freed tensors in its heap
    assert done.returncode == 0, done.stderr
    for itemsize, keep, anonymous, mapped in map(json.loads, done.stdout.splitlines()):
        tensor = itemsize * elements / 2**20
        most = (count if keep else 1) * tensor + 6  # 6 MB: a chunk, and the interpreter's own
        assert anonymous <= most, (itemsize, keep, anonymous, most)
        # the map is let go behind the reader, chunk by chunk
        assert mapped <= 6, (itemsize, keep, mapped)


@pytest.mark.parametrize("module", ["weights.checkpoint", "weights.resolve", "weights.aliases"])
def test_imports_stay_light(module):
    """Names and files need neither the hub's client nor the reference library; aliases not even
    torch.
    """
    heavy = ["huggingface_hub", "safetensors", "transformers", "requests", "httpx", "engine"]
    heavy += ["torch"] if module != "weights.checkpoint" else []
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_targets_name_what_an_independent_writer_writes(tmp_path):
    """tests/tiny_model.py does not know engine/model/llama.py: both must list the same tensors."""
    for variant in VARIANTS.values():
        config = ModelConfig.from_dict({**CONFIG, **variant})
        wanted = {name: tuple(shape) for target in targets(config) for name, shape in target.parts}
        assert wanted == {
            name: tuple(t.shape) for name, t in tensors({**CONFIG, **variant}).items()
        }
        assert sum(t.numel() for t in tensors({**CONFIG, **variant}).values()) == config.parameters


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-yarn", "mistral"])
def test_folders_that_transformers_writes(tmp_path, kind, shard):
    """Its config.json (with rope_parameters and no torch_dtype), its index, its shards: opened,
    checked, and equal.
    """
    transformers = pytest.importorskip("transformers")
    shape = {
        key: CONFIG[key]
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    }
    if kind == "mistral":
        model = transformers.MistralForCausalLM(
            transformers.MistralConfig(**shape, sliding_window=None)
        )
    else:
        rope = {
            "rope_theta": 5e5,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        extra = (
            {"rope_parameters": rope}
            if kind == "llama-yarn"
            else {"attention_bias": True, "mlp_bias": True}
        )
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, **extra, tie_word_embeddings=kind == "llama-tied")
        )
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "20KB")
    config = ModelConfig.from_folder(tmp_path)
    assert config.dtype == "bfloat16" and config.parameters == sum(
        p.numel() for p in model.parameters()
    )
    assert config.rope.kind == ("yarn" if kind == "llama-yarn" else "default")
    checkpoint, wanted = opened(tmp_path)
    for name, tensor in checkpoint.stream(wanted, dtype=torch.bfloat16):
        target = next(t for t in wanted if t.name == name)
        assert torch.equal(tensor, fused(model.state_dict(), target))
