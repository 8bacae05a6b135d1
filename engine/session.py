"""One conversation: its bank lives on between turns, its tokens are ids, and nothing that was read
is read again.
"""

import contextlib
import time
from dataclasses import replace
from functools import partial

import torch

from engine.bank.device import DeviceBank
from engine.bank.tiered import TieredBank, bank_figures
from engine.check import Pair, check
from engine.errors import ContextTooLong, SessionClosed, SettingError
from engine.history import Mark, go_again, look_again
from engine.plan.mem import mem_from_budget
from engine.prefill import run_chunk
from engine.prefill_eta import Clock, Work
from engine.query_ring import RING, QueryRing
from engine.stats import SessionStats
from engine.steps import Steps
from kernels.dispatch import BACKENDS

# queries at a prompt's end whose selections fill the working sets before the first step
WARM = 8


class Session:
    """Made by LLM.session(). `len(s)` tokens are in the bank; `s.ids` are they. Not thread-safe;
    one runs at a time per LLM.
    """

    def __init__(self, llm, capacity, method, plan, placement=None, offload=None):
        self.llm, self.capacity, self._offload = llm, capacity, offload
        self.backend = llm.backend
        self.ids = []
        self.last_logits = None  # float32 [vocab] of the newest token
        # an engine.check.Watch: a running estimate of the attention mass kept
        self.watch = None
        self._marks = []
        self._stats = SessionStats()
        config, model = llm.config, llm.model
        self._row_bytes = config.kv_bytes(model.dtype.itemsize)
        if placement is None:
            self.bank = DeviceBank(config, plan, capacity, model.dtype, model.device)
        else:
            self.bank = TieredBank(
                config,
                plan,
                capacity,
                model.dtype,
                model.device,
                placement,
                llm.host_pool,
                llm.backend,
            )
        self._ring = QueryRing(config, 1, model.dtype, model.device)
        self._use(method, plan)

    # ---------------------------------------------------------------- what it holds

    def __len__(self):
        return len(self.ids)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def closed(self):
        """Whether close() was called."""
        return self.bank is None

    @property
    def stats(self):
        """A SessionStats of now (a copy)."""
        if self.closed:
            return replace(self._stats, tokens=len(self.ids))
        held = dict(
            ring_bytes=self._ring.nbytes,
            scratch_bytes=self._steps.scratch_bytes,
            selection_bytes=self.runtime.nbytes,
            mem=self._mem(),
            **bank_figures(self.bank),
        )
        # what it needs, of what its tokens would take; the bank stands beside it
        if self.runtime.evicts:
            every = self.plan.num_layers * self._row_bytes * max(1, len(self.ids))
            held |= dict(
                selection_bytes=0,
                store_bytes=self.runtime.nbytes,
                snapshot_bytes=sum(m.nbytes for m in self._marks),
                resident=self.runtime.kv_bytes / every,
            )
        return replace(self._stats, tokens=len(self.ids), **held)

    @property
    def counters(self):
        """The SessionStats that this session counts in (not a copy)."""
        return self._stats

    def _mem(self):
        prompt = self._marks[-1].length if self._marks else len(self.ids)
        k = getattr(self.runtime, "k", 0)
        return (
            mem_from_budget(k, prompt, self.plan.dense_share)
            if k and self.plan.partial_layers
            else 1.0
        )

    @property
    def runtime(self):
        """State of the session's method (engine.methods.base.Runtime); for tools that look inside,
        such as engine/check.py.
        """
        return self._steps.runtime

    @property
    def dense_runtime(self):
        """Full attention over the same bank."""
        return self._steps.dense_runtime

    @property
    def query_ring(self):
        """The newest queries of every layer (engine.decode.QueryRing)."""
        return self._ring

    @property
    def selections(self):
        """{filter_layer: int64 [k]} of the last step, ascending positions; empty before one or
        where nothing was selected.
        """
        return self.runtime.selections() if self._selected else {}

    @property
    def selection_scores(self):
        """{filter_layer: float32 [k]}: by which scores `selections` were chosen, for the deepest
        filter layer; may be empty.
        """
        return self.runtime.selection_scores() if self._selected else {}

    # ---------------------------------------------------------------- method

    def _use(self, method, plan):
        self.method, self.plan = method, plan
        self._steps = Steps(
            self.llm, method, plan, self.capacity, self.backend, self.bank, self._ring
        )
        self._selected = False
        self.runtime.bank = self.bank
        self._fresh = self.runtime.snapshot()  # before the first prefill

    def set_method(self, method):
        """Go on with another method; nothing is read again. The bank's layers change layout where
        the new plan wants it.

        An evicting method takes all tokens so far for one prompt; one that sums attention runs
        their queries over the bank once more.
        """
        self._open()
        method, plan = self.llm.resolve_method(method)
        if self.ids:
            method.check_prefill(0, self._marks[-1].length if self._marks else len(self.ids))
            method.check_switch(len(self.ids))
        with self.llm.busy():
            placement = (
                self.llm.placement(method, plan, self.capacity, self._offload)
                if self.bank.tiered and plan.sparse_layers
                else None
            )
            self.bank = self.bank.relayout(plan, placement)
            self._again(method, plan)

    def set_backend(self, backend):
        """Go on with other launchers ("auto", "reference", "cpu", "triton") over the same bank;
        nothing is read again.

        "reference" runs eagerly on the plain launchers: what a fast path is checked against
        (benchmarks do so before they time).
        """
        self._open()
        if backend not in BACKENDS:
            raise SettingError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")
        with self.llm.busy():
            self.backend = backend
            self._again(self.method, self.plan)

    def _again(self, method, plan):
        before = self.runtime
        self._use(method, plan)
        if self.ids and (self.runtime.replays or self.runtime.evicts and before.method == method):
            # the same method on another backend: what it has done stays done
            self.runtime.copy_from(before)
        elif self.ids and self.runtime.evicts:
            last = self._marks[-1] if self._marks else None
            if self.runtime.reads_every_query:
                look_again(self)
            self._marks = [
                self._mark(
                    0, len(self.ids), last.logits if last and last.length == len(self.ids) else None
                )
            ]
        elif self.ids:
            self._marks = [self._mark(m.start, m.length, m.logits) for m in self._marks] or [
                self._mark(0, len(self.ids))
            ]

    # ---------------------------------------------------------------- reading and writing tokens

    def prefill(self, token_ids, progress=None, more=False):
        """Append tokens to the bank, chunk by chunk; returns float32 logits [vocab] of the last
        one.

        progress(PrefillProgress) is called after every chunk; if it (or Ctrl-C) raises, whole
        chunks stay in the session. more: the prompt goes on in the next prefill, so that what a
        method does at a prompt's end (a budget by its length, an eviction) waits for that; a decode
        step ends it too. Raises ContextTooLong where the tokens do not fit, and SettingError where
        the method cannot read parts or this one is too short to end its prompt (Method.last_part);
        nothing has been read then.
        """
        self._open()
        new = self._checked(token_ids)
        start, stop = len(self.ids), len(self.ids) + len(new)
        self._room(stop)
        self.method.check_prefill(start, stop)
        goes_on = self._marks and self._marks[-1].open and self._marks[-1].length == start
        self.method.check_parts(more or goes_on, len(new) if goes_on and not more else None)
        chunk, device = self.llm.chunk, self.llm.model.device
        self.runtime.begin_prefill(start, stop, more)
        clock = Clock(partial(self.runtime.prefill_work, Work.of(self.llm.config)), start, stop)
        with self.llm.busy(), torch.inference_mode(), self._whole_chunks(start), self._whole():
            for first in range(start, stop, chunk):
                last = min(stop, first + chunk)
                began = time.perf_counter()
                tokens = torch.tensor(
                    [new[first - start : last - start]], dtype=torch.int64, device=device
                )
                logits, newest = run_chunk(
                    self.llm.model,
                    self.llm.rotary,
                    self.runtime,
                    self.bank,
                    tokens,
                    first,
                    stop,
                    last_logits=last == stop,
                )
                self._commit(new[first - start : last - start], newest)
                if device.type == "cuda":
                    # a chunk is seconds of work: its time must be true for the time left
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - began
                clock.add(first, last, seconds)
                self._stats.count_prefill(last - first, seconds)
                if last == stop:
                    self._end_prefill(start, logits[0], more)
                if progress is not None:
                    progress(clock.progress(last))
        return self.last_logits

    @contextlib.contextmanager
    def _whole(self):
        """Whatever breaks off inside (Ctrl-C, no host memory): the bank goes back to the tokens
        that are in the session.
        """
        try:
            yield
        except BaseException:
            if not self.closed:
                self.bank.rewind(len(self.ids), broken=True)
            raise

    def _commit(self, ids, newest):
        length = len(self.ids) + len(ids)
        self._ring.commit(newest[:, :, -min(newest.shape[2], len(ids)) :], length)
        self.runtime.advance(len(ids))
        self.ids.extend(ids)
        self._ring.advanced(length, min(newest.shape[2], len(ids)))
        self.last_logits = None

    @contextlib.contextmanager
    def _whole_chunks(self, start):
        """Where a prefill is interrupted, the prompt was what its whole chunks hold."""
        try:
            yield
        except BaseException:
            done = self._marks[-1].length if self._marks else 0
            if len(self.ids) > max(start, done):
                self._end_prefill(start, None)
            raise

    def _end_prefill(self, start, logits, more=False):
        self._marks.append(self._mark(start, len(self.ids), logits, more))
        self.last_logits = logits
        self._selected = False
        if (
            not more
            and self.bank.tiered
            and self.bank.placement.reuse
            and self.runtime.packed
            and len(self.ids) >= self._steps.dense_below
        ):
            self.runtime.warm(self._steps.newest(len(self.ids), WARM))

    def _mark(self, start, length, logits=None, more=False):
        with torch.inference_mode():
            if not more:
                self.runtime.end_prefill(length, self._steps.at(length))
            queries = self._ring.newest() if self.runtime.evicts or self.runtime.replays else None
        return Mark(start, length, self.runtime.snapshot(), logits, queries, open=more)

    def adopt(self, ids):
        """Take `ids` as read: their rows are in the bank already (a synthetic bank, a saved session).

        The first tokens may have been read by `prefill`. Queries are not known, so that a windowed
        selector recomputes those it needs. Raises ContextTooLong where they do not fit.
        """
        self._open()
        self._room(len(ids))
        self.ids, self._marks = list(ids), []
        self._ring.hold(len(ids), len(ids))
        self._end_prefill(0, None)

    def decode(self, token_id):
        """Append one token; returns float32 logits [vocab]. Raises ContextTooLong where the bank is
        full, SettingError where it cannot end a prompt that was to go on.
        """
        self._open()
        (token_id,) = self._checked([token_id])
        n = len(self.ids) + 1
        self._room(n)
        if self._marks and self._marks[-1].open and self._marks[-1].length == n - 1:
            self.method.check_parts(True, 0)
            part = self._marks.pop()  # the prompt that was to go on ends here
            self._end_prefill(part.start, part.logits)
        with self.llm.busy(), torch.inference_mode(), self._whole():
            self._restore_window()
            began = time.perf_counter()
            own, sparse = self._steps.kind(n)
            watch = self.watch if sparse and self.plan.sparse_layers else None
            metered = watch is not None and watch.due()
            if watch is not None and not metered and watch.exact:
                own = sparse = False
                watch.exact_steps += 1
            self._steps.feed(token_id, n)
            self.bank.before_step(n)
            logits = self._metered() if metered else self._steps.run(n, own)
            self.bank.after_step(n)
            self.runtime.advance(1)
            self.ids.append(token_id)
            self._ring.advanced(n, 1)
            self.last_logits = logits
            self._selected = sparse
            rows = (self.runtime if sparse else self.dense_runtime).rows_read(n)
            self._stats.count_step(
                rows, self.plan.roles, self._row_bytes, sparse, time.perf_counter() - began
            )
        return logits

    def _metered(self):
        """A sparse step that also measures the attention mass kept, for `watch`."""
        pair = Pair(self)
        logits = pair.sparse.step(self._steps.token, self._steps.length, self.bank)[0, -1]
        self.watch.saw(pair.meter.mass)
        return logits

    @property
    def answer_length(self):
        """Tokens decoded since the latest prefill."""
        return len(self.ids) - (self._marks[-1].length if self._marks else 0)

    def check(self, steps=32, progress=None):
        """Full against sparse attention at the last positions, over the same bank: an
        engine.check.Report. Nothing changes.
        """
        self._open()
        return check(self, steps, progress)

    # ---------------------------------------------------------------- going back, copies, end

    def truncate(self, n):
        """Forget all but the first n tokens; what the next step sees is what it would have seen had
        they never been there.
        """
        self._open()
        if not 0 <= n <= len(self.ids):
            raise SettingError(
                f"truncate: found {n}, expected 0 to {len(self.ids)} (the session's tokens)"
            )
        if n == len(self.ids):
            return
        if self.runtime.evicts or self.runtime.replays:
            self._selected = False
            self._marks, again = go_again(self, self._marks, self._fresh, n)
            again()
            return
        del self.ids[n:]
        self.bank.rewind(n)
        self.last_logits = None
        self._selected = False
        self.runtime.forget(n)
        self._ring.truncated(n)
        cut = next((m for m in self._marks if m.length > n), None)
        self._marks = [m for m in self._marks if m.length <= n]
        # inside a prompt: the bank's latest prefill ends here now
        if cut is not None and cut.start < n:
            self._marks.append(self._mark(cut.start, n))
            return
        self.runtime.restore(self._marks[-1].state if self._marks else self._fresh, n)
        if self._marks and self._marks[-1].length == n:
            self.last_logits = self._marks[-1].logits

    def refresh_logits(self):
        """Logits of the newest token where a truncate left none: that token goes through the model
        once more, the bank unchanged.
        """
        self._open()
        if not self.ids:
            raise SettingError(
                "generate: found an empty session and no tokens, expected a prompt of at least one token"
            )
        n = len(self.ids)
        # an interrupted prompt's chunks left none: it is read again to its end
        if self.runtime.evicts or self.runtime.replays:
            last = self._marks[-1] if self._marks else Mark(0, n)
            self._marks, again = go_again(
                self, [*self._marks[:-1], replace(last, length=n + 1)], self._fresh, n
            )
            again()
            return
        tokens = torch.tensor([self.ids[-1:]], dtype=torch.int64, device=self.llm.model.device)
        with torch.inference_mode():
            logits, _ = run_chunk(
                self.llm.model,
                self.llm.rotary,
                self.dense_runtime,
                self.bank,
                tokens,
                n - 1,
                n,
                write=False,
                last_logits=True,
            )
        self.last_logits = logits[0]

    def _restore_window(self):
        """Recompute queries that the selector's window needs and the ring has lost (a truncate by
        more than the ring holds).
        """
        window, n = self.runtime.window, len(self.ids)
        first = max(0, n - window)
        if window == 0 or self._ring.covers(first, n):
            return
        tokens = torch.tensor([self.ids[first:]], dtype=torch.int64, device=self.llm.model.device)
        _, newest = run_chunk(
            self.llm.model,
            self.llm.rotary,
            self.dense_runtime,
            self.bank,
            tokens,
            first,
            n,
            write=False,
        )
        self._ring.commit(newest, n)
        self._ring.hold(first, n)

    def fork(self):
        """An independent session with the same tokens; rows are copied, the selection state too."""
        self._open()
        with self.llm.busy():
            twin = self.llm.session(self.method, offload=self._offload)
            try:
                with torch.inference_mode():
                    twin.bank.copy_from(self.bank, len(self.ids))
            except BaseException:
                twin.close()
                raise
            twin.ids = list(self.ids)
            twin._ring.copy_from(self._ring)
            twin.last_logits = None if self.last_logits is None else self.last_logits.clone()
            twin._marks, twin._fresh = list(self._marks), self._fresh
            twin.runtime.copy_from(self.runtime)
        return twin

    def generate(self, token_ids, params=None, progress=None, should_stop=None):
        """Prefill token_ids (may be empty after a prefill), then decode: an iterator of
        engine.generate.Piece, closable early.
        """
        from engine.generate import generate

        return generate(self, token_ids, params, progress=progress, should_stop=should_stop)

    def close(self):
        """Give the bank's memory back. Further calls raise SessionClosed."""
        if self.bank is not None:
            self.bank.close()
            self.bank = self._ring = self._steps = self.last_logits = None

    # ---------------------------------------------------------------- checks

    def _open(self):
        if self.closed:
            raise SessionClosed("this session was closed; make a new one with llm.session()")

    def _checked(self, token_ids):
        ids = [int(t) for t in token_ids]
        vocab = self.llm.config.vocab_size
        bad = next((t for t in ids if not 0 <= t < vocab), None)
        if bad is not None:
            raise SettingError(
                f"token id: found {bad}, expected 0 to {vocab - 1} (the model's vocabulary)"
            )
        if not ids:
            raise SettingError("prefill: found no tokens, expected at least one")
        return ids

    def _room(self, wanted):
        if wanted > self.capacity:
            raise ContextTooLong(
                f"{wanted} tokens do not fit: this session holds {len(self.ids)} and its context limit is {self.capacity} "
                f"(the model's own is {self.llm.config.max_positions}); raise it with max_context / --ctx, or shorten the text"
            )


assert RING >= 2 * 64  # a window of 64 queries survives a truncate of as many
