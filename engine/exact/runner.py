"""The steps of a session in exact mode: draft, verify, and hand out what was verified.

The session feeds a token and asks for full attention's logits after it, as ever. If the token is
the one that was drafted for this place, its logits are there already: one step of full attention
over the fed token and its drafts has computed them, and has written the rows. Else the rest of the
draft is dropped and the next cycle begins: the drafter guesses what will be fed next, by the
sampler's own random numbers, and full attention checks the guesses in one step.

So whatever is sampled is sampled from full attention's logits, in the order and by the numbers of
the plain loop. Greedy or seeded, the text is Full()'s; without a seed, so is the distribution.
Nothing is committed before it is fed. An interrupt, a truncate or a closed stream leaves rows
beyond the session's length, which nobody reads.

Of a model that several ranks hold, rank 0 alone has a sampler. It says how many tokens are drafted
and which they are; each other rank takes the same steps, and hears every token after its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.bank.base import Attends, Bank
from engine.base.errors import EngineError, OutOfHostMemory
from engine.exact.draft_length import DraftLength
from engine.exact.draft_weights import copied_layers
from engine.exact.prompt_lookup import PromptLookup
from engine.forward.graphs import GraphedStep
from engine.methods.base import Method
from engine.methods.exact import MOST_DRAFTS, Chooses, Exact, ExactRuntime, Kept
from engine.methods.window_recompute import WindowRecompute
from engine.model.share.divide import whole_of
from engine.plan.exact_costs import CHOSEN_BEFORE, ExactCosts
from engine.plan.layers import LayerPlan
from engine.runner.recompute.runner import RecomputeRunner
from engine.runner.state import SessionState
from engine.runner.step_runner import StepKind, StepRunner

REGION = 256  # tokens for which costs and what was accepted say who chooses
LOOKUP_PRIOR = 0.5  # acceptance that is assumed of a text that occurred before


@dataclass
class Cycle:
    """The rest of one verification: the drafts, logits [1 + drafts, vocab] after the fed token and
    after each draft, and the number of drafts accepted so far.

    length: tokens in the session when the next draft is fed. changes: the query ring's, then.
    """

    drafts: list[int]
    logits: torch.Tensor
    length: int
    changes: int
    source: DraftLength
    accepted: int = 0


@dataclass(frozen=True)
class Chosen:
    """What a verification chose for the next cycle's drafts. first, last: tokens in the session
    after the first and the last one that it took; changes: the query ring's, then.
    """

    first: int
    last: int
    changes: int

    def serves(self, n: int, changes: int) -> bool:
        """Whether it is of the cycle before the one that the n-th token begins."""
        return changes == self.changes and self.first < n <= self.last + 1


def runner_of(
    session: SessionState, method: Method, plan: LayerPlan, backend: str, bank: Bank
) -> StepRunner:
    """The runner of a session's steps under a method and its plan, over `bank`."""
    if isinstance(method, Exact):
        return ExactRunner(session, method, plan, backend, bank)
    if isinstance(method, WindowRecompute):
        return RecomputeRunner(session, method, plan, backend, bank)
    loaded, ring = session.loaded, session.query_ring
    return StepRunner(loaded, method, plan, bank.capacity, backend, bank, ring)


