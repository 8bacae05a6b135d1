"""Find Double Sparsity's heavy channels of a model: in which channels its queries and keys agree.

Source: Yang et al., Double Sparsity, 2024, and andy-yang-1/DoubleSparse (offline_calibration.py,
its first method): a text is read in pieces of --length tokens, and a channel weighs the mean of
|q * k|, both rotated, of every token with itself. A K/V head has the sum over its query heads. The
published text is 256 lines of the Pile; here it is --text, or the model's own welcome.txt. The file
is one of engine/methods/select/index/channels.py: DoubleSparsity(channels=FILE).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine import LLM, Full
from engine.bank.base import Bank
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.methods.base import Runtime, Setup
from engine.methods.select.index.channels import Channels, channels_text
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from tools.common.arguments import add_flags, command, loaded, require_plain
from tools.common.program import guarded, replace_text, require_writable
from weights.fingerprint import fingerprint

NAME, TEXT = "double_sparsity.json", "welcome.txt"


@dataclass(frozen=True)
class Watched(Full):
    """Full attention whose prompts leave what their queries and keys agree in."""

    named = False

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return replace(super().needs(plan, config, capacity, itemsize), every_query=True)

    def runtime(self, setup: Setup) -> Runtime:
        return WatchedRuntime(self, setup)


class WatchedRuntime(Runtime):
    """sums [layers, Hkv, D] float64 of |q * k| over the tokens that were read."""

    def __init__(self, method: Watched, setup: Setup):
        super().__init__(method, setup)
        config = setup.config
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        self.sums = torch.zeros(shape, dtype=torch.float64)
        self.stops = [0] * config.num_layers

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        if start < self.stops[layer]:  # the last layer, once more for the newest token
            return super().attend_prompt(layer, q, bank, start)
        self.stops[layer] = start + q.shape[1]
        k = bank.newest_rows(layer, start, start + q.shape[1])[0][0]
        asked = q[0].double().view(q.shape[1], len(k), -1, q.shape[3])
        self.sums[layer] += (asked * k.double().mT.permute(2, 0, 1).unsqueeze(2)).abs().sum((0, 2))
        return super().attend_prompt(layer, q, bank, start)


def weigh(llm: LLM, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
    """What each channel weighs, float64 [layers, Hkv, D]: the mean of |q * k| over all tokens."""
    total = None
    for ids in pieces:
        with llm.session(Watched()) as session:
            session.prefill(ids)
            sums = session.runtime.sums
            total = sums if total is None else total + sums
    assert total is not None
    return total / sum(map(len, pieces))


def ranked(weights: torch.Tensor) -> Channels:
    """The channels of every head, the heaviest first; of equal ones the lower."""
    order = weights.sort(dim=-1, descending=True, stable=True).indices.tolist()
    return tuple(tuple(tuple(head) for head in layer) for layer in order)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.studies.heavy_channels", __doc__)
    add = parser.add_argument
    add_flags(parser, "model threads", threads=1)
    add("--text", metavar="FILE", help=f"what is read (default: {TEXT} beside the model)")
    add("--length", type=int, default=512, help="tokens of a piece (default 512)")
    add("--pieces", type=int, default=256, help="pieces at most (default 256)")
    add("--out", metavar="FILE", help=f"the file to write (default: {NAME} beside the model)")
    args = parser.parse_args(argv)
    if args.length < 1 or args.pieces < 1:
        raise UsageError(
            f"found length {args.length} and pieces {args.pieces}, expected 1 of each at least"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Read the text, rank the channels and write them."""
    args = arguments(argv)
    llm = loaded(args, device="cpu", dtype="float32")
    config = llm.config
    require_plain(llm, cap=False)
    out, text = Path(args.out or llm.folder / NAME), Path(args.text or llm.folder / TEXT)
    require_writable("--out", out)
    try:
        ids = llm.encode(text.read_text(encoding="utf-8"))[: args.length * args.pieces]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: {text}: {error}; give a text with --text FILE") from None
    pieces = [ids[at : at + args.length] for at in range(0, len(ids), args.length)]
    weights = weigh(llm, pieces)
    channels, leading = ranked(weights), weights.sort(dim=-1, descending=True).values
    part = leading[..., : max(1, config.head_dim // 16)].sum(-1) / leading.sum(-1)
    print(f"{len(ids)} tokens in {len(pieces)} pieces; of |q * k| the heaviest 16th holds:")
    for layer, heads in enumerate(part.tolist()):
        print(f"layer {layer}: {', '.join(f'{share:.2f}' for share in heads)}")
    settings = {"text": text.name, "tokens": len(ids), "length": args.length}
    more = {"fingerprint": fingerprint(llm.folder), "settings": settings}
    more["made_by"] = f"tools.studies.heavy_channels {VERSION}"
    replace_text(out, channels_text(channels, config, more))
    print(f"\nDoubleSparsity(channels={str(out)!r}): written")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
