"""One conversation: its bank lives on between turns, and nothing that was read is read again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.bank.base import Bank
from engine.bank.device import DeviceBank
from engine.bank.tiered import TieredBank
from engine.check import Report, check
from engine.decode import Decoder, Step
from engine.device import StepClock, current, synchronize
from engine.errors import ContextTooLong, SessionClosed, SettingError
from engine.exact_runner import runner_of
from engine.generate import Piece, generate
from engine.guard import exclusive, rewound_on_error
from engine.history import History
from engine.methods.base import Method, Runtime, validate_parts
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from engine.prefill import run_chunk
from engine.prefill_eta import Eta, PrefillFlops, PrefillProgress
from engine.query_ring import QueryRing
from engine.saved.session_file import Progress, save_session
from engine.settings import checked_ids, found, is_integer, listed_ids, one_of
from engine.stats import SessionStats, held_figures
from engine.step_runner import StepKind
from engine.watch import MassMeter, Watch
from kernels.dispatch import BACKENDS

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.sampling import Sampler, SamplingParams

WARM = 8  # queries at a prompt's end whose selections fill the working sets before the first step


class Session:
    """Made by LLM.session(). `len(s)` tokens are in the bank; `s.ids` are they.

    Not thread-safe; one session runs at a time per LLM.
    """

    def __init__(
        self,
        llm: LLM,
        capacity: int,
        method: Method,
        plan: LayerPlan,
        placement: Placement | None = None,
        offload: str | None = None,
    ):
        self.llm, self.capacity, self._offload = llm, capacity, offload
        self.backend = llm.backend
        self.closed = False  # whether close() was called
        self.ids: list[int] = []
        self.last_logits: torch.Tensor | None = None  # float32 [vocab] of the newest token
        self.watch: Watch | None = None  # a running estimate of the attention mass kept
        self.sampler: Sampler | None = None  # of the answer that is being written: drafts guess it
        self.counters = SessionStats()  # what this session counts in; `stats` is a copy
        model = llm.model
        assert model is not None, "LLM.session() loads the weights first"
        self.model = model
        self._clock = StepClock(model.device)
        config, dtype, device = llm.config, model.dtype, model.device
        self.row_bytes = config.kv_bytes(dtype.itemsize)
        if placement is None:
            self.bank: Bank = DeviceBank(config, plan, capacity, dtype, device)
        else:
            pool = llm.host_pool
            self.bank = TieredBank(
                config, plan, capacity, dtype, device, placement, pool, llm.backend
            )
        self.query_ring = QueryRing(config, 1, dtype, device)
        self.history = History(self)
        self._use(method, plan)

    # ---------------------------------------------------------------- what it holds

    def __len__(self) -> int:
        return len(self.ids)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> SessionStats:
        """Counters and sizes of now (a copy)."""
        self.take_time(wait=True)
        held = {} if self.closed else held_figures(self)
        return replace(self.counters, tokens=len(self.ids), **held)

    def take_time(self, wait: bool = False) -> None:
        """Count the seconds of the decode steps that have ended. wait: of all of them."""
        self.counters.decode_seconds += self._clock.ended(wait)

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of the kernels' scratch."""
        return self._runner.scratch_bytes

    @property
    def runtime(self) -> Runtime:
        """State of the session's method."""
        return self._runner.runtime

    @property
    def dense_runtime(self) -> Runtime:
        """Full attention over the same bank."""
        return self._runner.dense_runtime

    @property
    def answer_length(self) -> int:
        """Tokens decoded since the latest prefill."""
        return len(self.ids) - self.history.prompt_length

    @property
    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: int64 [k]} of the last step, ascending; empty where none was made."""
        return self.runtime.selections() if self._selected else {}

    @property
    def selection_scores(self) -> dict[int, torch.Tensor]:
        """{filter layer: float32 [k]}, the scores by which `selections` were chosen, for the
        deepest filter layer; may be empty.
        """
        return self.runtime.selection_scores() if self._selected else {}

    def step_at(self, length: int) -> Step:
        """What every layer shares in the step of the newest of `length` tokens."""
        return self._runner.at(length)

    # ---------------------------------------------------------------- method

    def _use(self, method: Method, plan: LayerPlan) -> None:
        self.method, self.plan = method, plan
        self._runner = runner_of(self)
        self._selected = False  # whether the last step left a selection
        self.runtime.bank = self.bank
        self.history.begin(self.runtime)

    def set_method(self, method: Method) -> None:
        """Go on with another method; nothing is read again. The bank's layers change layout where
        the new plan wants it.

        An evicting method takes all tokens so far for one prompt; one that sums attention runs
        their queries over the bank once more.
        """
        self._require_open()
        method, plan = self.llm.resolve_method(method)
        if self.ids:
            method.validate_prompt(0, self.history.prompt_length or len(self.ids))
            method.validate_switch(len(self.ids))
        with self.llm.busy():
            placement = None
            if self.bank.tiered and plan.sparse_layers:
                placement = self.llm.placement(method, plan, self.capacity, self._offload)
            self.bank = self.bank.relayout(plan, placement)
            self._switch(method, plan)

    def set_backend(self, backend: str) -> None:
        """Go on with other launchers ("auto", "reference", "cpu", "triton") over the same bank;
        nothing is read again.

        "reference" runs eagerly on the plain launchers: what a fast backend is checked against.
        """
        self._require_open()
        one_of("backend", backend, BACKENDS)
        with self.llm.busy():
            self.backend = backend
            self._switch(self.method, self.plan)

    def _switch(self, method: Method, plan: LayerPlan) -> None:
        before = self.runtime
        self._use(method, plan)
        self.history.switch(before, method)

    # ---------------------------------------------------------------- reading a prompt

    def prefill(
        self,
        token_ids: Iterable[int],
        progress: Callable[[PrefillProgress], None] | None = None,
        more: bool = False,
    ) -> torch.Tensor | None:
        """Append tokens to the bank, chunk by chunk; float32 logits [vocab] of the last one.

        progress is called after every chunk; if it (or Ctrl-C) raises, whole chunks stay in the
        session. more: the prompt goes on in the next prefill, so that what a method does at a
        prompt's end (a budget by its length, an eviction) waits for that; a decode step ends it
        too. Raises ContextTooLong where the tokens do not fit, and SettingError where the method
        cannot read a prompt in parts or the last part is too short; nothing has been read then.
        """
        self._require_open()
        ids = checked_ids(token_ids, self.llm.config.vocab_size)
        start, stop = len(self.ids), len(self.ids) + len(ids)
        self._require_room(stop)
        self.method.validate_prompt(start, stop)
        goes_on = self.history.prompt_is_open(start)
        last = len(ids) if goes_on and not more else None
        validate_parts(self.method, self.runtime.needs, more or goes_on, last)
        self.runtime.begin_prompt(start, stop, more)
        flops = partial(self.runtime.prompt_flops, PrefillFlops.of(self.llm.config))
        eta = Eta(flops, start, stop)
        with exclusive(self.llm), self._ending_after_whole_chunks(start), rewound_on_error(self):
            size = len(ids) if self.runtime.needs.one_chunk else self.llm.chunk
            for first in range(start, stop, size):
                last = min(stop, first + size)
                began = time.perf_counter()
                logits = self._read_chunk(ids[first - start : last - start], first, stop)
                seconds = time.perf_counter() - began
                eta.add(first, last, seconds)
                self.counters.count_prefill(last - first, seconds)
                if logits is not None:
                    self._end_prompt(start, logits[0], more)
                if progress is not None:
                    progress(eta.progress(last))
        return self.last_logits

    def _read_chunk(self, ids: list[int], first: int, stop: int) -> torch.Tensor | None:
        """Run a chunk at positions from `first` on and commit it; logits [1, vocab] if it is the
        prompt's last, which ends at `stop`.
        """
        model, device = self.model, self.model.device
        logits, newest = run_chunk(
            model,
            self.llm.rotary,
            self.runtime,
            self.bank,
            torch.tensor([ids], dtype=torch.int64, device=device),
            first,
            stop,
            last_logits=first + len(ids) == stop,
        )
        count, length = min(newest.shape[2], len(ids)), first + len(ids)
        self.query_ring.write_chunk(newest[:, :, -count:], length)
        self.runtime.commit(len(ids))
        self.ids.extend(ids)
        self.query_ring.extend(length, count)
        self.last_logits = None
        # A chunk is seconds of work: its time must be true for the time left.
        synchronize(device)
        return logits

    def _end_prompt(self, start: int, logits: torch.Tensor | None, more: bool = False) -> None:
        length = len(self.ids)
        self.history.add(start, length, logits, more)
        self.last_logits = logits
        self._selected = False
        placement = self.bank.placement
        warms = placement is not None and placement.reuse and self.runtime.needs.fetches
        if warms and not more and length >= self._runner.dense_below:
            self.runtime.warm(self._runner.newest(length, WARM))

    def adopt(self, ids: Iterable[int]) -> None:
        """Take `ids` as read: their rows are in the bank already (a synthetic bank, a saved
        session).

        The first tokens may have been read by `prefill`. Queries are not known, so that a windowed
        selector recomputes those it needs. Raises ContextTooLong where they do not fit.
        """
        self._require_open()
        ids = checked_ids(ids, self.llm.config.vocab_size)
        self._require_room(len(ids))
        with exclusive(self.llm), rewound_on_error(self):
            self.ids = ids
            self.history.clear()
            self.query_ring.set_valid(len(ids), len(ids))
            self._end_prompt(0, None)

    # ---------------------------------------------------------------- decoding

    def decode(self, token_id: int) -> torch.Tensor:
        """Append one token; float32 logits [vocab].

        Raises ContextTooLong where the bank is full, SettingError where it cannot end a prompt that
        was to go on.
        """
        self._require_open()
        (token_id,) = checked_ids([token_id], self.llm.config.vocab_size)
        n = len(self.ids) + 1
        self._require_room(n)
        with exclusive(self.llm), rewound_on_error(self):
            self._end_open_prompt(n - 1)
            self.history.restore_window()
            with self._clock.step():
                kind, metered = self._watched(self._runner.kind(n))
                self._runner.feed(token_id, n)
                self.bank.before_step(n)
                logits = self._metered_step() if metered else self._runner.run(n, kind.own)
                self.bank.after_step(n)
                self._commit_step(token_id, n, kind.sparse, logits)
            self._count_step(n, kind.sparse)
            self.take_time()
        return logits

    def _end_open_prompt(self, length: int) -> None:
        """End the prompt that was to go on in another prefill, if there is one."""
        if self.history.prompt_is_open(length):
            validate_parts(self.method, self.runtime.needs, True, 0)
            part = self.history.savepoints.pop()
            self._end_prompt(part.start, part.logits)

    def _commit_step(self, token_id: int, n: int, sparse: bool, logits: torch.Tensor) -> None:
        self.runtime.commit(1)
        self.ids.append(token_id)
        self.query_ring.extend(n, 1)
        self.last_logits = logits
        self._selected = sparse

    def _count_step(self, n: int, sparse: bool) -> None:
        rows = self._runner.rows_read(n, sparse)
        self.counters.count_step(rows, self.plan.roles, self.row_bytes, sparse)

    def _watched(self, kind: StepKind) -> tuple[StepKind, bool]:
        """(which step runs, whether it is metered), as the watch wishes."""
        watch = self.watch
        if watch is None or not kind.sparse or not self.plan.sparse_layers:
            return kind, False
        if watch.due():
            return kind, True
        if watch.exact:
            watch.exact_steps += 1
            return StepKind(False, False), False
        return kind, False

    def _metered_step(self) -> torch.Tensor:
        """A sparse step that also measures the attention mass kept, for the watch."""
        assert self.watch is not None
        meter = MassMeter(self.runtime)
        decoder = Decoder(self.model, self.llm.rotary, meter, self.query_ring)
        logits = self._runner.run_with(decoder)
        self.watch.saw(meter.mass)
        return logits

    def generate(
        self,
        token_ids: Iterable[int],
        params: SamplingParams | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Generator[Piece, None, None]:
        """Prefill token_ids (may be empty after a prefill), then decode; may be closed early."""
        return generate(self, listed_ids(token_ids), params, progress, should_stop)

    def check(self, steps: int = 32, progress: Callable[[int, int], None] | None = None) -> Report:
        """Compare full and sparse attention at the last positions; nothing changes."""
        self._require_open()
        return check(self, steps, progress)

    def save(self, path: str | Path, extra: Any = None, progress: Progress | None = None) -> None:
        """Write all of this session to one file, for LLM.restore: checksummed, renamed into place.

        extra: anything of numbers, texts, lists, dicts and tensors, to come back with it. Raises
        SavedFileError where the disk refuses, SettingError for a method that evicts.
        """
        self._require_open()
        save_session(self, path, extra, progress)

    # ---------------------------------------------------------------- going back, copies, end

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens. The next step sees what it would have seen had the
        others never been there.
        """
        self._require_open()
        if not is_integer(n) or not 0 <= n <= len(self.ids):
            raise SettingError(
                f"truncate: found {found(n)}, expected 0 to {len(self.ids)} (the session's tokens)"
            )
        if n < len(self.ids):
            self._selected = False
            self.last_logits = None
            with current(self.llm.device):
                self.history.truncate(n)

    def refresh_logits(self) -> None:
        """Compute the newest token's logits where a truncate left none: that token goes through the
        model once more, the bank unchanged.
        """
        self._require_open()
        if not self.ids:
            raise SettingError(
                "generate: found an empty session and no tokens, expected a prompt of at least one "
                "token"
            )
        with current(self.llm.device):
            self.history.refresh_logits()

    def fork(self) -> Session:
        """An independent session with the same tokens; rows are copied, the selection state too."""
        self._require_open()
        with self.llm.busy():
            copy = self.llm.session(self.method, offload=self._offload)
            try:
                with torch.inference_mode():
                    copy.bank.copy_from(self.bank, len(self.ids))
            except BaseException:
                copy.close()
                raise
            copy.ids = list(self.ids)
            copy.query_ring.copy_from(self.query_ring)
            copy.last_logits = None if self.last_logits is None else self.last_logits.clone()
            copy.history.copy_from(self.history)
            copy.runtime.copy_from(self.runtime)
        return copy

    def close(self) -> None:
        """Give the bank's memory back. Further calls raise SessionClosed."""
        if not self.closed:
            self.closed = True
            with current(self.llm.device):
                self.bank.close()
            self.last_logits = None
            del self.bank, self.query_ring, self._runner

    # ---------------------------------------------------------------- checks and clean-up

    def _require_open(self) -> None:
        if self.closed:
            raise SessionClosed("this session was closed; make a new one with llm.session()")

    def _require_room(self, wanted: int) -> None:
        if wanted > self.capacity:
            raise ContextTooLong(
                f"{wanted} tokens do not fit: this session holds {len(self.ids)} and its context "
                f"limit is {self.capacity} (the model's own is {self.llm.config.max_positions}); "
                f"raise it with max_context / --ctx, or shorten the text"
            )

    @contextlib.contextmanager
    def _ending_after_whole_chunks(self, start: int) -> Iterator[None]:
        """On interruption the prompt ends after its last whole chunk."""
        try:
            yield
        except BaseException:
            if len(self.ids) > max(start, self.history.prompt_length):
                self._end_prompt(start, None)
            raise
