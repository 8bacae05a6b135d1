"""The state of a session: its tokens, its bank, its runner, and their invariants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from engine.bank.base import Bank
from engine.bank.block_bank import BlockBank
from engine.bank.chunk_bank import ChunkBank
from engine.bank.device import DeviceBank
from engine.bank.host.tiered import TieredBank
from engine.bank.near.near_bank import NearBank
from engine.bank.pool.heap_limit import HeapLimit
from engine.bank.query_ring import QueryRing
from engine.bank.recurrent.savepoints import Savepoints
from engine.bank.row_origins import RowOrigins, Span
from engine.bank.split.context_bank import ContextBank
from engine.bank.split.query_ring import SplitQueryRing
from engine.bank.split.split_bank import SplitBank
from engine.base.device import StepClock, current
from engine.base.errors import ContextTooLong, SessionClosed
from engine.base.interrupts import complete
from engine.base.newest_tokens import NewestTokens
from engine.load.loaded import Loaded
from engine.load.planner import Planner
from engine.methods.base import Runtime
from engine.methods.mass_meter import Watch
from engine.model.llama import Llama
from engine.plan.layers import LayerPlan, Role, mem_from_budget
from engine.plan.needs import STORES, Needs
from engine.plan.placement import Placement
from engine.runner.history import History, Savepoint
from engine.runner.step_runner import StepRunner
from engine.sampling.sampler import Sampler

Tokens = list[int] | NewestTokens
CLOSED_LINE = "this session was closed; make a new one with llm.session()"


@dataclass
class SessionStats:
    """Counters of one session since it began, and the sizes of its memory: seconds and bytes."""

    tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    # replay of evicted tokens after a truncate, which no other figure counts, and of those that
    # recurrent layers ran over again
    rerun_seconds: float = 0.0
    tokens_again: int = 0  # that recurrent layers ran over again after a truncate
    state_bytes: int = 0  # recurrent layers' state
    savepoint_bytes: int = 0  # earlier states of recurrent layers, in host memory
    decode_steps: int = 0
    decode_seconds: float = 0.0  # of steps that have ended (engine/base/device.py, StepClock)
    # steps in which the sparse layers read a selection, not everything
    sparse_steps: int = 0
    dense_steps: int = 0
    # bank rows (K and V of a token in a layer) read by the sparse layers, over layers and steps
    rows_read_sparse: int = 0
    bytes_read_sparse: int = 0
    bytes_read_dense: int = 0
    bank_bytes: int = 0
    scratch_bytes: int = 0
    ring_bytes: int = 0
    selection_bytes: int = 0
    host_bytes: int = 0  # host blocks of this session
    pin_seconds: float = 0.0  # spent by its host pool on page-locking memory
    # bank bytes on the device / bytes of all K and V at the session's capacity; where tokens are
    # evicted: bytes of K and V kept / those of all tokens so far
    resident: float = 1.0
    # the paper's Mem%: share of the bank that a sparse step reads
    mem: float = 1.0
    # selected tokens found in the working sets, summed over groups and steps
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    hit_rate: float = 0.0  # hits / selected tokens
    bytes_fetched: int = 0  # for selections: misses x bytes of a group's row, exactly
    store_bytes: int = 0  # K, V, positions and scores that an evicting method keeps
    forgets: bool = False  # whether it frees what the store does not take: no bank stands beside it
    # positions, scores and queries kept so that its answer can be taken back; where it forgets,
    # rows too
    snapshot_bytes: int = 0
    # came back from host memory otherwise: whole layers, blocks, rows that a method waited for, the
    # tails that rings begin with; no rows of a ring or a staging buffer, which lie on the device
    bytes_streamed: int = 0
    # of weights, since the model was loaded, for all sessions together
    weight_bytes_streamed: int = 0
    # chunks of a layer that had to wait for a staging buffer still being written to the host
    staging_stalls: int = 0
    # exact mode: steps of full attention, tokens drafted for them and accepted; what the cycles
    # cost in counted bytes, and what as many steps of full attention would have cost
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    cost_exact: float = 0.0
    cost_full: float = 0.0
    # {first layer: {"hits", "misses", "evictions", "plans", "bytes"}}
    groups: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Exact mode's speed over full attention's, by counted bytes; 0: not in exact mode."""
        return self.cost_full / self.cost_exact if self.cost_exact else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON."""
        return asdict(self)

    def roll_back(self, before: SessionStats, seconds: float) -> None:
        """Restore the counters `before` a replay, and count its `seconds`: the replayed tokens were
        counted when they first ran.
        """
        self.__dict__.update(before.__dict__)
        self.rerun_seconds += seconds

    def count_again(self, tokens: int, seconds: float) -> None:
        """Count tokens that recurrent layers ran over again."""
        self.tokens_again += tokens
        self.rerun_seconds += seconds

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """Count a prefill chunk."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds

    def count_step(
        self,
        rows: Sequence[int],
        roles: Sequence[Role],
        row_bytes: Sequence[int],
        sparse: bool,
    ) -> None:
        """Count a decode step.

        rows: bank rows that each layer read, of row_bytes each. sparse: whether the sparse layers
        read a selection.
        """
        partial = [role in (Role.SPARSE, Role.RETAINED) for role in roles]
        read = sum(count for count, less in zip(rows, partial) if less)
        size = [count * one for count, one in zip(rows, row_bytes)]
        some = sum(count for count, less in zip(size, partial) if less)
        self.decode_steps += 1
        self.sparse_steps += sparse
        self.dense_steps += not sparse
        self.rows_read_sparse += read
        self.bytes_read_sparse += some
        self.bytes_read_dense += sum(size) - some


