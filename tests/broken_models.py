"""Malformed model folders, one for each thing that can be wrong, with the exit code and words of
its error line.

    python -m tests.broken_models DIR            writes all of them under DIR
    python -m tests.broken_models DIR --lines    and prints what the engine says to each
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny_model import (
    CONFIG,
    HEADER_FIELDS,
    INDEX,
    NORM,
    SINGLE,
    joined,
    packed,
    sharded,
    sound,
    tokenizer,
)

Build = Callable[[Path], object]  # writes a folder
Weights = dict[str, torch.Tensor]
EMBED = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Broken:
    """One malformed folder: how to make it, the exit code, and words that its line must hold."""

    name: str
    build: Build
    code: int
    words: tuple[str, ...]
    library: bool = True  # whether LLM refuses it, too: it runs without a tokenizer


def _config(**changes: object) -> Build:
    """Change config.json but not the weights; a value of ... removes the key."""

    def build(folder: Path) -> None:
        sound(folder)
        config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))

    return build


def _file(name: str, content: bytes | str | dict | None) -> Build:
    """Replace one file of a sound model: by bytes or text, by a dict as JSON, by nothing (None)."""

    def build(folder: Path) -> None:
        sound(folder)
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(content, dict):
            path.write_text(json.dumps(content))
        elif content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return build


def _header(change: Callable[[dict, bytes], bytes]) -> Build:
    """Rewrite the weights' file of a sound model with change(header, data) -> content."""

    def build(folder: Path) -> None:
        (folder / SINGLE).write_bytes(change(*packed(sound(folder))))

    return build


def _field(name: str, **fields: object) -> Build:
    """Change fields of one tensor's header entry."""

    def change(header: dict, data: bytes) -> bytes:
        header[name] |= fields
        return joined(header, data)

    return _header(change)


def _weights(change: Callable[[Weights], Weights]) -> Build:
    """Rewrite the weights of a sound model with change(weights) -> weights."""

    def build(folder: Path) -> None:
        weights = sound(folder)
        (folder / SINGLE).write_bytes(joined(*packed(change(weights))))

    return build


def _without(name: str) -> Build:
    return _weights(lambda weights: {key: tensor for key, tensor in weights.items() if key != name})


def _poison(name: str, value: float) -> Build:
    """Put one bad number in the middle of one tensor."""

    def change(weights: Weights) -> Weights:
        flat = weights[name].view(-1)
        flat[flat.numel() // 2] = value
        return weights

    return _weights(change)


def _index(change: Callable[[Path, dict], object]) -> Build:
    """Make three shards, then change(folder, index); a dict that it returns becomes the index."""

    def build(folder: Path) -> None:
        changed = change(folder, sharded(folder, sound(folder), 3))
        if changed is not None:
            (folder / INDEX).write_text(json.dumps(changed))

    return build


def _mapped(name: str, file: object) -> Build:
    """Make the index claim that `name` lies in `file`."""
    return _index(lambda folder, index: {"weight_map": {**index["weight_map"], name: file}})


def _shard(name: str, content: bytes) -> Build:
    """Make three shards and replace the content of one file."""

    def change(folder: Path, index: dict) -> None:
        (folder / name).write_bytes(content)

    return _index(change)


def _link(name: str, target: str) -> Build:
    """Make three shards and replace one file by a symlink."""

    def change(folder: Path, index: dict) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return _index(change)


def _outside(folder: Path) -> None:
    """Make one shard a symlink to a sound file beside the model's folder."""
    shard = "model-00002-of-00003.safetensors"
    sharded(folder, sound(folder), 3)
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / shard).read_bytes())
    (folder / shard).unlink()
    (folder / shard).symlink_to(outside)


def _only(name: str | None, content: bytes = b"x") -> Build:
    """Make a folder with config and tokenizer, and this file instead of weights."""

    def build(folder: Path) -> None:
        sound(folder)
        (folder / SINGLE).unlink()
        if name:
            (folder / name).write_bytes(content)

    return build


def _duplicate(header: dict, data: bytes) -> bytes:
    text = json.dumps(header)
    return joined((text[:-1] + ", " + text[1:]).encode(), data)


