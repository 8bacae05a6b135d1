"""A model in memory: what is made once, when it is loaded, and shared by everything that runs
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.host_tier import HostTier
from engine.bank.pool.link import Link
from engine.base.device import current, raw
from engine.base.errors import SettingError
from engine.base.lock import Request, RequestLock
from engine.forward.graphs import compiled_pieces
from engine.forward.self_test import StepForms, matrices
from engine.forward.staged.ring import left_on_host, staged, staged_parts
from engine.load.options import Options
from engine.load.planner import Planner
from engine.model.config.config import ModelConfig
from engine.model.llama import Llama, assemble, post_attention, pre_attention
from engine.model.parts.parted import parted, parted_rotary, to_parts
from engine.model.rope import Rotary
from engine.plan.split.cut import Cut
from engine.text.tokenizer import Tokenizer
from kernels.launch.dispatch import ON_CPU, choose_for
from kernels.native.amx import in_use

SAMPLES = 4096  # elements of a weight that are hashed, evenly spread


@dataclass(frozen=True)
class Loaded:
    """A model on its device, never half-way there.

    name: as it was asked for. config: at the planned context. rotary: its rotation. pieces: the two
    halves of a layer, plain or compiled. halves: the forms of its decode steps, by backend. graphs:
    whether steps are captured as CUDA graphs. tokenizer: None for a model from a stream without
    one. held: the word of its weights' form, and which products multiply those of few bits;
    few_bits: their bytes where that is of few bits; weights_digest: of the weights as they were
    read. host_tier: the host memory of its sessions. lock: one request at a time. learnt: what
    methods have found in a sample that the model read, by name (engine/runner/sample/text.py).
    copies: layers of the same weights in few bits, by what makes them (engine/exact/).
    cut: where its layers lie, if on several devices. activations: as of Options.
    across, over_heads, peers, lead: of a model that several processes hold (engine/ranks/): what
    chooses by the heads of all, what gives a number [H] of every query head for those of own heads,
    the group of all ranks, and on rank 0 what has the others make each call; None: of one process.
    """

    name: str
    config: ModelConfig
    model: Llama
    rotary: Rotary
    pieces: tuple[Callable, Callable]
    halves: StepForms
    graphs: bool
    tokenizer: Tokenizer | None
    held: str
    few_bits: Any
    weights_digest: str
    weights_forms: str
    host_tier: HostTier
    lock: RequestLock
    learnt: dict[str, dict[int, Any]] = field(default_factory=dict)
    copies: dict[str, StepForms] = field(default_factory=dict)
    across: Callable[..., None] | None = None
    over_heads: Callable[[torch.Tensor], torch.Tensor] | None = None
    peers: Any = None
    lead: Any = None
    cut: Cut | None = None
    activations: str = "auto"

    @classmethod
    def of(
        cls,
        planner: Planner,
        stream: Iterable[tuple[str, Any]],
        tokenizer: Tokenizer | None,
        host_tier: HostTier,
        lock: RequestLock,
    ) -> Loaded:
        """Assemble the weights of a stream of (target name, tensor) as `planner` has planned."""
        config, options = planner.config, planner.options
        compiled = options.compiles(config, planner.device)
        # a forced backend compares plain products; otherwise weights take their fastest form
        form = "auto" if planner.backend in ON_CPU else "plain"
        words = "words" if planner.backend == "triton" else form
        stacked = choose_for(planner.backend, planner.device) == "triton"
        twice = planner.plan().head_copy > 0 if planner.cut is None else planner.packs_head
        digest = WeightsDigest()
        tied, stream = config.tied_embeddings, digest.watch(stream)
        stream = digest.made(planner.rounding.stream(stream, tied))
        streaming = planner.staging.layers if planner.staging else ()
        keep = partial(left_on_host, layers=streaming) if streaming else None
        cut = planner.cut
        if cut is not None:
            stream = to_parts(stream, cut.starts, cut.devices, tied)
        model = assemble(
            config,
            planner.dtype,
            planner.device,
            stream,
            form,
            words,
            rounds=options.activations == "int8",
            head_twice=twice,
            stacked=stacked,
            keep=keep,
            head_on=None if cut is None else cut.devices[-1],
        )
        if cut is not None:
            model = parted(model, config, cut.starts, cut.devices)
        if streaming:
            model = staged(model, streaming) if cut is None else staged_parts(model, streaming)
        trim_heap()
        compiled = compiled and model.capturable
        captured = options.captures(config, planner.device) and model.capturable
        pinned = all(ring.pinned for ring in model.rings)
        rotary = parted_rotary(model, far=options.forever)
        pieces = compiled_pieces() if compiled else (pre_attention, post_attention)
        return cls(
            name=planner.name,
            config=config,
            model=model,
            rotary=rotary,
            pieces=pieces,
            halves=StepForms(model, rotary, pieces, options.step),
            graphs=captured and pinned and all(one.type == "cuda" for one in planner.places),
            tokenizer=tokenizer,
            held=_held(options, model),
            few_bits=planner.few_bits,
            weights_digest=digest.hexdigest,
            weights_forms=digest.forms,
            host_tier=host_tier,
            lock=lock,
            cut=cut,
            activations=options.activations,
        )

    def planned_as(self, planner: Planner, lock: RequestLock) -> Loaded:
        """The same model and host memory under another plan. Raises SettingError where that has
        other weights in host memory.
        """
        if self.model.streaming != (planner.staging.layers if planner.staging else ()):
            raise SettingError(
                "weights_offload: found another division of the weights than the shared model's, "
                "which is loaded; leave it out"
            )
        step, far = planner.options.step, planner.options.forever
        if planner.cut is None:
            halves = self.halves.asked_for(step)
            rotary = Rotary(planner.config, self.device, far=far)
            return replace(self, config=planner.config, rotary=rotary, halves=halves, lock=lock)
        where = planner.cut.starts, planner.cut.devices
        model = parted(self.model, planner.config, *where)
        rotary = parted_rotary(model, far=far)
        forms = StepForms(model, rotary, self.pieces, step)
        now = replace(self, config=planner.config, lock=lock)
        return replace(now, model=model, rotary=rotary, halves=forms)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        return self.model.dtype

    @property
    def weight_bytes_streamed(self) -> int:
        """Bytes of weights that have come from host memory since the model was loaded."""
        return sum(ring.streamed for ring in self.model.rings)

    @property
    def host_pool(self) -> HostPool:
        """The pool of host blocks of this model's sessions, made when first needed."""
        return self.host_tier.pool

    @property
    def link(self) -> Link:
        """How rows travel between host memory and this device, measured when first needed."""
        return self.host_tier.link

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer (generation_config.json, else config.json)."""
        return self.config.eos_token_ids

    def agreed(self, yes: bool) -> bool:
        """Whether all ranks of the model say yes; of one process, its own word."""
        return yes if self.peers is None else self.peers.agree(yes)

    def request(self) -> Request:
        """Hold the model for one streamed answer, whose pieces may be taken by several threads."""
        return self.lock.request()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Hold the model and its device for one call. The thread may nest, another gets Busy."""
        with self.lock.held(), current(self.device):
            yield


