"""Learn DuoAttention's gates of a model: which K/V heads need every token.

Source: Xiao et al., DuoAttention (ICLR 2025), section 2.3. A gate per K/V head mixes the outputs of
full and of streaming attention; the weights stay as they are. Gates are trained so that the last
hidden states behind a text with pass keys, at the questions and answers, stay those of full
attention (mean squared difference) while they are small (their mean times --reg). Published: 10
pass keys, 2,000 steps, rate 0.02, which rises and falls over a fifth of them each, regularisation
0.05, contexts of 1K to 32K; here --length, since a CPU trains. The file is one of
engine/methods/evict/duo_gates.py: Duo(gates=FILE). A run that is stopped goes on from OUT.part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine import LLM
from engine.base.errors import BadCheckpoint, UsageError
from engine.base.version import VERSION
from engine.methods.evict.duo_gates import gates_text
from engine.methods.tables.head_table import facts_of
from engine.model.llama import Llama, post_attention, pre_attention, rms_norm
from engine.model.rope import Rotary
from tools.common.arguments import add_flags, command, loaded, require_plain
from tools.common.page import table
from tools.common.program import guarded, replace_json, replace_text, require_writable, say
from tools.tasks.prompts import common_start, completed, token_counter
from tools.tasks.sample import make_sample
from weights.fingerprint import fingerprint, weights_digest
from weights.jsonfile import read_object

NAME = "duo.json"
BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's
EVERY = 10  # steps between two saved states
RAMP = 0.2  # of the steps, in which the rate rises, and falls


@dataclass
class State:
    """Gates float32 [layers, K/V heads], Adam's moments, and the steps that made them."""

    gates: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    step: int = 0

    @classmethod
    def fresh(cls, layers: int, heads: int) -> State:
        """All gates open."""
        return cls(torch.ones(layers, heads), *torch.zeros(2, layers, heads))

    def update(self, gradient: torch.Tensor, rate: float) -> None:
        """One step of Adam; gates stay in [0, 1]."""
        self.step += 1
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.lerp_(gradient.square(), 1 - BETAS[1])
        mean, square = (
            moment / (1 - beta**self.step)
            for moment, beta in zip((self.mean, self.square), BETAS, strict=True)
        )
        self.gates.sub_(rate * mean / (square.sqrt() + EPS)).clamp_(0, 1)


def rate_at(step: int, steps: int, highest: float) -> float:
    """The learning rate of step 0 .. steps-1."""
    ramp = max(1.0, RAMP * steps)
    return highest * min(1.0, max(0.1, (step + 1) / ramp), max(0.1, (steps - step) / ramp))


def lambda_mask(count: int, sinks: int, recent: int) -> torch.Tensor:
    """What a streaming head's queries see: bool [count, count]."""
    rows = torch.arange(count)
    age = rows.unsqueeze(1) - rows
    return (age >= 0) & ((rows < sinks) | (age <= recent))


