"""The interface of a method: a frozen value that makes a layer plan, and a runtime per session.

Decode and prefill call the hooks below and know nothing else of a method. The layer plan says what
each layer does; the runtime follows it. `Needs` (engine/plan/needs.py) says what the engine must
provide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.bank.base import AttendsPrompt, Bank, Opened, Step
from engine.bank.host.streamed_attention import attend_stream
from engine.bank.row_origins import FULL, Span
from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.model.config.latent import OPENED_ROWS
from engine.model.low_bits import FewBits
from engine.plan.filter_layers import FilterLayers
from engine.plan.layers import LayerPlan, layer_plan
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.chain.layer import Reading
from kernels.launch.dispatch import NATIVE
from kernels.launch.softmax import Softmax
from kernels.prefill.dense import prefill_dense
from kernels.prefill.window import prefill_window
from kernels.select.topk import select_topk

# makes the logits behind tokens first .. stop-1 of a chunk or step: float32 [stop - first, vocab]
Logits = Callable[[int, int], torch.Tensor]
Encode = Callable[[str], list[int]]  # ids of a text; none where a session has no tokenizer
SAMPLED = 256  # tokens of the sample that a method may learn a model's queries and keys from
# what is found in the rotated queries float [SAMPLED, H, D] and keys [Hkv, SAMPLED, D] of a layer
Found = Callable[[int, torch.Tensor, torch.Tensor], Any]
# {layer: what `Found` returns} of a sample that the model reads by full attention; made once for a
# model and a name, and kept
Sample = Callable[[str, Found], dict[int, Any]]


class Pass(NamedTuple):
    """A pass over tokens behind a prompt that leaves no row: their ids, and what they attend to."""

    ids: list[int]
    attends: AttendsPrompt


@dataclass(frozen=True)
class Method:
    """Base of all methods. Unknown fields raise; values are validated at construction."""

    # whether users may ask for the method by name; not inherited, default True
    # (engine/methods/registry.py)
    named = False
    # whether it reads a session's first prompt by full attention, on the reference launchers to the
    # bit, so that others may use its rows (`prompt_origins`); not inherited either, default False
    full_prompts = False

    @property
    def name(self) -> str:
        """Name on the command line and in tables."""
        return type(self).__name__.lower()

    @property
    def cannot_draft(self) -> str:
        """Why exact mode (engine/methods/exact.py) cannot draft with this method, or ""."""
        return "it selects no tokens to read"

    @property
    def chooses_verified(self) -> bool:
        """Whether its runtime's `attend_verified` chooses what `attend_kept` reads."""
        return False

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        """The method with the filter layers that `filter_layers` finds, where it has none."""
        return self

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Layer plan for a model; by default all layers attend to everything."""
        others = config.local_layers, config.recurrent_layers
        return layer_plan(config.num_layers, (), 0, *others)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Return the needs of a session of `capacity` tokens. itemsize: bytes of a bank element."""
        return Needs()

    def dense_below_tokens(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, device_type: str, capacity: int
    ) -> int:
        """Context length in tokens below which every layer attends to everything."""
        return 0

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """Device bytes that reading a prompt of `capacity` tokens in such chunks takes beside a
        chunk's activations and Needs.device_bytes.
        """
        return 0

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The most rows of an offloaded layer that the chunk at positions begin .. stop-1 of a
        prompt of `total` tokens reads in host memory, `room` rows at a time at most. capacity:
        tokens of the session; first: the first query that attends (None: all of them).
        """
        return begin

    def outlook(
        self,
        plan: LayerPlan,
        config: ModelConfig,
        itemsize: int,
        device_type: str,
        context: int,
        offloaded: Collection[int] = (),
        held: FewBits | None = None,
    ) -> str:
        """Return the plan's line on this method's speed at `context` tokens, or "". offloaded:
        layers in host memory. held: weights in few bits.
        """
        return ""

    def bounds_distances(self, plan: LayerPlan, positions: int, length: int) -> bool:
        """Whether no query sees a token further away than a rope made for `positions` knows, in a
        text of `length` tokens, however long that is.
        """
        return False

    def streamed(self, config: ModelConfig) -> Method:
        """This method as a stream without end runs it, in constant memory. Raises SettingError
        where it cannot.
        """
        raise self.no_stream("keeps the rows of every token")

    def forgotten(self, length: int) -> str:
        """Say what a stream of `length` tokens has begun to forget; "" while it holds them all."""
        return ""

    def gone(self, length: int, held: int) -> int:
        """How many of a stream's `length` tokens have no row any more, where it holds `held`."""
        return max(0, length - held)

    def no_stream(self, why: str) -> SettingError:
        """The error for a stream of a method that it does not take."""
        return SettingError(
            f"forever: found {self.name}, which {why}; use streaming_llm, lm_infinite or window "
            "with a number of tokens (--method streaming_llm --tokens 2048), or infllm"
        )

    def validate(self, plan: LayerPlan) -> None:
        """Raise SettingError where these settings cannot work on this layer plan."""

    def validate_prompt(self, start: int, stop: int) -> None:
        """Raise SettingError where a session of `start` tokens cannot read on to `stop`."""

    def validate_switch(self, length: int) -> None:
        """Raise SettingError if a session that read `length` tokens under another method cannot
        continue with this one.
        """

    def prompt_origins(
        self, plan: LayerPlan, begin: int, first: int, stop: int, total: float
    ) -> list[Span]:
        """Return the origins (engine/bank/row_origins.py) of the rows first .. stop-1, which one
        chunk reads, of a prompt at positions begin .. total-1; total is infinite while it goes on.
        """
        return [(stop, FULL if vars(type(self)).get("full_prompts", False) else None)]

    def runtime(self, setup: Setup) -> Runtime:
        """The state of this method in one session."""
        return Runtime(self, setup)