class WeightsDigest:
    """The sha256 of a stream of weights, as they are loaded: names, shapes, and SAMPLES elements of
    each, so that it costs no second reading.
    """

    def __init__(self) -> None:
        self._sha, self._forms = hashlib.sha256(), hashlib.sha256()

    def watch(self, stream: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass a stream of (name, weight) through."""
        for name, weight in stream:
            for label, tensor in _tensors(weight):
                self._sha.update(f"\n{name}{label} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                self._sha.update(_sample(tensor))
            yield name, weight

    def made(self, stream: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass a stream of (name, weight as it is held) through: of those only the forms count."""
        for name, weight in stream:
            for label, tensor in _tensors(weight):
                self._forms.update(f"\n{name}{label} {tuple(tensor.shape)} {tensor.dtype}".encode())
            yield name, weight

    @property
    def hexdigest(self) -> str:
        """Of what has passed `watch`."""
        return self._sha.hexdigest()

    @property
    def forms(self) -> str:
        """Of the forms that have passed `made`: "int8" is another one with a compiler, or on a
        GPU.
        """
        return self._forms.hexdigest()


def _tensors(weight: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight: itself, those of its fields (a quantised one), of its parts."""
    if isinstance(weight, torch.Tensor):
        yield "", weight
        return
    parts = vars(weight) if hasattr(weight, "__dict__") else dict(enumerate(weight))
    for name, value in sorted(parts.items(), key=lambda item: str(item[0])):
        if isinstance(value, (torch.Tensor, tuple)):
            for label, tensor in _tensors(value):
                yield f".{name}{label}", tensor


def _sample(tensor: torch.Tensor) -> bytes:
    step = max(1, tensor.numel() // SAMPLES)
    # an odd step walks over all columns of a matrix whose width is a power of two
    some = tensor.detach().reshape(-1)[:: step | 1].cpu().contiguous()
    return raw(some).tobytes()


def trim_heap() -> None:
    """Return the allocator's unused pages to the system (glibc; elsewhere nothing happens).

    Weights that are re-laid while loading leave holes of their size: 8% of a float32 160M model,
    measured.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def trim_while_loading(
    stream: Iterable[tuple[str, Any]], every: int = 32 * 2**20
) -> Iterator[tuple[str, Any]]:
    """Pass (name, tensor) pairs on and trim the heap after each `every` bytes.

    So the memory in use during a load stays near the bytes loaded.
    """
    since = 0
    for name, tensor in stream:
        since += _bytes(tensor)
        yield name, tensor
        del tensor
        if since >= every:
            trim_heap()
            since = 0


def _bytes(weight: Any) -> int:
    """Bytes of a weight: a tensor, or what holds several (a quantised one, the parts of one)."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    return sum(map(_bytes, weight)) if isinstance(weight, (list, tuple)) else 0


def _held(options: Options, model: Llama) -> str:
    """The word for the weights with the forms of products that multiply few bits here, whether a
    prompt's rows are rounded, and what runs in tiles of AMX: they round differently, so rows of one
    mean nothing to another.
    """
    forms = sorted({matrix.form for matrix in matrices(model)})
    word = options.weights
    if options.activations != "auto":
        word = f"{word}, activations {options.activations}"
    word = f"{word}, {' and '.join(forms)}" if forms else word
    return ", ".join((word, *in_use()))