def hidden(
    model: Llama,
    rotary: Rotary,
    ids: torch.Tensor,
    first: int,
    mask: torch.Tensor,
    gates: torch.Tensor | None = None,
    full: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(normed states float32 [S - first, hidden] of a text's tokens int64 [S] from `first` on, what
    each layer's attention through `mask` gave [1, H, S, D]); with gates [L, Hkv] they mix it with
    that of another pass, as published: `full`.
    """
    config, found = model.config, []
    turns = rotary.of_layers(torch.arange(len(ids)).unsqueeze(0), len(ids))
    x, more = model.begun(ids.unsqueeze(0))
    for number, layer in model.turns():
        qkv = pre_attention(layer, x, *turns[number], *config.sizes_of(number))[:3]
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in qkv), attn_mask=mask, scale=config.scale, enable_gqa=True
        )
        if gates is not None:
            part = gates[number].repeat_interleave(config.group).view(1, -1, 1, 1)
            out = torch.lerp(out, full[number], part)
        found.append(out)
        x = post_attention(layer, x, out.transpose(1, 2), config.rms_norm_eps)
        x = model.refined(number, x, None if more is None else more[:, :, number])
    states = rms_norm(x, model.norm, config.rms_norm_eps, config.block)[0, first:]
    return states.float(), found


def text_of(llm: LLM, length: int, passkeys: int, seed: int) -> tuple[list[int], int]:
    """(ids, how many of them are the document's) of a document with pass keys, followed by its
    questions and answers, through the model's chat template where it has one.
    """
    tokenizer = llm.tokenizer
    sample = make_sample("passkey", length, token_counter(tokenizer), seed, passkeys)
    turns = list(zip(sample.questions, sample.answers, strict=True))
    if tokenizer.template is None:
        text = sample.document.rstrip()
        text += "".join(f"{completed('', question)} {answer}" for question, answer in turns)
        shared = tokenizer.encode(sample.document.rstrip(), special=True)
        return tokenizer.encode(text, special=True), len(shared)
    turns[0] = f"{sample.document.rstrip()}\n\n{turns[0][0]}", turns[0][1]
    said = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    ids = tokenizer.encode(tokenizer.render(said), special=False)
    # the same document before another question
    other = [{"role": "user", "content": f"{sample.document.rstrip()}\n\n?"}, *said[1:]]
    beside = tokenizer.encode(tokenizer.render(other), special=False)
    return ids, common_start([ids, beside])


def learn(args: argparse.Namespace, llm: LLM, state: State, part: Path, key: list[Any]) -> None:
    """Train the gates to the last step, saving as it goes."""
    model, rotary = llm.model.on_torch(), Rotary(llm.config, torch.device("cpu"))
    begun = time.perf_counter()
    while state.step < args.steps:
        ids, first = text_of(llm, args.length, args.passkeys, args.seed + state.step)
        tokens = torch.tensor(ids)
        mask = lambda_mask(len(ids), args.sinks, args.recent)
        with torch.no_grad():
            whole = lambda_mask(len(ids), len(ids), 0)
            wanted, full = hidden(model, rotary, tokens, first, whole)
        gates = state.gates.clone().requires_grad_()
        states, _ = hidden(model, rotary, tokens, first, mask, gates, full)
        apart = (states - wanted).square().mean()
        (gradient,) = torch.autograd.grad(apart + args.reg * gates.mean(), gates)
        state.update(gradient, rate_at(state.step, args.steps, args.rate))
        if state.step % EVERY == 0 or state.step == args.steps:
            data = {"key": key, "step": state.step}
            data |= {name: getattr(state, name).tolist() for name in ("gates", "mean", "square")}
            replace_json(part, data)
            say(
                f"step {state.step}/{args.steps}: states apart {apart:.4f}, mean gate "
                f"{float(state.gates.mean()):.3f}, {time.perf_counter() - begun:.0f} s"
            )


def begun_state(part: Path, key: list[Any], layers: int, heads: int) -> State:
    """The state that a stopped run of the same settings left, or a fresh one."""
    if not part.exists():
        return State.fresh(layers, heads)
    try:
        data = read_object(part)
        if data["key"] != key:
            raise UsageError(
                f"--out: found {part} of other settings or weights, expected {key}; delete it to "
                "begin anew"
            )
        tensors = [torch.tensor(data[name]) for name in ("gates", "mean", "square")]
        if any(t.shape != (layers, heads) for t in tensors):
            raise ValueError("shape")
        state = State(*tensors, step=int(data["step"]))
    except (BadCheckpoint, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--out: found {part}, which is no state; delete it") from error
    say(f"going on from step {state.step} of {part}")
    return state


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.studies.duo_gates", __doc__)
    add = parser.add_argument
    add_flags(parser, "model seed threads", seed=1, threads=1)
    add("--length", type=int, default=1536, help="tokens of a text's document (default 1536)")
    add("--passkeys", type=int, default=10, help="pass keys of a text (default 10)")
    add("--steps", type=int, default=2000, help="texts, one a step (default 2000)")
    add("--rate", type=float, default=0.02, help="highest learning rate (default 0.02)")
    add("--reg", type=float, default=0.05, help="weight of the mean gate (default 0.05)")
    add("--sinks", type=int, default=64, help="first tokens of streaming heads (default 64)")
    add("--recent", type=int, default=256, help="newest tokens of theirs (default 256)")
    add("--out", metavar="FILE", help="the gates' file (default: duo.json beside the model)")
    args = parser.parse_args(argv)
    whole = args.steps >= 1 and args.passkeys >= 1 and args.sinks >= 0 and args.recent >= 1
    if not (whole and args.length > args.sinks + args.recent and args.reg >= 0 < args.rate):
        raise UsageError(
            f"found length {args.length}, sinks {args.sinks}, recent {args.recent}, steps "
            f"{args.steps}, passkeys {args.passkeys}, rate {args.rate}, reg {args.reg}; expected a "
            "length above sinks + recent, else no head streams, and positive numbers"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, print the gates and write them."""
    args = arguments(argv)
    llm = loaded(args, device="cpu", dtype="float32")
    config = llm.config
    require_plain(llm, cap=False)
    out = Path(args.out or llm.folder / NAME)
    require_writable("--out", out)
    settings = {
        name: getattr(args, name)
        for name in ("length", "passkeys", "steps", "rate", "reg", "sinks", "recent", "seed")
    }
    key = [weights_digest(llm.folder), *settings.values()]
    part = out.with_name(out.name + ".part")
    state = begun_state(part, key, config.num_layers, config.num_kv_heads)
    learn(args, llm, state, part, key)
    heads = [f"head {i}" for i in range(config.num_kv_heads)]
    shown = ((n, *(f"{x:.3f}" for x in row)) for n, row in enumerate(state.gates.tolist()))
    print("\n".join(table(["layer", *heads], shown)))
    gates = tuple(tuple(round(gate, 4) for gate in row) for row in state.gates.tolist())
    more = {"fingerprint": fingerprint(llm.folder), "settings": settings}
    more["made_by"] = f"tools.studies.duo_gates {VERSION}"
    replace_text(out, gates_text(gates, config, more))
    part.unlink()
    print(f"\nDuo(gates={str(out)!r}), of {dict(facts_of(config))['model_type']}: written")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
