"""Chunked prefill: the prompt goes through the model chunk by chunk. Activations are O(chunk);
logits are computed for the last token only, unless the caller wants every token's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.bank.base import AttendsPrompt, Bank
from engine.bank.split.query_ring import SplitQueries
from engine.base.device import crossed, current
from engine.forward.prompt_layer import PLAIN, Pieces, pieces_of
from engine.forward.recurrent.mixer import beside, recur_chunk
from engine.model.heads.latent import LatentHeads
from engine.model.llama import Llama, pre_attention
from engine.model.rope import Rotary
from engine.plan.needs import MOST_WINDOW
from kernels.layer.native_step import copy_rows
from kernels.native.own_pages import empty

# called with the last layer's output [B, C, hidden] of every token of a chunk, and the position of
# the first
Outputs = Callable[[torch.Tensor, int], None]


def run_chunk(
    model: Llama,
    rotary: Rotary,
    runtime: AttendsPrompt,
    bank: Bank,
    tokens: torch.Tensor,
    start: int,
    total: int,
    write: bool = True,
    last_logits: bool = False,
    pieces: Pieces | tuple[Pieces, ...] = PLAIN,
    backend: str = "auto",
    every: Outputs | None = None,
    advance: bool = True,
) -> tuple[torch.Tensor | None, Any]:
    """Run one chunk through all layers: tokens int64 [B, C] at positions start .. start+C-1 of a
    prompt that ends at `total`.

    Returns (logits float32 [B, vocab] or None, newest pre-RoPE queries [attending layers,
    B, min(C, MOST_WINDOW), H, D]; SplitQueries of a model in parts). write=False leaves the bank as
    it is: it holds this chunk, and the caller wants its queries, logits or state. pieces: the two
    halves of a layer, or of each part. backend: that rounds rows for a bank in fewer bits, and of
    recurrent layers. every: takes the output of all tokens, for which the last layer is computed
    whole. advance: the bank's commit takes the state.

    Of a model in parts the host issues one part's work after the other's and waits for none, so
    that GPUs work on chunks that follow each other at the same time.
    """
    through = partial(
        _through,
        tokens=tokens,
        start=start,
        total=total,
        write=write,
        last_logits=last_logits,
        backend=backend,
        every=every,
        advance=advance,
    )
    if not model.parts:
        return through(model, rotary, runtime, bank, None, pieces_of(pieces, 0))
    x: torch.Tensor | None = None
    newest = []
    for number, part in enumerate(model.parts):
        own = part, rotary.parts[number], runtime.by_part[number], bank.parts[number]
        with current(part.device):
            x = None if x is None else crossed(x, part.device)
            x, queries = through(*own, x, pieces_of(pieces, number))
        newest.append(queries)
    return None if x is None or not last_logits else crossed(x, model.device), SplitQueries(newest)


def _through(
    model: Llama,
    rotary: Rotary,
    runtime: AttendsPrompt,
    bank: Bank,
    x: torch.Tensor | None,
    pieces: Pieces,
    tokens: torch.Tensor,
    start: int,
    total: int,
    write: bool,
    last_logits: bool,
    backend: str,
    every: Outputs | None,
    advance: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """As `run_chunk`, of a model or of one of its parts: from the tokens where x is None, else from
    what the part before it packed, x [B, C, width]. A part that others follow returns what it has
    packed for them in place of logits.
    """
    config = model.config
    ends, device = config.ends[1], model.device
    shortens = ends and every is None  # only the newest token's output of the last layer is wanted
    positions = torch.arange(start, start + tokens.shape[1], device=device)[None]
    turns = rotary.of_layers(positions, total)
    x, more = model.begun(tokens) if x is None else model.unpacked(x)
    widest = max(config.heads_of(layer)[1] for layer in config.attending_layers)
    opening = _opening(model, runtime, start, tokens.shape[1], not shortens, backend)
    newest = []
    for number, layer in model.turns():
        x, predicted = model.entered(number, x)
        mixed = _mixed(model, number, x, bank, start, advance, backend)
        if mixed is not None and layer.mixer_out is None:
            if number == config.num_layers - 1 and shortens:
                if not last_logits:
                    break
                x, mixed = x[:, -1:], mixed[:, -1:]
            x = pieces[1](layer, x, mixed, config.rms_norm_eps)
            continue
        opens = layer.latent if number in opening else None
        half: Callable = pieces[0] if opens is None else partial(pre_attention, absorb=False)
        q, k, v, q_pre_rope = half(layer, x, *turns[number], *config.sizes_of(number))
        newest.append(_newest(q_pre_rope, widest, opens, backend))
        del q_pre_rope
        if write:
            bank.write_chunk(number, k, v, start, backend)
        del k, v
        first, slides = start, bool(config.windows and config.windows[number])
        if number == config.num_layers - 1 and shortens:
            if runtime.needs.every_query and not slides:
                runtime.attend_prompt(number, q, bank, first)
            if not last_logits:  # only the prompt's last token needs the last layer's output
                break
            x, q, first = x[:, -1:], q[:, -1:], start + tokens.shape[1] - 1
            more, predicted = (None if t is None else t[:, -1:] for t in (more, predicted))
        attended = _attended(runtime, number, q, bank, first, slides, opens)
        del q
        attended = attended if mixed is None else beside(config, attended, mixed[:, -x.shape[1] :])
        x = pieces[1](layer, x, attended, config.rms_norm_eps)
        x = model.refined(number, x, None if more is None else more[:, :, number], predicted)
    if not ends:
        return model.packed(x, more), torch.stack(newest)
    if every is not None:
        every(x, start)
    return model.logits(x[:, -1]) if last_logits else None, torch.stack(newest)


def _mixed(
    model: Llama, number: int, x: torch.Tensor, bank: Bank, start: int, keep: bool, backend: str
) -> torch.Tensor | None:
    """What a layer's recurrence brings, as `recur_chunk`; None where it has none."""
    if model.layers[number].mixer is None:
        return None
    return recur_chunk(model, number, x, bank.recurrent, start, keep, backend)


