"""The decode steps of a session: the method's own or full attention's, eager or as CUDA graphs.

The step itself is one function (engine/forward/decode.py). On a GPU it is captured once per
capacity bucket: kernels read the length on the device, so a graph replays at any length within its
bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from engine.bank.base import Attends, Bank, Step
from engine.bank.query_ring import QueryRing
from engine.base.device import current
from engine.forward.decode import Decoder, parts_of
from engine.forward.graphs import GraphedStep, SplitGraphedStep
from engine.forward.layer import FusedLayer, LayerForm
from engine.forward.prefill import Outputs, run_chunk
from engine.forward.prompt_layer import prompt_pieces
from engine.forward.split.layers import torch_layer
from engine.forward.split.pace import ChunkPace
from engine.load.loaded import Loaded
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.methods.split.dealt import context_runtime
from engine.methods.split.exact_runtime import over_parts
from engine.model.config.config import ModelConfig
from engine.model.llama import Llama
from engine.model.share.divide import whole_of
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.runner.sample.text import sampled
from engine.sampling.greedy import DeviceArgmax


class StepKind(NamedTuple):
    """The kind of a step. own: the method's, not full attention's. sparse: some layer reads a part
    of the bank.
    """

    own: bool
    sparse: bool


class StepRunner:
    """Two kinds of step over one bank. A session that changes its method or backend gets a new one.

    runtime, dense_runtime: the method's Runtime and full attention's. initial: the state of
    `runtime` before its first prompt. dense_below: tokens of context below which full attention
    runs. fused: whether steps run on our own kernels. token int64 [1, 1], length int32 [1]: inputs
    of a captured graph, filled by `feed`. batchable: whether its step may join a batched step
    (engine/batch/step.py). needs_rows: whether tokens are worth nothing to it without their rows.
    pace: how far the chunks of a prompt run ahead of the host.
    """

    batchable = True
    needs_rows = True

    def __init__(
        self,
        loaded: Loaded,
        method: Method,
        plan: LayerPlan,
        capacity: int,
        backend: str,
        bank: Bank,
        query_ring: QueryRing,
    ):
        config = loaded.config
        self.method, self.plan, self.backend, self.bank = method, plan, backend, bank
        self._loaded, self._query_ring, self._rotary = loaded, query_ring, loaded.rotary
        self._plain = backend == "reference"
        # The reference is the oracle: plain launchers, pieces uncompiled, no graph.
        oracle = torch_layer(loaded.model, backend=backend) if self._plain else None
        self.halves = oracle or loaded.halves(backend)
        self.model = model = self.halves.model
        device, dtype = model.device, model.dtype
        self.fused = isinstance(self.halves, FusedLayer)
        self.prompt_pieces = prompt_pieces(self.halves)
        full = Full()
        cut = loaded.cut
        if cut is None:
            setups = [self._setup(config, model, self.halves, method, plan, capacity)]
        else:
            given = zip(model.parts, self.halves.parts, cut.layers(plan), strict=True)
            setups = [self._setup(p.config, p, h, method, own, capacity) for p, h, own in given]
        self.runtime = self._runtime(method, setups, plan)
        self.initial = self.runtime.state()
        wide = full.plan(config)
        plans = [wide] if cut is None else cut.layers(wide)
        dense = [replace(one, plan=own) for one, own in zip(setups, plans, strict=True)]
        self.dense_runtime = self._runtime(full, dense, wide)
        self.scratch_bytes = sum(
            tensor.nbytes for setup in setups for tensor in vars(setup.scratch).values()
        )
        # of the whole model: ranks hold shares of several sizes, and all take the same steps
        self.dense_below = method.dense_below_tokens(
            plan, whole_of(config), dtype.itemsize, device.type, capacity
        )
        self._partial = bool(plan.partial_layers)
        # a method that stages whole layers starts copies, whatever its layers read
        self._differs = self._partial or self.runtime.needs.staged_layers > 0
        self.pace = ChunkPace([part.device for part in model.parts] or [device])
        self.argmax = DeviceArgmax(device)
        self.token = self.argmax.token
        self.length = torch.zeros(1, dtype=torch.int32, device=device)

        self._own_step = self.issued_by(self.runtime, self.runtime.needs, self.token)
        self._dense_step = self.issued_by(self.dense_runtime, self.dense_runtime.needs, self.token)

    def _setup(
        self,
        config: ModelConfig,
        model: Llama,
        halves: LayerForm,
        method: Method,
        plan: LayerPlan,
        capacity: int,
    ) -> Setup:
        """The inputs of a runtime over a model, or over a part of one, on its device."""
        loaded = self._loaded
        setup = Setup.of(
            config,
            method,
            capacity,
            plan=plan,
            device=model.device,
            dtype=model.dtype,
            backend=self.backend,
            sinks=model.sinks,
        )
        if loaded.activations == "int8":
            softmax = tuple(replace(of, query_bits=8) for of in setup.softmax)
            setup = replace(setup, softmax=softmax)
        read = partial(sampled, loaded, self.backend)
        setup = replace(setup, sample=read, across=loaded.across, over_heads=loaded.over_heads)
        if config.context is not None:
            setup = replace(setup, gathered=loaded.peers.gathered)
        if loaded.tokenizer is not None:
            setup = replace(setup, marks=loaded.tokenizer.marks)
        if not isinstance(halves, FusedLayer):
            setup = replace(setup, scratch=setup.scratch.merging_apart())
        return setup

    def _runtime(self, method: Method, setups: Sequence[Setup], plan: LayerPlan) -> Runtime:
        """A method's runtime, of one for each part where there are several."""
        cut = self._loaded.cut
        if setups[0].config.context is not None:
            return context_runtime(method, setups[0])
        if cut is None:
            return method.runtime(setups[0])
        parts = []
        for setup in setups:
            with current(setup.device):
                parts.append(method.runtime(setup))
        whole = replace(setups[0], config=self._loaded.config, plan=plan)
        return over_parts(method, whole, parts, cut.starts)

    def issued_by(
        self,
        attends: Attends,
        needs: Needs,
        token: torch.Tensor,
        layers: int = 0,
        form: LayerForm | None = None,
    ) -> GraphedStep:
        """A step of `attends` on token int64 [1, Q] and this runner's length, which ends after so
        many layers; 0: after all. form: of layers with other weights; None: of the model's.
        """
        loaded, form = self._loaded, form or self.halves
        model = form.model.first(layers) if layers else form.model
        decoder = Decoder(model, loaded.rotary, attends, self._query_ring, form)
        graphs = loaded.graphs and not self._plain and self.model.capturable
        kind = SplitGraphedStep if model.parts else GraphedStep
        agree = loaded.agreed if loaded.graphs else bool
        return kind(decoder, needs, token, self.length, self.bank, graphs, agree)

    @property
    def joint_graphs(self) -> bool:
        """Whether a step of several sessions may be a graph: of one device, as one graph cannot
        hold several devices' work, and of one process, as ranks would have to capture the same
        sets.
        """
        return not self.model.parts and self._loaded.peers is None

    def rows_read(self, n: int, sparse: bool) -> list[int]:
        """Return the bank rows that each layer read in the step to length n."""
        return (self.runtime if sparse else self.dense_runtime).rows_read(n)

    def kind(self, n: int) -> StepKind:
        """Return the kind of the step to length n."""
        own = n >= self.dense_below and self._differs
        return StepKind(own, own and self._partial)

    def runs_ahead(self, n: int) -> bool:
        """Return whether the step to length n is launched before the host knows its token: if it
        replays a graph. An eager step would keep the host as long anyway.
        """
        return self.step_of(self.kind(n).own).captures

    def step_of(self, own: bool) -> GraphedStep:
        """Return the method's step, or full attention's."""
        return self._own_step if own else self._dense_step

    def steps_again(self, n: int) -> bool:
        """Return whether the n-th token, which a step decoded, runs as a step again where its state
        is wanted once more: a chunk of full attention would make another one of it.
        """
        return self.kind(n).sparse

    def left_selection(self, kind: StepKind) -> bool:
        """Return whether the step that ran, of this kind, left a selection."""
        return kind.sparse

    def feed(self, token_id: int, n: int) -> None:
        """Write the n-th token to the input of the next step."""
        self.token.fill_(token_id)
        self.length.fill_(n - 1)

    def feed_argmax(self, logits: torch.Tensor | None, n: int) -> None:
        """Write the argmax of the session's `logits` [vocab] to the input of the next step. The
        host reads that token by `argmax.read`.
        """
        assert logits is not None, (
            "no logits to choose from: see engine.session.generate.runs_ahead"
        )
        self.argmax.choose(logits)
        self.length.fill_(n - 1)

    def run(self, n: int, own: bool) -> torch.Tensor:
        """Run a step of the fed token; float32 logits [vocab]."""
        return self.step_of(own)(n)[0, -1]

    def run_with(self, decoder: Decoder) -> torch.Tensor:
        """Run another decoder's step, eager, of the fed token; float32 logits [vocab]."""
        return decoder.step(self.token, self.length, self.bank)[0, -1]

    def logits_again(self, n: int) -> torch.Tensor | None:
        """Return the logits [vocab] behind the newest of n tokens where no row is needed for them;
        None: the rows are.
        """
        return None

    def read(
        self, tokens: torch.Tensor, first: int, stop: int, every: Outputs | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run a chunk of a prompt that ends at `stop`: tokens int64 [1, C] at positions from
        `first` on; as run_chunk (engine/forward/prefill.py), with logits at the prompt's end.
        """
        where = self._rotary, self.runtime, self.bank, tokens, first, stop
        return run_chunk(
            self.model,
            *where,
            last_logits=first + tokens.shape[1] == stop,
            pieces=self.prompt_pieces,
            backend=self.backend,
            every=every,
        )

    def at(self, length: int) -> Step:
        """Return the Step of the newest of `length` tokens, as a decode step would build it."""
        device = self.token.device
        positions = torch.full((1, 1), length - 1, device=device)
        visible = torch.full((1,), length, dtype=torch.int32, device=device)
        bank = self.bank
        step = Step(positions, visible, bank, bank.capacity, self._query_ring, self._rotary)
        if bank.parts:
            step.parts = parts_of(step)
        return step

    def newest(self, length: int, count: int) -> Iterator[Step]:
        """Yield the Steps of the newest `count` of `length` tokens that have their queries in the
        ring, oldest first.
        """
        for n in range(max(1, length - count + 1, self._query_ring.low + 1), length + 1):
            yield self.at(n)
