"""The memory plan's result: what a model needs on a device, whether it fits, and how to say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.base.errors import OutOfMemoryPlan
from engine.base.figures import brief, human
from engine.base.newest_tokens import BYTES, KEPT
from engine.forward.staged.staging import Staging
from engine.load.link_bytes import SLOW_LINK
from engine.methods.base import Method
from engine.plan.free_memory import HEADROOM
from engine.plan.layers import LayerPlan, mem_from_budget
from engine.plan.placement import Placement

# A chunk of this many tokens takes as long to compute as an offloaded layer takes to stream back:
# 3.3K tokens at 650 TFLOP/s and 50 GB/s (docs/OFFLOAD.md)
OFFLOAD_CHUNK = 4096
# Streamed weights cross once a chunk: at 25 GB/s they would hide under 26K tokens of 16 bits
LARGER = (8192, OFFLOAD_CHUNK)
ROUND = 64  # contexts are whole blocks of tokens

Item = tuple[str, int, str]  # name, bytes, note


@dataclass(frozen=True)
class Plan:
    """Layer plan and memory plan of one model under one method; nothing is allocated.

    max_context, chunk: tokens; largest_context: most tokens that fit. dense_below: tokens of
    context below which every layer reads everything. items: device memory at max_context. free,
    host_free: bytes found on the device and in host memory; free_name and host_name say what bounds
    them, with a figure; shared: it is a GPU's and the host's at once. placement: what lives in host
    memory; None: nothing. host_bytes: host tier of one session (on a CPU it is part of the total).
    full_bank: bytes of K and V of all layers. budget: selected or retained tokens. selected: those
    that a stream's step reads of the retained ones; 0: all. kept: bytes of K
    and V that an evicting method keeps after a prompt of max_context; 0 for other methods. outlook:
    what exact mode promises at max_context. prompt_link_bytes, step_link_bytes: the most that
    reading max_context tokens, and a step after them, brings of rows from host memory. offload:
    what was asked: "auto", "host" or "device". staging: layers whose weights stream; None: none.
    link_rate: measured bytes per second of copies from host memory; 0: not measured. head_copy:
    bytes of a tied lm_head that is held a second time, packed for products. kernels: why a CPU's
    steps run torch's operators; "" where they run our kernels. forever: sessions are
    streams without end, and max_context is what they hold.
    """

    model: str
    method: Method
    layers: LayerPlan
    device: str
    dtype: str
    max_context: int
    largest_context: int
    chunk: int
    dense_below: int
    items: tuple[Item, ...]
    free: int
    free_name: str
    note: str = ""
    placement: Placement | None = None
    host_bytes: int = 0
    host_free: int = 0
    host_name: str = "no host memory"
    shared: bool = False
    full_bank: int = 0
    budget: int = 0
    selected: int = 0
    kept: int = 0
    outlook: str = ""
    prompt_link_bytes: int = 0
    step_link_bytes: int = 0
    offload: str = "auto"
    staging: Staging | None = None
    link_rate: float = 0.0
    head_copy: int = 0
    kernels: str = ""
    forever: bool = False

    def without_end(self, selected: int = 0) -> Plan:
        """This plan as that of streams, which hold max_context rows however long they are, and the
        newest token ids. selected: rows that a step reads of them; 0: all.
        """
        ids = "token ids", BYTES, f"the newest {KEPT} of the text, to go back by"
        return replace(self, forever=True, items=(*self.items, ids), selected=selected)

    @property
    def total(self) -> int:
        """Device bytes at the peak: everything resident and the prefill workspace."""
        return sum(size for _, size, _ in self.items)

    @property
    def by_device(self) -> tuple[Plan, ...]:
        """The plan of each device, if the model lies on several; else this plan."""
        return (self,)

    @property
    def lines(self) -> list[str]:
        """A line for each device, if the model lies on several."""
        return []

    @property
    def step_weights(self) -> int:
        """Bytes of weights that a step reads: all but an embedding that has a copy for products."""
        return self.bytes_of("weights") + self.staged_bytes - self.head_copy

    @property
    def staged_bytes(self) -> int:
        """Bytes of weights in host memory, which every decode step brings to the device."""
        return self.staging.bytes if self.staging else 0

    @property
    def host_total(self) -> int:
        """Bytes in host memory: of one session's host tier, and of weights."""
        return self.host_bytes + self.staged_bytes

    @property
    def prompt_weight_bytes(self) -> int:
        """Bytes of weights that reading max_context tokens brings over: once a chunk."""
        return -(-self.max_context // self.chunk) * self.staged_bytes

    @property
    def fits_device(self) -> bool:
        """Whether the peak on the device stays within the memory that a plan may use."""
        return self.total <= self.free * HEADROOM

    @property
    def fits(self) -> bool:
        """Whether both peaks stay within the device and host memory that a plan may use."""
        return self.fits_device and (
            self.device == "cpu" or self.host_total <= self.host_free * HEADROOM
        )

    @property
    def mem(self) -> float:
        """The paper's Mem% at max_context: the share of the bank that a step reads."""
        if not self.budget:
            return 1.0
        return mem_from_budget(self.budget, self.max_context, self.layers.dense_share)

    @property
    def resident(self) -> float:
        """Share of the bank's bytes that is on the device at max_context.

        Slots, tail and staging count. Where tokens are evicted it is the share that the store
        keeps; the whole bank is allocated beside it and not counted, unless the method forgets.
        """
        if self.kept:
            return self.kept / max(1, self.full_bank)
        names = ("context bank", "working sets", "streaming")
        held = sum(size for name, size, _ in self.items if name in names)
        return held / max(1, self.full_bank)

    @property
    def forgets(self) -> bool:
        """Whether rows that an evicting method does not keep are freed."""
        return self.kept > 0 and bool(getattr(self.method, "forget", False))

    @property
    def where(self) -> str:
        """One line on what lives where."""
        if self.placement is None:
            whose = ", whose memory is the host's" if self.shared else ""
            kept = "everything" if self.staging is None else "all of the bank"
            return f"{kept} on the device{whose}{self.unheeded and f'; {self.unheeded}'}"
        line = f"{self.placement.describe()}; {human(self.host_bytes)} of {self.host_name}"
        if self.shared:
            line += "; it is the device's memory too: offload=auto reads those rows in place"
        if getattr(self.method, "wait_layers", None) == 0 and self.placement.budget:
            line += "; no wait layers: wait_layers=1 hides more of each load where the link is slow"
        if self.device != "cpu" and self.chunk < OFFLOAD_CHUNK and not self.placement.kept:
            line += f"; chunks of {self.chunk} tokens do not hide the transfers of a prefill"
        return line

    @property
    def unheeded(self) -> str:
        """One line where host memory was asked for and the method has no use for it, else ""."""
        if self.offload != "host" or self.placement is not None:
            return ""
        why = "keeps no bank" if self.forgets else "keeps its bank on the device"
        return f"{self.method.name} {why}: offload=host has no effect"

    @property
    def covered(self) -> str:
        """One line where the method's budget leaves nothing of the context out, else ""."""
        if self.forever or not 0 < self.max_context <= self.budget:
            return ""
        if not self.layers.partial_layers:
            return ""
        drops = "chooses" if self.layers.sparse_layers else "drops"
        return (
            f"{self.method.name} {drops} nothing: its budget covers the whole context of "
            f"{self.max_context:,} tokens; give it fewer tokens, or a longer context"
        )

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one item."""
        return next(size for item, size, _ in self.items if item == name)

    def left_for_host(self, budget: int) -> int:
        """Return the bytes that `budget` bytes of ordinary memory leave on a CPU for the host tiers
        of all sessions, beside the weights and one session's other parts.
        """
        tier = "host tier" if self.placement else "context bank"
        return max(0, budget - sum(size for name, size, _ in self.items if name != tier))

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON."""
        return {
            "model": self.model,
            "method": repr(self.method),
            "layers": self.layers.describe(),
            "device": self.device,
            "dtype": self.dtype,
            "max_context": self.max_context,
            "largest_context": self.largest_context,
            "chunk": self.chunk,
            "dense_below": self.dense_below,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "fits": self.fits,
            "items": {name: size for name, size, _ in self.items},
            "host_bytes": self.host_bytes,
            "mem": self.mem,
            "resident": self.resident,
            "store_kv_bytes": self.kept,
            "bank_bytes": self.bytes_of("context bank"),
            "placement": self.where,
            "prompt_link_bytes": self.prompt_link_bytes,
            "step_link_bytes": self.step_link_bytes,
            **(self._staged_figures() if self.staging else {}),
            **({"outlook": self.outlook} if self.outlook else {}),
            **({"kernels": self.kernels} if self.kernels else {}),
        }

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.items)
        lines = [
            f"model     {self.model}, {self.dtype} on {self.device}",
            f"method    {brief(self.method)}",
            f"layers    {self.layers.describe()}",
        ]
        if self.outlook:
            lines.append(f"exact     {self.outlook}")
        elif self.layers.sparse_layers:
            start = "at every length"
            if self.dense_below:
                start = f"from {self.dense_below} tokens on (below, full attention reads less)"
            lines.append(f"sparse    {start}")
        context = f"{self.max_context} tokens"
        if self.forever:
            context = f"without end, in constant memory: {self.budget} tokens of each layer stay"
        lines += [f"context   {context}, prefill in chunks of {self.chunk}", "memory"]
        lines += [
            f"  {name:<{width}}  {human(size):>10}  {note}".rstrip()
            for name, size, note in self.items
        ]
        held = f"{self.resident:.1%} of the bank is on the device"
        if self.kept:
            held = f"a store of {human(self.kept)} ({self.resident:.1%} of all K and V), and "
            held += (
                "nothing else of the prompt"
                if self.forgets
                else (
                    f"beside it the whole bank ({human(self.full_bank)}), which answers do not read"
                )
            )
        lines += [
            f"  {'total at peak':<{width}}  {human(self.total):>10}  of {self.free_name}",
            f"placement {self.where}",
        ]
        if self.forever:
            most = f"at most {self.selected}" if self.selected else f"{self.budget}"
            lines.append(f"reads     {most} rows of each layer in a step, at any length")
        else:
            lines += [
                f"reads     {self.mem:.1%} of the bank in a step (the paper's Mem%); {held}",
                f"largest context that fits here: {self.largest_context} tokens",
            ]
        lines += self._link_lines()
        if self.kernels:
            lines.append(
                f"kernels   torch's operators ({self.kernels}); with a C++ compiler, such as g++, "
                f"attention reads K and V two to five times as fast"
            )
        if self.covered:
            lines.append(self.covered)
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)

    def _staged_figures(self) -> dict[str, Any]:
        assert self.staging is not None
        return {
            "staged_layers": list(self.staging.layers),
            "staged_weight_bytes": self.staged_bytes,
            "prompt_weight_bytes": self.prompt_weight_bytes,
        }

    @property
    def _rate(self) -> tuple[float, str]:
        """Bytes per second of copies from host memory, and the words for them."""
        rate = self.link_rate or SLOW_LINK
        return rate, f"{rate / 1e9:.3g} GB/s ({'measured' if self.link_rate else 'assumed'})"

    @property
    def _on_cpus(self) -> bool:
        """Whether no device is a GPU."""
        return all(part.device == "cpu" for part in self.by_device)

    @property
    def streaming(self) -> str:
        """One line on the weights that stream and the most tokens per second that their link
        allows; "" where none do.
        """
        if self.staging is None:
            return ""
        line = f"weights of {self.staging.named} stream: {human(self.staged_bytes)} a step"
        if self._on_cpus:
            return f"{line}, copied within RAM"
        rate, said = self._rate
        line += f", at most {rate / self.staged_bytes:.2g} tokens/s at {said}"
        if self.step_link_bytes:
            both = rate / (self.staged_bytes + self.step_link_bytes)
            line += f", {both:.2g} with {human(self.step_link_bytes)} of rows"
        return line

    def _staged_lines(self) -> list[str]:
        """Say what streamed weights cost, before anything is loaded."""
        if self.staging is None:
            return []
        lines = [self.streaming.replace("weights", "weights  ", 1)]
        if self._on_cpus:
            return lines
        rate, said = self._rate
        chunks = -(-self.max_context // self.chunk)
        lines.append(
            f"reading   {self.max_context} tokens brings {human(self.prompt_weight_bytes)} of "
            f"weights over in chunks of {self.chunk} ({chunks} x {human(self.staged_bytes)}): "
            f"{self.prompt_weight_bytes / rate:.2g} s of transfers at {said}"
        )
        return lines

    def _link_lines(self) -> list[str]:
        """Say what crosses the link between host memory and the device."""
        lines = self._staged_lines()
        if self.prompt_link_bytes:
            lines.append(
                f"reading   {self.max_context} tokens brings at most "
                f"{human(self.prompt_link_bytes)} from host memory to the device"
            )
        if self.step_link_bytes:
            seconds = self.step_link_bytes / SLOW_LINK
            lines.append(
                f"a step    at {self.max_context} tokens brings at most "
                f"{human(self.step_link_bytes)} from host memory: {seconds:.2g} s at 25 GB/s"
            )
        return lines

    def no_room(self, capacity: int) -> OutOfMemoryPlan:
        """Make the error for a session that the allocator refused."""
        return OutOfMemoryPlan(
            f"no memory for another session of {capacity} tokens "
            f"({self.bytes_of('context bank')} bytes of bank); close one, or lower max_context"
        )

    def require_fit(self, flag: str = "max_context") -> None:
        """Raise OutOfMemoryPlan, with the remedies in order, if the plan does not fit.

        flag: what the caller calls the context length.
        """
        if self.fits:
            return
        if self.fits_device and self.staging is not None:
            raise OutOfMemoryPlan(
                f"{self.model} at {self.max_context} tokens needs "
                f"{human(self.host_total)} of host memory "
                f"({human(self.staged_bytes)} for weights that do not fit on the device), but only "
                f"{human(self.host_free * HEADROOM)} of {self.host_name} may be used; remedies: "
                f"weights='int4', then a smaller {flag}, then a smaller model"
            )
        if self.fits_device:
            raise OutOfMemoryPlan(
                f"{self.model} at {self.max_context} tokens needs {human(self.host_bytes)} of host "
                f"memory for offloaded layers, but only {human(self.host_free * HEADROOM)} of "
                f"{self.host_name} may be used; remedies: "
                f"{flag}={self.largest_context}, then offload='device', then freeing memory"
            )
        part, size, _ = max(self.items, key=lambda item: item[1])
        first = "a smaller model"
        if self.forever:
            first = f"fewer tokens of the method (found {self.budget}) and a smaller chunk"
        elif self.largest_context >= ROUND:
            first = (
                f"a context of at most {self.largest_context} tokens "
                f"({flag}={self.largest_context})"
            )
        raise OutOfMemoryPlan(
            f"{self.model} at {self.max_context} tokens needs {human(self.total)} "
            f"({part}: {human(size)}), but only {human(self.free * HEADROOM)} of "
            f"{self.free_name} may be used; remedies: {first}, "
            f"then a smaller dtype than {self.dtype}, then freeing memory"
        )
