"""How a session goes back to an earlier length, and how it goes on with another method.

A savepoint is kept at the end of every prompt. What lies between two of them comes back in one of
three ways, by what the method's state follows from:

  bank    Every token is in the bank. Truncating sets its length.
  store   Rows were evicted. The store of the last savepoint is rebuilt, the tokens since run again.
  rerun   The state follows from the steps taken. They run again from the last savepoint.

The last two are exact too; they cost the steps that run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.prefill import run_chunk

if TYPE_CHECKING:
    from engine.methods.base import Method, Runtime
    from engine.session import Session


@dataclass(frozen=True)
class Savepoint:
    """The end of a prompt: the bank's length before it and then, and the runtime's state then.

    logits: float32 [vocab] of the prompt's last token. queries: the newest pre-RoPE queries, kept
    where they could not be recomputed. open: the prompt goes on in the next prefill.
    """

    start: int
    length: int
    state: Any = field(repr=False, default=None)
    logits: torch.Tensor | None = field(repr=False, default=None)
    queries: torch.Tensor | None = field(repr=False, default=None)
    open: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept for going back."""

        def size(thing: Any) -> int:
            if isinstance(thing, torch.Tensor):
                return thing.numel() * thing.element_size()
            return sum(map(size, thing)) if isinstance(thing, (list, tuple)) else 0

        return size([self.state, self.queries])