def scratch_shape(
    config: ModelConfig,
    needs: Needs,
    capacity: int,
    dtype: torch.dtype,
    batch: int = 1,
    queries: int = 1,
) -> ScratchShape:
    """Return the shape of the kernels' scratch for a session of a method with these needs.

    capacity: rows of the bank; dtype: the model's; queries: the most tokens of one step.
    """
    return ScratchShape(
        batch=batch,
        queries=max(queries, needs.queries),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        capacity=capacity,
        budget=max(needs.selected, 0 if config.local_heads else config.window),
        scored=needs.selected > 0,
        window=needs.window,
        dtype=config.row_dtype(dtype),
        capped=config.block.score_cap > 0,
        local=(*config.local_heads, config.window) if config.local_heads else None,
    )


@dataclass(frozen=True)
class Setup:
    """The inputs of a runtime: one session's fixed facts.

    backend: kernel backend ("auto", "reference", "cpu", "triton"); scratch: buffers of the kernels;
    softmax: what is particular in every layer's; marks: gives the ids of special tokens and of
    punctuation, None where a session has no tokenizer; sample: reads a sample, None where there is
    no model; across: select_topk over the heads of all ranks (engine/ranks/merge.py); over_heads:
    gives a number of every query head for those of a rank's own; gathered: gives a tensor of every
    rank, [ranks, ...], where each holds the rows of its own tokens; None: of one process.
    """

    config: ModelConfig
    plan: LayerPlan
    capacity: int
    device: torch.device
    dtype: torch.dtype
    batch: int
    backend: str
    scratch: Scratch
    softmax: tuple[Softmax, ...]
    marks: Callable[[], tuple[Collection[int], Collection[int]]] | None = None
    sample: Sample | None = None
    across: Callable[..., None] | None = None
    over_heads: Callable[[torch.Tensor], torch.Tensor] | None = None
    gathered: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        method: Method,
        capacity: int,
        *,
        plan: LayerPlan | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
        queries: int = 1,
        backend: str = "auto",
        sinks: Sequence[torch.Tensor] = (),
    ) -> Setup:
        """The facts of a session of `method`, with scratch for steps of up to `queries` tokens.

        plan: the method's layer plan, where it is at hand already. sinks: those of every layer
        (Llama.sinks).
        """
        device, plan = torch.device(device), plan or method.plan(config)
        needs = method.needs(plan, config, capacity, dtype.itemsize)
        shape = scratch_shape(config, needs, capacity, dtype, batch, queries)
        scratch = make_scratch(shape, device, backend)
        softmax = config.softmax(sinks)
        return cls(config, plan, capacity, device, dtype, batch, backend, scratch, softmax)


