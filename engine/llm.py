"""The public face: an LLM plans, loads and makes sessions; generate, stream and chat use one of
them each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from engine.bank.host_pool import HostPool
from engine.bank.host_tier import HostTier
from engine.bank.link import Link
from engine.batch import Batch
from engine.check import Report
from engine.device import current, typed_errors
from engine.errors import OutOfMemoryPlan, SettingError
from engine.generate import Completion, Piece, generate
from engine.heap import trim_heap, trimmed
from engine.methods.base import Method, require_windows
from engine.methods.full import Full
from engine.methods.omnikv.settings import OmniKV
from engine.model.config import ModelConfig
from engine.model.llama import Llama, assemble, post_attention, pre_attention
from engine.model.rope import Rotary
from engine.model.tensors import targets
from engine.model_files import ModelFiles, model_files, rounding
from engine.options import OFFLOADS, Options
from engine.plan import filter_layers
from engine.plan.filter_layers import FilterLayers
from engine.plan.free_memory import HEADROOM
from engine.plan.layers import LayerPlan
from engine.plan.memory import make_plan
from engine.plan.placement import Placement, full_placement, reserved_rows
from engine.plan.report import Plan
from engine.prefill_eta import PrefillProgress
from engine.rehearsal import StepForms
from engine.request_lock import Request, RequestLock
from engine.sampling import SamplingParams
from engine.saved.model_key import WeightsDigest
from engine.saved.session_file import Progress, restore_session
from engine.session import Session
from engine.settings import callables, integer, is_one_prompt, listed_ids, one_of
from engine.step_runner import compiled_pieces
from engine.text.tokenizer import Tokenizer
from weights.resolve import Resolved, resolve

Prompt = str | Sequence[int]
WeightStream = Callable[
    [ModelConfig, torch.dtype, torch.device], Iterable[tuple[str, torch.Tensor]]
]


class LLM:
    """One model on one device.

    model: alias, hub id, folder in Hugging Face layout, or GGUF file. settings: the fields of
    engine.options.Options. load=False plans only; call load() later. progress(LoadProgress) and
    download_progress are called while weights are read and fetched. Raises a subclass of
    engine.EngineError before anything large is allocated.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        load: bool = True,
        progress: Callable[[Any], None] | None = None,
        download_progress: Callable[[Any], None] | None = None,
        **settings: Any,
    ):
        callables(progress=progress, download_progress=download_progress)
        options = Options.of(settings)
        resolved = resolve(str(model), progress=download_progress, config_only=not load)
        self.resolved: Resolved | None = resolved
        self.folder: Path | None = Path(resolved.folder)
        self.tokenizer: Tokenizer | None = None
        self._progress, self._download_progress = progress, download_progress
        rope, positions = resolved.rope(options.rope)
        self._files: ModelFiles | None = model_files(self.folder, resolved.sizes)
        config = self._files.config(rope)
        self._prepare(str(model), config.reaching(positions), options)
        self._host_tier = self._new_host_tier()
        if load:
            self.load()

    @classmethod
    def from_stream(
        cls,
        config: ModelConfig,
        stream: WeightStream,
        *,
        name: str = "random",
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> LLM:
        """An LLM whose weights come from stream(config, dtype, device) -> (target name, tensor).

        For benchmarks, tests and applications that keep weights elsewhere: no folder, and no
        tokenizer unless one is given. It plans, checks and runs as every other LLM.
        """
        self = cls.__new__(cls)
        options = Options.of({"method": Full()} | settings)
        if options.rope is not None:
            raise SettingError("rope: from_stream takes a config; ModelConfig.from_dict(rope=...)")
        self.resolved, self.folder, self._files = None, None, None
        self.tokenizer = tokenizer
        self._prepare(name, config, options)
        self._plan.require_fit()
        self._host_tier = self._new_host_tier()
        with current(self.device), typed_errors():
            self._finish(stream(config, self.dtype, self.device))
        return self

    @classmethod
    def sharing(cls, other: LLM, **settings: Any) -> LLM:
        """Another LLM over the weights and the host memory of `other`, planned anew with
        `settings`.

        For comparisons side by side. Settings that are not given are those of `other`. The plan
        still counts the weights, which are there already, so it is not required to fit.
        """
        other.load()
        self = cls.__new__(cls)
        self.__dict__.update(other.__dict__)
        kept = {name: getattr(other, name) for name in ("method", "max_context", "chunk")}
        options = dataclasses.replace(other.options, **kept | settings)
        self._prepare(other.name, other.config, options)
        self.model, self.halves = other.model, other.halves.asked_for(self.options.step)
        return self

    # ---------------------------------------------------------------- construction

    def _prepare(self, name: str, config: ModelConfig, options: Options) -> None:
        """Plan: everything that is known before weights are read."""
        self.name, self.config, self.options = name, options.holding(config), options
        self.device = options.resolved_device()
        self.dtype = options.resolved_dtype(config.dtype, self.device)
        self.model: Llama | None = None
        self._rounding = rounding(self._files, options, config, self.dtype, self.device)
        self.few_bits = self._rounding.bytes(config, self.dtype, self.device, options.backend)
        self._hint, self._lock = "", RequestLock()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        options.require_positions(config)
        method = options.method if options.method is not None else self._default_method()
        self.method, layers = self.resolve_method(method)
        self._plan = self._make_plan(self.method, layers, options.max_context, options.chunk)
        self.config = self.config.at_context(self._plan.max_context)

    def _make_plan(
        self,
        method: Method,
        layers: LayerPlan,
        max_context: int | None,
        chunk: int | None,
        offload: str | None = None,
    ) -> Plan:
        options, on_gpu = self.options, self.device.type == "cuda"
        return make_plan(
            self.name,
            self.config,
            method,
            layers,
            self.dtype,
            self.device,
            max_context,
            chunk,
            budget=options.vram_budget if on_gpu else options.ram_budget,
            note=self._hint,
            backend=options.backend,
            offload=offload or options.offload,
            slots=options.slots,
            host_budget=options.ram_budget,
            weights=self.few_bits,
            imagined=options.imagined_gpu,
        )

    def _new_host_tier(self) -> HostTier:
        limit = self.options.ram_budget
        if self.device.type == "cuda":
            limit = limit or int(self._plan.host_free * HEADROOM)
        elif limit is not None:
            limit = self.plan(offload="host").left_for_host(limit)
        return HostTier(self.device, limit, self.options.host_pool)

    def _filter_layers(self) -> FilterLayers:
        """The model's filter layers as far as anybody knows them; the plan shows their hint."""
        known = filter_layers.filter_layers(self.folder, self.resolved, self.config)
        self._hint = known.hint
        return known

    def _default_method(self) -> Method:
        if self._filter_layers().source != "spread":
            return OmniKV()
        self._hint = filter_layers.UNCALIBRATED
        return Full()

    def load(self) -> None:
        """Read the weights, once. Raises OutOfMemoryPlan, then what is wrong with the folder."""
        if self.model is not None:
            return
        self.options.require_device()
        self._plan.require_fit()
        # a plan may have fetched config.json only, or nothing
        self.folder = Path(resolve(self.name, progress=self._download_progress).folder)
        assert self._files is not None and self.resolved is not None
        self.resolved.require_fetched()
        checkpoint = self._files.at(self.folder).tensors(self.config)
        self.tokenizer = self._files.tokenizer(self.config)
        stream = checkpoint.stream(
            targets(self.config),
            self.device,
            self.dtype,
            check_finite=self.options.check_finite,
            progress=self._progress,
        )
        with current(self.device), typed_errors():
            self._finish(trimmed(stream))

    def _finish(self, stream: Iterable[tuple[str, Any]]) -> None:
        compiled = self.options.compiles(self.config, self.device)
        # a forced backend compares plain products; otherwise weights take their fastest form
        form = "auto" if self.backend in ("auto", "cpu") else "plain"
        held = form, "words" if self.backend == "triton" else form, self._plan.head_copy > 0
        digest = WeightsDigest()
        stream = self._rounding.stream(digest.watch(stream), self.config.tied_embeddings)
        self.model = assemble(self.config, self.dtype, self.device, stream, *held)
        self.weights_digest = digest.hexdigest  # of saved sessions
        trim_heap()
        self.rotary = Rotary(self.config, self.device)
        self.pieces = compiled_pieces() if compiled else (pre_attention, post_attention)
        self.graphs = compiled and self.device.type == "cuda"
        self.halves = StepForms(self.model, self.rotary, self.pieces, self.options.step)

    # ---------------------------------------------------------------- facts

    def plan(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
    ) -> Plan:
        """Layer plan and memory plan: str() is for people, to_dict() for programs.

        Of this LLM as it is, or of a session with another method, capacity or offload. Allocates
        nothing and requires nothing to fit.
        """
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
        require_windows(method, self.config)
        method = method.completed(self._filter_layers)
        plan = method.plan(self.config)
        method.validate(plan)
        return method, plan

    def placement(
        self, method: Method, layers: LayerPlan, capacity: int, offload: str | None = None
    ) -> Placement | None:
        """Where the bank of a session with this method and capacity lives; None where all of it is
        on the device.

        offload: "host" or "device" for this session; None as the LLM was made.
        """
        planned = None if offload else self._plan.placement
        offload = offload or self.options.offload
        on_gpu = self.device.type == "cuda"
        capacity = reserved_rows(capacity, self.device.type)
        needs = method.needs(layers, self.config, capacity, self.dtype.itemsize)
        staged = needs.staged_layers and offload == "auto" and on_gpu
        if offload == "device" or (planned is None and offload != "host" and not staged):
            return None
        placement = full_placement(
            needs,
            capacity,
            min(self.chunk, capacity),
            self.options.slots,
            by_layer=on_gpu,
        )
        if (
            placement is None
            or planned is None
            or not set(planned.offload_groups) <= set(placement.offload_groups)
        ):
            return placement
        return placement.keeping(planned.offload_groups)

    @property
    def backend(self) -> str:
        """The launchers that sessions begin with."""
        return self.options.backend

    @property
    def host_pool(self) -> HostPool:
        """The pool of host blocks of this LLM's sessions, made when first needed."""
        return self._host_tier.pool

    @property
    def link(self) -> Link:
        """How rows travel between host memory and this device, measured when first needed."""
        return self._host_tier.link

    @property
    def max_context(self) -> int:
        """Tokens that one session can hold."""
        return self._plan.max_context

    @property
    def chunk(self) -> int:
        """Tokens per prefill chunk."""
        return self._plan.chunk

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer (generation_config.json, else config.json)."""
        return self.config.eos_token_ids

    def request(self) -> Request:
        """Hold this LLM for one streamed answer, whose pieces may be taken by several threads."""
        return self._lock.request()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Hold this LLM and its device for one call. The thread may nest, another gets Busy."""
        with self._lock.held(), current(self.device):
            yield

    # ---------------------------------------------------------------- requests

    def session(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
    ) -> Session:
        """A new, empty Session.

        method: default the LLM's own. max_context: tokens that it can hold, default the planned
        ones. offload ("host" | "device"): default as the LLM was made.
        """
        self.load()
        capacity = self.max_context if max_context is None else max_context
        integer("max_context", capacity, 1, self.max_context)
        if offload is not None:
            one_of("offload", offload, OFFLOADS)
        mine = self.method, self._plan.layers
        method, plan = mine if method is None else self.resolve_method(method)
        placement = self.placement(method, plan, capacity, offload)
        try:
            with current(self.device):
                return Session(self, capacity, method, plan, placement, offload)
        # torch's allocators raise RuntimeError, CUDA's a subclass of it
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error).lower():
                raise
            raise OutOfMemoryPlan(
                f"no memory for another session of {capacity} tokens "
                f"({self._plan.bytes_of('context bank')} bytes of bank); close one, or lower "
                f"max_context"
            ) from error

    def batch(self, slots: int = 4, pause: float | None = None) -> Batch:
        """Up to `slots` sessions whose decode steps read the weights once. pause: see Batch."""
        return Batch(self, slots, pause)

    def restore(
        self,
        path: str | Path,
        max_context: int | None = None,
        offload: str | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> tuple[Session, Any]:
        """(session, extra) that Session.save wrote, with its method; nothing is read again.
        Placement (offload) may differ from then.

        tokens: only the first so many. progress(tokens done, in all) follows every piece. Raises
        SavedFileError where the file is damaged or of other weights, rope, dtype or version,
        ContextTooLong where it does not fit; no session is left then.
        """
        return restore_session(self, path, max_context, offload, tokens, progress)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Completion of a text or of token ids; a list of them, in turn, for a list of either."""
        if is_one_prompt(prompts):
            return Completion.join(self.stream(cast(Prompt, prompts), params))
        return [Completion.join(self.stream(cast(Prompt, p), params)) for p in prompts]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[Piece]:
        """Pieces of the answer to a text or ids, from a session that ends with it or is closed."""
        ids = self.encode(prompt)
        filter_layers.hint_at(self._hint, len(ids))
        with self.session() as session:
            yield from generate(session, ids, params, progress=progress, should_stop=should_stop)

    def chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None
    ) -> Completion:
        """Completion of a conversation of {"role", "content"}; control tokens in it are text.
        TemplateError where the model has no chat template.
        """
        tokenizer = self._needed_tokenizer()
        ids, _ = tokenizer.encode_spans(tokenizer.write(messages), special=False)
        return Completion.join(self.stream(ids, params))

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, steps: int = 32
    ) -> Report:
        """Answer a prompt, then compare full and sparse attention along the answer."""
        with self.session() as session:
            for _ in generate(session, self.encode(prompt), params):
                pass
            return session.check(steps)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, start tokens and the control tokens that it spells included, as in
        transformers, or a copy of the ids given.
        """
        if not isinstance(prompt, str):
            return listed_ids(prompt)
        return self._needed_tokenizer().encode(prompt)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            why = f"{self.folder} holds none" if self.folder else "it was made from a stream"
            raise SettingError(f"this LLM has no tokenizer ({why}); pass token ids")
        return self.tokenizer
