"""What a caller may choose about an LLM, checked once and frozen."""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from engine.bank.pool.host_pool import HostPool
from engine.base.checks import MOST, boolean, found, integer, is_number, one_of
from engine.base.errors import SettingError
from engine.base.figures import first_line
from engine.methods.base import Method
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.placement import SLOTS
from kernels.launch.dispatch import BACKENDS, choose_for
from kernels.rows.forms import DTYPES as PACKED
from kernels.rows.forms import FORMS

MOST_DEVICES = 16
MOST_SHARE = 4096  # of a split, as many as a model has layers at most
IMAGINED = ("imagined_gpu", "imagined_host")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_THREADS = 64  # or four for each core: with 10,000 a token takes 20 s
OFFLOADS = ("auto", "host", "device")
SAVEPOINTS = 12  # of a session's recurrent state
MOST_SAVEPOINTS = 1024
STREAMED = ("auto", "off", "all")  # or how many layers
STEPS = ("auto", "fused", "plain")
WEIGHTS = ("auto", "int8", "int4", "int4:64", "int4:128", "float")
FP8_SINCE = 8, 9  # the compute capability of the first GPUs that convert 8-bit floats
ACTIVATIONS = ("auto", "int8")
BANKS = ("auto", "model", "int8", "int4", "fp8")


OLDEST = (8, 0)  # compute capability: bfloat16 products and 16-byte asynchronous copies


def unfit(card: int) -> str:
    """Say why a card cannot run the engine; empty where it can."""
    try:
        found = torch.cuda.get_device_capability(card)
        name = torch.cuda.get_device_name(card)
    except RuntimeError as error:
        return f"the driver refuses: {first_line(error)}"
    if found < OLDEST:
        return (
            f"{name} of compute capability {found[0]}.{found[1]}, expected {OLDEST[0]}.{OLDEST[1]} "
            f"(Ampere) or later"
        )
    return ""


class PlanSettings(TypedDict, total=False):
    """The keyword arguments of LLM.plan beside its own: settings of another LLM."""

    device: str
    devices: Sequence[str | int] | None
    split: Sequence[int] | None
    dtype: str
    threads: int | None
    chunk: int | None
    compile: bool | None
    slots: float
    host_pool: HostPool | None
    vram_budget: int | None
    ram_budget: int | None
    beyond: bool
    forever: bool
    backend: str
    step: str
    weights: str
    activations: str
    weights_offload: int | str
    bank: str
    savepoints: int
    check_finite: bool
    imagined_gpu: int | None
    imagined_host: int | None
    wait: bool


class LLMSettings(PlanSettings, total=False):
    """The fields of Options as keyword arguments, for type checkers."""

    max_context: int | None
    method: Method | None
    offload: str
    rope: str | None


