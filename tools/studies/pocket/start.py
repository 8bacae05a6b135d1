"""The shipped model's first weights: a structured start.

It writes an induction circuit into them: heads that look one and two tokens back, a layer that
chooses coarsely where to look (tools/studies/pocket/selector.py), and behind it matching heads that
look for tokens whose previous tokens are mine. Without it a run of an hour on two cores does not
begin to retrieve (weights/pocket/MODEL_CARD.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.studies.pocket import selector
from tools.studies.pocket.model import Pocket

# behind the layer that chooses, where OmniKV reads what was chosen
MATCH_LAYERS = (2, 4)
# how strongly layer 0 writes what stood before beside the token itself; 0.2 drowned it
# (docs/LOG.md)
BACK = 0.14
# rotary pairs from here on turn less than one radian over 8,000 positions: matching at distance
# uses them
LOWEST_PAIR = 14


@torch.no_grad()
def structured_start(model: Pocket, spelled: list[str], seed: int) -> None:
    """Fill the weights. spelled[i] is token i's text: tokens of one to three digits get vectors of
    their digits and places.
    """
    s, gen = model.shape, torch.Generator().manual_seed(seed)
    d, hd = s.hidden, s.head_dim
    mean = torch.zeros(d)
    mean[selector.CONSTANT] = 1
    project = torch.eye(d)
    project[selector.LANE] = 0
    content = F.normalize(
        (torch.randn(s.vocab, d, generator=gen) + word_vectors(spelled, d, gen)) @ project, dim=1
    )
    content = F.normalize(content + 0.8 * digit_vectors(spelled, d, gen) @ project, dim=1)
    model.embed.copy_(content + mean)
    model.embed[:, selector.OWN] = selector.codes(spelled, word_names(spelled), gen)
    # what a norm makes of an embedding: content, constant and two codes
    normed = math.sqrt(d / (2 + 2 * selector.STRENGTH**2))
    for stack, scale in (
        (model.q, 0.5),
        (model.k, 0.5),
        (model.v, 0.5),
        (model.gate, 0.7),
        (model.up, 0.7),
    ):
        stack.copy_(torch.randn(stack.shape, generator=gen) * scale / math.sqrt(d))
    model.o.copy_(torch.randn(model.o.shape, generator=gen) * 0.02 / math.sqrt(d))
    model.down.zero_()
    # dims that hardly turn
    low = [i + side * hd // 2 for side in (0, 1) for i in range(LOWEST_PAIR, hd // 2)]
    code = torch.zeros(hd, d)
    code[low] = _orthonormal(len(low), d, gen) @ project
    outs = [torch.zeros(hd, d) for _ in range(4)]
    for out in outs:
        out[low] = _orthonormal(len(low), d, gen) @ project
    _look_back(model, mean, normed, code, outs)
    turns = [torch.zeros(hd, hd) for _ in range(3)]
    for turn in turns:
        turn[torch.tensor(low)[:, None], torch.tensor(low)[None, :]] = _orthonormal(
            len(low), len(low), gen
        )
    _match(model, code, outs, turns, project, gen)
    selector.plant(model, normed)


def _look_back(
    model: Pocket, mean: Tensor, normed: float, code: Tensor, outs: list[Tensor]
) -> None:
    """Layer 0: constant keys; three heads' queries are turned by one, two and three positions, the
    fourth sees the last few alike; each writes the code of its tokens into another subspace.
    """
    s, hd, half = model.shape, model.shape.head_dim, model.shape.head_dim // 2
    frequency = s.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    fast, near = (frequency > 0.03).float(), ((frequency > 0.03) & (frequency < 0.2)).float()
    strength = 2.6 * math.sqrt(math.sqrt(hd))
    constant = torch.cat((fast, torch.zeros(half)))
    for kv in range(2):
        model.k[0, kv * hd : (kv + 1) * hd] = strength * constant[:, None] * mean[None, :] / normed
        model.v[0, kv * hd : (kv + 1) * hd] = code
    for head, (offset, weight) in enumerate(((1, fast), (2, fast), (3, fast), (0, near))):
        turned = torch.cat(
            (weight * torch.cos(offset * frequency), -weight * torch.sin(offset * frequency))
        )
        model.q[0, head * hd : (head + 1) * hd] = (
            strength * turned[:, None] * mean[None, :] / normed
        )
        model.o[0, :, head * hd : (head + 1) * hd] = BACK * outs[head].T


def _match(
    model: Pocket,
    code: Tensor,
    outs: list[Tensor],
    turns: list[Tensor],
    project: Tensor,
    gen: torch.Generator,
) -> None:
    """The matching layers: head 0 finds tokens whose previous token is mine; head 2 those that have
    my last two tokens one place further back, behind one separator; head 3 those with the same
    words near. Each comparison has its random basis, so that a key's two tokens are told
    from one.
    """
    hd, gain = model.shape.head_dim, 2.1
    second, third, around = turns
    offered = second @ outs[1] + third @ outs[2] + around @ outs[3]
    for layer in MATCH_LAYERS:
        asked = {0: code, 2: second @ outs[0] + third @ outs[1], 3: around @ outs[3]}
        for head, query in asked.items():
            model.q[layer, head * hd : (head + 1) * hd] = gain * query
        for kv, key in ((0, outs[0]), (1, offered)):
            copy = _orthonormal(hd, model.shape.hidden, gen) @ project
            model.k[layer, kv * hd : (kv + 1) * hd] = gain * key
            model.v[layer, kv * hd : (kv + 1) * hd] = copy
            model.o[layer, :, 2 * kv * hd : (2 * kv + 1) * hd] = 0.2 * copy.T


def _orthonormal(rows: int, cols: int, gen: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(cols, rows, generator=gen))[0].T


def word_names(spelled: list[str]) -> list[str]:
    """A name per token, the same for tokens that are the same word but for spaces: " k" is asked
    for as "k".
    """
    return [
        text.strip() if text.strip().isalpha() else str(index) for index, text in enumerate(spelled)
    ]


def word_vectors(spelled: list[str], width: int, gen: torch.Generator) -> Tensor:
    """[vocab, width]: normal vectors, one for all tokens that are the same word but for spaces."""
    names = word_names(spelled)
    places = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return torch.randn(len(places), width, generator=gen)[
        torch.tensor([places[name] for name in names])
    ]


def digit_vectors(spelled: list[str], width: int, gen: torch.Generator) -> Tensor:
    """[vocab, width]: for a token of one to three digits the sum of vectors of (place, digit), with
    the digit also as a point on circles.
    """
    places = torch.randn(3, 10, width, generator=gen) / math.sqrt(width)
    circle = torch.randn(3, 6, width, generator=gen) / math.sqrt(width)
    length = torch.randn(3, width, generator=gen) / math.sqrt(width)
    out = torch.zeros(len(spelled), width)
    for index, text in enumerate(spelled):
        if text.isascii() and text.isdigit() and len(text) <= 3:
            for place, char in enumerate(reversed(text)):
                angle = 2 * math.pi * int(char) / 10 * torch.tensor([1.0, 2.0, 5.0])
                turn = torch.cat((angle.cos(), angle.sin()))
                out[index] += places[place, int(char)] + turn @ circle[place]
            out[index] += 0.5 * length[len(text) - 1]
    return out / 2
