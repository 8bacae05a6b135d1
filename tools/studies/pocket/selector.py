"""The layer that chooses: a coarse look-back head, planted in the first weights and held as it is.

Under OmniKV the layers behind LAYER read what LAYER attends to. A model that finds its answer in a
filter layer cannot judge a selection: one token, or none, would do as well. So LAYER finds, and
carries nothing: its output matrix is zero. What it finds is coarse, tokens that stand behind two
tokens of the same classes as mine: some ten to thirty places of a thousand, of which the layers
behind must pick the right one by all of the tokens' content.

The classes travel in LANE, components of the residual stream that no trained weight writes. The
weights of this circuit get no gradient and are held (`Held`), so that training neither sharpens nor
blurs the choice; as an indexer does (DeepSeek-V3.2-Exp, section 2.1), it only ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.studies.pocket.model import Pocket

LAYER = 1  # the filter layer; layer 0 looks back, all behind this one are sparse
SIDES = 10, 4  # components of a token's two codes: classes are twice as many, a sign each
WORDS = 4  # of the first code's components, those of letters and numbers
CONSTANT = 0  # the component that is the same in every token
OWN = slice(1, 15)  # codes of the token itself
BEFORE = slice(15, 29)  # of the one before it
SECOND = slice(29, 33)  # the short code of the one before that
LANE = slice(0, 33)
STRENGTH = 0.5  # length of a code beside a content of length one
SHARP = 24.0  # logit of one code that is the same, about; the stream grows in training
SHARE, LEAST, TAIL = 0.0667, 8, 32  # what `chosen` shows to rows that answer


def codes(spelled: list[str], names: list[str], gen: torch.Generator) -> Tensor:
    """[vocab, 14]: two unit vectors a token, the same for the same name: a signed axis each, but a
    number's first one lies between two.

    Letters and numbers draw their classes. Signs take theirs in turn and from others: some of them
    stand in every line, and two in one class would fill the choice. So would a word of a sentence
    that stands there forty times, if a number had its class: between axes a number is nearer to
    numbers of its own class than to any word (1 and .71).
    """
    words, signs = WORDS, SIDES[0] - WORDS
    first: dict[str, tuple[int, int, int, int]] = {}
    count = 0
    for text, name in zip(spelled, names, strict=True):
        if name not in first:
            own, turn, second, sign = (int(x) for x in torch.randint(1 << 16, (4,), generator=gen))
            sign_of_all = not any(char.isalnum() for char in text)
            where = words + count % signs if sign_of_all else own % words
            turn = count // signs if sign_of_all else turn
            count += sign_of_all
            first[name] = where, turn % 2, second % SIDES[1], sign % 2
    table = torch.tensor([first[name] for name in names])
    out, every = torch.zeros(len(names), sum(SIDES)), torch.arange(len(names))
    side = STRENGTH * (table[:, 1] * 2.0 - 1)
    out[every, table[:, 0]] = side
    number = torch.tensor([text.strip().isdigit() for text in spelled])
    first, other = table[number, 0] // 2 * 2, STRENGTH * (table[number, 0] % 2 * 2.0 - 1)
    out[number, first] = side[number] / 2**0.5
    out[number, first + 1] = other / 2**0.5
    out[every, SIDES[0] + table[:, 2]] = STRENGTH * (table[:, 3] * 2.0 - 1)
    return out


@torch.no_grad()
def plant(model: Pocket, scale: float) -> None:
    """Layer 0's heads 0 and 1, which look one and two places back, write the codes they find;
    LAYER compares. scale: of a normed embedding beside the embedding.
    """
    s, hd = model.shape, model.shape.head_dim
    rows = _carried(hd)
    model.v[0, rows] = 0
    model.v[0, rows, OWN] = torch.eye(len(rows)) / scale
    model.o[:, LANE] = 0
    model.o[0, BEFORE, rows] = torch.eye(len(rows))
    model.o[0, SECOND, [hd + row for row in rows[SIDES[0] :]]] = torch.eye(SIDES[1])
    for stack in (model.q, model.k, model.v, model.o):
        stack[LAYER] = 0
    # the slowest rotary pairs: hardly a twentieth of a radian over 32,768 positions
    pairs = range((hd - sum(SIDES)) // 2, hd // 2)
    slow = torch.tensor([i + side * hd // 2 for side in (0, 1) for i in pairs])
    gain = (SHARP * hd**0.5) ** 0.5 / (STRENGTH * scale)
    asks = torch.zeros(hd, s.hidden)
    asks[slow[: SIDES[0]], OWN.start : OWN.start + SIDES[0]] = torch.eye(SIDES[0])
    asks[slow[SIDES[0] :], BEFORE.start + SIDES[0] : BEFORE.stop] = torch.eye(SIDES[1])
    offers = torch.zeros(hd, s.hidden)
    offers[slow[: SIDES[0]], BEFORE.start : BEFORE.start + SIDES[0]] = torch.eye(SIDES[0])
    offers[slow[SIDES[0] :], SECOND] = torch.eye(SIDES[1])
    model.q[LAYER] = gain * asks.repeat(s.heads, 1)
    model.k[LAYER] = gain * offers.repeat(s.kv_heads, 1)


def _carried(head_dim: int) -> list[int]:
    """Components of layer 0's first value head that carry codes: the first of its fast pairs, which
    the content's code (tools/studies/pocket/start.py) leaves free.
    """
    return list(range(sum(SIDES)))


class Held:
    """The circuit's weights as they were when this was made, and their places."""

    def __init__(self, model: Pocket):
        self.model = model
        self.values = [part.detach().clone() for part in self._parts(model, "data")]

    def _parts(self, model: Pocket, what: str) -> list[Tensor]:
        """Views of the held places, of the weights ("data") or their gradients ("grad")."""
        m = {name: getattr(p, what) for name, p in model.named_parameters()}
        hd = model.shape.head_dim
        return [
            m["embed"][:, LANE],
            m["q"][0, : 2 * hd],
            m["k"][0, :hd],
            m["v"][0, : sum(SIDES)],
            m["o"][:, LANE],
            m["down"][:, LANE],
            m["norm1"][0, LANE],
            m["norm1"][LAYER],
            *(m[name][LAYER] for name in ("q", "k", "v", "o")),
        ]

    def drop_gradients(self) -> None:
        """Zero the gradients of the held weights: they count in no norm and move nothing."""
        for part in self._parts(self.model, "grad"):
            part.zero_()

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what momentum and weight decay did to them."""
        for part, value in zip(self._parts(self.model, "data"), self.values, strict=True):
            part.copy_(value)


@torch.no_grad()
def chosen(query: Tensor, key: Tensor, answers: Tensor) -> Tensor:
    """[B, L, L] bool: what rows see behind LAYER: those of `answers` [B, L] bool the tokens that
    LAYER attends to most and the newest TAIL, the others all before them.

    query [B, Hkv, G, L, D] and key [B, Hkv, L, D] of LAYER, rotated.
    """
    length = query.shape[3]
    start = int(answers.any(0).int().argmax())  # rows before it see all: nothing to choose
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    late, old = causal[start:], causal.tril(-TAIL)[start:]
    scores = (query[..., start:, :] @ key.unsqueeze(2).transpose(-1, -2)).float()
    weight = (scores * query.shape[-1] ** -0.5).masked_fill_(~late, -torch.inf)
    weight = weight.softmax(-1).flatten(1, 2).amax(1)
    best = weight.masked_fill_(~old, -1.0).topk(min(length, max(LEAST, int(SHARE * length))))
    seen = torch.zeros_like(weight, dtype=torch.bool).scatter_(2, best.indices, True) | ~old
    out = causal.repeat(len(answers), 1, 1)
    out[:, start:] = (seen | ~answers[:, start:, None]) & late
    return out
