"""A decode step of every family beside Llama's at equal shapes.

Random weights at the 160M shape (12 layers of 768, 12 heads of 64, MLP of 2,048, vocabulary of
32,000), one thread. Llama and a family take turns, A B A B, and the figure is the median over
rounds of the ratio of their steps' thread CPU time, which other programs disturb less than the
clock. A mixture has experts that together are as wide as the MLP.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from engine import LLM, Full
from engine.model.config.config import ModelConfig
from engine.model.tensors import random_stream
from engine.session.session import Session
from kernels.launch.isa import isa
from tools.common.arguments import command
from tools.common.program import guarded, say

SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
# what each family's own facts need beside the shape
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "SmolLM3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156,
        "logits_scaling": 8.0,
    },
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"sliding_window": 1024},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "sliding_window": 1024},
    "Gemma3ForCausalLM": {"sliding_window": 512, "sliding_window_pattern": 6},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "GptOssForCausalLM": {
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
}
STEPS = 4  # of one turn


def session_of(architecture: str, dtype: str, context: int) -> Session:
    """A session of `context` random tokens of a family at SHAPE."""
    data = SHAPE | FAMILIES[architecture] | {"architectures": [architecture], "dtype": dtype}
    llm = LLM.from_stream(
        ModelConfig.from_dict(data),
        partial(random_stream, seed=0),
        name=architecture,
        method=Full(),
        device="cpu",
        threads=1,
        max_context=2048,
    )
    session = llm.session()
    session.prefill([i * 7919 % SHAPE["vocab_size"] for i in range(context)])
    return session


def turn(session: Session) -> float:
    """Thread CPU seconds of a step, mean of STEPS; the session goes back."""
    length, began = len(session), time.thread_time()
    for token in range(STEPS):
        session.decode(token)
    seconds = time.thread_time() - began
    session.truncate(length)
    return seconds / STEPS


def ratio(llama: Session, other: Session, rounds: int) -> tuple[float, float, float]:
    """(median ratio of other to llama, median seconds of each) over A B A B rounds."""
    turn(llama), turn(other)
    pairs = [(turn(llama), turn(other)) for _ in range(rounds)]
    return (
        statistics.median(b / a for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def run(dtype: str, context: int, rounds: int, names: Sequence[str]) -> None:
    """Print a Markdown table."""
    torch.set_num_threads(1)
    print(f"{dtype}, {isa()}, one thread, {context} tokens of context, {rounds} rounds\n")
    print("| family | Llama, ms | family, ms | ratio |\n|---|---|---|---|")
    llama = session_of("LlamaForCausalLM", dtype, context)
    for name in names:
        other = session_of(name, dtype, context)
        found, a, b = ratio(llama, other, rounds)
        print(f"| {name} | {1000 * a:.2f} | {1000 * b:.2f} | {found:.3f} |", flush=True)
        say(f"{name}: {found:.3f}")
        other.close()
        del other


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1, 2 or 130."""
    parser = command("python -m tools.families.speed", "Time every family beside Llama.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens (512)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns of each (15)")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    options = parser.parse_args(argv)
    return guarded(lambda: run(options.dtype, options.context, options.rounds, options.only))


if __name__ == "__main__":
    sys.exit(main())