class History:
    """The savepoints of one session, and the three ways back."""

    def __init__(self, session: Session):
        self._session = session
        self.savepoints: list[Savepoint] = []
        self._initial: Any = None  # the runtime's state before the first prompt

    # ---------------------------------------------------------------- what is kept

    @property
    def latest(self) -> Savepoint | None:
        """The newest savepoint."""
        return self.savepoints[-1] if self.savepoints else None

    @property
    def prompt_length(self) -> int:
        """Tokens in the bank at the end of the latest prompt; 0 before the first."""
        return self.savepoints[-1].length if self.savepoints else 0

    @property
    def nbytes(self) -> int:
        """Bytes kept for going back."""
        return sum(point.nbytes for point in self.savepoints)

    def prompt_is_open(self, length: int) -> bool:
        """Whether the prompt that ended at `length` was to go on."""
        latest = self.latest
        return latest is not None and latest.open and latest.length == length

    def begin(self, runtime: Runtime) -> None:
        """Note a new runtime's state before its first prompt."""
        self._initial = runtime.state()

    def add(
        self, start: int, length: int, logits: torch.Tensor | None = None, more: bool = False
    ) -> None:
        """End a prompt: positions start .. length-1 were it. more: it goes on."""
        self.savepoints.append(self._ended(start, length, logits, more))

    def copy_from(self, other: History) -> None:
        """Hold what another session's history holds (fork)."""
        self.savepoints, self._initial = list(other.savepoints), other._initial

    def clear(self) -> None:
        """Forget all savepoints."""
        self.savepoints = []

    def _ended(
        self, start: int, length: int, logits: torch.Tensor | None = None, more: bool = False
    ) -> Savepoint:
        session = self._session
        runtime, queries = session.runtime, None
        with torch.inference_mode():
            if not more:
                runtime.end_prompt(length, session.step_at(length))
            if runtime.needs.history != "bank":
                queries = session.query_ring.newest()
        return Savepoint(start, length, runtime.state(), logits, queries, more)

    # ---------------------------------------------------------------- going back

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens of the session."""
        session = self._session
        if session.runtime.needs.history != "bank":
            self._run_again(n, self.savepoints)
            return
        del session.ids[n:]
        session.bank.rewind(n)
        session.runtime.truncate(n)
        session.query_ring.truncate(n)
        cut = next((point for point in self.savepoints if point.length > n), None)
        self.savepoints = [point for point in self.savepoints if point.length <= n]
        if cut is not None and cut.start < n:
            self.add(cut.start, n)  # inside a prompt: it ends here now
            return
        latest = self.latest
        session.runtime.load(latest.state if latest else self._initial, n)
        if latest is not None and latest.length == n:
            session.last_logits = latest.logits

    def refresh_logits(self) -> None:
        """Compute the logits of the session's newest token anew; the bank stays as it is."""
        session = self._session
        n = len(session.ids)
        if session.runtime.needs.history != "bank":
            # An interrupted prompt left no logits: it is read again to its end.
            last = self.latest or Savepoint(0, n)
            self._run_again(n, [*self.savepoints[:-1], replace(last, length=n + 1)])
            return
        with torch.inference_mode():
            logits, _ = self._rerun_chunk(n - 1, n, last_logits=True)
        assert logits is not None
        session.last_logits = logits[0]

    def restore_window(self) -> None:
        """Recompute the queries that the next selection needs and the ring has lost (a truncate by
        more than the ring holds).
        """
        session, ring = self._session, self._session.query_ring
        n, window = len(session.ids), session.runtime.needs.window
        first = max(0, n - window)
        if window == 0 or ring.covers(first, n):
            return
        _, newest = self._rerun_chunk(first, n)
        ring.write_chunk(newest, n)
        ring.set_valid(first, n)

    def _rerun_chunk(
        self, first: int, stop: int, last_logits: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run tokens first .. stop-1 through the model with full attention; writes no rows."""
        session, model = self._session, self._session.model
        tokens = torch.tensor([session.ids[first:stop]], dtype=torch.int64, device=model.device)
        return run_chunk(
            model,
            session.llm.rotary,
            session.dense_runtime,
            session.bank,
            tokens,
            first,
            stop,
            write=False,
            last_logits=last_logits,
        )

    def _run_again(self, n: int, ends: list[Savepoint]) -> None:
        """Go back to the last savepoint at or before n, then forth: tokens since are decoded, or
        read where they were part of a prompt.

        ends: the ends of the session's prompts.
        """
        session = self._session
        kept = [point for point in ends if point.length <= n]
        while (
            kept
            and kept[-1].open
            and 0 < n - kept[-1].length < (session.runtime.needs.final_call or 0)
        ):
            kept.pop()  # too little of this prompt is left for a call of its own
        cut = ends[len(kept)] if len(kept) < len(ends) else None
        point = kept[-1] if kept else Savepoint(0, 0, self._initial)
        session.take_time(wait=True)
        ids, counters = session.ids[:n], replace(session.counters)
        prompt = cut.start if cut is not None and cut.start < n else n
        self.savepoints = kept
        self._load(point)
        for token in ids[point.length : prompt]:
            session.decode(token)
        if prompt < n:
            session.prefill(ids[prompt:])
        session.take_time(wait=True)
        # What ran again was counted before.
        session.counters.__dict__.update(counters.__dict__)

    def _load(self, point: Savepoint) -> None:
        """Set the session back to a savepoint."""
        session, ring = self._session, self._session.query_ring
        del session.ids[point.length :]
        session.bank.rewind(point.length)
        ring.truncate(point.length)
        if point.queries is not None:
            ring.write_chunk(point.queries, point.length)
            ring.set_valid(point.length - point.queries.shape[2], point.length)
        with torch.inference_mode():
            session.runtime.load(point.state, point.length)
        session.last_logits = point.logits

    # ---------------------------------------------------------------- another method

    def switch(self, before: Runtime, method: Method) -> None:
        """The session's runtime was replaced: bring the new one to where the old one stood.

        The same method (on another backend) takes its state over. An evicting method takes all
        tokens so far for one prompt; one that sums attention runs their queries over the bank
        again.
        """
        session, runtime = self._session, self._session.runtime
        n, way = len(session.ids), runtime.needs.history
        if n == 0:
            return
        if way == "rerun" or (way == "store" and before.method == method):
            runtime.copy_from(before)
            return
        if way == "store":
            latest = self.latest
            logits = latest.logits if latest and latest.length == n else None
            if runtime.needs.every_query:
                self._show_every_query()
            self.savepoints = [self._ended(0, n, logits)]
            return
        points = self.savepoints or [Savepoint(0, n)]
        self.savepoints = [self._ended(p.start, p.length, p.logits) for p in points]

    def _show_every_query(self) -> None:
        """Run the queries of all tokens over the bank again; rows stay as they are."""
        session, runtime = self._session, self._session.runtime
        n, chunk, model = len(session.ids), session.llm.chunk, session.model
        runtime.begin_prompt(0, n)
        with torch.inference_mode():
            for first in range(0, n, chunk):
                last = min(n, first + chunk)
                tokens = torch.tensor(
                    [session.ids[first:last]], dtype=torch.int64, device=model.device
                )
                rotary, bank = session.llm.rotary, session.bank
                run_chunk(model, rotary, runtime, bank, tokens, first, n, write=False)
                runtime.commit(last - first)
