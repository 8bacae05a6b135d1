"""The public face: an LLM plans, loads and makes sessions; generate, stream and chat use one of
them each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from engine.base.checks import callables, checked_ids, integer, is_one_prompt, listed_ids
from engine.base.device import current, typed_errors
from engine.base.errors import SettingError
from engine.base.lock import Request, RequestLock
from engine.batch.batch import Batch
from engine.forward.scores import PromptScores
from engine.load.ahead.children import compiled_meanwhile
from engine.load.files import model_files
from engine.load.loaded import Loaded, trim_while_loading
from engine.load.options import LLMSettings, Options, PlanSettings
from engine.load.planner import Planner
from engine.load.report import Plan
from engine.methods.base import Method
from engine.methods.full import Full
from engine.model.config.config import ModelConfig
from engine.model.llama import Llama
from engine.model.rope import Rotary
from engine.model.tensors import targets
from engine.plan import filter_layers
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from engine.plan.prefill_time import PrefillProgress
from engine.sampling.params import SamplingParams
from engine.saved.session_file import Progress, restore_session
from engine.session.check import Report
from engine.session.generate import generate
from engine.session.results import Completion, Piece
from engine.session.session import Session, open_session
from engine.text.tokenizer import Tokenizer
from weights.checkpoint import LoadProgress
from weights.resolve import Resolved, resolve, shipped

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int]
WeightStream = Callable[
    [ModelConfig, torch.dtype, torch.device], Iterable[tuple[str, torch.Tensor]]
]


class LLM:
    """One model on one device.

    model: alias, hub id, folder in Hugging Face layout, or GGUF file; None or "pocket": the shipped
    model. settings: the fields of engine.load.options.Options. load=False plans only; call load()
    later. progress(LoadProgress) and download_progress are called while weights are read and
    fetched. Raises a subclass of engine.EngineError before anything large is allocated.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        load: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
        download_progress: Callable[[str], None] | None = None,
        **settings: Unpack[LLMSettings],
    ):
        callables(progress=progress, download_progress=download_progress)
        options = Options.of(settings)
        name = str(shipped() if model is None else model)
        resolved = resolve(name, progress=download_progress, config_only=not load)
        self._progress, self._download_progress = progress, download_progress
        folder = Path(resolved.folder)
        rope, positions = resolved.rope(options.rope)
        files = model_files(folder, resolved.sizes)
        config = self._own(files.config(rope).reaching(positions))
        self._begin(Planner(name, config, options, folder, resolved, files))
        if load:
            self.load()

    def _own(self, config: ModelConfig) -> ModelConfig:
        """The configuration of what this process holds of a model."""
        return config

    def _begin(self, planner: Planner) -> None:
        """Stand as planned, with nothing loaded."""
        self.planner, self.folder = planner, planner.folder
        self.loaded: Loaded | None = None
        options = planner.options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._lock = RequestLock(options.wait)

    @classmethod
    def from_stream(
        cls,
        config: ModelConfig,
        stream: WeightStream,
        *,
        name: str = "random",
        tokenizer: Tokenizer | None = None,
        **settings: Unpack[LLMSettings],
    ) -> LLM:
        """An LLM whose weights come from stream(config, dtype, device) -> (target name, tensor).

        For benchmarks, tests and applications that keep weights elsewhere: no folder, and no
        tokenizer unless one is given. It plans, checks and runs as every other LLM.
        """
        options = Options.of({"method": Full()} | settings)
        if options.rope is not None:
            raise SettingError("rope: from_stream takes a config; ModelConfig.from_dict(rope=...)")
        planner = Planner(name, config, options)
        planner.plan().require_fit()
        self = cls.__new__(cls)
        self._begin(planner)
        made = stream(planner.config, planner.dtype, planner.device)
        self._load(trim_while_loading(made), tokenizer)
        return self

    @classmethod
    def sharing(cls, other: LLM, **settings: Unpack[LLMSettings]) -> LLM:
        """Another LLM over the weights and the host memory of `other`, planned anew with
        `settings`.

        For comparisons side by side, one request at a time. Settings that are not given are those
        of `other`. The plan counts the weights, which are there, so it is not required to fit.
        """
        kept = {name: getattr(other, name) for name in ("method", "max_context", "chunk")}
        if settings.get("forever") or other.options.forever:
            kept["max_context"] = None  # of a stream it follows from the method
        for name in ("device", "devices", "split", "activations"):
            if name in settings and settings.get(name) != getattr(other.options, name):
                raise SettingError(f"{name}: found in sharing(), whose weights lie where they are")
        theirs = other.planner
        planner = theirs.asked(theirs.host_tier, theirs.cut, **{**kept, **settings})
        self = cls.__new__(cls)
        self._progress, self._download_progress = None, None
        self._begin(planner)
        self._lock = RequestLock(planner.options.wait, other._lock)
        self.loaded = other.load().planned_as(planner, self._lock)
        return self

    # ---------------------------------------------------------------- loading

    def load(self) -> Loaded:
        """Read the weights, once. Raises OutOfMemoryPlan, then what is wrong with the folder."""
        if self.loaded is not None:
            return self.loaded
        planner = self.planner
        planner.options.require_device()
        planner.plan().require_fit()
        # a plan may have fetched config.json only, or nothing
        self.folder = Path(resolve(self.name, progress=self._download_progress).folder)
        assert planner.files is not None and planner.resolved is not None
        planner.resolved.require_fetched()
        files = planner.files.at(self.folder)
        checkpoint, tokenizer = files.tensors(self.config), files.tokenizer(self.config)
        of, finite = (targets(self.config), self.device, self.dtype), self.options.check_finite
        stream = checkpoint.stream(*of, check_finite=finite, progress=self._progress)
        return self._load(trim_while_loading(stream), tokenizer)

    def _load(self, stream: Iterable[tuple[str, Any]], tokenizer: Tokenizer | None) -> Loaded:
        planner = self.planner
        shared = planner.host_tier, self._lock
        with current(self.device), typed_errors(), compiled_meanwhile(planner.first_answer):
            self.loaded = Loaded.of(planner, stream, tokenizer, *shared)
        return self.loaded

    # ---------------------------------------------------------------- facts

    def plan(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
        **settings: Unpack[PlanSettings],
    ) -> Plan:
        """Return the layer plan and the memory plan: str() is for people, to_dict() for programs.

        They are of this LLM, or of a session with another method, capacity or offload. With
        settings they are of an LLM made with these. Nothing is allocated, and nothing has to fit.
        """
        if "rope" in settings:
            raise SettingError("rope: found in plan(), expected in LLM(...), which applies it")
        return self.planner.plan(method, max_context, offload, **settings)

    def resolve_method(self, method: Method) -> tuple[Method, LayerPlan]:
        """As Planner.resolve_method."""
        return self.planner.resolve_method(method)

    def placement(
        self, method: Method, layers: LayerPlan, capacity: int, offload: str | None = None
    ) -> Placement | None:
        """As Planner.placement."""
        return self.planner.placement(method, layers, capacity, offload)

    @property
    def name(self) -> str:
        """The model as it was asked for."""
        return self.planner.name

    @property
    def resolved(self) -> Resolved | None:
        """How its name was resolved; None for a model that came from a stream."""
        return self.planner.resolved

    @property
    def options(self) -> Options:
        """The settings, checked."""
        return self.planner.options

    @property
    def config(self) -> ModelConfig:
        """The model's configuration at the planned context."""
        return self.planner.config

    @property
    def method(self) -> Method:
        """The method that sessions begin with."""
        return self.planner.method

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.planner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of weights that are held as floats."""
        return self.planner.dtype

    @property
    def backend(self) -> str:
        """The launchers that sessions begin with."""
        return self.planner.backend

    @property
    def max_context(self) -> int:
        """Tokens that one session can hold; of a stream without end, 2 ** 31 - 2 ** 16."""
        return self.planner.limit

    @property
    def chunk(self) -> int:
        """Tokens per prefill chunk."""
        return self.planner.chunk

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of a loaded model; None where there is none."""
        return self.loaded.tokenizer if self.loaded else None

    @property
    def model(self) -> Llama | None:
        """The weights; None before they are loaded."""
        return self.loaded.model if self.loaded else None

    @property
    def rotary(self) -> Rotary:
        """Rotations of the model, which is loaded for it."""
        return self.load().rotary

    @property
    def host_pool(self) -> Any:
        """The HostPool of this LLM's sessions, made when first needed."""
        return self.planner.host_tier.pool

    @property
    def link(self) -> Any:
        """The Link: how rows travel between host memory and this device, measured when asked."""
        return self.planner.host_tier.link

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
        return open_session(self.load(), self.planner, method, max_context, offload)

    def batch(self, slots: int = 4, pause: float | None = None) -> Batch:
        """Up to `slots` sessions whose decode steps read the weights once. pause: see Batch."""
        return Batch(self.load(), self.planner, slots, pause)

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
        return restore_session(
            self.load(), self.session, path, max_context, offload, tokens, progress
        )

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
        filter_layers.hint_at(self.planner.hint, len(ids))
        with self.session() as session:
            yield from generate(session, ids, params, progress=progress, should_stop=should_stop)

    def chat(
        self, messages: Sequence[dict[str, str]] | str, params: SamplingParams | None = None
    ) -> Completion:
        """Completion of a conversation of {"role", "content"}, or of a text that a user says;
        control tokens in it are text. TemplateError where the model has no chat template.
        """
        return Completion.join(self.stream(self.chat_ids(messages), params))

    def check(
        self, prompt: Prompt, params: SamplingParams | None = None, steps: int = 32
    ) -> Report:
        """Answer a prompt, then compare full and sparse attention along the answer."""
        with self.session() as session:
            for _ in generate(session, self.encode(prompt), params):
                pass
            return session.check(steps)

    def score(
        self,
        prompt: Prompt,
        top_logprobs: int = 0,
        progress: Callable[[PrefillProgress], None] | None = None,
    ) -> PromptScores:
        """How likely a prompt's own tokens are: log probabilities of a text or ids, the first None.

        top_logprobs: likeliest alternatives to each. The method reads the prompt as it reads every
        prompt: most by full attention, those with a sparse prefill by that. Logits are held for a
        few tokens at a time.
        """
        integer("top_logprobs", top_logprobs, 0, 1000)
        ids = checked_ids(self.encode(prompt), self.config.vocab_size)
        with self.session() as session:
            scores = PromptScores(self.load().model, ids, top_logprobs)
            session.prefill(ids, progress, every=scores.take)
        return scores

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, start tokens and the control tokens that it spells included, as in
        transformers, or a copy of the ids given.
        """
        if not isinstance(prompt, str):
            return listed_ids(prompt)
        return self._needed_tokenizer().encode(prompt)

    def chat_ids(self, messages: Sequence[dict[str, str]] | str) -> list[int]:
        """Token ids of a conversation of {"role", "content"}, or of a text that a user says, up to
        where the answer begins; control tokens in its contents are text. TemplateError where the
        model has no chat template.
        """
        tokenizer = self._needed_tokenizer()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids, _ = tokenizer.encode_spans(tokenizer.write(messages), special=False)
        return ids

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            why = f"{self.folder} holds none" if self.folder else "it was made from a stream"
            raise SettingError(f"this LLM has no tokenizer ({why}); pass token ids")
        return self.tokenizer
