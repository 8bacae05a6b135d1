"""Find RazorAttention's retrieval heads of a model: which K/V heads need every token. No data.

Source: Tang et al., RazorAttention (2024), and the code of its authors' company (MindSpore Golden
Stick): a text of --length random tokens is read --repeats times in a row (2,500 and 4 there). A
head's echo score is how much of its attention goes to the same token of the rounds before, its
induction score how much to the tokens behind those, mean over the queries of all rounds but the
first. A K/V head has the largest score of its query heads. The same --seed gives the same file, one
of engine/methods/evict/razor_heads.py: Razor(heads=FILE).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from engine import LLM, Razor
from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.methods.evict.razor_heads import Heads, heads_text
from engine.model.llama import Llama, post_attention, pre_attention
from engine.model.rope import Rotary
from tools.common.arguments import add_flags, command, loaded, require_plain
from tools.common.page import table
from tools.common.program import guarded, replace_text, require_writable
from weights.fingerprint import fingerprint

NAME = "razor.json"
BLOCK = 1 << 24  # logits at a time


def text_of(llm: LLM, length: int, repeats: int, seed: int) -> tuple[list[int], int]:
    """(ids, how many stand before the first round): random tokens, none of them special, different
    ones as far as the vocabulary reaches, `repeats` times behind what every text begins with.
    """
    tokenizer, size = llm.tokenizer, llm.config.vocab_size
    special = set() if tokenizer is None else set(tokenizer.special_ids)
    start = [] if tokenizer is None else list(tokenizer.prefix_ids)
    words = torch.tensor([i for i in range(size) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    rounds = [words[torch.randperm(len(words), generator=generator)]]
    while sum(map(len, rounds)) < length:
        rounds.append(words[torch.randperm(len(words), generator=generator)])
    return start + torch.cat(rounds)[:length].tolist() * repeats, len(start)


def head_scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Echo and induction scores float32 [H] of rotated q [S, H, D] and k [S, Hkv, D] of a text
    whose rounds of `length` tokens begin at `first`.
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    group, begin = heads // kv_heads, first + length
    keys, sums = k.transpose(0, 1), torch.zeros(2, heads)
    size = max(1, BLOCK // (heads * count))
    for at in range(begin, count, size):
        rows = torch.arange(at, min(count, at + size))
        folded = q[rows].view(len(rows), kv_heads, group, dim).permute(1, 2, 0, 3).flatten(1, 2)
        logits = (folded @ keys.transpose(1, 2)).view(heads, len(rows), count) * scale
        unseen = torch.arange(count) > rows[:, None]
        weights = logits.masked_fill_(unseen, float("-inf")).softmax(-1)
        for back in range(length, count - first, length):
            there = (rows - back)[:, None]
            inside = there >= first
            for number, places in enumerate((there, there + 1)):
                found = weights.gather(2, places.clamp(min=0).expand(heads, -1, 1))
                sums[number] += (found * inside).sum((1, 2))
    echo, induction = sums / (count - begin)
    return echo, induction


def probe(
    model: Llama, rotary: Rotary, ids: Sequence[int], first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Echo and induction scores [layers, K/V heads] of a model, by one pass over a text."""
    config, found = model.config, []
    turns = rotary.of_layers(torch.arange(len(ids)).unsqueeze(0), len(ids))
    x, more = model.begun(torch.tensor(ids).unsqueeze(0))
    for number, layer in model.turns():
        q, k, v = pre_attention(layer, x, *turns[number], *config.sizes_of(number))[:3]
        scores = head_scores(q[0], k[0], config.scale, first, length)
        found.append([t.view(-1, config.group).amax(1) for t in scores])
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            is_causal=True,
            scale=config.scale,
            enable_gqa=True,
        )
        x = post_attention(layer, x, out.transpose(1, 2), config.rms_norm_eps)
        x = model.refined(number, x, None if more is None else more[:, :, number])
    echo, induction = (torch.stack(side) for side in zip(*found, strict=True))
    return echo, induction


def rounded(scores: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """A table of scores as the file has it."""
    return tuple(tuple(round(min(1.0, x), 4) for x in row) for row in scores.tolist())


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.studies.razor_heads", __doc__)
    add = parser.add_argument
    add_flags(parser, "model seed threads", seed=1, threads=1)
    add("--length", type=int, default=2500, help="random tokens of a round (default 2500)")
    add("--repeats", type=int, default=4, help="rounds (default 4)")
    add("--out", metavar="FILE", help="the scores' file (default: razor.json beside the model)")
    args = parser.parse_args(argv)
    if args.length < 2 or args.repeats < 2:
        raise UsageError(
            f"found length {args.length} and repeats {args.repeats}, expected 2 of each at least: "
            "what is not repeated shows no head"
        )
    return args


def show(heads: Heads, method: Razor) -> None:
    """Print a table: echo and induction of each head, and whether the defaults keep it whole."""
    echo, induction = heads
    rows = []
    for layer, whole in enumerate(method.whole):
        every = zip(echo[layer], induction[layer], whole)
        rows.append((layer, *(f"{e:.3f}, {i:.3f}{' *' if kept else ''}" for e, i, kept in every)))
    print(
        "\n".join(
            table(["layer", *(f"head {i}: echo, induction" for i in range(len(echo[0])))], rows)
        )
    )
    print(f"\n* retrieval heads at induction={method.induction:g}, echo={method.echo:g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Probe, print the scores and write them."""
    args = arguments(argv)
    llm = loaded(args, device="cpu", dtype="float32")
    config = llm.config
    require_plain(llm, cap=False)
    out = Path(args.out or llm.folder / NAME)
    require_writable("--out", out)
    ids, first = text_of(llm, args.length, args.repeats, args.seed)
    with torch.no_grad():
        rotary = Rotary(config, torch.device("cpu"))
        scores = probe(llm.model.on_torch(), rotary, ids, first, args.length)
    heads = rounded(scores[0]), rounded(scores[1])
    settings = {name: getattr(args, name) for name in ("length", "repeats", "seed")}
    more = {"fingerprint": fingerprint(llm.folder), "settings": settings}
    more["made_by"] = f"tools.studies.razor_heads {VERSION}"
    show(heads, Razor(heads=heads))
    replace_text(out, heads_text(heads, config, more))
    print(f"\nRazor(heads={str(out)!r}): written")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
