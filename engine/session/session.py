"""One conversation: its bank persists between turns, and no token is read twice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.bank.recurrent.savepoints import Savepoints
from engine.bank.row_origins import Span
from engine.base.checks import (
    checked_ids,
    integer,
    listed_ids,
    one_of,
)
from engine.base.device import current
from engine.base.errors import SettingError
from engine.forward.native_backend import require_native
from engine.forward.prefill import Outputs
from engine.load.loaded import Loaded
from engine.load.options import OFFLOADS
from engine.load.planner import Planner
from engine.methods.base import Method
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.placement import Placement
from engine.plan.prefill_time import Progress
from engine.runner.extend import decode, prefill, with_logits
from engine.runner.prefill import adopt
from engine.runner.ranks.led import led
from engine.runner.rewind import cut, tokens_again
from engine.runner.state import SessionState, SessionStats, held_figures
from engine.runner.step import step
from engine.sampling.params import SamplingParams
from engine.saved.session_file import Progress as SaveProgress
from engine.saved.session_file import save_session
from engine.session.check import Report, check
from engine.session.generate import generate
from engine.session.results import Piece
from engine.session.switch import fork, new_runner, reads_again, switch
from kernels.launch.dispatch import BACKENDS


class Session(SessionState):
    """Made by LLM.session(). `s.ids` are its tokens, `len(s)` of them.

    Not thread-safe; one session runs at a time per LLM. Every call is all or nothing, interrupted
    or not; a prefill keeps whole chunks.
    """

    def __init__(
        self,
        loaded: Loaded,
        planner: Planner,
        capacity: int,
        method: Method,
        plan: LayerPlan,
        placement: Placement | None = None,
        offload: str | None = None,
    ) -> None:
        needs = method.needs(plan, loaded.config, capacity, loaded.dtype.itemsize)
        super().__init__(loaded, planner, capacity, plan, needs, placement, offload)
        self.go_on(new_runner(self, method, plan, planner.backend, self.bank), [])

    # ---------------------------------------------------------------- what it holds

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

    @property
    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: int64 [k]} of the last step, ascending; in exact mode of its drafts."""
        return self.runtime.selections() if self.selected else {}

    @property
    def selection_scores(self) -> dict[int, torch.Tensor]:
        """{filter layer: float32 [k]}, the scores by which `selections` were chosen, for the
        deepest filter layer; may be empty.
        """
        return self.runtime.selection_scores() if self.selected else {}

    # ---------------------------------------------------------------- method

    def set_method(self, method: Method, progress: Progress | None = None) -> None:
        """Continue with another method. The bank's layers change layout if the new plan requires
        it; no token is read again.

        An evicting method takes all tokens so far for one prompt; one that sums attention runs
        their queries over the bank once more, with `progress`. A session that forgets has no rows
        for another method: its tokens are read again as one prompt (`reads_again`). A prompt that
        was to go on ends here. All or nothing, interrupted or not; what was to be read again is
        read by the next call.
        """
        self.require_open()
        method, plan = self.planner.resolve_method(method)
        if self.endless and method != self.method:
            raise SettingError(
                f"method: found {method.name} in a stream of {self.method.name}, which cannot read "
                "again what it has forgotten; begin a new one (--method with --forever)"
            )
        if self.ids:
            method.validate_prompt(0, self.history.prompt_length or len(self.ids))
            if not self.bank.lacks:
                method.validate_switch(len(self.ids))
        placement = None
        if (self.bank.tiered and plan.sparse_layers) or self.reads_again(method):
            placement = self.planner.placement(method, plan, self.capacity, self.offload)
        switch(self, method, plan, self.backend, placement, progress)

    @property
    def forgotten(self) -> int:
        """Tokens whose rows a stream without end has freed; 0 for another session."""
        held = self.runtime.needs.retained
        return self.method.gone(len(self), held) if self.endless else 0

    def reads_again(self, method: Method) -> int:
        """Return how many tokens `set_method(method)` reads again because their rows are gone."""
        self.require_open()
        return len(self.ids) if not self.endless and reads_again(self, *self._with(method)) else 0

    def frees(self, method: Method) -> int:
        """Return how many tokens' rows `set_method(method)` frees but for what it keeps: as many
        are read again by a change to a method that needs them.
        """
        self.require_open()
        _, needs = self._with(method)
        return len(self.ids) if needs.lacks and not self.bank.lacks else 0

    def _with(self, method: Method) -> tuple[Method, Needs]:
        """A method as this session's model resolves it, and what it needs here."""
        method, plan = self.planner.resolve_method(method)
        size = self.loaded.dtype.itemsize
        return method, method.needs(plan, self.loaded.config, self.capacity, size)

    def set_backend(self, backend: str) -> None:
        """Continue with other launchers ("auto", "reference", "cpu", "native", "triton") over the
        same bank; no token is read again.

        "reference" runs eagerly on the plain launchers: the oracle of the fast backends. "cpu" is
        torch's operators, "native" the C++ kernels, "auto" on a CPU those where they run. Raises
        SettingError for another name, and for "native" where it cannot run.
        """
        self.require_open()
        one_of("backend", backend, BACKENDS)
        require_native(backend, self.loaded.device, compile=True)
        switch(self, self.method, self.plan, backend, self.bank.placement)

    # ---------------------------------------------------------------- reading a prompt

    def prefill(
        self,
        token_ids: Iterable[int],
        progress: Progress | None = None,
        more: bool = False,
        every: Outputs | None = None,
    ) -> torch.Tensor | None:
        """Append tokens to the bank, chunk by chunk; float32 logits [vocab] of the last one.

        progress is called after every chunk; if it (or Ctrl-C) raises, whole chunks stay in the
        session. more: the prompt goes on in the next prefill, so that what a method does at a
        prompt's end (a budget by its length, an eviction) waits for that; a decode step ends it
        too. every(x, start): takes each chunk's output of the last layer, [1, C, hidden], of tokens
        start .. start+C-1, before the chunk is committed. Raises ContextTooLong where the tokens do
        not fit, and SettingError where the method cannot read a prompt in parts or the last part is
        too short; nothing has been read then.
        """
        return prefill(self, token_ids, progress, more, every)

    def adopt(
        self,
        ids: Iterable[int],
        origins: Iterable[Span] = (),
        states: Savepoints | None = None,
    ) -> None:
        """Take `ids` as read: their rows are in the bank already (a synthetic bank, blocks of a
        cache). origins: how they came about; unknown where none are given. states: of a session
        that holds these tokens, where layers are recurrent; without them those read again.

        The first tokens may have been read by `prefill`. Queries are not known, so that a windowed
        selector recomputes those it needs. Raises ContextTooLong where they do not fit.
        """
        self.require_open()
        ids = checked_ids(ids, self.loaded.config.vocab_size)
        self.require_room(len(ids))
        if self.bank.forgets and self.runner.needs_rows:
            raise SettingError(
                f"adopt: found {self.method.name} with forget=True, which has no bank for rows "
                "that others made; read the tokens, or use forget=False"
            )
        adopt(self, ids, origins, states)

    # ---------------------------------------------------------------- decoding

    def decode(self, token_id: int) -> torch.Tensor:
        """Append one token; float32 logits [vocab].

        Raises ContextTooLong where the bank is full, SettingError where it cannot end a prompt that
        was to go on.
        """
        return decode(self, token_id)

    def step(self, token_id: int | None) -> torch.Tensor:
        """Decode a validated id; float32 logits [vocab]. None: the argmax of `last_logits`, which
        is read after the step is launched and is then the last of `ids`.
        """
        return step(self, token_id)

    def generate(
        self,
        token_ids: Iterable[int],
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Generator[Piece, None, None]:
        """Prefill token_ids (may be empty after a prefill), then decode; may be closed early."""
        return generate(self, listed_ids(token_ids), params, progress, should_stop)

    def check(self, steps: int = 32, progress: Callable[[int, int], None] | None = None) -> Report:
        """Compare full and sparse attention at the last positions. The session does not change,
        even if interrupted.
        """
        self.require_open()
        return check(self, steps, progress)

    def save(
        self, path: str | Path, extra: Any = None, progress: SaveProgress | None = None
    ) -> None:
        """Write this session to one file, for LLM.restore: checksummed, renamed into place.

        extra: a value of numbers, texts, lists, dicts and tensors that LLM.restore returns. Raises
        SavedFileError if the disk refuses the file, SettingError for a method that evicts.
        """
        self.require_open()
        save_session(self, path, extra, progress)

    # ---------------------------------------------------------------- going back, copies, end

    def truncate(self, n: int, later: bool = False) -> None:
        """Keep the first n tokens. The next step gives the same logits as if the other tokens had
        never been read.

        A method that has evicted runs `tokens_again(n)` tokens again. later: leave that to the next
        call that needs them, which may show progress; an interrupt leaves it there too.
        """
        cut(self, n, later)

    def tokens_again(self, n: int) -> int:
        """Return how many tokens `truncate(n)` replays because their rows were evicted."""
        self.require_open()
        return tokens_again(self, n)

    def refresh_logits(self, progress: Progress | None = None) -> None:
        """Recompute the newest token's logits if a truncate left none: that token goes through the
        model once more; the bank does not change.
        """
        with_logits(self, progress)

    @led
    def fork(self) -> Session:
        """An independent session with the same tokens, capacity, backend and watch; rows are
        copied, the selection state too. Its counters begin at zero.
        """
        self.require_open()
        return fork(self, open_session)

    # ---------------------------------------------------------------- checks and clean-up


def open_session(
    loaded: Loaded,
    planner: Planner,
    method: Method | None = None,
    max_context: int | None = None,
    offload: str | None = None,
) -> Session:
    """A new, empty session; arguments as of LLM.session. Raises SettingError, and OutOfMemoryPlan
    where the device has no room for it.
    """
    endless = planner.options.forever
    if endless and max_context is not None:
        raise SettingError(
            f"max_context: found {max_context} for a session that has no end (forever); leave it "
            "out"
        )
    capacity = planner.max_context if max_context is None else max_context
    integer("max_context", capacity, 1, planner.max_context)
    if offload is not None:
        one_of("offload", offload, OFFLOADS)
    mine = planner.method, planner.layers
    method, plan = mine if method is None else planner.resolve_method(method)
    if endless:
        capacity = planner.stream_rows(method, plan)
    placement = planner.placement(method, plan, capacity, offload)
    try:
        with current(loaded.device):
            return Session(loaded, planner, capacity, method, plan, placement, offload)
    # torch's allocators raise RuntimeError, CUDA's a subclass of it
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        raise planner.plan().no_room(capacity) from error