class _Closed:
    """Placeholder for the bank, queries and runner of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise SessionClosed(CLOSED_LINE)


CLOSED: Any = _Closed()


class SessionState:
    """The data of one session. Only this module writes these fields; functions of engine/runner
    change a session by its methods, and engine/session/session.py is its public face.

    A session is whole when `inconsistent` is false and `history.pending` is None: bank, query ring
    and runtime then hold exactly the tokens `committed`.
    """

    def __init__(
        self,
        loaded: Loaded,
        planner: Planner,
        capacity: int,
        plan: LayerPlan,
        needs: Needs,
        placement: Placement | None = None,
        offload: str | None = None,
    ) -> None:
        self.loaded, self.planner = loaded, planner
        self.capacity, self.offload = capacity, offload
        # tokens that it may come to hold: a stream's rows are as many as `capacity` all the while
        self.endless = planner.options.forever
        self.limit = planner.limit if self.endless else capacity
        self.closed = False  # whether close() was called
        # tokens that the bank and the runtime stand at; `ids`, but for a truncate under way
        self.committed: Tokens = NewestTokens() if self.endless else []
        self.origins = RowOrigins()  # how their rows came about
        # whether a commit or a prompt's end has begun and not ended
        self.inconsistent = False
        self.last_logits: torch.Tensor | None = None  # float32 [vocab] of the newest token
        self.selected = False  # whether the last step left a selection
        self.watch: Watch | None = None  # a running estimate of the attention mass kept
        self.sampler: Sampler | None = None  # of the answer being generated: drafts are sampled too
        self.counters = SessionStats()  # `stats` is a copy
        self.clock = StepClock(loaded.model.device)
        config, dtype, device = loaded.config, loaded.dtype, loaded.model.device
        self.row_bytes = [
            config.kv_bytes(dtype.itemsize, local=layer in config.local_layers)
            for layer in range(config.num_layers)
        ]
        parts = loaded.model.parts
        self.query_ring = (
            SplitQueryRing([p.config for p in parts], 1, dtype, [p.device for p in parts])
            if parts
            else QueryRing(config, 1, dtype, device)
        )
        self.history = History(planner.savepoints)
        self.bank = self.new_bank(plan, needs, placement)

    def bytes_of(self, length: int) -> int:
        """Bytes of K and V that layers see of `length` tokens, each row once."""
        config = self.loaded.config
        seen = config.rows_seen(length)
        writing = (*config.keeping_layers, *config.ring_layers)
        return sum(seen[layer] * self.row_bytes[layer] for layer in writing)

    def new_bank(self, plan: LayerPlan, needs: Needs, placement: Placement | None) -> Bank:
        """An empty bank for this session under a method with such needs."""
        loaded, cut = self.loaded, self.loaded.cut
        heap = HeapLimit(self.planner.workspace * 3 // 4) if needs.forgets else None
        if cut is None:
            return self._bank_of(loaded.model, plan, needs, placement, heap)
        parts = loaded.model.parts
        given: Any = placement  # a SplitPlacement
        wanted = (None,) * len(parts) if given is None else given.parts
        banks = []
        for part, own, where in zip(parts, cut.layers(plan), wanted, strict=True):
            with current(part.device):
                banks.append(self._bank_of(part, own, needs, where, heap))
        return SplitBank(loaded.config, cut, banks, self.capacity, loaded.dtype)

    def _bank_of(
        self,
        model: Llama,
        plan: LayerPlan,
        needs: Needs,
        placement: Placement | None,
        heap: HeapLimit | None,
    ) -> Bank:
        """The bank of a model's layers, or of a part's, on its device. heap: of one that forgets,
        the same for all parts.
        """
        loaded, planner = self.loaded, self.planner
        config, dtype, device = loaded.config, loaded.dtype, model.device
        if model is not loaded.model:
            config = model.config
        if needs.kept is not None:
            bank = BlockBank(config, self.capacity, dtype, device, needs, chunk=planner.chunk)
            if placement is not None:
                bank.move_to_host(placement, loaded.host_pool, planner.backend)
            return bank
        if needs.forgets:
            span = needs.waiting_rows(planner.chunk)
            sizes = dict(span=span, chunk=planner.chunk)
            return ChunkBank(config, self.capacity, dtype, device, **sizes, heap=heap)
        given = config, plan, self.capacity, dtype, device
        if config.context is not None:
            pool = None if placement is None else loaded.host_pool
            room = planner.chunk, placement, pool, planner.backend, loaded.peers.said
            return ContextBank(*given, *room)
        if needs.near is not None:
            return NearBank(*given, needs.near, chunk=planner.chunk)
        if placement is None:
            return DeviceBank(*given, chunk=planner.chunk)
        return TieredBank(*given, placement, loaded.host_pool, planner.backend)

    def go_on(self, runner: StepRunner, points: list[Savepoint]) -> None:
        """Replace the runner; `points` are the savepoints under its method."""
        self.method, self.plan, self.backend = runner.method, runner.plan, runner.backend
        self.bank, self.runner = runner.bank, runner
        self.selected = False
        forgets = runner.runtime.needs.forgets
        stores = min(STORES, self.planner.options.savepoints) if forgets else None
        self.history.begin(runner.initial, points, stores)

    # ---------------------------------------------------------------- contents

    @property
    def ids(self) -> Tokens:
        """The session's tokens; of a stream without end the newest, by their positions."""
        pending = self.history.pending
        return self.committed if pending is None else pending.ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def runtime(self) -> Runtime:
        """State of the session's method."""
        return self.runner.runtime

    @property
    def dense_runtime(self) -> Runtime:
        """Full attention over the same bank."""
        return self.runner.dense_runtime

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of the kernels' scratch."""
        return self.runner.scratch_bytes

    @property
    def answer_length(self) -> int:
        """Tokens decoded since the latest prefill."""
        return len(self.ids) - self.history.prompt_length

    def take_time(self, wait: bool = False) -> None:
        """Count the seconds of the decode steps that have ended. wait: of all of them."""
        self.counters.decode_seconds += self.clock.ended(wait)

    def require_open(self) -> None:
        """Raise SessionClosed if the session was closed."""
        if self.closed:
            raise SessionClosed(CLOSED_LINE)

    def require_room(self, wanted: int) -> None:
        """Raise ContextTooLong if the session cannot hold `wanted` tokens."""
        if wanted > self.limit:
            raise ContextTooLong(
                f"{wanted} tokens do not fit: this session holds {len(self.ids)} and its context "
                f"limit is {self.limit} (the model's own is "
                f"{self.loaded.config.max_positions}); raise it with max_context / --ctx, or "
                f"shorten the text"
            )

    # ---------------------------------------------------------------- changes

    def commit(
        self,
        ids: list[int],
        queries: int,
        logits: torch.Tensor | None = None,
        selected: bool = False,
    ) -> None:
        """Append the tokens of the chunk or step that just ran. queries: how many of the newest are
        in the query ring. logits: after the last token. selected: whether the step left a
        selection.
        """
        n = len(self.committed)

        def take() -> None:
            if self.bank.recurrent is not None:
                self.bank.recurrent.commit(n + len(ids))
            self.committed[n:] = ids
            self.last_logits, self.selected = logits, selected
            self.inconsistent = False

        self.inconsistent = True
        self.runtime.commit(len(ids))
        self.query_ring.extend(n + len(ids), queries)
        # whoever keeps the tokens keeps their logits
        complete(take)
        self.keep_state()
        if isinstance(self.committed, NewestTokens):
            self.history.forget_before(self.committed.first)

    def keep_state(self, turn: bool = False) -> None:
        """Keep a savepoint of the recurrent layers' state where one is due. turn: a prompt begins
        or ends here.
        """
        state, states = self.bank.recurrent, self.history.states
        if state is None or not states.due(state.length, turn):
            return
        queries, window = None, self.runtime.needs.window
        if window and self.query_ring.high == state.length:
            newest = self.query_ring.newest(window + state.length - state.base)
            queries = self.query_ring.as_one(newest).cpu()
        states.add(replace(state.snapshot(), turn=turn, queries=queries, end=state.length))

    def keep_queries(self) -> None:
        """Keep the queries of savepoints that the session can return to, and no others."""
        history = self.history
        if history.most_stores is not None:
            self.query_ring.keep_at(p.length for p in history.savepoints if history.loadable(p))

    def stand_back(self, n: int, again: bool = False) -> int:
        """Have the recurrent layers' state at a length up to n tokens, the nearest that is known;
        return that length. again: not where it stands, if that is beyond n.
        """
        state = self.bank.recurrent
        if state is None:
            return n
        if state.length > n and (again or not state.holds(n)):
            state.rewind(n)
        point = self.history.states.best(n)
        if point is not None and min(point.length, n) > state.length:
            state.load(point, min(point.length, n))
            if point.queries is not None:
                ring, width = self.query_ring, point.queries.shape[2]
                ring.write_chunk(ring.taken(point.queries), point.end)
                ring.set_valid(point.end - width, state.length)
        return state.length

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change the runtime's state inside; an exception leaves it inconsistent."""
        self.inconsistent = True
        yield
        self.inconsistent = False

    def made_consistent(self) -> None:
        """Mark the runtime consistent: its state is known, or is about to be rebuilt."""
        self.inconsistent = False

    def stand_at(self, logits: torch.Tensor | None) -> None:
        """Set the newest token's logits, and that no step has left a selection."""
        self.last_logits, self.selected = logits, False

    def learn(self, logits: torch.Tensor | None) -> None:
        """Set the newest token's logits (None: unknown); the last selection does not change."""
        self.last_logits = logits

    def forget_selection(self) -> None:
        """Invalidate the last step's selection."""
        self.selected = False

    def selects_again(self, selected: bool) -> None:
        """Restore, after a check, whether the last step left a selection."""
        self.selected = selected

    def rewind(self, n: int) -> None:
        """Truncate tokens, bank and query ring to n. The caller truncates the runtime."""
        del self.committed[n:]
        self.bank.rewind(n)
        self.query_ring.truncate(n)
        self.stand_back(n)
        self.history.states.cut(n)

    def take_over(
        self, ids: list[int], origins: Iterable[Span], states: Savepoints | None = None
    ) -> None:
        """Adopt tokens whose rows are in the bank already; the query ring is empty. states: of
        recurrent layers, which stand at the last of them up to these tokens.
        """
        self.committed = ids
        self.origins.add(0, origins)
        self.history.keep([])
        self.query_ring.truncate(0)
        self.query_ring.set_valid(len(ids), len(ids))
        if self.bank.recurrent is not None:
            if states is not None:
                self.history.states.copy_from(states)
                self.history.states.cut(len(ids))
                self.bank.recurrent.rewind(0)
            self.stand_back(len(ids))

    def restored(self, ids: Tokens, points: list[Savepoint], origins: Iterable[Span]) -> None:
        """Adopt the tokens of a saved session, whose rows and queries are loaded."""
        self.committed = NewestTokens(ids) if self.endless and isinstance(ids, list) else ids
        self.origins.add(0, origins)
        self.history.keep(points)

    def write_with(self, sampler: Sampler | None) -> None:
        """Set the sampler of the next tokens; None: there is none, or no token can be drafted."""
        self.sampler = sampler

    def watch_with(self, watch: Watch | None) -> None:
        """Set the meter of the attention mass kept; None: no meter."""
        self.watch = watch

    def copy_state(self, other: SessionState) -> None:
        """Copy another session of the same method and backend, whose rows are in this bank."""
        self.committed = other.committed.copy()
        self.origins.add(0, other.origins.of(0, len(other.committed)))
        self.query_ring.copy_from(other.query_ring)
        logits = other.last_logits
        self.last_logits = None if logits is None else logits.clone()
        self.history.copy_from(other.history)
        self.runtime.copy_from(other.runtime)
        self.watch = None if other.watch is None else replace(other.watch)

    def close(self) -> None:
        """Free the bank's memory. Further calls raise SessionClosed."""
        if not self.closed:
            if self.loaded.lead is not None:
                self.loaded.lead.closed(self)
            self.closed = True
            with current(self.loaded.device):
                self.bank.close()
            self.last_logits = None
            self.bank = self.query_ring = self.runner = CLOSED


