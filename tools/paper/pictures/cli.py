"""Draw similarity of the chosen sets between layers and between steps, and mass kept by depth, for
any model of full attention layers and any prompt: PNG (with matplotlib) and JSON.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import LLM, OmniKV
from engine.base.errors import UsageError
from engine.session.session import Session
from tools.calibrate.texts import read_text
from tools.common.arguments import add_flags, command, loaded, require_least, require_plain
from tools.common.program import (
    entry,
    model_label,
    replace_json,
    require_writable,
    say,
)
from tools.paper.meters.answers import asked, follow
from tools.paper.meters.sets import SCORES, SetMeter
from tools.paper.pictures.draw import draw
from weights.fingerprint import weights_digest

SHOWN = 3  # layers whose steps are drawn
FORMAT = 1


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.paper.pictures",
        "Draw which layers and steps choose the same tokens, and the mass kept.",
    )
    add = parser.add_argument
    add_flags(parser, "model device dtype threads out", out=Path("pictures-out"))
    add("--prompt", metavar="FILE", help="a text that the model goes on from (- is stdin)")
    add("--task", default="facts", help="of a prompt that is made where no --prompt is given")
    add("--length", type=int, default=1024, help="tokens of that prompt, or most of the file's")
    add("--steps", type=int, default=16, help="tokens of the answer, at most")
    add("--share", type=float, default=6.67, help="chosen tokens, in per cent of the prompt")
    add(
        "--layers", type=int, nargs="+", help="whose choices are drawn (default: the filter layers)"
    )
    add(
        "--scores",
        choices=SCORES,
        default=SCORES[0],
        help="logits: softmax of head-maximum logits, as the paper's code; heads: the maximum of "
        "the heads' own softmaxes",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raise UsageError where a number cannot be meant, or nothing could be written."""
    if not 0 < args.share <= 100:
        raise UsageError(f"--share: found {args.share:g}, expected per cent above 0, at most 100")
    require_least(args, steps=1, length=160)
    require_writable("--out", args.out / "attention.json")


def prompt_of(llm: LLM, args: argparse.Namespace) -> tuple[str, list[int]]:
    """(what it is, token ids) of the prompt."""
    if args.prompt is None:
        return f"a made document ({args.task})", asked(llm, args.task, args.length, 0).ids
    ids = llm.encode(read_text(args.prompt))
    if len(ids) < 16:
        raise UsageError(f"--prompt {args.prompt}: found {len(ids)} tokens, expected at least 16")
    cut = f", the first {args.length} of {len(ids)} tokens" if len(ids) > args.length else ""
    return Path(args.prompt).name + cut, ids[: args.length]


def layers_of(llm: LLM, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The layers whose choices are drawn: those asked for, else the model's filter layers."""
    if wanted is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plan = llm.resolve_method(OmniKV(share=0.0667, dense_below=0))[1]
        wanted = [group.filter_layer for group in plan.groups]
        return tuple(wanted[:: max(1, -(-len(wanted) // SHOWN))])
    count = llm.config.num_layers
    wrong = next((layer for layer in wanted if not 0 <= layer < count), None)
    if wrong is not None:
        raise UsageError(f"--layers: found {wrong}, expected numbers from 0 to {count - 1}")
    return tuple(sorted(set(wanted)))


def measured(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is drawn, as JSON has it."""
    require_plain(llm)
    what, ids = prompt_of(llm, args)
    chosen = layers_of(llm, args.layers)
    k = max(1, int(args.share / 100 * len(ids)))
    with llm.session(max_context=len(ids) + args.steps) as session:
        meter, text = _watched(llm, session, ids, args, k)
    return {
        "format": FORMAT,
        "model": model_label(args.model),
        "weights": weights_digest(llm.folder),
        "prompt": what,
        "tokens": len(ids),
        "chosen": k,
        "steps": len(meter.sets),
        "scores": args.scores,
        "answer": text,
        "layers": list(chosen),
        "between_layers": meter.between_layers().tolist(),
        "between_steps": {str(i): meter.between_steps(i).tolist() for i in chosen},
        "mass": meter.mean_mass().tolist(),
        "edges": (meter.edges / len(meter.sets)).tolist(),
        "chance": k / meter.prompt,
    }


def _watched(
    llm: LLM, session: Session, ids: list[int], args: argparse.Namespace, k: int
) -> tuple[SetMeter, str]:
    """The meter of the model's own answer, and the answer's text."""
    meter = SetMeter(session.dense_runtime, len(ids) - 1, k, args.scores)
    tokens = follow(session, ids, args.steps, meter)
    return meter, llm.tokenizer.decode(tokens) if llm.tokenizer else ""


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON, draw."""
    check(args)
    llm = loaded(args, texts=True)
    data = measured(llm, args)
    replace_json(args.out / "attention.json", data)
    print(args.out / "attention.json")
    paths = draw(data, args.out)
    if paths is None:
        say("no pictures: matplotlib is not installed (pip install '.[plots]')")
    for path in paths or ():
        print(path)


main = entry(arguments, run)
