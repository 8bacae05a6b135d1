"""What is known of a model before its weights are read: its method, its layer plan, what fits.

A planner allocates nothing large and never changes: an LLM, its sessions and its batches ask one
for methods, placements and plans.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.bank.pool.host_tier import HostTier
from engine.bank.split.placement import SplitPlacement
from engine.base.errors import SettingError
from engine.forward.native_backend import require_native
from engine.forward.staged.staging import Staging, spread
from engine.load.ahead.launches import FirstAnswer
from engine.load.files import ModelFiles, rounding
from engine.load.memory import default_chunk, make_plan, plan_at, prefill_bytes
from engine.load.options import Options
from engine.load.report import LARGER, Plan
from engine.load.split.planning import SplitPlanning
from engine.load.split.refused import require_roundable
from engine.load.split.split_plan import SplitPlan
from engine.load.staged.choice import CONTEXT, fewest_streamed, movable, streamed_layers
from engine.load.staged.sizes import layer_sizes
from engine.methods.base import Method
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.requirements import require_windows
from engine.methods.split.allowed import divides, require_split
from engine.model.config.config import ModelConfig
from engine.model.parts.config import part_of
from engine.plan import filter_layers
from engine.plan.filter_layers import FilterLayers
from engine.plan.free_memory import HEADROOM
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement, full_placement, reserved_rows
from engine.plan.split.cut import Cut
from kernels.launch.dispatch import ON_CPU, choose_for
from kernels.launch.shapes import card
from kernels.layer.linear import packs
from weights.resolve import Resolved

STREAM = 2048  # tokens that a stream keeps where nobody says which method it runs
# tokens of a stream, whose positions are int32: 248 days at 100 a second
ENDLESS = 2**31 - 2**16


class Planner:
    """Plans of one model under one set of options.

    name: as the model was asked for. config: at the planned context. folder, resolved, files: where
    the model lies; None for one that comes from a stream. few_bits: bytes of its weights where they
    are held in few bits. hint: what to say of a model without filter layers of its own, or "".
    host_tier: the host memory of its sessions, whose idle bytes are free to a plan; None: its own.
    cut: where the layers lie already, on several devices; None: where the plan puts them.
    Raises SettingError for options that do not fit together or the model.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        options: Options,
        folder: Path | None = None,
        resolved: Resolved | None = None,
        files: ModelFiles | None = None,
        host_tier: HostTier | None = None,
        cut: Cut | None = None,
    ) -> None:
        self.name, self.config, self.options = name, options.holding(config), options
        self.folder, self.resolved, self.files = folder, resolved, files
        self.devices = options.resolved_devices()
        self.device = self.devices[0] if self.devices else options.resolved_device()
        gpus = [device for device in self.devices if device.type == "cuda"]
        linked = gpus[0] if gpus else self.device
        self.host_tier = host_tier or HostTier(linked, self._host_limit, options.host_pool)
        cpus = [device for device in self.devices if device.type == "cpu"]
        self.dtype = options.resolved_dtype(config.dtype, cpus[0] if cpus else self.device)
        self.rounding = rounding(files, options, config, self.dtype, self.device)
        require_native(options.backend, self.device)
        self.few_bits = self.rounding.bytes(config, self.dtype, self.device, options.backend)
        if options.activations != "auto":
            self._round_activations()
        self.hint = ""
        self.cut = cut  # where the layers lie, if on several devices
        if self.devices:
            require_roundable(self.rounding, self.devices)
        method = options.method if options.method is not None else self._default_method()
        self.method, layers = self.resolve_method(method)
        options.require_positions(config, self.method, layers)
        chosen = [choose_for(options.backend, device) for device in self.places]
        self._triton = "triton" in chosen
        asked = streamed_layers(options.weights_offload, config, self._triton)
        self.staging = self._streaming(asked)
        self._plan = self._make_plan(self.method, layers, options.max_context, options.chunk)
        self._stream_what_does_not_fit(layers)
        self.config = self.config.at_context(self._plan.max_context)

    def _round_activations(self) -> None:
        """Say in the plan that a prompt's rows are rounded. Raises SettingError where nothing would
        round them.
        """
        word, held = self.options.activations, self.few_bits
        for device in self.devices or (self.device,):
            if device.type != "cpu" or choose_for(self.options.backend, device) == "triton":
                raise SettingError(
                    f"activations: found {word!r} on {device}, expected 'auto': only a CPU's "
                    "products with weights of few bits round them"
                )
        if held is None:
            raise SettingError(
                f"activations: found {word!r} beside weights in floats, expected 'auto', or "
                "weights='int8' or 'int4'"
            )
        self.few_bits = held._replace(note=f"{held.note}; a prompt's activations in {word}")

    def asked(
        self, host_tier: HostTier | None = None, cut: Cut | None = None, **settings: Any
    ) -> Planner:
        """A planner of the same model with other settings, over host memory of its own or this.
        cut: where the layers lie already.
        """
        own = dict(vars(self.options))
        if host_tier is not None:  # over weights that are where they are
            own["weights_offload"] = len(self.staging.layers) if self.staging else "off"
        options = Options.of({**own, **settings})
        known = self.folder, self.resolved, self.files
        return Planner(self.name, self.config, options, *known, host_tier, cut)

    def _host_limit(self) -> int | None:
        """The most bytes of host memory that sessions may take; None: no limit."""
        limit = self.options.ram_budget
        if self.device.type == "cuda" and not self._plan.shared:
            limit = limit or int(self._plan.host_free * HEADROOM)
            return max(1, limit - self._plan.staged_bytes)
        if self._plan.shared and limit is None:
            limit = int(self._plan.free * HEADROOM)
        return None if limit is None else self.plan(offload="host").left_for_host(limit)

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes of the matrices of every layer."""
        held = self.rounding, self.dtype, self.device, self.options.backend
        return layer_sizes(self.config, *held)

    def _streaming(self, count: int) -> Staging | None:
        """`count` layers that stream; None for none."""
        return Staging(spread(count, self.config.num_layers), self._sizes) if count else None

    def _stream_what_does_not_fit(self, layers: LayerPlan) -> None:
        """Plan with the fewest layers that have to stream, where the model would be refused."""
        options, config, plan = self.options, self.config, self._plan
        gpus, cut = all(device.type == "cuda" for device in self.places), self.cut
        by_itself = gpus and options.weights_offload == "auto"
        if not by_itself or plan.shared or plan.fits_device or not movable(config, self._triton):
            return
        context = options.max_context or min(config.max_positions, CONTEXT)
        for chunk in (*LARGER, None) if options.chunk is None else (options.chunk,):

            def fits(count: int, chunk: int | None = chunk) -> bool:
                self.staging, self.cut = self._streaming(count), None
                return self._make_plan(self.method, layers, context, chunk).fits_device

            count = fewest_streamed(fits, config.num_layers)
            self.staging, self.cut = self._streaming(count), None if count else cut
            if count:
                break
        self._plan = self._make_plan(self.method, layers, options.max_context, chunk)

    def _make_plan(
        self,
        method: Method,
        layers: LayerPlan,
        max_context: int | None,
        chunk: int | None,
        offload: str | None = None,
    ) -> Plan:
        options, on_gpu = self.options, self.device.type == "cuda"
        if options.forever:
            chunk = chunk or default_chunk(self.device.type, self.config)
            max_context = self.stream_rows(method, layers, chunk)
        if self.devices:
            found = self._split_plan(method, layers, max_context, chunk, offload)
            return found.without_end() if options.forever else found
        model = self.name, self.config, method, layers, self.dtype, self.device
        # ranks of one machine: those that hold all weights each, and those that have a GPU each
        ranks = self.config.context.ranks if self.config.context else 1
        share = self.config.share
        hosts = share.ranks if share is not None and on_gpu else ranks
        plan = make_plan(
            *model,
            max_context,
            chunk,
            budget=options.vram_budget if on_gpu else options.ram_budget,
            note=self.hint,
            backend=options.backend,
            offload=offload or options.offload,
            slots=options.slots,
            host_budget=options.ram_budget,
            weights=self.few_bits,
            imagined=options.imagined_gpu,
            imagined_host=options.imagined_host,
            idle_host=self.host_tier.idle,
            savepoints=options.savepoints,
            staging=self.staging,
            shared_by=(ranks, hosts),
        )
        plan = replace(plan, link_rate=self.host_tier.rate)
        if not options.forever:
            return plan
        needs = method.needs(layers, self.config, plan.max_context, self.dtype.itemsize)
        return plan.without_end(needs.selected)

    def _split_plan(
        self,
        method: Method,
        layers: LayerPlan,
        max_context: int | None,
        chunk: int | None,
        offload: str | None,
    ) -> SplitPlan:
        """As `_make_plan`, over several devices; the first one made says where the layers lie."""
        options, offload = self.options, offload or self.options.offload
        shared: dict[str, Any] = dict(slots=options.slots, savepoints=options.savepoints)
        shared["backend"] = options.backend
        budgets = {"cuda": options.vram_budget, "cpu": options.ram_budget}
        own = self.name, self.config, self.dtype, self.devices, options.split, budgets
        streaming = self.staging.layers if self.staging else ()
        planning = SplitPlanning(*own, self.rounding, streaming, **shared)
        model = self.name, self.config, method, layers, self.dtype, self.device

        def whole(context: int, tokens: int) -> Plan:
            own = {"offload": offload, "weights": self.few_bits, **shared}
            return plan_at(*model, context, tokens, note=self.hint, **own)

        given = method, layers, max_context, chunk, offload
        if self.cut is not None:
            found = planning.plan(whole, self.cut, *given)
            return replace(found, link_rate=self.host_tier.rate)
        self.cut = planning.cut(method, layers, max_context or self.config.max_positions)
        found = planning.plan(whole, self.cut, *given)
        if max_context is None and found.max_context < self.config.max_positions:
            self.cut = planning.cut(method, layers, found.max_context)
            found = planning.plan(whole, self.cut, *given)
        return replace(found, link_rate=self.host_tier.rate)

    @property
    def places(self) -> tuple[torch.device, ...]:
        """The device, or all of several."""
        return self.devices or (self.device,)

    @property
    def packs_head(self) -> bool:
        """Whether a tied lm_head of a model over several devices is packed, as one device would
        (`packing_head` of engine/load/memory.py), so that it gives the same bits.
        """
        packed = self.few_bits is None and self.backend in ON_CPU and packs(self.dtype)
        return packed and self.config.tied_embeddings and self.devices[-1].type == "cpu"

    def stream_rows(self, method: Method, layers: LayerPlan, chunk: int | None = None) -> int:
        """Rows that a stream of a method holds at once, however long it is: its store's, and a
        chunk's (None: as planned).
        """
        store = method.needs(layers, self.config, ENDLESS, self.dtype.itemsize).retained
        return store + (self.chunk if chunk is None else chunk)

    def _filter_layers(self) -> FilterLayers:
        """The model's filter layers as far as anybody knows them; the plan shows their hint."""
        known = filter_layers.filter_layers(self.folder, self.resolved, self.config)
        self.hint = known.hint
        return known

    def _default_method(self) -> Method:
        if self.options.forever:
            return StreamingLLM(tokens=min(STREAM, self.config.max_positions))
        if self._filter_layers().source != "spread":
            return OmniKV()
        self.hint = filter_layers.UNCALIBRATED
        return Full()

    # ---------------------------------------------------------------- what callers ask

    def plan(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
        **settings: Any,
    ) -> Plan:
        """The plan as it stands, or of a session with another method, capacity or offload; with
        settings, of an LLM made with these.
        """
        if settings:
            return self.asked(**settings).plan(method, max_context, offload)
        if method is None and max_context is None and offload is None:
            return self._plan
        method, layers = self.resolve_method(method if method is not None else self.method)
        return self._make_plan(method, layers, max_context or self.max_context, self.chunk, offload)

    def resolve_method(self, method: Method) -> tuple[Method, LayerPlan]:
        """(method with its filter layers filled in, layer plan) for this model; SettingError where
        they do not fit together.
        """
        if not isinstance(method, Method):
            raise SettingError(
                f"method: found {method!r}, expected Full(), OmniKV(...) or another engine method"
            )
        if self.options.forever:
            method = method.streamed(self.config)
        method = method.completed(self._filter_layers)
        if self.devices:
            require_split(method)
        plan = method.plan(self.config)
        require_windows(method, plan, self.config)
        method.validate(plan)
        if self.cut is not None and not divides(method):
            self.cut.require_whole(method.name, plan)
        return method, plan

    def placement(
        self, method: Method, layers: LayerPlan, capacity: int, offload: str | None = None
    ) -> Placement | None:
        """Where the bank of a session with this method and capacity lives; None where all of it is
        on the device.

        offload: "host" or "device" for this session; None as the LLM was made.
        """
        if self.cut is None:
            whole = self.config, layers, self.device, self._plan
            return self._placement_of(method, capacity, offload, *whole)
        parts, plan = [], self._plan
        assert isinstance(plan, SplitPlan)
        each = zip(self.cut.spans, self.cut.layers(layers), self.cut.devices, plan.parts)
        for (first, stop), own, device, planned in each:
            given = part_of(self.config, first, stop), own, device, planned
            parts.append(self._placement_of(method, capacity, offload, *given))
        if all(part is None for part in parts):
            return None
        found: Any = SplitPlacement(tuple(parts), self.cut.starts)
        return found

    def _placement_of(
        self,
        method: Method,
        capacity: int,
        offload: str | None,
        config: ModelConfig,
        layers: LayerPlan,
        device: torch.device,
        plan: Plan,
    ) -> Placement | None:
        """As `placement`, of a model's layers or a part's on its device; plan: as it was made."""
        planned = None if offload else plan.placement
        offload = offload or self.options.offload
        on_gpu = device.type == "cuda"
        capacity = reserved_rows(capacity, device.type)
        needs = method.needs(layers, config, capacity, self.dtype.itemsize)
        staged = needs.staged_layers and offload == "auto" and on_gpu and not plan.shared
        if offload == "device" or (planned is None and offload != "host" and not staged):
            return None
        rows = config.bank_rows(capacity)
        chunk, slots = min(self.chunk, rows), self.options.slots
        placement = full_placement(
            needs, rows, chunk, slots, by_layer=on_gpu, row_layers=config.row_layers
        )
        if (
            placement is None
            or planned is None
            or not set(planned.offload_groups) <= set(placement.offload_groups)
        ):
            return placement
        return placement.keeping(planned.offload_groups)

    def first_answer(self) -> FirstAnswer | None:
        """What decides about the launches of the first answer; None where Triton launches nothing
        on a GPU.
        """
        found = None if self.devices else card(self.device)
        if found is None or choose_for(self.backend, self.device) != "triton":
            return None
        return FirstAnswer(
            config=self.config,
            method=self.method,
            layers=self.layers,
            dtype=self.dtype,
            rounding=self.rounding,
            capacity=self.max_context,
            chunk=self.chunk,
            placement=self.placement(self.method, self.layers, self.max_context),
            fused=self.options.step != "plain",
            card=found,
        )

    @property
    def backend(self) -> str:
        """The launchers that sessions begin with."""
        return self.options.backend

    @property
    def savepoints(self) -> int:
        """The most earlier states of recurrent layers that a session keeps."""
        return self.options.savepoints if self.config.recurrent else 0

    @property
    def max_context(self) -> int:
        """Tokens whose rows one session can hold."""
        return self._plan.max_context

    @property
    def limit(self) -> int:
        """Tokens that one session may come to: `max_context`, but for a stream."""
        return ENDLESS if self.options.forever else self.max_context

    @property
    def chunk(self) -> int:
        """Tokens per prefill chunk."""
        return self._plan.chunk

    @property
    def workspace(self) -> int:
        """Bytes of a chunk's activations in the plan."""
        return prefill_bytes(self.config, self.dtype.itemsize, self.chunk, self.device.type)

    @property
    def layers(self) -> LayerPlan:
        """The layer plan of `method`."""
        return self._plan.layers
