"""What it costs that each rank of a model chooses tokens by its own heads (--selection per_rank).

Full attention reads the head of a text in one process, and its last tokens are fed one by one:
after each, KL(full || method) and KL(global || method) in nats, where `global` is OmniKV's choice
by all heads, as ranks make it by default. Beside per_rank stands a control of as many tokens drawn
at random. Per_rank runs over real processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import mean, median

import torch

from engine import LLM, Full, OmniKV, RankedLLM
from engine.methods.base import Method
from engine.methods.controls.controls import OmniKVRandom
from tools.common.arguments import add_flags, command
from tools.common.documents import KINDS, Text, texts
from tools.common.page import line, table
from tools.common.program import entry, model_label

GLOBAL, RANDOM = "global", "random"
Steps = list[torch.Tensor]  # log probabilities float64 [vocab] after each token


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.own_heads",
        "What it costs that each rank chooses tokens by its own heads.",
    )
    add_flags(parser, "model filters wait threads")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="ranks (default 2)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per text")
    parser.add_argument("--texts", type=int, default=4, help="texts, the kinds in turn")
    parser.add_argument("--positions", type=int, default=64, help="tokens fed, of each text")
    parser.add_argument("--tokens", type=int, default=128, help="tokens chosen per step")
    return parser.parse_args(argv)


def kl(p: Steps, q: Steps) -> list[float]:
    """KL(p || q) in nats after every token."""
    return [max(0.0, float((a.exp() * (a - b)).sum())) for a, b in zip(p, q, strict=True)]


def followed(llm: LLM, text: Text, positions: int, methods: dict[str, Method]) -> dict[str, Steps]:
    """Each method's steps over a text's last tokens; full attention has read those before them."""
    found: dict[str, Steps] = {}
    head = len(text.ids) - positions
    with llm.session(method=Full()) as session:
        session.prefill(text.ids[:head])
        for name, method in methods.items():
            session.truncate(head)
            session.set_method(method)
            logits = [session.decode(token) for token in text.ids[head:]]
            found[name] = [torch.log_softmax(one.double(), -1) for one in logits]
    return found


def run(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    settings = dict(dtype="float32", device="cpu", max_context=args.length, threads=args.threads)
    filters = tuple(args.filters) if args.filters else None
    budget = dict(filter_layers=filters, wait_layers=args.wait, tokens=args.tokens)
    method = OmniKV(**budget, tail=64, dense_below=0)
    control = OmniKVRandom(**budget, tail=64, dense_below=0)
    one = LLM(args.model, **settings, method=method)
    assert one.tokenizer is not None
    end = min(128, args.length // 4)
    some = texts(one.tokenizer, "held-out", args.length, args.texts, KINDS, end)
    asked = {"full": Full(), GLOBAL: method, RANDOM: control}
    steps = [followed(one, text, args.positions, asked) for text in some]
    for ranks in args.ranks:
        many = RankedLLM(args.model, ranks, selection="per_rank", **settings, method=method)
        name = f"per_rank, {ranks} ranks"
        for text, found in zip(some, steps, strict=True):
            found |= followed(many, text, args.positions, {name: method})
        many.close()
    print(
        f"{model_label(args.model)}, {len(some)} texts of {args.length} tokens, the last "
        f"{args.positions} fed; {args.tokens} tokens chosen, float32\n"
    )
    columns = ["choice", "KL(full || it), mean", "median", "KL(global || it), mean", "same token"]
    print("\n".join(table(columns, ())))
    for name in [name for name in steps[0] if name != "full"]:
        far = [x for found in steps for x in kl(found["full"], found[name])]
        near = [x for found in steps for x in kl(found[GLOBAL], found[name])]
        same = mean(
            float(a.argmax() == b.argmax())
            for found in steps
            for a, b in zip(found["full"], found[name], strict=True)
        )
        shown = f"{mean(far):.4f}", f"{median(far):.5f}", f"{mean(near):.4f}", f"{same:.1%}"
        print(line([name, *shown]), flush=True)


main = entry(arguments, run)


if __name__ == "__main__":
    sys.exit(main())
