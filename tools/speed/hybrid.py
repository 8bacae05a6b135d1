"""A hybrid's steps and prompts beside transformers, and its recurrent layers beside the memory.

Random weights of Qwen3.5-0.8B's shape, with fewer layers and a smaller vocabulary where asked for,
the same shape in transformers, which runs torch's form of the delta rule without further packages.
`--llama-cpp` adds llama.cpp (the packages llama-cpp-python and gguf), which reads a file of that
shape. They take turns; figures are medians of thread CPU seconds of one thread. Then the recurrent
layers alone: a step through all of them, whose bytes are their weights, states and rows, beside the
rate at which a sum reads; and a prompt's tokens chunk by chunk beside the same tokens in steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full
from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from engine.model.llama import post_attention, pre_recurrence
from engine.model.tensors import random_stream
from engine.session.session import Session
from tools.bench.header import version
from tools.bench.run import Missing
from tools.common.program import say
from tools.speed import harness
from tools.speed.harness import SHAPED, Report, flag
from tools.speed.peers.llama_cpp import Llama, write
from weights.aliases import ALIASES
from weights.shapes import config_of

ALIAS = "qwen3.5-0.8b"
DEPTH = 128  # tokens of context before a step
BATCH = 8  # steps of one turn


def fields(layers: int, vocabulary: int) -> dict[str, Any]:
    """config.json of the shape, with so many of its layers and words."""
    found = config_of(ALIASES[ALIAS])
    return {**found, "num_hidden_layers": layers, "vocab_size": vocabulary}


def peer(data: dict[str, Any], dtype: torch.dtype) -> Any:
    """transformers' model of random weights of the same shape."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError("transformers is not installed (pip install transformers)") from error
    known = {key: value for key, value in data.items() if key not in ("architectures",)}
    config = transformers.Qwen3_5TextConfig(**known)
    with torch.device("meta"):
        made = transformers.Qwen3_5ForCausalLM(config)
    made = made.to(dtype).to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            else:
                weight.fill_(-4.0 if name.endswith("A_log") else 0.0)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config)
    return made


class Peer:
    """transformers' prompts and steps."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, None

    def read(self, ids: list[int]) -> None:
        """Read a prompt into a fresh cache: logits of its last token."""
        import transformers

        self.cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode():
            given = torch.tensor([ids])
            self.model(given, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def steps(self, token: int) -> None:
        """BATCH steps of one token."""
        with torch.inference_mode():
            for _ in range(BATCH):
                self.model(torch.tensor([[token]]), past_key_values=self.cache, use_cache=True)


def ours(session: Session, token: int) -> None:
    """BATCH steps of a session."""
    for _ in range(BATCH):
        session.decode(token)


def llama_cpp(data: dict[str, Any], dtype: torch.dtype, context: int) -> Llama:
    """llama.cpp's model of random weights of the same shape. Raises UsageError where it does not
    run.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            # llama.cpp maps the file, which stays readable when its name is gone
            return Llama(write(data, dtype, Path(folder) / "hybrid.gguf"), context, BATCH)
        except Missing as error:
            raise UsageError(str(error)) from error


def whole(
    session: Session, others: dict[str, Any], prompt: int, turns: int
) -> dict[str, list[float]]:
    """{what: median seconds of ours and of each of the others}: of a step, and of a prompt."""
    ids = [3 + number % 97 for number in range(prompt)]

    def again(_: int) -> float:
        session.truncate(0)
        return harness.seconds(session.prefill, ids)

    ways: dict[str, Callable[[int], float]] = {"engine": again}
    for name, other in others.items():
        ways[name] = lambda _, other=other: harness.seconds(other.read, ids)  # type: ignore[misc]
    prompts = harness.in_turns(ways, turns)
    session.truncate(0)
    session.prefill(ids[:DEPTH])
    ways = {"engine": lambda _: harness.seconds(ours, session, 5) / BATCH}
    for name, other in others.items():
        other.read(ids[:DEPTH])
        ways[name] = lambda _, other=other: harness.seconds(other.steps, 5) / BATCH  # type: ignore[misc]
    steps = harness.in_turns(ways, turns)
    return {
        what: [statistics.median(times) for times in found.values()]
        for what, found in (("step", steps), ("prompt", prompts))
    }