def held_figures(session: SessionState) -> dict[str, Any]:
    """Return the fields of SessionStats that are sizes of an open session's memory."""
    runtime, plan, state = session.runtime, session.plan, session.bank.recurrent
    k, prompt = runtime.k, session.history.prompt_length or len(session.ids)
    figures = dict(
        ring_bytes=session.query_ring.nbytes,
        scratch_bytes=session.scratch_bytes,
        selection_bytes=runtime.nbytes,
        state_bytes=0 if state is None else state.nbytes,
        savepoint_bytes=session.history.states.nbytes,
        weight_bytes_streamed=session.loaded.weight_bytes_streamed,
        mem=mem_from_budget(k, prompt, plan.dense_share) if k and plan.partial_layers else 1.0,
        **session.bank.figures(),
    )
    if session.bank.forgets:
        kept = session.history.nbytes + session.query_ring.kept_bytes
        figures |= dict(forgets=True, snapshot_bytes=kept)
    if runtime.needs.history == "store":
        # Resident: what the method needs, of what its tokens would take. A bank may stand beside.
        every = session.bytes_of(max(1, len(session.ids)))
        figures |= dict(
            selection_bytes=0,
            store_bytes=runtime.nbytes,
            snapshot_bytes=session.history.nbytes + session.query_ring.kept_bytes,
            resident=runtime.kv_bytes / every,
        )
    return figures
