"""What a session counts while it runs, and the sizes of what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine.plan.layers import Role
from engine.plan.mem import mem_from_budget

if TYPE_CHECKING:
    from engine.session import Session


@dataclass
class SessionStats:
    """Counters of one session since it began, and the sizes of what it holds.

    Times are in seconds, sizes in bytes.
    """

    tokens: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    # running evicted tokens again after a truncate, which no other figure counts
    rerun_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0  # of steps that have ended (engine/device.py, StepClock)
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
    # positions, scores and queries kept so that its answer can be taken back
    snapshot_bytes: int = 0
    # whole layers and blocks copied back to the device (prefill, dense steps, brutal offload)
    bytes_streamed: int = 0
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

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """Count a prefill chunk."""
        self.prefill_tokens += tokens
        self.prefill_seconds += seconds

    def count_step(
        self,
        rows: Sequence[int],
        roles: Sequence[Role],
        row_bytes: int,
        sparse: bool,
    ) -> None:
        """Count a decode step.

        rows: bank rows that each layer read. sparse: whether the sparse layers read a selection.
        """
        read = sum(r for r, role in zip(rows, roles) if role in (Role.SPARSE, Role.RETAINED))
        self.decode_steps += 1
        self.sparse_steps += sparse
        self.dense_steps += not sparse
        self.rows_read_sparse += read
        self.bytes_read_sparse += read * row_bytes
        self.bytes_read_dense += (sum(rows) - read) * row_bytes


def held_figures(session: Session) -> dict[str, Any]:
    """The fields of SessionStats that say what an open session holds now."""
    runtime, plan = session.runtime, session.plan
    k, prompt = runtime.k, session.history.prompt_length or len(session.ids)
    figures = dict(
        ring_bytes=session.query_ring.nbytes,
        scratch_bytes=session.scratch_bytes,
        selection_bytes=runtime.nbytes,
        mem=mem_from_budget(k, prompt, plan.dense_share) if k and plan.partial_layers else 1.0,
        **session.bank.figures(),
    )
    if runtime.needs.history == "store":
        # Resident: what the method needs, of what its tokens would take. The bank stands beside.
        every = plan.num_layers * session.row_bytes * max(1, len(session.ids))
        figures |= dict(
            selection_bytes=0,
            store_bytes=runtime.nbytes,
            snapshot_bytes=session.history.nbytes,
            resident=runtime.kv_bytes / every,
        )
    return figures
