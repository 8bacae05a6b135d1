"""The bytes that a decode step must read, the rate at which this machine reads, and so how fast a
step could be: predicted before anything is timed.

Floor of a step = (weights + keys and values read) / read bandwidth. Activations, scores, partial
results and launches count nothing: they are what an implementation may waste.
"""

import time
from dataclasses import dataclass

import torch

from engine.plan.layers import Role


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step at n tokens reads. `scoring`, which filter layers write and read,
    is stated but not in the floor.
    """

    weights: int
    dense: int  # keys and values of FULL, FILTER and WAIT layers
    sparse: int  # what SPARSE and RETAINED layers read: a selection and tail, or a store
    scoring: int = 0
    choosing: int = 0  # what layers read to choose beside the rows that they attend to

    @property
    def floor(self):
        """Bytes that the floor counts."""
        return self.weights + self.read

    @property
    def read(self):
        """Bytes of K and V, and of what stands for them, that a step reads."""
        return self.dense + self.sparse + self.choosing


def streamed_weights(config, dtype_bytes):
    """Bytes of weights that every step reads: all, but one row only of an untied embedding, and of
    a mixture the experts that a token takes.
    """
    table = config.vocab_size * config.hidden_size
    return (
        config.step_parameters - (0 if config.tied_embeddings else table - config.hidden_size)
    ) * dtype_bytes


def step_bytes(config, dtype_bytes, layers, n, rows):
    """StepBytes of a step that makes the bank n tokens long. layers: LayerPlan; rows: tokens that
    each layer reads (all n of them below a crossover).
    """
    row = config.kv_bytes(dtype_bytes)
    partial = [rows[layer] for layer in layers.partial_layers]
    filters = [
        group.filter_layer
        for group in layers.groups
        if group.layers and layers.roles[group.filter_layer] is Role.FILTER
    ]
    scored = len(filters) if min(partial, default=n) < n else 0
    return StepBytes(
        streamed_weights(config, dtype_bytes),
        (sum(rows) - sum(partial)) * row,
        sum(partial) * row,
        scored * n * (8 * config.num_heads + 12),
    )


@dataclass(frozen=True)
class Rates:
    """Bandwidths measured in this run, bytes per second: reading memory, copying within it (read +
    written), the link both ways.
    """

    read: float
    copy: float
    h2d: float | None = None
    d2h: float | None = None

    def to_dict(self):
        """GB/s for people and JSON."""
        return {name: round(value / 1e9, 2) for name, value in vars(self).items() if value}


def measure_rates(device, size=None, seconds=2.0):
    """Rates of a device from reductions, a matrix-vector product and a copy over `size` bytes
    (default 1 GiB, 4 GiB on a GPU).
    """
    device = torch.device(device)
    size = size or (4 if device.type == "cuda" else 1) * 1024**3
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    matrix, vector = x.view(-1, 1024), torch.ones(1024, device=device)
    reads = [lambda: x.sum(), lambda: torch.mv(matrix, vector)]
    if device.type == "cpu":
        half = x.view(torch.bfloat16).view(-1, 1024)
        small = torch.ones(1024, dtype=torch.bfloat16)
        reads.append(lambda: torch.mv(half, small))
    read = max(size / best_time(f, device, seconds / 4) for f in reads)
    y = torch.empty_like(x[: x.numel() // 2])
    copy = size / best_time(lambda: y.copy_(x[: y.numel()]), device, seconds / 4)
    link = _link(device, seconds / 4) if device.type == "cuda" else ()
    # the faster of the two: a floor must not be beaten
    return Rates(max(read, copy), copy, *link)


def _link(device, seconds, size=512 * 1024**2):
    host = torch.ones(size // 4, pin_memory=True)
    far = torch.empty_like(host, device=device)
    up = best_time(lambda: far.copy_(host, non_blocking=True), device, seconds)
    down = best_time(lambda: host.copy_(far, non_blocking=True), device, seconds)
    return size / up, size / down


def best_time(function, device, seconds=0.5, least=3):
    """Seconds of the fastest of several calls (at least `least`, for about `seconds`), synchronised
    on a GPU.
    """
    function()
    sync(device)
    best, began, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        function()
        sync(device)
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def sync(device):
    """Wait for a GPU; nothing on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def floor_seconds(needed, rates, fetched=0):
    """Seconds that a step cannot go below: bytes over the read rate; `fetched` bytes over the link
    run beside them.
    """
    link = fetched / rates.h2d if fetched and rates.h2d else 0.0
    return max(needed.floor / rates.read, link)
