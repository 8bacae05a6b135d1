"""What a method is: a frozen value that makes a layer plan, and a runtime per session that attends.

Decode and prefill call the hooks below and know nothing else of a method; the layer plan tells
roles, the runtime follows it.
"""

from dataclasses import dataclass

import torch

from engine.bank.streamed_attention import attend_stream
from engine.errors import SettingError
from engine.plan.layers import layer_plan
from kernels.dense_decode import decode_dense
from kernels.prefill import prefill_dense


@dataclass(frozen=True)
class Method:
    """Base of all methods. Unknown fields raise, values are validated at construction."""

    @property
    def name(self):
        """Name on the command line and in tables."""
        return type(self).__name__.lower()

    def plan(self, config):
        """Layer plan for a model; all layers attend to everything unless a method says otherwise."""
        return layer_plan(config.num_layers)

    def budget_capacity(self, plan, capacity):
        """Most bank tokens a sparse layer may read per step when the bank holds `capacity` tokens;
        0 without sparse layers.
        """
        return 0

    def runtime_bytes(self, plan, capacity, config, size):
        """Device bytes of the runtime's own buffers in a bank of `capacity` tokens of `size` bytes
        an element; equals Runtime.nbytes.
        """
        return 0

    def store_bytes(self, plan, config, itemsize, capacity):
        """Device bytes of rows that the method keeps beside a bank of `capacity` tokens, at most
        (evicting methods).
        """
        return 0

    def dense_below_tokens(self, plan, config, dtype_bytes, device_type, capacity):
        """Below this many tokens of context every layer attends to everything."""
        return 0

    # whether users may ask for it by its name: what a class says itself counts, True where it is
    # silent
    named = False
    evicts = False  # whether rows are given up for good (engine/methods/evict/base.py)
    selects = False  # whether sparse layers read a selection that `bank.fetch` was told of
    # whether a prompt may be read in several calls (Session.prefill's `more`)
    in_parts = True
    # its newest tokens that are read in another way than the rest, so that one call must hold them
    last_part = 0
    stages = 0  # whole offloaded layers that a step keeps on the device at once

    def packs(self, plan):
        """Layers that may live in host memory, those fetched together in one tuple: the groups,
        unless a method says otherwise.
        """
        return tuple(group.layers for group in plan.groups if group.layers)

    def check(self, plan):
        """Raise SettingError where these settings cannot work on this layer plan."""

    def check_prefill(self, start, stop):
        """Raise SettingError where a session of `start` tokens cannot read on to `stop`; asked
        before reading.
        """

    def check_parts(self, more, last=None):
        """Raise SettingError where a prompt cannot be read in parts, or not ended by a part of
        `last` tokens.
        """
        if more and not self.in_parts:
            raise SettingError(
                f"{self.name}: reads a prompt in one call, and prefill was told that more follows"
            )
        if last is not None and last < self.last_part:
            raise SettingError(
                f"{self.name}: reads the last {self.last_part} tokens of a prompt in a way of their own, and the part that "
                f"ends this one has {last}: let it have {self.last_part}"
            )

    def check_switch(self, length):
        """Raise SettingError where a session that has read `length` tokens under another method
        cannot go on with this one.
        """

    def runtime(self, setup):
        """The state of this method in one session (a Runtime)."""
        return Runtime(self, setup)


@dataclass(frozen=True)
class Setup:
    """What a runtime is built from: one session's fixed facts."""

    config: object
    plan: object
    capacity: int
    device: object
    dtype: object
    batch: int
    backend: str  # kernel backend: "auto", "reference", "cpu", "triton"
    scratch: object