def _pipe(folder: Path) -> None:
    sound(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _as_folder(folder: Path) -> None:
    sound(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def _loop(folder: Path) -> None:
    sound(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def _quantised(dtype: str) -> Build:
    """Store every linear weight in one byte per element, as some exports do while config.json does
    not say so.
    """

    def change(header: dict, data: bytes) -> bytes:
        out, bytes_out = {}, b""
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            small = name.endswith("proj.weight")
            content = data[begin:end:4] if small else data[begin:end]
            kind = dtype if small else entry["dtype"]
            values = (kind, entry["shape"], [len(bytes_out), len(bytes_out) + len(content)])
            out[name] = dict(zip(HEADER_FIELDS, values, strict=True))
            bytes_out += content
        return joined(out, bytes_out)

    return _header(change)


def _hole(header: dict, data: bytes) -> bytes:
    """Leave 64 bytes that no tensor owns after the first one."""
    for name in list(header)[1:]:
        header[name]["data_offsets"] = [offset + 64 for offset in header[name]["data_offsets"]]
    first = next(iter(header.values()))["data_offsets"][1]
    return joined(header, data[:first] + bytes(64) + data[first:])


def _slow_tokenizer(folder: Path) -> None:
    sound(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def _tekken(folder: Path) -> None:
    sound(folder)
    (folder / "tokenizer.json").rename(folder / "tekken.json")


# A post-processor that names a token it does not define: the tokenizers library panics (not raises)
# at the first use.
PANIC = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {},
    "single": [
        {"SpecialToken": {"id": "<nope>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
EXL2 = {"quant_method": "exl2", "bits": 4}
SHARD = "model-00002-of-00003.safetensors"
LINUX = hasattr(os, "mkfifo")

BROKEN: list[Broken] = [
    Broken("no-folder", lambda folder: None, 2, ("no such folder",)),
    Broken(
        "a-file", lambda folder: folder.write_text("x"), 2, ("found a file", "expected a folder")
    ),
    Broken("empty-folder", lambda folder: folder.mkdir(), 1, ("config.json", "missing")),
    # config.json as a file
    Broken("config-missing", _file("config.json", None), 1, ("config.json", "missing")),
    Broken("config-empty", _file("config.json", b""), 1, ("config.json", "not valid JSON")),
    Broken("config-text", _file("config.json", "hello"), 1, ("config.json", "not valid JSON")),
    Broken(
        "config-binary",
        _file("config.json", b"\xff\xfe\x00{"),
        1,
        ("config.json", "not valid JSON"),
    ),
    Broken(
        "config-list",
        _file("config.json", "[1]"),
        1,
        ("config.json", "found a JSON list", "expected an object"),
    ),
    Broken(
        "config-deep", _file("config.json", "[" * 99999), 1, ("config.json", "nested too deeply")
    ),
    Broken(
        "config-twice",
        _file("config.json", '{"vocab_size": 1, "vocab_size": 2}'),
        1,
        ("vocab_size", "twice"),
    ),
    Broken("config-loop", _loop, 1, ("config.json", "symbolic links")),
    Broken("config-is-folder", _as_folder, 1, ("config.json", "found a folder", "expected a file")),
    *(
        [Broken("config-is-pipe", _pipe, 1, ("config.json", "no regular file", "expected a file"))]
        if LINUX
        else []
    ),
    # config.json's fields
    Broken(
        "size-missing",
        _config(hidden_size=...),
        1,
        ("config.json", "hidden_size", "found nothing", "an integer from 1"),
    ),
    Broken(
        "size-null",
        _config(vocab_size=None),
        1,
        ("config.json", "vocab_size", "found nothing", "an integer"),
    ),
    Broken(
        "size-negative",
        _config(num_hidden_layers=-1),
        1,
        ("num_hidden_layers", "found -1", "from 1 to"),
    ),
    Broken(
        "size-text",
        _config(intermediate_size="48"),
        1,
        ("intermediate_size", "found 48", "an integer"),
    ),
    Broken(
        "size-fraction", _config(hidden_size=32.0), 1, ("hidden_size", "found 32.0", "an integer")
    ),
    Broken(
        "size-absurd",
        _config(vocab_size=10**12),
        1,
        ("vocab_size", "found 1000000000000", "to 16777216"),
    ),
    Broken(
        "kv-heads",
        _config(num_key_value_heads=3),
        1,
        ("num_key_value_heads", "found 3", "num_attention_heads = 4"),
    ),
    Broken(
        "heads",
        _config(num_attention_heads=5, num_key_value_heads=5),
        1,
        ("num_attention_heads", "found 5", "divisor of hidden_size = 32"),
    ),
    Broken("head-dim-odd", _config(head_dim=7), 1, ("head_dim", "found 7", "an even number")),
    Broken("eps-zero", _config(rms_norm_eps=0), 1, ("rms_norm_eps", "found 0", "above 0")),
    Broken(
        "theta-nan",
        _config(rope_theta=float("nan")),
        1,
        ("rope_theta", "found nan", "expected a number"),
    ),
    Broken(
        "tied-text",
        _config(tie_word_embeddings="yes"),
        1,
        ("tie_word_embeddings", "found yes", "true or false"),
    ),
    Broken(
        "rope-unknown",
        _config(rope_scaling={"type": "longrope"}),
        1,
        ("rope_scaling.type", "longrope", "yarn"),
    ),
    Broken(
        "rope-factor",
        _config(rope_scaling={"type": "linear", "factor": 0}),
        1,
        ("rope_scaling.factor", "found 0"),
    ),
    Broken(
        "rope-field-missing",
        _config(rope_scaling=LLAMA3),
        1,
        ("rope_scaling.low_freq_factor", "found nothing"),
    ),
    Broken(
        "rope-text",
        _config(rope_parameters="yarn"),
        1,
        ("rope_parameters", "found yarn", "an object"),
    ),
    Broken(
        "architecture",
        _config(architectures=["GPT2LMHeadModel"]),
        1,
        ("GPT2LMHeadModel", "LlamaForCausalLM"),
    ),
    Broken(
        "activation", _config(hidden_act="gelu"), 1, ("hidden_act", "found gelu", "expected silu")
    ),
    Broken(
        "sliding-window",
        _config(sliding_window=128),
        1,
        ("sliding_window", "found 128", "expected null"),
    ),
    Broken(
        "exl2", _config(quantization_config=EXL2), 1, ("quantised formats not supported yet: exl2",)
    ),
    Broken(  # whose tensors are floats: sound, but for what a group divides
        "gptq-group",
        _config(quantization_config={**GPTQ, "group_size": 0}),
        1,
        ("quantization_config.group_size", "found 0"),
    ),
    Broken(
        "gptq-bits",
        _config(quantization_config={**GPTQ, "bits": 3}),
        1,
        ("quantization_config.bits", "found 3", "4, 8"),
    ),
    Broken(
        "mlx", _config(quantization={"bits": 4}), 1, ("quantised formats not supported yet: mlx",)
    ),
    Broken(
        "stored-fp8",
        _config(torch_dtype="float8_e4m3fn"),
        1,
        ("torch_dtype", "found float8_e4m3fn", "bfloat16"),
    ),
    Broken("eos-beyond", _config(eos_token_id=64), 1, ("eos_token_id", "found 64", "from 0 to 63")),
    Broken(
        "generation-text",
        _file("generation_config.json", "eos"),
        1,
        ("generation_config.json", "not valid JSON"),
    ),
    Broken(
        "generation-eos",
        _file("generation_config.json", {"eos_token_id": ["</s>"]}),
        1,
        ("generation_config.json", "eos_token_id", "found </s>", "an id from 0 to 63"),
    ),
    # one safetensors file
    Broken("no-weights", _only(None), 1, ("found no weights", "expected model.safetensors")),
    Broken(
        "pickle-only",
        _only("pytorch_model.bin"),
        1,
        ("pytorch_model.bin", "pickle", "expected model.safetensors"),
    ),
    Broken(
        "gguf-only", _only("model.Q4_K_M.gguf"), 1, ("model.Q4_K_M.gguf", "not supported yet: gguf")
    ),
    Broken("shard-without-index", _only(SHARD), 1, (SHARD, "without an index")),
    Broken(
        "zero-bytes",
        _file(SINGLE, b""),
        1,
        (SINGLE, "found 0 bytes", "expected a safetensors file"),
    ),
    Broken("seven-bytes", _file(SINGLE, b"1234567"), 1, (SINGLE, "found 7 bytes")),
    Broken(
        "header-absurd",
        _file(SINGLE, b"\xff" * 64),
        1,
        (SINGLE, f"header of {2**64 - 1} bytes", "at most 100000000"),
    ),
    Broken(
        "header-cut",
        _file(SINGLE, (5000).to_bytes(8, "little") + b"{}"),
        1,
        (SINGLE, "truncated", "5000"),
    ),
    Broken(
        "header-text", _file(SINGLE, joined(b"<html>not found</html>", b"")), 1, (SINGLE, "no JSON")
    ),
    Broken(
        "header-list",
        _file(SINGLE, joined(b"[]", b"")),
        1,
        (SINGLE, "found a JSON list", "an object"),
    ),
    Broken("header-twice", _header(_duplicate), 1, (SINGLE, "given twice", "once")),
    Broken(
        "header-entry",
        _header(lambda h, d: joined({**h, NORM: 5}, d)),
        1,
        (NORM, "found 5", "an object"),
    ),
    Broken(
        "data-cut",
        _header(lambda h, d: joined(h, d[:-100])),
        1,
        (SINGLE, "lm_head.weight", "truncated?"),
    ),
    Broken(
        "data-extra",
        _header(lambda h, d: joined(h, d + b"xyz")),
        1,
        (SINGLE, "3 bytes after the last", "none"),
    ),
    Broken(
        "offsets-overlap",
        _field(NORM, data_offsets=[0, 128]),
        1,
        ("data_offsets", "overlaps", "expected"),
    ),
    Broken("offsets-hole", _header(_hole), 1, (SINGLE, "leaves a hole", "found begin", "expected")),
    Broken(
        "offsets-backwards",
        _field(NORM, data_offsets=[256, 128]),
        1,
        (NORM, "[256, 128]", "begin <= end"),
    ),
    Broken(
        "offsets-negative",
        _field(NORM, data_offsets=[-128, 0]),
        1,
        (NORM, "[-128, 0]", "begin <= end"),
    ),
    Broken(
        "shape-overflow",
        _field(NORM, shape=[2**62, 2**62]),
        1,
        (NORM, "found 128 bytes", "expected"),
    ),
    Broken(
        "shape-negative",
        _field(NORM, shape=[-32]),
        1,
        (NORM, "shape", "found [-32]", "a list of sizes"),
    ),
    Broken("shape-bytes", _field(NORM, shape=[31]), 1, (NORM, "found 128 bytes", "expected 124")),
    Broken("dtype-unknown", _field(NORM, dtype="F7"), 1, (NORM, "dtype", "found F7", "BF16")),
    Broken(
        "dtype-fp8",
        _quantised("F8_E4M3"),
        1,
        (Q, "quantised formats not supported yet", "F8_E4M3", "BF16"),
    ),
    Broken(
        "dtype-int8", _quantised("I8"), 1, (Q, "quantised formats not supported yet", "I8", "BF16")
    ),
    # tensors against the config
    Broken("tensor-missing", _without(Q), 1, (Q, "found nothing", "expected shape [32, 32]")),
    Broken(
        "tensor-extra",
        _weights(lambda w: {**w, "model.extra": torch.ones(2)}),
        1,
        (SINGLE, "model.extra", "no such"),
    ),
    Broken(
        "bias-unexpected",
        _weights(lambda w: {**w, Q[:-6] + "bias": torch.ones(32)}),
        1,
        ("q_proj.bias", "no such"),
    ),
    Broken(
        "tensor-shape",
        _config(intermediate_size=64),
        1,
        ("gate_proj.weight", "shape [48, 32]", "expected [64, 32]"),
    ),
    Broken("lm-head-missing", _without("lm_head.weight"), 1, ("lm_head.weight", "tie_word")),
    Broken(
        "layer-missing",
        _config(num_hidden_layers=2),
        1,
        ("model.layers.1.", "found nothing", "9 missing"),
    ),
    Broken(
        "value-nan", _poison(Q, float("nan")), 1, (SINGLE, Q, "NaN or infinity", "expected finite")
    ),
    Broken(
        "value-inf",
        _poison(NORM, float("-inf")),
        1,
        (SINGLE, NORM, "NaN or infinity", "expected finite"),
    ),
    # index and shards
    Broken("index-text", _shard(INDEX, b"{"), 1, (INDEX, "not valid JSON")),
    Broken(
        "index-no-map",
        _index(lambda f, i: {"metadata": {}}),
        1,
        (INDEX, "weight_map", "found nothing", "an object"),
    ),
    Broken("index-number", _mapped(Q, 3), 1, (INDEX, Q, "found 3", "beside the index")),
    Broken(
        "index-parent",
        _mapped(Q, "../outside.safetensors"),
        1,
        (INDEX, Q, "../outside", "beside the index"),
    ),
    Broken(
        "index-absolute",
        _mapped(Q, "/etc/x.safetensors"),
        1,
        (INDEX, Q, "/etc/x.safetensors", "beside the index"),
    ),
    Broken(
        "index-pickle",
        _mapped(Q, "pytorch_model.bin"),
        1,
        (INDEX, "pytorch_model.bin", ".safetensors file"),
    ),
    Broken(
        "index-absent-tensor",
        _mapped("model.ghost", SHARD),
        1,
        (INDEX, "model.ghost", f"found {SHARD}", "expected"),
    ),
    Broken(
        "index-wrong-shard", _mapped(EMBED, SHARD), 1, (INDEX, EMBED, f"found {SHARD}", "expected")
    ),
    Broken(
        "shard-missing",
        _index(lambda f, i: (f / SHARD).unlink()),
        1,
        (SHARD, "missing shard", "found 2 of the 3"),
    ),
    Broken("shard-zero", _shard(SHARD, b""), 1, (SHARD, "found 0 bytes")),
    Broken("shard-loop", _link(SHARD, SHARD), 1, (SHARD, "symbolic links")),
    Broken("shard-dangling", _link(SHARD, "nowhere.safetensors"), 1, (SHARD, "dangling symlink")),
    Broken("shard-outside", _outside, 1, (SHARD, "symlink to", "inside the model's folder")),
    Broken(
        "shard-repeats",
        _shard(SHARD, joined(*packed({EMBED: torch.ones(64, 32)}))),
        1,
        (SHARD, EMBED, "found also in model-00001-of-00003.safetensors", "expected once"),
    ),
    # tokenizer
    Broken(
        "tokenizer-missing",
        _file("tokenizer.json", None),
        1,
        ("tokenizer.json", "found nothing", "expected"),
        library=False,
    ),
    Broken("tokenizer-tekken", _tekken, 1, ("tokenizer.json", "only tekken.json", "make it")),
    Broken("tokenizer-empty", _file("tokenizer.json", b""), 1, ("tokenizer.json",)),
    Broken("tokenizer-text", _file("tokenizer.json", "{]"), 1, ("tokenizer.json",)),
    Broken(
        "tokenizer-other",
        _file("tokenizer.json", {"model": {"type": "Magic"}}),
        1,
        ("tokenizer.json",),
    ),
    Broken(
        "tokenizer-panic",
        _file("tokenizer.json", {**tokenizer(60), "post_processor": PANIC}),
        1,
        ("tokenizer.json", "fails", "no entry found for key"),
    ),
    Broken(
        "tokenizer-settings",
        _file("tokenizer_config.json", "[1"),
        1,
        ("tokenizer_config.json", "not valid JSON"),
    ),
    Broken(
        "template-number",
        _file("tokenizer_config.json", {"chat_template": 5}),
        1,
        ("tokenizer_config.json", "chat_template", "found int", "expected"),
    ),
    Broken("tokenizer-slow", _slow_tokenizer, 1, ("tokenizer.json", "only tokenizer.model")),
    Broken(
        "calibration",
        _file("omnikv.json", {"format": 1, "filter_layers": [9]}),
        1,
        ("omnikv.json", "[9]", "expected"),
    ),
    Broken(
        "tokenizer-beyond",
        _file("tokenizer.json", tokenizer(65)),
        1,
        ("tokenizer.json", "found token id 64", "64"),
    ),
]


def cases() -> list[Broken]:
    """Return all cases, those of tests/broken_families.py included."""
    from tests.broken_families import BROKEN_FAMILIES

    return BROKEN + BROKEN_FAMILIES


def write(folder: Path) -> None:
    """Write every case to folder/NAME. `no-folder` and `a-file` leave no folder, on purpose."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases():
        case.build(folder / case.name)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} is not empty", file=sys.stderr)
        return 2
    write(folder)
    if "--lines" in arguments:
        from engine import LLM
        from engine.base.errors import EngineError

        for case in cases():
            try:
                LLM(str(folder / case.name), device="cpu", max_context=64)
                code, line = 0, "loaded"
            except EngineError as error:
                code, line = error.exit_code, str(error).replace(f"{folder}/", "")
            print(f"{case.name:20} {code}  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