def layers_alone(session: Session, prompt: int, turns: int) -> dict[str, float]:
    """Seconds of the recurrent layers alone: a step through all of them ("step"), a prompt's tokens
    through one of them chunk by chunk ("chunk") and token by token ("recurrent"), without their
    products; the bytes that the step reads, and seconds of reading as many by a sum ("read").
    """
    model, state = session.runner.model, session.bank.recurrent
    assert state is not None
    numbers, eps = model.config.recurrent_layers, model.config.rms_norm_eps
    x = torch.randn(1, 1, model.config.hidden_size).to(model.dtype)
    at = torch.tensor([[state.length]])

    def step() -> None:
        out = x
        for number in numbers:
            layer = model.layers[number]
            assert layer.mixer is not None
            mixed = pre_recurrence(layer, out, eps)
            found = state.step(number, layer.mixer, mixed, at, "auto")
            out = post_attention(layer, out, layer.mixer.gated(found, mixed.z, eps, "auto"), eps)

    held = sum(m.nbytes for number in numbers for m in model.layers[number].matrices)
    rows = state.length - state.base
    states = sum(part.state.nbytes for part in map(state.of, numbers))
    tails = sum(t.nbytes * rows // t.shape[2] for n in numbers for t in state.of(n).tail)
    size = held + states + tails
    memory = torch.ones(size // 4)
    layer, first = model.layers[numbers[0]], numbers[0]
    assert layer.mixer is not None
    tokens = torch.randn(1, prompt, model.config.hidden_size).to(model.dtype)
    mixed = pre_recurrence(layer, tokens, eps)
    net = layer.mixer

    def chunks() -> None:
        state.chunk(first, net, mixed, state.length, False, "auto")

    def one_by_one() -> None:
        for i in range(prompt):
            one = type(mixed)(*(part[:, i : i + 1] for part in mixed))
            state.step(first, net, one, at, "auto")

    with torch.inference_mode():
        ways = {"step": step, "read": memory.sum, "chunk": chunks, "recurrent": one_by_one}
        timed = {name: lambda _, way=way: harness.seconds(way) for name, way in ways.items()}
        found = harness.in_turns(timed, turns)
    return {name: statistics.median(times) for name, times in found.items()} | {"bytes": size}


def work(args: argparse.Namespace) -> Report:
    """Measure and lay out."""
    harness.require(args, 4, "layers")
    harness.require(args, 1, "turns", "prompt")
    torch.set_num_threads(1)
    data, dtype = fields(args.layers, args.vocabulary), getattr(torch, args.dtype)
    config = replace(ModelConfig.from_dict(data), dtype=args.dtype)
    context = max(args.prompt, DEPTH) + BATCH * (args.turns + 2)
    llm = LLM.from_stream(
        config,
        random_stream,
        device="cpu",
        dtype=args.dtype,
        max_context=context,
        method=Full(),
        threads=1,
    )
    with llm.session() as session:
        say(f"{args.layers} layers, {args.dtype}: {llm.plan().bytes_of('weights') / 1e9:.2f} GB")
        others: dict[str, Any] = {"transformers": Peer(peer(data, dtype))}
        if args.llama_cpp:
            others["llama.cpp"] = llama_cpp(data, dtype, context)
        both = whole(session, others, args.prompt, args.turns)
        alone = layers_alone(session, args.prompt, args.turns)
    rate, share = alone["bytes"] / alone["step"], alone["read"] / alone["step"]
    rows = [
        ("a step, ms", *(f"{1e3 * s:.1f}" for s in both["step"])),
        ("a prompt, tokens/s", *(f"{args.prompt / s:.0f}" for s in both["prompt"])),
    ]
    lines = [
        harness.markdown(" | ".join((f"{ALIAS}, {args.layers} layers", "engine", *others)), rows),
        "",
        f"recurrent layers' step: {1e3 * alone['step']:.1f} ms for {alone['bytes'] / 1e6:.0f} MB, "
        f"{rate / 1e9:.1f} GB/s, {share:.2f} of the rate of a sum",
        f"delta rule of {args.prompt} tokens, one layer: {1e3 * alone['chunk']:.1f} ms chunk by "
        f"chunk, {1e3 * alone['recurrent']:.1f} in steps, "
        f"{alone['recurrent'] / alone['chunk']:.1f} times as long",
    ]
    facts = (
        f"{args.dtype}, one thread, thread CPU time, medians of {args.turns} turns, "
        f"{harness.machine()}; torch {version('torch')}, transformers {version('transformers')}"
    )
    if args.llama_cpp:
        facts += f", {others['llama.cpp'].settings}"
    kept = dict(dtype=args.dtype, layers=args.layers, prompt=args.prompt, whole=both, alone=alone)
    return Report(facts, "\n".join(lines), kept | {"facts": facts} | harness.origin())


FLAGS = {
    "--dtype": SHAPED["--dtype"],
    "--layers": flag(24, "layers of the shape, of 24"),
    "--vocabulary": flag(32000, "words; the released model has 248,320"),
    "--prompt": flag(512, "tokens of a prompt"),
    "--turns": flag(3, "turns of each"),
    "--llama-cpp": dict(action="store_true", help="time llama.cpp too, which must be installed"),
}
main = harness.program("hybrid", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
