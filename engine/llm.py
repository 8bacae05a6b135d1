"""The public face: LLM(model, ...) plans, loads and makes sessions; generate, stream and chat are
thin over the one decode loop.
"""

import contextlib
import copy
import dataclasses
import threading
from pathlib import Path

import torch

from engine.bank.host_pool import HostPool
from engine.bank.link import measure_link
from engine.errors import BadCheckpoint, Busy, OutOfMemoryPlan, SettingError
from engine.generate import Completion, generate
from engine.graph import compiled_pieces
from engine.methods.base import Method
from engine.methods.full import Full
from engine.methods.omnikv.settings import OmniKV
from engine.model.config import ModelConfig
from engine.model.llama import Llama, assemble, ignored, post_attention, pre_attention, targets
from engine.model.rope import Rotary
from engine.plan import filter_layers as calibration
from engine.plan.memory import HEADROOM, make_plan, trim_heap, trimmed
from engine.plan.placement import SLOTS, full_placement
from engine.session import Session
from engine.text.tokenizer import Tokenizer
from weights.checkpoint import Checkpoint
from weights.resolve import resolve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OFFLOADS = ("auto", "host", "device")
BACKENDS = ("auto", "reference", "cpu", "triton")


class LLM:
    """One model on one device.

    model: alias, hub id or folder in Hugging Face layout, or (config, weights) through
    LLM.from_stream. device: "auto" | "cpu" | "cuda" | "cuda:N". dtype: "auto" (as stored; float16
    becomes bfloat16 on a CPU) or a name. max_context: tokens per session (default: the model's own
    length or what fits). threads: CPU threads. chunk: tokens per prefill chunk. compile: None (on
    for a GPU, off for a CPU). method: Full() | OmniKV(...), default OmniKV where the model is known
    to have filter layers, else Full. offload: "auto" (on a GPU, what does not fit goes to host
    memory) | "host" (all sparse layers) | "device" (nothing). slots: rows that an offloaded group
    keeps on the device per selected token (0: nothing is kept from step to step). host_pool: an
    engine.bank.host_pool.HostPool to share with other LLMs. vram_budget, ram_budget: bytes to stay
    within. load=False plans only; call load() later. progress(LoadProgress). Raises typed errors
    (engine.errors), all before anything large is allocated.
    """

    def __init__(
        self,
        model,
        *,
        device="auto",
        dtype="auto",
        max_context=None,
        threads=None,
        chunk=None,
        compile=None,
        offload="auto",
        vram_budget=None,
        ram_budget=None,
        method=None,
        load=True,
        progress=None,
        check_finite=True,
        backend="auto",
        download_progress=None,
        slots=SLOTS,
        host_pool=None,
    ):
        self._settings(
            threads, max_context, chunk, backend, offload, slots, vram_budget, ram_budget, host_pool
        )
        self.resolved = resolve(str(model), progress=download_progress, config_only=not load)
        self.folder, self.name = Path(self.resolved.folder), str(model)
        config = ModelConfig.from_folder(self.folder)
        self._prepare(config, device, dtype, compile)
        self.method, layers = self.resolve_method(
            method if method is not None else self._default_method()
        )
        self._plan = self._make_plan(self.method, layers, self._context(max_context), chunk)
        self._progress, self._download_progress, self._check_finite = (
            progress,
            download_progress,
            check_finite,
        )
        self.tokenizer = None
        if load:
            self.load()

    @classmethod
    def from_stream(
        cls,
        config,
        stream,
        *,
        name="random",
        device="auto",
        dtype="auto",
        max_context=None,
        threads=None,
        chunk=None,
        compile=None,
        offload="auto",
        vram_budget=None,
        ram_budget=None,
        method=None,
        backend="auto",
        tokenizer=None,
        slots=SLOTS,
        host_pool=None,
    ):
        """An LLM from a ModelConfig and stream(config, dtype, device) -> iterable of (target name,
        tensor), e.g. model.random_stream.

        For benchmarks and tests: no folder, no tokenizer unless one is given. Same plan, same
        checks, same paths.
        """
        self = cls.__new__(cls)
        self._settings(
            threads, max_context, chunk, backend, offload, slots, vram_budget, ram_budget, host_pool
        )
        self.resolved, self.folder, self.name, self.tokenizer = None, None, name, tokenizer
        self._prepare(config, device, dtype, compile)
        self.method, layers = self.resolve_method(method if method is not None else Full())
        self._plan = self._make_plan(self.method, layers, self._context(max_context), chunk)
        self._plan.check()
        self._finish(
            assemble(
                config,
                self.dtype,
                self.device,
                stream(config, self.dtype, self.device),
                _form(backend),
            )
        )
        return self

    # ---------------------------------------------------------------- construction

    def _settings(
        self,
        threads,
        max_context,
        chunk,
        backend,
        offload,
        slots,
        vram_budget,
        ram_budget,
        host_pool,
    ):
        for name, value in (("threads", threads), ("max_context", max_context), ("chunk", chunk)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise SettingError(f"{name}: found {value!r}, expected an int of at least 1")
        if backend not in BACKENDS:
            raise SettingError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")
        if offload not in OFFLOADS:
            raise SettingError(f"offload: found {offload!r}, expected 'auto', 'host' or 'device'")
        if (
            isinstance(slots, bool)
            or not isinstance(slots, (int, float))
            or not (slots == 0 or slots >= 1)
        ):
            raise SettingError(
                f"slots: found {slots!r}, expected a number of at least 1 (rows per selected token), or 0 for no reuse"
            )
        self._offload, self._slots, self._vram_budget, self._ram_budget = (
            offload,
            slots,
            vram_budget,
            ram_budget,
        )
        # one for all twins, made when first needed
        self._host = {"pool": host_pool, "link": None}
        if threads is not None:
            torch.set_num_threads(threads)
        self.backend, self.model, self._hint = backend, None, ""
        self._owner, self._depth, self._guard = None, 0, threading.Lock()

    def _prepare(self, config, device, dtype, compile):
        self.config = config
        self.device = _device(device)
        self.dtype = _dtype(dtype, config.dtype, self.device)
        self._compile = self.device.type == "cuda" if compile is None else compile

    def _make_plan(self, method, layers, max_context, chunk, offload=None):
        on_gpu = self.device.type == "cuda"
        return make_plan(
            self.name,
            self.config,
            method,
            layers,
            self.dtype,
            self.device,
            max_context,
            chunk,
            budget=self._vram_budget if on_gpu else self._ram_budget,
            note=self._hint,
            backend=self.backend,
            offload=offload or self._offload,
            slots=self._slots,
            host_budget=self._ram_budget,
        )

    def placement(self, method, layers, capacity, offload=None):
        """engine.plan.placement.Placement of a session with this method and capacity, or None where
        nothing is offloaded.

        offload: "host" or "device" for this session; None as the LLM was made.
        """
        offload, planned = offload or self._offload, None if offload else self._plan.placement
        brutal = method.stages and offload == "auto" and self.device.type == "cuda"
        if offload == "device" or (planned is None and offload != "host" and not brutal):
            return None
        placement = full_placement(
            self.config,
            method,
            layers,
            self.dtype.itemsize,
            capacity,
            min(self.chunk, capacity),
            self._slots,
            by_layer=self.device.type == "cuda",
        )
        same = (
            placement is not None
            and planned is not None
            and set(planned.packs) <= set(placement.packs)
        )
        return placement.keeping(planned.packs) if same else placement

    def _host_tier(self):
        host, on_gpu = self._host, self.device.type == "cuda"
        if host["pool"] is None:
            host["pool"] = HostPool(
                (self._ram_budget or int(self._plan.host_free * HEADROOM)) if on_gpu else None
            )
        if host["link"] is None:
            host["link"] = measure_link(host["pool"], self.device)
            host["pool"].programs = host["link"].programs
        return host

    @property
    def host_pool(self):
        """The engine.bank.host_pool.HostPool of this LLM's sessions, made when first needed."""
        return self._host_tier()["pool"]

    @property
    def link(self):
        """engine.bank.link.Link: how rows travel between host memory and this device, measured when
        the host tier is first needed.
        """
        return self._host_tier()["link"]

    def _context(self, max_context):
        if max_context is not None and max_context > self.config.context_limit:
            raise SettingError(
                f"max_context: found {max_context}, expected at most {self.config.context_limit} "
                f"(the model's own positions, max_position_embeddings in config.json)"
            )
        return max_context

    def _default_method(self):
        known = calibration.filter_layers(self.folder, self.resolved, self.config)
        return OmniKV() if known.source != "spread" else Full()

    def resolve_method(self, method):
        """(method with its filter layers filled in, layer plan) for this model; SettingError where
        they do not fit together.
        """
        if not isinstance(method, Method):
            raise SettingError(
                f"method: found {method!r}, expected Full(), OmniKV(...) or another engine method"
            )
        if getattr(method, "filter_layers", ()) is None:
            known = calibration.filter_layers(self.folder, self.resolved, self.config)
            self._hint = known.hint
            wait = {"wait_layers": known.wait} if getattr(method, "wait_layers", 0) is None else {}
            method = (
                dataclasses.replace(method, filter_layers=known.layers, **wait)
                if known.layers
                else Full()
            )
        plan = method.plan(self.config)
        method.check(plan)
        return method, plan

    def load(self):
        """Read the weights (once). Raises OutOfMemoryPlan first where the plan does not fit, then
        what is wrong with the folder.
        """
        if self.model is not None:
            return
        self._plan.check()
        # a plan may have fetched config.json only
        self.folder = resolve(self.name, progress=self._download_progress).folder
        config = self.config
        checkpoint = Checkpoint.open(self.folder)
        checkpoint.check(targets(config), ignored(config))
        self.tokenizer = Tokenizer(self.folder)
        if self.tokenizer.vocab_max_id >= config.vocab_size:
            raise BadCheckpoint(
                f"{self.folder / 'tokenizer.json'}: found token id {self.tokenizer.vocab_max_id}, expected ids below "
                f"{config.vocab_size} (the embedding's rows)"
            )
        stream = checkpoint.stream(
            targets(config),
            self.device,
            self.dtype,
            check_finite=self._check_finite,
            progress=self._progress,
        )
        self._finish(
            assemble(config, self.dtype, self.device, trimmed(stream), _form(self.backend))
        )

    def _finish(self, model: Llama):
        self.model = model
        trim_heap()
        self.rotary = Rotary(self.config, self.device)
        self.pieces = compiled_pieces() if self._compile else (pre_attention, post_attention)
        self.graphs = self._compile and self.device.type == "cuda"

    # ---------------------------------------------------------------- facts

    def plan(self, method=None, max_context=None, offload=None):
        """Layer plan and memory plan (engine.plan.memory.Plan): str() is for people, to_dict() for
        programs.

        Of this LLM as it is, or of a session with another method, capacity or offload (nothing is
        allocated, nothing checked).
        """
        if method is None and max_context is None and offload is None:
            return self._plan
        method, layers = self.resolve_method(method if method is not None else self.method)
        return self._make_plan(method, layers, max_context or self.max_context, self.chunk, offload)

    @property
    def max_context(self):
        """Tokens that one session can hold."""
        return self._plan.max_context

    @property
    def chunk(self):
        """Tokens per prefill chunk."""
        return self._plan.chunk

    @property
    def end_token_ids(self):
        """Token ids that end an answer (generation_config.json, else config.json)."""
        return self.config.eos_token_ids

    @contextlib.contextmanager
    def busy(self):
        """Hold this LLM for one request; the same thread may nest, a second one gets Busy."""
        me = threading.get_ident()
        with self._guard:
            if self._owner not in (None, me):
                raise Busy("this LLM is running another request; wait for it, or load a second LLM")
            self._owner, self._depth = me, self._depth + 1
        try:
            yield
        finally:
            with self._guard:
                self._depth -= 1
                if self._depth == 0:
                    self._owner = None

    def twin(self, *, method=None, max_context=None, offload="auto", slots=SLOTS):
        """Another LLM over the same weights, planned anew for a method, a capacity and a place for
        the bank; nothing is loaded.

        For comparisons side by side. Its plan still counts the weights, which are there already, so
        it is not checked to fit.
        """
        self.load()
        other = copy.copy(self)
        other._settings(
            None,
            max_context,
            None,
            self.backend,
            offload,
            slots,
            self._vram_budget,
            self._ram_budget,
            None,
        )
        other.model, other._host = self.model, self._host
        other.method, layers = other.resolve_method(method if method is not None else self.method)
        other._plan = other._make_plan(
            other.method, layers, other._context(max_context or self.max_context), self.chunk
        )
        return other

    # ---------------------------------------------------------------- requests

    def session(self, method=None, max_context=None, offload=None):
        """A new, empty Session; `method` defaults to the LLM's own, `max_context` (tokens it can
        hold) to the planned one, offload ("host" | "device") to what the LLM was made with.
        """
        self.load()
        capacity = self.max_context if max_context is None else max_context
        if (
            isinstance(capacity, bool)
            or not isinstance(capacity, int)
            or not 1 <= capacity <= self.max_context
        ):
            raise SettingError(
                f"max_context: found {capacity!r}, expected an int from 1 to {self.max_context} (this LLM's plan)"
            )
        if offload not in (None, *OFFLOADS):
            raise SettingError(f"offload: found {offload!r}, expected 'auto', 'host' or 'device'")
        method, plan = (
            self.resolve_method(method) if method is not None else (self.method, self._plan.layers)
        )
        try:
            return Session(
                self,
                capacity,
                method,
                plan,
                self.placement(method, plan, capacity, offload),
                offload,
            )
        # torch's allocators raise RuntimeError, CUDA's a subclass of it
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error).lower():
                raise
            raise OutOfMemoryPlan(
                f"no memory for another session of {capacity} tokens ({self._plan.bytes_of('context bank')} "
                f"bytes of bank); close one, or lower max_context"
            ) from error

    def generate(self, prompts, params=None):
        """Completion of a text or a list of token ids, or a list of Completions for a list of
        either. One after the other.
        """
        if isinstance(prompts, str) or (
            len(prompts) > 0 and all(isinstance(t, int) for t in prompts)
        ):
            return Completion.join(self.stream(prompts, params))
        return [self.generate(prompt, params) for prompt in prompts]

    def stream(self, prompt, params=None, progress=None, should_stop=None):
        """Iterator of Piece for a text or token ids, on a session of its own that ends with it.
        Closable early.
        """
        ids = self.encode(prompt)
        with self.session() as session:
            yield from generate(session, ids, params, progress=progress, should_stop=should_stop)

    def chat(self, messages, params=None):
        """Completion of a conversation: messages are {"role", "content"}; needs a model with a chat
        template (TemplateError).
        """
        text = self._words().render(messages, add_generation_prompt=True)
        return Completion.join(self.stream(self._words().encode(text, special=False), params))

    def check(self, prompt, params=None, steps=32):
        """Answer a prompt, then compare full and sparse attention along the answer: an
        engine.check.Report.
        """
        with self.session() as session:
            for _ in generate(session, self.encode(prompt), params):
                pass
            return session.check(steps)

    def encode(self, prompt):
        """Token ids of a text (with the model's own start tokens), or a copy of the ids given."""
        return self._words().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _words(self):
        if self.tokenizer is None:
            raise SettingError(
                "this LLM has no tokenizer (it was made from a stream of weights); pass token ids"
            )
        return self.tokenizer


def _form(backend):
    """Weights are held in the fastest form unless a kernel path was forced, which then compares
    plain products.
    """
    return "auto" if backend in ("auto", "cpu") else "plain"


def _device(name):
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingError(f"device: found {name!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            f"device: found {name!r}, but this torch ({torch.__version__}) sees no CUDA device; use device='cpu'"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(
            f"device: found {name!r}, expected an index below {torch.cuda.device_count()}"
        )
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device


def _dtype(name, stored, device):
    if name == "auto":
        name = "bfloat16" if stored == "float16" and device.type == "cpu" else stored
    if name not in DTYPES:
        raise SettingError(
            f"dtype: found {name!r}, expected 'auto', {', '.join(map(repr, DTYPES))}"
        )
    return DTYPES[name]
