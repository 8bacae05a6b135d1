"""Random walks of a session over a model with recurrent layers, or with latent attention: read,
decode, truncate, fork, interrupt, save, restore, check. After each walk the session must say what a
fresh one says that read and decoded the same tokens in the same parts.

    python -m tests.programs.hybrid_walks [--walks N] [--seed S] [--tier device|host] [--method M]
        [--savepoints N] [--family F]

Prints one line: walks, the worst difference of logits, and the most tokens that a truncate ran
again beside the tokens it took back. tests/engine/session/test_hybrid_walks.py runs some.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine import LLM, Full, OmniKV, SamplingParams
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.session.session import Session
from tests.builders import HYBRIDS, VOCAB, hybrid_config, latent_config, tiny_llm

CONTEXT, CHUNK = 1024, 64
LATENT = "latent"  # the family without a recurrence
SPARSE = OmniKV(filter_layers=(3,), tokens=24, tail=64, dense_below=0)
WINDOWED = OmniKV(
    filter_layers=(3,), tokens=24, tail=64, dense_below=0, selector="exponential", window=16
)
METHODS: dict[str, Method] = {
    "full": Full(),
    "omnikv": SPARSE,
    "windowed": WINDOWED,
    "exact": Exact(SPARSE, draft=4),
}
# of the largest logit: chunks end elsewhere, so sums are taken in another order
TOLERANCE = 2e-4


class Interrupted(Exception):
    """Raised where a user would press Ctrl-C."""


@dataclass
class Found:
    """What walks have shown: the worst relative difference of logits, walks whose sparse layers
    chose other tokens at a tie, tokens that truncates took back and ran again, and the worst of
    those pairs.
    """

    walks: int = 0
    sparse: int = 0  # steps whose sparse layers read a selection, or tokens that they drafted
    worst: float = 0.0
    ties: int = 0
    back: int = 0
    again: int = 0
    pairs: list[tuple[int, int, int]] = field(default_factory=list)  # length, to, again


@dataclass
class Walk:
    """One session and the parts in which its tokens came: (read or decoded, tokens)."""

    llm: LLM
    method: Method
    tier: str | None
    draw: random.Random
    folder: Path
    found: Found
    session: Session = field(init=False)
    parts: list[tuple[bool, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.llm.session(self.method, offload=self.tier)

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.parts)

    def tokens(self, most: int) -> list[int]:
        count = min(self.draw.randint(1, most), CONTEXT - len(self) - 16)
        return [self.draw.randrange(VOCAB) for _ in range(count)]

    # ---------------------------------------------------------------- what a user does

    def read(self) -> None:
        ids = self.tokens(self.draw.choice((5, 70, 300)))
        if not ids:
            return
        if self.draw.random() < 0.25:
            return self.read_interrupted(ids)
        self.session.prefill(ids)
        self.parts.append((True, ids))

    def read_interrupted(self, ids: list[int]) -> None:
        stop = self.draw.randint(1, 3)

        def progress(_: object) -> None:
            nonlocal stop
            stop -= 1
            if not stop:
                raise Interrupted

        before = len(self)
        try:
            self.session.prefill(ids, progress)
        except Interrupted:
            pass
        if len(self.session) > before:
            self.parts.append((True, ids[: len(self.session) - before]))

    def decode(self) -> None:
        if not self.parts:
            return
        ids = self.tokens(self.draw.choice((3, 30)))
        for token in ids:
            self.session.decode(token)
        if ids:
            self.parts.append((False, ids))

    def generate(self) -> None:
        count = min(self.draw.randint(1, 12), CONTEXT - len(self) - 16)
        if not self.parts or count < 1:
            return
        before, drafted = len(self), self.session.stats.drafted
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        for _ in self.session.generate([], params):
            pass
        self.parts.append((False, self.session.ids[before:]))
        self.found.sparse += self.session.stats.drafted - drafted

    def truncate(self) -> None:
        length = len(self)
        if not length:
            return
        near = self.draw.random() < 0.6
        n = self.draw.randint(max(0, length - 40), length) if near else self.draw.randint(0, length)
        said = self.session.tokens_again(n)
        if self.draw.random() < 0.2:
            self.truncate_interrupted(n)
        else:
            before = self.session.stats.tokens_again
            self.session.truncate(n)
            assert self.session.stats.tokens_again - before <= said + 64  # a selector's window
            if self.session.runtime.needs.window == 0:
                assert self.session.stats.tokens_again - before == said
        self.found.back += length - n
        self.found.again += said
        self.found.pairs.append((length, n, said))
        self.cut(n)

    def truncate_interrupted(self, n: int) -> None:
        self.session.truncate(n, later=True)

        def progress(_: object) -> None:
            raise Interrupted

        if n:
            try:
                self.session.refresh_logits(progress)
            except Interrupted:
                pass

    def cut(self, n: int) -> None:
        kept = []
        for read, ids in self.parts:
            if n <= 0:
                break
            kept.append((read, ids[:n]))
            n -= len(ids)
        self.parts = kept

    def fork(self) -> None:
        other = self.session.fork()
        if self.draw.random() < 0.5:
            self.session, other = other, self.session
        other.close()

    def save(self) -> None:
        path = self.folder / "session"
        self.session.save(path)
        self.session.close()
        self.session, _ = self.llm.restore(path, offload=self.tier)

    def check(self) -> None:
        decoded = bool(self.parts) and not self.parts[-1][0]
        sparse = self.session.plan.sparse_layers and not isinstance(self.method, Exact)
        if decoded and sparse and self.session.answer_length:
            self.session.check(self.draw.randint(1, 12))

    # ---------------------------------------------------------------- what a fresh session says

    def compare(self) -> None:
        assert self.session.ids == [token for _, ids in self.parts for token in ids]
        if not self.parts:
            return
        fresh = self.llm.session(self.method, offload=self.tier)
        for read, ids in self.parts:
            if read:
                fresh.prefill(ids)
                continue
            for token in ids:
                fresh.decode(token)
        difference, alike = 0.0, True
        for token in (None, 1, 2):
            if token is None:
                self.session.refresh_logits()
                mine, theirs = self.session.last_logits, fresh.last_logits
            else:
                mine, theirs = self.session.decode(token), fresh.decode(token)
                alike = alike and self.same_choice(fresh)
            assert mine is not None and theirs is not None
            difference = max(difference, float((mine - theirs).abs().max() / theirs.abs().max()))
        fresh.close()
        if difference > TOLERANCE and not alike:
            self.found.ties += 1
            return
        self.found.worst = max(self.found.worst, difference)

    def same_choice(self, fresh: Session) -> bool:
        mine, theirs = self.session.selections, fresh.selections
        return all(torch.equal(mine[layer], theirs[layer]) for layer in theirs if layer in mine)


OPERATIONS = (
    (Walk.read, 3),
    (Walk.decode, 3),
    (Walk.generate, 2),
    (Walk.truncate, 4),
    (Walk.fork, 1),
    (Walk.save, 1),
    (Walk.check, 1),
)


def walks(
    count: int,
    seed: int,
    method: str,
    tier: str | None,
    savepoints: int = 12,
    steps: int = 8,
    family: str = "qwen3.5",
) -> Found:
    """Take `count` walks of `steps` operations each."""
    given = dict(max_positions=CONTEXT)
    config = latent_config(**given) if family == LATENT else hybrid_config(family=family, **given)
    settings = dict(max_context=CONTEXT, chunk=CHUNK, savepoints=savepoints)
    llm = tiny_llm(METHODS[method], config, **settings)
    with tempfile.TemporaryDirectory() as folder:
        return walks_of(llm, Path(folder), count, seed, METHODS[method], tier, steps)


def walks_of(
    llm: LLM,
    folder: Path,
    count: int,
    seed: int,
    method: Method,
    tier: str | None,
    steps: int = 8,
) -> Found:
    """Take walks over a model; every rank of one takes the same. folder: where they save."""
    found, (chosen, weights) = Found(), zip(*OPERATIONS)
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        walk = Walk(llm, method, tier, draw, folder, found)
        for operation in draw.choices(chosen, weights, k=steps):
            operation(walk)
        walk.compare()
        if not isinstance(method, Exact):
            found.sparse += walk.session.stats.sparse_steps
        walk.session.close()
        found.walks += 1
        assert found.worst <= TOLERANCE, f"walk {number} of seed {seed}: {found.worst:.1e}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--walks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=("device", "host"), default="device")
    parser.add_argument("--method", choices=tuple(METHODS), default="omnikv")
    parser.add_argument("--savepoints", type=int, default=12)
    parser.add_argument("--family", choices=(*HYBRIDS, LATENT), default="qwen3.5")
    args = parser.parse_args()
    settings = dict(savepoints=args.savepoints, family=args.family)
    found = walks(args.walks, args.seed, args.method, args.tier, **settings)
    share = found.again / max(1, found.back)
    length, to, again = max(found.pairs, key=lambda pair: pair[2], default=(0, 0, 0))
    print(
        f"{found.walks} walks of {args.family}, {args.method} on the {args.tier} tier, "
        f"{args.savepoints} savepoints: {found.sparse} sparse steps, logits at most "
        f"{found.worst:.1e} apart, {found.ties} ties; "
        f"{len(found.pairs)} truncates took back {found.back} tokens and ran {found.again} again "
        f"({share:.2f} of each), at most {again} (from {length} to {to})"
    )


if __name__ == "__main__":
    main()