@dataclass(frozen=True)
class Options:
    """The keyword arguments of LLM. Raises SettingError, naming the argument and what it takes.

    device: "auto" | "cpu" | "cuda" | "cuda:N". devices: several, over which the layers are divided
    (docs/PARALLEL.md): names as of `device`, or numbers of GPUs; a device may be named more than
    once, and "cpu:N" is the CPU. split: layers of each, or what they are in proportion to (None: by
    bytes and free memory). dtype: "auto" (as stored; float16 becomes bfloat16
    on a CPU) or a name. max_context: tokens per session (None: the model's own length, or what
    fits). threads: CPU threads. chunk: tokens per prefill chunk. compile: None (on for a GPU, off
    for a CPU). method: Full(), OmniKV(...) or another method; None: OmniKV where the model's filter
    layers are known, else Full. offload: "auto" (on a GPU, what does not fit goes to host memory),
    "host" (all that the method can spare) or "device" (nothing). slots: rows that an offloaded
    group keeps on the device per selected token; 0 keeps nothing from step to step. host_pool: a
    HostPool to share with other LLMs. vram_budget, ram_budget: bytes for the weights, one session
    and the host tier of all sessions. rope: another rope than config.json's, such as "yarn:4"
    (engine/model/config/rope_override.py). beyond: allow a max_context beyond the model's own
    positions, with a warning. forever: sessions are streams without end in constant memory, under a
    method that keeps sinks and a window by position (docs/EVICTION.md); it forgets, whatever it is
    told, and None is StreamingLLM. backend: "auto" ("triton" on a GPU, "native" on a CPU), or the
    launchers to force: "reference" (the oracle), "cpu" (torch's operators; weights in few bits are
    dequantised for every product), "native" (C++), "triton". step: how a decode step multiplies and
    normalizes: "fused" (our own kernels), "plain" (torch's operators), or "auto": on a GPU fused,
    if a self-test on the device agrees with plain. weights: "auto" (as stored), "int8" or "int4" to
    round float weights as they are read (int4 has a scale for every 32 columns, "int4:64" and
    "int4:128" for as many as they say), "float" to dequantise what is stored in few bits.
    activations: "int8" rounds what a prompt multiplies by weights of few bits, on a CPU, to 8 bits
    for every 32 columns, and the queries that meet an int8 bank, under one scale each: faster, and
    coarser than such weights alone (docs/QUANTISATION.md); "auto" never does.
    weights_offload: layers whose matrices lie in host memory and stream to the device in every
    pass: "auto" (on a GPU as many as a model needs that would not fit otherwise), "off", "all" or a
    number (docs/OFFLOAD.md). bank:
    "model" (K and V in the model's dtype; "auto" is that), "int8", "int4" (values in 4 bits, keys
    in 6) or "fp8" (docs/QUANTISATION.md). savepoints: earlier states that a session of a model with
    recurrent layers keeps in host memory, so that going back reads few tokens again (0: none); of a
    method that forgets, stores, 2 at most.
    check_finite: refuse weights with NaN or infinity. imagined_gpu: with load=False, plan for a GPU
    with so many free bytes, whether there is one or not; imagined_host: and for so many of host
    memory beside it (None: ram_budget, or this machine's). wait: a call while another thread's
    request runs waits for its turn, in order, instead of raising Busy.
    """

    device: str = "auto"
    devices: tuple[str, ...] | None = None
    split: tuple[int, ...] | None = None
    dtype: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    chunk: int | None = None
    compile: bool | None = None
    method: Method | None = None
    offload: str = "auto"
    slots: float = SLOTS
    host_pool: HostPool | None = None
    vram_budget: int | None = None
    ram_budget: int | None = None
    rope: str | None = None
    beyond: bool = False
    forever: bool = False
    backend: str = "auto"
    step: str = "auto"
    weights: str = "auto"
    activations: str = "auto"
    weights_offload: int | str = "auto"
    bank: str = "auto"
    savepoints: int = SAVEPOINTS
    check_finite: bool = True
    imagined_gpu: int | None = None
    imagined_host: int | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        for name in ("max_context", "chunk", "vram_budget", "ram_budget", *IMAGINED):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1, MOST)
        if self.threads is not None:
            integer("threads", self.threads, 1, max(MOST_THREADS, 4 * (os.cpu_count() or 1)))
        one_of("compile", self.compile, (None, False, True))
        integer("savepoints", self.savepoints, 0, MOST_SAVEPOINTS)
        if self.host_pool is not None and not hasattr(self.host_pool, "take"):
            raise SettingError(f"host_pool: found {found(self.host_pool)}, expected a HostPool")
        one_of("backend", self.backend, BACKENDS)
        one_of("offload", self.offload, OFFLOADS)
        one_of("step", self.step, STEPS)
        one_of("weights", self.weights, WEIGHTS)
        one_of("activations", self.activations, ACTIVATIONS)
        if isinstance(self.weights_offload, str):
            one_of("weights_offload", self.weights_offload, STREAMED)
        else:
            integer("weights_offload", self.weights_offload, 0, MOST)
        one_of("bank", self.bank, BANKS)
        if self.rope is not None and not isinstance(self.rope, str):
            raise SettingError(f"rope: found {found(self.rope)}, expected a text such as 'yarn:4'")
        if self.devices is not None or self.split is not None:
            self._require_devices()
        one_of("beyond", self.beyond, (False, True))
        boolean("forever", self.forever)
        if self.forever and self.max_context is not None:
            raise SettingError(
                f"max_context: found {self.max_context} beside forever, which has no end; leave "
                "one of them out"
            )
        boolean("wait", self.wait)
        if not is_number(self.slots) or not (self.slots == 0 or 1 <= self.slots <= MOST):
            raise SettingError(
                f"slots: found {found(self.slots)}, expected a number of at least 1 (rows per "
                f"selected token), or 0 for no reuse"
            )

    def _require_devices(self) -> None:
        """Check `devices` and `split`, and hold them as tuples."""
        if self.devices is None:
            raise SettingError("split: found without devices, which it divides layers over")
        given = [self.devices] if isinstance(self.devices, str) else list(self.devices)
        names = tuple(f"cuda:{one}" if str(one).isdecimal() else str(one) for one in given)
        if not 2 <= len(names) <= MOST_DEVICES:
            raise SettingError(
                f"devices: found {len(names)}, expected 2 to {MOST_DEVICES} names such as cuda:0 "
                "and cuda:1; for one use device"
            )
        object.__setattr__(self, "devices", names)
        for name, value, usual in (
            ("device", self.device, "auto"),
            ("imagined_gpu", self.imagined_gpu, None),
        ):
            if value != usual:
                raise SettingError(
                    f"{name}: found {value!r} beside devices {', '.join(names)}; leave one out"
                )
        if self.split is None:
            return
        shares = tuple(self.split)
        for share in shares:
            integer("split", share, 1, MOST_SHARE)
        if len(shares) != len(names):
            raise SettingError(
                f"split: found {len(shares)} numbers ({':'.join(map(str, shares))}), expected "
                f"{len(names)}, one for each of the devices {', '.join(names)}"
            )
        object.__setattr__(self, "split", shares)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Options:
        """Make Options of keyword arguments; SettingError names the nearest to an unknown one."""
        settings: dict[str, Any] = dict(given)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise SettingError(f"LLM: found an unknown argument {name!r}{hint}")
        return cls(**settings)

    def require_positions(self, config: ModelConfig, method: Method, plan: LayerPlan) -> None:
        """Refuse a context beyond a model's positions, or warn where that was asked for and the
        method sees distances that the rope does not know. Dynamic rope goes on stretching by
        itself, so it only warns.
        """
        asked, limit = self.max_context, config.context_limit
        if self.forever:
            if not method.bounds_distances(plan, limit, limit):
                warnings.warn(
                    f"forever: {method.name} sees tokens further away than the {limit} positions "
                    f"that this model's rope was made for; answers get worse there: use fewer "
                    f"tokens",
                    stacklevel=4,
                )
            return
        if asked is None or asked <= limit:
            return
        if not self.beyond and config.rope.kind != "dynamic":
            factor = -(-asked // config.max_positions)
            raise SettingError(
                f"max_context: found {asked}, expected at most {limit} "
                f"(the model's own positions, max_position_embeddings in config.json); "
                f"rope yarn:{factor} stretches them (--rope), beyond allows it as it is (--beyond)"
            )
        if method.bounds_distances(plan, limit, asked):
            return
        warnings.warn(
            f"max_context: {asked} is beyond the {limit} positions that this model's rope was made "
            f"for; answers get worse there",
            stacklevel=4,
        )

    def compiles(self, config: ModelConfig, device: torch.device) -> bool:
        """Whether the step is compiled: on a GPU unless told otherwise, and of mixtures those whose
        experts the device chooses. Not on ranks: a compiler would look into their sums.
        """
        possible = self._left_alone(config, device)
        if self.compile and not possible:
            raise SettingError(
                "compile: found True, but here the host chooses the experts of a mixture; leave it "
                "out"
            )
        alone = config.share is None and config.context is None
        return self.captures(config, device) and alone if self.compile is None else self.compile

    def captures(self, config: ModelConfig, device: torch.device) -> bool:
        """Whether steps are captured as CUDA graphs, where the model lets them."""
        on_gpu = device.type == "cuda"
        return on_gpu and self.compile is not False and self._left_alone(config, device)

    def _left_alone(self, config: ModelConfig, device: torch.device) -> bool:
        """Whether a step asks nothing of the host."""
        return config.experts is None or choose_for(self.backend, device) == "triton"

    def resolved_device(self) -> torch.device:
        """The torch.device that `device` names here; SettingError where there is none, or where it
        cannot read the bank.
        """
        device = self._named_device("device", self.device)
        self.require_bank(device)
        return device

    def resolved_devices(self) -> tuple[torch.device, ...]:
        """The torch.devices that `devices` names here, as `resolved_device`; (): one, `device`."""
        found = []
        for name in self.devices or ():
            device = self._named_device("devices", name)
            self.require_bank(device)
            found.append(device)
        return tuple(found)

    def _named_device(self, setting: str, name: str) -> torch.device:
        if self.imagined_gpu is not None:
            return torch.device("cuda", 0)
        several = setting == "devices"
        cpu = "cpu in its place" if several else "device='cpu'"
        if name == "auto" and not several:
            why = unfit(0) if torch.cuda.is_available() else "no GPU"
            if why and why != "no GPU":
                warnings.warn(f"device 'auto' takes the CPU: {why}", stacklevel=2)
            return torch.device("cpu") if why else torch.device("cuda", 0)
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            known = "'cpu' or 'cuda:N'" if several else "'auto', 'cpu', 'cuda' or 'cuda:N'"
            raise SettingError(f"{setting}: found {name!r}, expected {known}")
        if device.type == "cpu":
            return torch.device("cpu") if several else device
        if not torch.cuda.is_available():
            raise SettingError(
                f"{setting}: found {name!r}, but this torch ({torch.__version__}) sees no CUDA "
                f"device; use {cpu}"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise SettingError(
                f"{setting}: found {name!r}, expected an index below {torch.cuda.device_count()}"
            )
        if why := unfit(device.index or 0):
            raise SettingError(f"{setting}: found {name!r}, {why}; use {cpu}")
        return torch.device(device.type, device.index or 0)

    def require_device(self) -> None:
        """Raise SettingError where the device is imagined: nothing can be loaded to it."""
        if self.imagined_gpu is not None:
            raise SettingError(
                "imagined_gpu: found a GPU to plan for, expected None to load a model; "
                "make another LLM without it"
            )

    def holding(self, config: ModelConfig) -> ModelConfig:
        """`config` with the form of the bank's rows that `bank` asks for. Raises SettingError where
        the model's heads cannot be packed.
        """
        if self.bank not in PACKED:
            return dataclasses.replace(config, bank="model")
        form = FORMS[PACKED[self.bank]]
        if config.latent:
            raise SettingError(
                f"bank: found {self.bank!r}, expected 'auto' or 'model' for a model with latent "
                "attention: packed rows of K and of V differ, and here both are one row"
            )
        if config.head_dim % form.multiple or config.head_dim > form.most:
            raise SettingError(
                f"bank: found {self.bank!r}, expected 'auto' or 'model' for heads of "
                f"{config.head_dim} elements: packed rows take multiples of {form.multiple} up to "
                f"{form.most}"
            )
        return dataclasses.replace(config, bank=self.bank)

    def require_bank(self, device: torch.device) -> None:
        """Raise SettingError for a form of rows that the device does not multiply."""
        if self.bank != "fp8" or device.type == "cpu" or self.imagined_gpu is not None:
            return
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < FP8_SINCE:
            raise SettingError(
                f"bank: found 'fp8', but this GPU's compute capability is {major}.{minor} and "
                f"8-bit floats need 8.9; use bank='int8', which takes as many bytes"
            )

    def resolved_dtype(self, stored: str, device: torch.device) -> torch.dtype:
        """The torch.dtype that `dtype` means for weights stored as `stored` on a device."""
        name = self.dtype
        if name == "auto":
            name = "bfloat16" if stored == "float16" and device.type == "cpu" else stored
        if name not in DTYPES:
            raise SettingError(
                f"dtype: found {name!r}, expected 'auto', {', '.join(map(repr, DTYPES))}"
            )
        return DTYPES[name]
