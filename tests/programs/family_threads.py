"""What all cores gain over one for every family: prompts and decode steps of a few layers with
random weights, beside what memory gains in the same turn. A family whose layers ask torch for much
between our own products gains least, since torch's threads and ours share the cores.

Sizes are those of a small model (hidden size 768), so that a family takes seconds. Needs
transformers, which describes the families.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full
from engine.base.cores.free_cores import free_cores
from engine.base.errors import UsageError
from engine.load.files import Folder
from engine.model.tensors import random_stream
from tools.common.program import guarded, progress
from tools.families.models import configuration, word_tokenizer
from tools.speed.harness import READ, in_turns, machine, markdown, on_threads, read_rate

VOCAB = 4096
STEPS = 12  # of a turn
HIDDEN = dict(hidden_size=768, intermediate_size=2048, num_attention_heads=12, vocab_size=VOCAB)
PLAIN = dict(**HIDDEN, num_key_value_heads=4, head_dim=64)
MAMBA = dict(mamba_n_heads=24, mamba_d_head=64, mamba_d_state=64, mamba_n_groups=2)
EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512)
LATENT = dict(
    **HIDDEN,
    num_key_value_heads=12,
    kv_lora_rank=256,
    q_lora_rank=384,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
)
DELTA = dict(
    linear_num_value_heads=12,
    linear_num_key_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
# variant (tools/families/models.py): its sizes
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "ministral": PLAIN,
    "olmo2": PLAIN,
    "gemma3": PLAIN,
    "gemma3n": {**PLAIN, "vocab_size_per_layer_input": VOCAB},
    "qwen3-moe": {**PLAIN, **EXPERTS},
    "minimax-m2": {**PLAIN, "intermediate_size": 512},
    "gpt-oss": {
        **PLAIN,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 768,
    },
    "deepseek-v3": {
        **LATENT,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    "minicpm3": LATENT,
    "qwen3.5": {**PLAIN, **DELTA},
    "granite-hybrid": {
        **PLAIN,
        **MAMBA,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
    },
    "bamba": {**PLAIN, **MAMBA},
    "falcon-h1": {**PLAIN, **MAMBA, "mamba_d_ssm": 1536},
    "nemotron-h": {**PLAIN, "mamba_num_heads": 24, "mamba_head_dim": 64, "ssm_state_size": 64},
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.family_threads", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="families (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024], help="of prompts")
    parser.add_argument("--turns", type=int, default=3, help="of one thread and all (default 3)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights (default bfloat16)")
    return parser.parse_args(argv)


def model(name: str, dtype: str, context: int) -> LLM:
    """A family's model with random weights."""
    import transformers

    config = configuration(name, **FAMILIES[name], max_position_embeddings=8192)
    with torch.device("meta"):
        kind = type(transformers.AutoModelForCausalLM.from_config(config)).__name__
    described = {**json.loads(config.to_json_string()), "architectures": [kind]}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(described))
        word_tokenizer(folder, VOCAB)
        own = Folder(folder).config(None)
    stream = partial(random_stream, seed=0)
    given = dict(device="cpu", dtype=dtype, max_context=context, method=Full())
    return LLM.from_stream(own, stream, **given)


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def figures(llm: LLM, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of each prompt, of a step behind the longest, and of a read of memory."""
    found, ids = {}, [i % 1000 for i in range(max(args.tokens))]
    for count in args.tokens:
        with llm.session() as session:
            found[f"{count} tokens"] = timed(partial(session.prefill, ids[:count]))
            if count == max(args.tokens):
                steps = [timed(partial(session.decode, 3)) for _ in range(STEPS)]
                found["a step"] = statistics.median(steps[1:])
    found["memory"] = 1e3 * READ / read_rate(torch.ones(READ // 4))
    return found


def measured(name: str, args: argparse.Namespace) -> list[str]:
    """A row of the table: medians on one thread and on all, and their ratio."""
    progress(name)
    llm, cores = model(name, args.dtype, max(args.tokens) + 256), free_cores()
    ways = {t: partial(on_threads, t, partial(figures, llm, args)) for t in (1, cores)}
    found = in_turns(ways, args.turns)
    cells = [name]
    for what in found[1][0]:
        one, both = (statistics.median(turn[what] for turn in found[t]) for t in (1, cores))
        cells.append(f"{one:.1f}, {both:.1f} ({one / both:.2f})")
    return cells


def report(args: argparse.Namespace) -> None:
    """Print the table."""
    names = args.names or list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        raise UsageError(f"FAMILY: found {unknown[0]}, expected one of {', '.join(FAMILIES)}")
    print(f"{machine()}, {args.dtype}, medians of {args.turns} turns, ms on one thread, on all")
    columns = [f"{count} tokens" for count in args.tokens]
    head = " | ".join(["family", *columns, "a step", "memory, 256 MiB"])
    print("\n" + markdown(head, [measured(name, args) for name in names]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return an exit code."""
    args = arguments(argv)
    return guarded(lambda: report(args))


if __name__ == "__main__":
    sys.exit(main())