class ExactRunner(StepRunner):
    """Runs every step as full attention's, ahead where the session's sampler can be guessed."""

    batchable = False  # it drafts, then verifies

    def __init__(
        self, session: SessionState, method: Exact, plan: LayerPlan, backend: str, bank: Bank
    ):
        loaded = session.loaded
        super().__init__(loaded, method, plan, bank.capacity, backend, bank, session.query_ring)
        assert isinstance(self.runtime, ExactRuntime)
        self._method = method
        # not the session, which holds this runner: one that is dropped is freed at once
        self._of = weakref.ref(session)
        self._exact, self._drafter = self.runtime, self.runtime.drafter
        self._kept = Kept(self._drafter)
        given = self._drafter.needs, self.token
        copied = method.draft_weights == "int8"
        form = copied_layers(loaded, backend) if copied else self.halves
        self._own_draft = self.issued_by(self._drafter, *given, method.early_exit, form)
        self._kept_draft = self.issued_by(self._kept, *given, form=form)
        self._chooses = Chooses(self._drafter)
        self._verify_steps: dict[tuple[int, bool], GraphedStep] = {}
        self._chosen: Chosen | None = None
        self._chose = True  # whether the cycle's first draft step chose
        self._by_verifier: tuple[int, bool | None] = -1, None  # of a region of tokens
        placement = bank.placement
        self._costs = ExactCosts.of(
            whole_of(loaded.config),
            plan,
            bank.dtype.itemsize,
            loaded.device.type,
            placement.layers if placement else (),
            loaded.few_bits,
            method.early_exit,
            copied,
        )
        fixed = None if method.draft == "auto" else int(method.draft)
        self._by_drafter = DraftLength(fixed)
        self._by_lookup = DraftLength(None if fixed is None else fixed, LOOKUP_PRIOR)
        self._lookup = PromptLookup()
        self._cycle: Cycle | None = None
        self._fed = self._read = -1
        self._rows: list[int] = []  # bank rows that the latest `run` read, by layer

    @property
    def _session(self) -> SessionState:
        session = self._of()
        assert session is not None  # whoever runs a session's step holds the session
        return session

    # ---------------------------------------------------------------- what the session calls

    def runs_ahead(self, n: int) -> bool:
        """Never: the host compares the token with what was drafted."""
        return False

    def feed(self, token_id: int, n: int) -> None:
        """Put the n-th token where the next step reads it."""
        self._fed = token_id
        super().feed(token_id, n)

    def feed_argmax(self, logits: torch.Tensor | None, n: int) -> None:
        """Feed the argmax of `logits`, and read it at once: it is compared with a draft."""
        super().feed_argmax(logits, n)
        self._fed = self.argmax.read()

    def steps_again(self, n: int) -> bool:
        """Never: every row is full attention's."""
        return False

    def left_selection(self, kind: StepKind) -> bool:
        """Whether the drafter chose anything for the cycle that computed the last logits."""
        return bool(self.runtime.selections())

    def rows_read(self, n: int, sparse: bool) -> list[int]:
        """Return the rows that the cycle read which computed the n-th token's logits, drafts
        included. They are 0 if an earlier cycle computed them.
        """
        return self._rows

    def run(self, n: int, own: bool) -> torch.Tensor:
        """Full attention's logits [vocab] after the token that was fed, the n-th."""
        ready = self._ready(n)
        if ready is not None:
            self._rows = [0] * self.plan.num_layers
            return ready
        self._exact.forget_choice()
        try:
            drafts, source, cost = self._draft(n)
            if not drafts:
                super().feed(self._fed, n)
                self._count(n, 0, cost, self.dense_runtime.rows_read(n))
                return super().run(n, False)
            return self._verify(n, drafts, source, cost)
        except BaseException:
            self._cycle = None
            self._forget(n)
            raise

    # ---------------------------------------------------------------- handing out

    def _ready(self, n: int) -> torch.Tensor | None:
        """The logits after the n-th token where it was drafted and verified; else the cycle ends,
        and its drafter learns what became of it.
        """
        cycle, counters = self._cycle, self._session.counters
        if cycle is None:
            return None
        valid = cycle.length == n - 1 and cycle.changes == self._query_ring.changes
        left = cycle.accepted < len(cycle.drafts)
        if valid and left and cycle.drafts[cycle.accepted] == self._fed:
            cycle.accepted += 1
            cycle.length = n
            counters.accepted += 1
            counters.cost_full += self._costs.full(self.dense_runtime.rows_read(n))
            return cycle.logits[cycle.accepted]
        self._cycle = None
        cycle.source.acceptance.learn(cycle.accepted, valid and left)
        return None

    # ---------------------------------------------------------------- drafting

    def _draft(self, n: int) -> tuple[list[int], DraftLength, float]:
        """(drafts of what follows the n-th token, who made them, what the cycle costs)."""
        dense = self.dense_runtime.rows_read(n)
        own, kept = self._draft_rows(n)
        early, verifier = self._method.early_exit > 0, self._verifier_chooses(n)
        first, later = self._costs.draft(own, True), self._costs.draft(kept, early)
        # a length is chosen by the cycles that will follow, whose choice is there
        begins = 0.0 if not verifier or self._serves(n) else first - later
        first = later if verifier else first

        def copied(d: int) -> float:
            return self._costs.full(dense, d + 1, verifier and d > 0)

        def drafted(d: int) -> float:
            return copied(d) + (first + later * (d - 1) if d else 0.0)

        count, found = self._agreed(*self._wanted(n, copied, drafted))
        if found:
            return found, self._by_lookup, copied(len(found))
        if not count:
            return [], self._by_drafter, self._costs.full(dense)
        drafts = self._guess(n, count)
        return drafts, self._by_drafter, drafted(len(drafts)) + begins

    def _verifier_chooses(self, n: int) -> bool:
        """Whether verifications choose what drafts read, at this length: the same on every rank.
        Not over devices, where lists of theirs do not cross, nor over tokens of several ranks.
        """
        model = self._loaded.model
        if (model is not None and model.parts) or self._loaded.config.context is not None:
            return False
        region = n // REGION
        if region != self._by_verifier[0]:
            read = max(self._drafter.kept_rows(n))
            draft = self._method.draft
            most, fixed = (MOST_DRAFTS, False) if draft == "auto" else (int(draft), True)
            reached = self._by_drafter.acceptance.reached(
                1 / CHOSEN_BEFORE if self._by_verifier[1] else 1.0
            )
            given = self._costs, n, read, most, fixed, reached, self._by_verifier[1]
            on_host = any(map(self.bank.on_host, range(self.plan.num_layers)))
            self._by_verifier = region, not on_host and self._method.verifier_chooses(*given)
        return bool(self._by_verifier[1])

    def _serves(self, n: int) -> bool:
        """Whether the cycle before has chosen for the one that the n-th token begins."""
        chosen = self._chosen
        return chosen is not None and chosen.serves(n, self._query_ring.changes)

    def _forget(self, n: int) -> None:
        """The drafter takes back its rows from the n-th on, and whatever was chosen."""
        self._chosen = None
        self._drafter.truncate(n - 1)

    def _wanted(
        self, n: int, copied: Callable[[int], float], drafted: Callable[[int], float]
    ) -> tuple[int, list[int]]:
        """(how many tokens to guess, or 0; what occurred before, to be tried in their place).
        copied(d), drafted(d): what a cycle of d drafts costs.
        """
        sampler = self._session.sampler
        if sampler is None:
            return 0, []
        most = min(MOST_DRAFTS, self._session.limit - n, sampler.left)
        if most < 1:
            return 0, []
        found = self._copied(most)
        count = self._by_drafter.choose(most, drafted)
        if found:
            copies = self._by_lookup.choose(len(found), copied)
            paid = self._by_lookup.gain(copies, copied)
            if copies and paid >= self._by_drafter.gain(count, drafted):
                return 0, found[:copies]
        return count, []

    def _agreed(self, count: int, found: list[int]) -> tuple[int, list[int]]:
        """What rank 0 wants, on every rank."""
        peers = self._loaded.peers
        if peers is None:
            return count, found
        rest = [0] * (MOST_DRAFTS - len(found))
        count, copies, *tokens = peers.said(count, len(found), *found, *rest)[0]
        return count, tokens[:copies]

    def _draft_rows(self, n: int) -> tuple[list[int], list[int]]:
        """Rows that the first draft step reads after n tokens, and a later one, by layer."""
        if not self._method.early_exit:
            return self._drafter.rows_read(n), self._drafter.kept_rows(n)
        rows = self._costs.drafts(self._drafter.rows_read(n))
        return rows, rows

    def _copied(self, most: int) -> list[int]:
        """What followed the newest tokens where they occurred before."""
        if not self._method.lookup:
            return []
        if self._read != self._query_ring.changes:
            self._read = self._query_ring.changes
            self._lookup.forget(0)  # a prompt was read, or tokens were taken back
        return self._lookup.drafts(self._session.ids, self._fed, most)

    def _guess(self, n: int, count: int) -> list[int]:
        """At most `count` drafts by the method's sparse steps: where no verification has chosen,
        the first chooses, the others read what is chosen; or by steps that end early. Fewer after
        an end token, or where host memory ends.
        """
        sampler, bank = self._session.sampler, self.bank
        drafts: list[int] = []
        ends, token, step = self._loaded.end_token_ids, self._fed, self._own_draft
        self._chose = not self._serves(n)
        if not self._chose:
            step = self._kept_draft
        with nullcontext() if sampler is None else sampler.drafting() as guess:
            for m in range(n, n + count):
                if not self._has_room(m):
                    break
                super().feed(token, m)
                logits = step(m)[0, -1]
                self._drafter.commit(1)
                if step is self._own_draft and not self._method.early_exit:
                    self._kept.tail_start.copy_(self._drafter.tail_start(self.at(m)))
                    step = self._kept_draft
                token = self._guessed(guess, logits)
                if token < 0:
                    break
                drafts.append(token)
                if token in ends:
                    break
        self._exact.note_choice()
        # the rows that the drafter saw from here on are provisional
        self._forget(n)
        bank.before_step(n)
        return drafts

    def _guessed(self, guess: Callable[[torch.Tensor], int] | None, logits: torch.Tensor) -> int:
        """The token that `guess` takes by logits [vocab], on every rank; -1: it takes none."""
        token = -1
        if guess is not None:
            try:
                token = guess(logits)
            except EngineError:  # no finite logits: full attention's decide what to say
                pass
        peers = self._loaded.peers
        return token if peers is None else peers.said(token)[0][0]

    def _has_room(self, m: int) -> bool:
        """Prepare the bank for a step that makes it m tokens long, if all memory allows."""
        room = True
        try:
            self.bank.before_step(m)
        except OutOfHostMemory:
            room = False
        peers = self._loaded.peers
        return room if peers is None else all(own for (own,) in peers.said(room))

    # ---------------------------------------------------------------- verifying

    def _verify(self, n: int, drafts: list[int], source: DraftLength, cost: float) -> torch.Tensor:
        """One step of full attention over the fed token and its drafts; logits after the former."""
        bank, last = self.bank, n
        while last < n + len(drafts) and self._has_room(last + 1):
            last += 1
        drafts = drafts[: last - n]
        chooses = self._verifier_chooses(n)
        step = self._verify_step(1 + len(drafts), chooses)
        step.token.copy_(torch.tensor([[self._fed, *drafts]]))
        self.length.fill_(n - 1)
        logits = step(last)[0]
        # what lies beyond the fed token is nobody's until it is fed too
        bank.before_step(n)
        self._cycle = Cycle(drafts, logits, n, self._query_ring.changes, source)
        if chooses:
            # of its first token: what it chose lies before that token's tail
            self._kept.tail_start.copy_(self._drafter.tail_start(self.at(n)))
            self._chosen = Chosen(n, last, self._query_ring.changes)
        rows = self.dense_runtime.rows_read(last)
        if source is self._by_drafter:
            own, kept = self._draft_rows(n)
            first, more = own if self._chose else kept, len(drafts) - 1
            rows = [a + b + more * c for a, b, c in zip(rows, first, kept)]
        self._count(n, len(drafts), cost, rows)
        return logits[0]

    def _verify_step(self, width: int, chooses: bool) -> GraphedStep:
        """The step of full attention over `width` tokens, made when first asked for. chooses:
        whether it does, for the next cycle.
        """
        key = width, chooses
        if key not in self._verify_steps:
            token = torch.zeros(1, width, dtype=torch.int64, device=self.token.device)
            attends: Attends = self._chooses if chooses else self.dense_runtime
            needs = self.dense_runtime.needs
            self._verify_steps[key] = self.issued_by(attends, needs, token)
        return self._verify_steps[key]

    def _count(self, n: int, drafts: int, cost: float, rows: list[int]) -> None:
        counters = self._session.counters
        self._rows = rows
        counters.cycles += 1
        counters.drafted += drafts
        counters.cost_exact += cost
        counters.cost_full += self._costs.full(self.dense_runtime.rows_read(n))
