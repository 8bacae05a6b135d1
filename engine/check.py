"""Proof on the user's own prompt: full and sparse steps at the same positions over the same bank,
compared.

All keys and values are kept, so the comparison needs no second read: at every position of the last
answer the full step runs first, then the session's own step, which writes last and leaves the bank
as it was.
"""

from dataclasses import asdict, dataclass, field

import torch

from engine.decode import Decoder
from engine.errors import SettingError
from engine.plan.layers import Role
from engine.query_ring import RING

# a windowed selector needs up to 64 queries before the first checked position, and the ring holds
# RING
MOST_STEPS = RING - 64


class MassMeter:
    """A runtime that, beside attending as `inner` does, measures how much attention each sparse
    layer keeps.

    mass[layer]: share of the softmax over every visible row that falls on the selection and the
    tail, mean over query heads (METHODS.md 3.8, item 37, per head). Costs one more reading of a
    sparse layer's K per step.
    """

    def __init__(self, inner):
        self.inner, self.mass = inner, {}

    def attend(self, layer, q, step):
        """As the inner runtime; SPARSE layers leave their mass behind."""
        out = self.inner.attend(layer, q, step)
        if self.inner.setup.plan.roles[layer] is Role.SPARSE:
            self.mass[layer] = self._kept(layer, q, step)
        return out

    def _kept(self, layer, q, step):
        n, start = int(step.visible[0]), int(self.inner.tail_first(step)[0])
        q, scale, logits = q[0, -1].float(), self.inner.scale, []
        for _, k, _ in step.bank.blocks(layer, 0, n):
            heads = k[0].float()
            folded = q.view(heads.shape[0], -1, q.shape[-1])
            logits.append(torch.matmul(folded, heads.transpose(1, 2)) * scale)
        weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1).flatten(0, 1)
        chosen = self.inner.chosen_rows(layer).to(weights.device)
        # a choice per head: those of a K/V head hold for its query heads
        if chosen.dim() == 2:
            chosen = chosen.repeat_interleave(len(weights) // len(chosen), 0)
            return float((weights.gather(1, chosen).sum(-1) + weights[:, start:n].sum(-1)).mean())
        return float((weights[:, chosen].sum(-1) + weights[:, start:n].sum(-1)).mean())


@dataclass(frozen=True)
class StepCheck:
    """One position: whether both would say the same token, KL(full || sparse) in nats, and the mass
    kept per sparse layer.
    """

    position: int
    full_token: int
    sparse_token: int
    kl: float
    mass: dict

    @property
    def agrees(self):
        """Whether the most likely tokens are equal."""
        return self.full_token == self.sparse_token

    @property
    def mean_mass(self):
        """Mass kept, mean over the sparse layers."""
        return sum(self.mass.values()) / max(1, len(self.mass))


@dataclass(frozen=True)
class Report:
    """What a check found. `texts` are the answer's tokens as text, one per step, where there is a
    tokenizer.
    """

    steps: tuple
    context: int
    budget: int
    texts: tuple = field(default=())

    @property
    def agreement(self):
        """Share of positions at which both say the same token."""
        return sum(s.agrees for s in self.steps) / len(self.steps)

    @property
    def mean_kl(self):
        """Mean KL(full || sparse) in nats."""
        return sum(s.kl for s in self.steps) / len(self.steps)

    @property
    def worst(self):
        """The step with the largest KL."""
        return max(self.steps, key=lambda s: s.kl)

    def mass_by_layer(self):
        """{sparse layer: mean mass kept}."""
        layers = self.steps[0].mass
        return {layer: sum(s.mass[layer] for s in self.steps) / len(self.steps) for layer in layers}

    def to_dict(self):
        """Plain dict for JSON."""
        return {
            "context": self.context,
            "budget": self.budget,
            "agreement": self.agreement,
            "mean_kl": self.mean_kl,
            "mass_by_layer": self.mass_by_layer(),
            "texts": list(self.texts),
            "steps": [asdict(s) for s in self.steps],
        }

    def __str__(self):
        worst, same = self.worst, sum(s.agrees for s in self.steps)
        at = self.steps.index(worst)
        words = f" near {''.join(self.texts[max(0, at - 8) : at + 1])!r}" if self.texts else ""
        mass = self.mass_by_layer()
        lines = [
            f"checked {len(self.steps)} steps at {self.context} tokens of context, {min(self.budget, self.context)} chosen per step:",
            f"  same next token as full attention  {same}/{len(self.steps)} ({100 * self.agreement:.1f}%)",
            f"  KL(full || sparse)                 mean {self.mean_kl:.2g}, worst {worst.kl:.2g} nats at position {worst.position}{words}",
        ]
        if mass:
            low = min(mass, key=mass.get)
            mean = sum(mass.values()) / len(mass)
            lines += [
                f"  attention mass kept                mean {mean:.3f}, least {mass[low]:.3f} in layer {low}",
                "    by layer  " + "  ".join(f"{layer}:{kept:.3f}" for layer, kept in mass.items()),
            ]
        return "\n".join(lines)


def check(session, steps=32, progress=None):
    """Compare full and sparse attention at the last `steps` positions of a session's answer; the
    session is left as it was.

    Positions that a prefill read are never checked: their rows come from a chunk, and a step would
    leave its own there. progress(done, total) after every position. Raises SettingError where there
    is nothing to compare: too few tokens, or a method without sparse layers.
    """
    last = len(session)
    steps = min(steps, MOST_STEPS, session.answer_length)
    if not session.plan.sparse_layers:
        raise SettingError(
            "check: this method has no sparse layer, there is nothing to compare; use method=OmniKV(...)"
        )
    if steps < 1:
        raise SettingError(
            f"check: found a session of {last} tokens, expected a prompt and at least one token of an answer"
        )
    pair = Pair(session)
    slots = session.query_ring.slots.clone()
    found = []
    try:
        with session.llm.busy(), torch.inference_mode():
            for position in range(last - steps, last):
                found.append(pair.at(position))
                if progress is not None:
                    progress(len(found), steps)
    finally:
        session.query_ring.slots.copy_(slots)
    words = session.llm.tokenizer.stream() if session.llm.tokenizer is not None else None
    texts = tuple(words.push(token) for token in session.ids[last - steps :]) if words else ()
    return Report(tuple(found), last, session.runtime.k, texts)


class Pair:
    """A full and a metered sparse step over one session's bank, eager."""

    def __init__(self, session):
        self.session = session
        model, rotary, ring = session.llm.model, session.llm.rotary, session.query_ring
        self.meter = MassMeter(session.runtime)
        self.full = Decoder(model, rotary, session.dense_runtime, ring)
        self.sparse = Decoder(model, rotary, self.meter, ring)

    def at(self, position):
        """StepCheck of the token at `position`: the full step first, the session's own last."""
        device = self.session.llm.model.device
        token = torch.tensor([[self.session.ids[position]]], device=device)
        length = torch.tensor([position], dtype=torch.int32, device=device)
        with self.session.bank.rehearsal(position + 1):
            full = self.full.step(token, length, self.session.bank)[0, -1]
            sparse = self.sparse.step(token, length, self.session.bank)[0, -1]
        p, q = torch.log_softmax(full.double(), -1), torch.log_softmax(sparse.double(), -1)
        return StepCheck(
            position,
            int(full.argmax()),
            int(sparse.argmax()),
            max(0.0, float((p.exp() * (p - q)).sum())),
            dict(self.meter.mass),
        )


@dataclass
class Watch:
    """A running estimate of the mass kept: every `every`-th step is metered.

    exact_below: where a metered step keeps less, the steps until the next metered one run full
    attention; None only warns.
    """

    every: int = 16
    exact_below: float | None = None
    steps: int = 0
    sampled: int = 0
    exact_steps: int = 0
    mass: float = 1.0  # of the newest metered step, mean over sparse layers
    lowest: float = 1.0

    def __post_init__(self):
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise SettingError(f"watch: found every={self.every!r}, expected an int of at least 1")
        if self.exact_below is not None and not 0 < self.exact_below <= 1:
            raise SettingError(
                f"exact_below: found {self.exact_below!r}, expected a number in (0, 1]"
            )

    def due(self):
        """Whether this sparse step is to be metered; counts it."""
        self.steps += 1
        return (self.steps - 1) % self.every == 0

    def saw(self, mass):
        """A metered step kept `mass` ({layer: share})."""
        self.mass = sum(mass.values()) / max(1, len(mass))
        self.lowest = min(self.lowest, self.mass)
        self.sampled += 1

    @property
    def exact(self):
        """Whether the steps up to the next sample run full attention."""
        return self.exact_below is not None and self.mass < self.exact_below