class Runtime:
    """Full attention in every layer; the methods derive from it. One per session, reset by
    truncate.
    """

    window = 0  # queries of the past that the next step's selection needs
    # whether a step can be captured into a CUDA graph (no visit to the host)
    capturable = True
    # whether sparse layers read what `bank.fetch` brought (else rows are gathered and waited for)
    packed = False
    bank = None  # the session's bank, set by the session
    # whether what a session has read cannot be attended to again: truncate reads anew
    # (Session.truncate)
    evicts = False
    # whether only its own steps lead to its state: truncate goes the way since the last prompt's
    # end again
    replays = False
    # whether the last layer shows all queries of a chunk too, before the one whose output counts
    reads_every_query = False

    def __init__(self, method, setup):
        self.method, self.setup = method, setup
        self.scale = setup.config.head_dim**-0.5

    @property
    def nbytes(self):
        """Device bytes of this runtime's own buffers."""
        return 0

    @property
    def differs(self):
        """Whether a decode step of this runtime is anything but plain full attention; where not,
        the session runs that.
        """
        return bool(self.setup.plan.sparse_layers)

    def begin_prefill(self, start, stop, more=False):
        """Positions start .. stop-1 are about to be read, chunk by chunk. more: at least
        Method.last_part tokens of the prompt follow.
        """

    def prefill_work(self, work, start, stop):
        """(linear, attention) operations of reading positions start .. stop-1; `work` is
        engine.prefill_eta.PrefillFlops.
        """
        return work.parts(start, stop)

    def advance(self, count):
        """The `count` tokens of the chunk or step that has just run are there to stay: what it left
        pending holds from here on.

        Attention itself changes nothing that a second run of the same chunk or step would see;
        whatever breaks off, nothing happened.
        """

    def end_prefill(self, length, step=None):
        """The bank holds `length` tokens at the end of a prefill (hook A); budgets by share are
        fixed here.

        step: engine.decode.Step of the newest token, with the bank, the query ring and the
        rotation; None in a session without tokens.
        """

    def warm(self, steps):
        """Make ready what the first decode step would fetch: `steps` are engine.decode.Step of the
        prompt's last tokens, oldest first.
        """

    def prefill_attend(self, layer, q, bank, start):
        """Attention of a chunk at positions start .. start+C-1, rows already written. q [B, C, H,
        D] -> [B, C, H, D].
        """
        if bank.on_host(layer) and self.setup.backend != "reference":
            return attend_stream(q, bank, layer, start, self.scale)
        k, v = bank.kv(layer)
        return prefill_dense(q, k, v, start, self.scale, backend=self.setup.backend)

    def attend(self, layer, q, step):
        """Attention of a decode step. q [B, Q, H, D] rotated; step: engine.decode.Step -> [B, Q, H,
        D].
        """
        return self.attend_dense(layer, q, step)

    def attend_dense(self, layer, q, step, scores=None, kind="softmax"):
        """Attention to everything in the bank, leaving head maxima in `scores` if given."""
        if scores is None and step.bank.must_stream(layer, self.setup.backend):
            return attend_stream(q, step.bank, layer, step.bank.length - q.shape[1], self.scale)
        k, v = step.bank.kv(layer, step.bucket)
        return decode_dense(
            q,
            k,
            v,
            step.visible,
            self.scale,
            scores=scores,
            kind=kind,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
        )

    def selections(self):
        """{filter layer: int64 [k] positions} of the last step, for sequence 0; empty for methods
        that select nothing.
        """
        return {}

    def selection_scores(self):
        """{filter layer: float32 [k]} of those selections whose scores are still at hand after the
        step; may be empty.
        """
        return {}

    def rows_read(self, n):
        """Bank rows that each layer reads in a decode step at n tokens: a list of ints, one per
        layer (exact, from the plan).
        """
        return [n] * self.setup.config.num_layers

    def snapshot(self):
        """State that truncate must bring back, apart from what follows from the bank and the query
        ring.
        """
        return None

    def restore(self, state, length):
        """Undo to a snapshot taken when the bank held `length` tokens."""

    def copy_from(self, other, sequence=0):
        """Hold for sequence `sequence` what the runtime of one sequence holds (fork; a batch)."""
        self.restore(other.snapshot(), None)

    def forget(self, length):
        """Drop what the last step chose: the session was truncated to `length` tokens (0: as new)."""


def device_int(value, setup):
    """One int per sequence on the device: int32 [B]."""
    return torch.full((setup.batch,), value, dtype=torch.int32, device=setup.device)
