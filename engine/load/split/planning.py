"""Planning a model over several devices: where its layers are cut, and each device's plan."""

from __future__ import annotations

from typing import Any

import torch

from engine.forward.staged.staging import Staging
from engine.load.memory import default_chunk, plan_at
from engine.load.report import LARGER, OFFLOAD_CHUNK
from engine.load.split.split_plan import SplitPlan
from engine.load.staged.sizes import layer_sizes
from engine.methods.base import Method
from engine.methods.split.allowed import divides
from engine.model.config.config import ModelConfig
from engine.model.low_bits import FewBits, Rounding
from engine.model.parts.config import part_of
from engine.plan.free_memory import free_bytes
from engine.plan.layers import LayerPlan
from engine.plan.split.cut import Cut, choose_cut

Budget = dict[str, int | None]  # bytes by the type of a device


class SplitPlanning:
    """Plans a model over `devices`.

    split: as of Options. budgets: bytes of a GPU, and of host memory. rounding: how its weights are
    held. streaming: the layers whose weights lie in host memory. settings: of plan_at, the same for
    every part.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        dtype: torch.dtype,
        devices: tuple[torch.device, ...],
        split: tuple[int, ...] | None,
        budgets: Budget,
        rounding: Rounding,
        streaming: tuple[int, ...],
        backend: str,
        **settings: Any,
    ) -> None:
        self._name, self._config, self._dtype, self._devices = name, config, dtype, devices
        self._split, self._budgets, self._rounding = split, budgets, rounding
        self._streaming = streaming
        self._backend, self._settings = backend, {"backend": backend, **settings}

    def cut(self, method: Method, layers: LayerPlan, context: int) -> Cut:
        """Where the layers are cut, for sessions of so many tokens."""
        config, size = self._config, self._dtype.itemsize
        windows = config.windows or (0,) * config.num_layers
        bytes_of = []
        for layer, window in enumerate(windows):
            one = part_of(config, layer, layer + 1)
            held = self._weights(one, 0, layer)
            own = one.parameters * size if held is None else held.nbytes
            staged = self._staging(one, 0, layer)
            if staged is not None and self._devices[0].type == "cuda":
                own -= staged.bytes
            rows = min(context, 2 * window) if window else context
            rows = rows if config.rows_of(layer) == layer else 0
            bytes_of.append(own + rows * config.kv_bytes(size, local=window > 0))
        room = [self._free(device) for device in self._devices]
        given = bytes_of, room, self._split, divides(method), config.row_layers
        return choose_cut(method.name, layers, self._devices, *given)

    def _weights(self, config: ModelConfig, part: int, first: int) -> FewBits | None:
        """The weights of a part that begins with layer `first`, on the device of number `part`."""
        own = self._rounding.of_part(self._config, first)
        return own.bytes(config, self._dtype, self._devices[part], self._backend)

    def _staging(self, config: ModelConfig, part: int, first: int) -> Staging | None:
        """The layers that stream of a part, as `_weights`; None for none."""
        stop = first + config.num_layers
        layers = tuple(layer - first for layer in self._streaming if first <= layer < stop)
        if not layers:
            return None
        own = self._rounding.of_part(self._config, first)
        held = own, self._dtype, self._devices[part], self._backend
        return Staging(layers, layer_sizes(config, *held))

    def _free(self, device: torch.device) -> float:
        budget = self._budgets[device.type]
        return free_bytes(device, budget).bytes / self._devices.count(device)

    def plan(
        self,
        whole: Any,
        cut: Cut,
        method: Method,
        layers: LayerPlan,
        max_context: int | None,
        chunk: int | None,
        offload: str,
    ) -> SplitPlan:
        """The plan under a cut. whole: makes the plan of the model as on one device, of a context
        and a chunk.
        """
        own = chunk or default_chunk(self._devices[0].type, self._config)
        found = self._parts(cut, method, layers, max_context, own, offload)
        if max_context is None:
            max_context = min(part.max_context for part in found)
            found = self._parts(cut, method, layers, max_context, own, offload)
        on_gpu = [p for p, device in zip(found, self._devices) if device.type == "cuda"]
        sizes: tuple[int, ...] = ()
        if any(part.staging for part in on_gpu):
            sizes = LARGER
        elif any(part.placement for part in on_gpu):
            sizes = (OFFLOAD_CHUNK,)
        for size in sizes if chunk is None else ():
            larger = self._parts(cut, method, layers, max_context, size, offload)
            if all(part.fits for part in larger):
                found = larger
                break
        return SplitPlan.of(whole(max_context, found[0].chunk), found, cut.starts)

    def _parts(
        self,
        cut: Cut,
        method: Method,
        layers: LayerPlan,
        max_context: int | None,
        chunk: int,
        offload: str,
    ) -> tuple[Any, ...]:
        found = []
        given = zip(cut.spans, cut.layers(layers), self._devices)
        for number, ((first, stop), own, device) in enumerate(given):
            config = part_of(self._config, first, stop)
            staging = self._staging(config, number, first)
            found.append(
                plan_at(
                    self._name,
                    config,
                    method,
                    own,
                    self._dtype,
                    device,
                    max_context,
                    chunk,
                    budget=self._budgets[device.type],
                    host_budget=self._budgets["cpu"],
                    offload=offload,
                    weights=self._weights(config, number, first),
                    staging=staging,
                    shared_by=(self._devices.count(device), len(self._devices)),
                    **self._settings,
                )
            )
        return tuple(found)