class Runtime:
    """Full attention in every layer; the methods derive from it. One per session, reset by
    truncate.
    """

    bank: Bank | None = None  # the session's bank, set by the session
    by_part: Sequence[Runtime] = ()  # of the parts of a model over several devices

    def __init__(self, method: Method, setup: Setup):
        self.method, self.setup, self.plan = method, setup, setup.plan
        self.scale, self.softmax = setup.config.scale, setup.softmax
        # no rows chosen, for each sequence
        self._none = torch.zeros(setup.batch, dtype=torch.int32, device=setup.device)
        self.needs = method.needs(setup.plan, setup.config, setup.capacity, setup.dtype.itemsize)

    @property
    def choose_of_all(self) -> Callable[..., None]:
        """Chooses tokens by the maxima over all heads, as kernels.select.topk.select_topk."""
        return self.setup.across or select_topk

    @property
    def nbytes(self) -> int:
        """Device bytes of this runtime's own buffers; equals Needs.device_bytes for a batch of
        1.
        """
        return 0

    @property
    def k(self) -> int:
        """Tokens that a sparse layer selects per step (or a store keeps); 0: it reads
        everything.
        """
        return 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the method needs between steps; 0: those of the bank."""
        return 0

    def clear_scratch(self) -> None:
        """Zero what the kernels' scratch holds between calls, after a call that broke off."""
        self.setup.scratch.clear()

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Positions start .. stop-1 are about to be read, chunk by chunk. more: at least
        Needs.final_call tokens of the prompt follow in later calls.
        """

    def chunk_stop(self, first: int, stop: int) -> int:
        """Where the chunk that begins at `first` ends: at `stop`, as planned, or before."""
        return stop

    def hear(self, ids: Sequence[int], logits: Logits) -> None:
        """Note the tokens of the chunk or step that is about to be committed, and the logits behind
        each; called where Needs.outputs says so.
        """

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Attention of a chunk at positions start .. start+C-1 whose K and V are in the bank.
        q [B, C, H, D] rotated -> [B, C, H, D].
        """
        if bank.on_host(layer) and self.setup.backend != "reference":
            return attend_stream(q, bank, layer, start, *self._streamed(layer, bank))
        k, v = bank.kv(layer)
        return prefill_dense(
            q, k, v, start, self.scale, self.setup.backend, softmax=self.softmax[layer]
        )

    @property
    def reads_whole_prompts(self) -> bool:
        """Whether `attend_prompt` attends to everything in every layer and keeps nothing of it, so
        that `attend_opened` may stand for it: not where a method has its own, unless it says so.
        """
        return type(self).attend_prompt is Runtime.attend_prompt

    def attend_opened(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, opened: Opened
    ) -> torch.Tensor:
        """`attend_prompt` of latent attention where `reads_whole_prompts`: q [B, C, H, D] meets the
        K and V of D elements that `opened` makes of OPENED_ROWS rows at a time.
        """
        given = self._streamed(layer, bank)
        return attend_stream(q, bank, layer, start, *given, size=OPENED_ROWS, opened=opened)

    def _streamed(self, layer: int, bank: Bank) -> tuple[float, None, bool, Softmax, str]:
        """What a prompt's `attend_stream` is told of a layer."""
        # the model's last layer attends in the last chunk only: no block of it comes unasked
        ahead = any(bank.on_host(i) for i in range(layer + 1, bank.num_layers - 1))
        return self.scale, None, ahead, self.softmax[layer], self.setup.backend

    def attend_prompt_local(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, stop: int
    ) -> torch.Tensor:
        """Attention of a chunk in a sliding-window layer: q [B, C, H, D] at positions from `start`
        on, whose rows up to stop-1 are in the layer's ring.
        """
        ring = bank.window_ring(layer)
        assert ring is not None, f"layer {layer} keeps no window"
        low = max(0, start - ring.window + 1)
        k, v = ring.views(low, stop)
        given = start - low, ring.window, self.scale, self.setup.backend, self.softmax[layer]
        return prefill_window(q, k, v, *given)

    def passes(self, bank: Bank, begin: int, ids: Sequence[int], encode: Encode) -> list[Pass]:
        """Return what runs through the model again (engine/runner/passes/passes.py) before the
        prompt ends that began at `begin`; Needs.again says so. ids: all of the session's tokens,
        whose rows are in `bank` or in a store. Nothing but what `end_prompt` uses up may change.
        """
        return []

    def passes_flops(self, flops: PrefillFlops, begin: int, stop: int) -> tuple[float, float]:
        """(linear, attention) operations of the passes of a prompt at positions begin .. stop-1."""
        return 0.0, 0.0

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """A prompt has ended and the bank holds `length` tokens: fix budgets by share, evict.

        step: the newest token's, with the bank, the query ring and the rotation; None in a session
        without tokens.
        """

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """(linear, attention) operations of reading positions start .. stop-1."""
        return flops.parts(start, stop)

    # ---------------------------------------------------------------- a step

    @property
    def ahead(self) -> tuple[int, ...]:
        """Layers of which `foresee` wants to be told."""
        return self.needs.ahead

    def foresee(self, layer: int, q: torch.Tensor, step: Step) -> None:
        """Note what `layer`, one of `ahead`, would ask: q [B, Q, H, D], rotated, are its queries of
        what the layer before takes, which has not attended yet.
        """

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of a decode step. q [B, Q, H, D] rotated -> [B, Q, H, D]."""
        return self.attend_dense(layer, q, step)

    def chained(self, layer: int) -> Reading | None:
        """As Reads: this class's own `attend` and `attend_local` read everything they may see. A
        class that has others says what those do, or that nobody may stand for them.
        """
        own = type(self)
        local = layer in self.setup.config.local_layers
        same = own.attend is Runtime.attend and own.attend_dense is Runtime.attend_dense
        same = own.attend_local is Runtime.attend_local if local else same
        return Reading() if same and self.setup.backend in NATIVE else None

    def chained_at(self, n: int) -> tuple[int, int]:
        """As Reads: nothing is chosen."""
        return 0, 0

    def attend_dense(
        self,
        layer: int,
        q: torch.Tensor,
        step: Step,
        scores: torch.Tensor | None = None,
        kind: str = "softmax",
        ranked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention to everything in the bank; leaves the maxima over heads in `scores` if given,
        and counts the `ranked` first of them for the choice that follows.
        """
        if scores is None and step.bank.must_stream(layer, self.setup.backend):
            first = step.bank.length - q.shape[1]
            softmax = self.softmax[layer]
            given = self.scale, None, True, softmax, self.setup.backend
            return attend_stream(q, step.bank, layer, first, *given)
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
            ranked=ranked,
            softmax=self.softmax[layer],
        )

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """Attention of a draft step over the tokens that the last `attend` chose and all from
        tail_start [B] on; no layer chooses. A method that cannot keep its choice chooses anew.
        """
        return self.attend(layer, q, step)

    def attend_verified(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of a verification, q [1, Q, H, D], to everything, of which `attend_kept` reads
        what the last query chose, where Method.chooses_verified says so.
        """
        return self.attend_dense(layer, q, step)

    def kept_rows(self, n: int) -> list[int]:
        """Bank tokens that each layer reads in `attend_kept` at n tokens."""
        return self.rows_read(n)

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of q [B, Q, H, D] in a sliding-window layer, under every method the same: each
        query sees the newest tokens of its window.
        """
        ring, out = step.bank.window_ring(layer), []
        assert ring is not None, f"layer {layer} keeps no window"
        for number in range(q.shape[1]):
            first, stop = step.in_window(ring.window, ring.size, number)
            out.append(
                decode_sparse(
                    q[:, number : number + 1],
                    ring.k,
                    ring.v,
                    self._none.view(-1, 1, 1),
                    self._none,
                    first,
                    stop,
                    self.scale,
                    scratch=self.setup.scratch,
                    backend=self.setup.backend,
                    softmax=self.softmax[layer],
                )
            )
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def warm(self, steps: Iterable[Step]) -> None:
        """Fetch the first decode step's rows. steps: of the prompt's last tokens, oldest first."""

    def carry(self, part: int) -> None:
        """Bring to a part of a model, before its part of a step, what earlier parts have chosen for
        its layers.
        """

    def carry_kept(self, part: int) -> None:
        """As `carry`, before a step of `attend_kept`: what parts read in no other step."""

    def receive(self, group: int, other: Any, theirs: int) -> None:
        """Take over for `group` what `other`, the runtime of layers on another device, has chosen
        for its own group `theirs`. The host does not wait.
        """

    def received(self, step: Step) -> None:
        """Begin a part's step: what it has received may be fetched."""

    def commit(self, count: int) -> None:
        """Commit the chunk or step of `count` tokens that just ran. `attend` and `attend_prompt`
        leave state unchanged until then, so an interrupted step can be repeated.
        """

    # ---------------------------------------------------------------- what a step read

    def rows_read(self, n: int) -> list[int]:
        """Bank tokens that each layer reads in a decode step at n tokens, one count per layer;
        known without asking the device.
        """
        return self.setup.config.rows_seen(n)

    def choosing_bytes(self, n: int) -> int:
        """Bytes that a step at n tokens reads to choose, beside the rows of `rows_read`."""
        return 0

    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: int64 [k] positions, ascending} of the last step, sequence 0."""
        return {}

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """{filter layer: float32 [k]}: scores of those selections that are still in memory."""
        return {}

    def chosen_rows(self, layer: int) -> torch.Tensor:
        """Positions int64 [k] or [heads, k] that a sparse layer read in the last step before
        `tail_start`, sequence 0, ascending; -1 behind those of a head that read fewer.
        """
        return torch.zeros(0, dtype=torch.int64, device=self.setup.device)

    def drawn_rows(self, layer: int) -> torch.Tensor:
        """Those of `chosen_rows` that stand for all that was not chosen: int64 [m], ascending."""
        return torch.zeros(0, dtype=torch.int64, device=self.setup.device)

    def mass_kept(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor | None:
        """The share of the newest query's attention that falls on what a sparse layer read, float32
        [H], q [B, Q, H, D]; None: whoever asks reads the rows of all tokens for it.
        """
        return None

    def tail_start(self, step: Step) -> torch.Tensor:
        """First position [B] int32 from which sparse layers read everything."""
        return torch.zeros_like(step.visible)

    def choice(self) -> Any:
        """Copy the choice of the last step: the data of `selections` and `selection_scores`."""
        return None

    def load_choice(self, choice: Any) -> None:
        """Go back to a `choice`."""

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """Return the state that truncate must restore: all that cannot be derived from the bank and
        the query ring.
        """
        return None

    def has_state(self) -> bool:
        """Return whether `state` is not None for want of rows."""
        return True

    def savepoint(self) -> Any:
        """Return the `state` that a session keeps of a prompt's end, for `load` by this runtime
        while it goes on from there; by default all of it.
        """
        return self.state()

    def load(self, state: Any, length: int | None) -> None:
        """Go back to a `state` taken when the bank held `length` tokens (None: a copy)."""

    def loadable(self, state: Any) -> bool:
        """Whether what a `savepoint` of this session does not hold is there still."""
        return True

    def restored(self, state: Any, length: int) -> Any:
        """Return for `load` a state of a file, taken at `length` tokens. Raises ValueError if it
        cannot be one of this runtime: its first number is the budget that the buffers were
        allocated for, and the others count tokens.
        """
        fresh = self.state()
        parts = fresh if isinstance(fresh, tuple) else (fresh,)
        found = state if isinstance(state, tuple) else (state,)
        if [type(x) for x in found] != [type(x) for x in parts]:
            raise ValueError("state")
        for i, x in enumerate(found):
            most = max(self.needs.selected, parts[0] or 0) if i == 0 else length
            if x is not None and not 0 <= x <= most:
                raise ValueError("state")
        return state

    def truncate(self, length: int) -> None:
        """Forget what the last step chose: the session was cut to `length` tokens (0: as new)."""

    def waiting_from(self, length: int) -> int:
        """The first of `length` positions whose rows no store has taken yet."""
        return length

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        """Take over, as sequence `sequence`, the state of a runtime of one sequence (fork,
        batch).
        """
        self.load(other.state(), None)


def device_int(value: int, setup: Setup) -> torch.Tensor:
    """The same int for every sequence, on the device: int32 [B]."""
    return torch.full((setup.batch,), value, dtype=torch.int32, device=setup.device)