def _opening(
    model: Llama, runtime: AttendsPrompt, start: int, count: int, whole: bool, backend: str
) -> range:
    """The layers of latent attention whose rows become keys and values in this chunk: where its
    queries are many, and not the last one's, whose newest query alone attends unless it is `whole`.
    The reference never makes them.
    """
    config = model.config
    if config.latent is None or backend == "reference" or not runtime.reads_whole_prompts:
        return range(0)
    given = start, count, model.dtype.itemsize, model.device.type
    return range((config.num_layers - (not whole)) * config.latent.expands(*given))


def _newest(
    queries: torch.Tensor, widest: int, opens: LatentHeads | None, backend: str
) -> torch.Tensor:
    """A copy of the newest queries before rotation, which outlives its layer; narrower heads end in
    zeros that nobody reads.
    """
    newest = queries[:, -MOST_WINDOW:]
    newest = newest if opens is None else opens.absorbed(newest)
    missing = widest - newest.shape[-1]
    newest = F.pad(newest, (0, missing)) if missing else newest
    held = empty(tuple(newest.shape), newest)
    copy_rows(held, newest, backend)
    return held


def _attended(
    runtime: AttendsPrompt,
    number: int,
    q: torch.Tensor,
    bank: Bank,
    first: int,
    slides: bool,
    opens: LatentHeads | None,
) -> torch.Tensor:
    """What a layer's queries q [B, C, H, D] at the positions from `first` on attend to. opens:
    makes keys and values of rows, and the heads are joined then.
    """
    if opens is not None:
        found = runtime.attend_opened(number, opens.attending(q), bank, first, opens.opened)
        return found[..., : opens.sizes.value].flatten(2)
    if slides:
        return runtime.attend_prompt_local(number, q, bank, first, first + q.shape[1])
    return runtime.attend_prompt(number, q, bank, first)
