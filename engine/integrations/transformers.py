"""OmniKV as an attention function and a cache of transformers, to try it on a model that
transformers loads, also one that this engine does not run.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="omnikv")
    cache = OmniKVCache(model, OmniKV(filter_layers=(2, 8), tokens=256, dense_below=0), 4096)
    model.generate(**inputs, past_key_values=cache)

Importing this module registers "omnikv". The cache holds the engine's own bank and runtime, so that
a step chooses and reads what a session of the engine does. It is slow: every layer of every step
goes through Python, on the reference launchers unless `backend` says otherwise. One sequence, no
padding, no gradients, no sliding windows, and no cap or sinks in the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.bank.base import Step
from engine.bank.device import DeviceBank
from engine.bank.query_ring import QueryRing
from engine.base.checks import found, integer, one_of
from engine.base.errors import ContextTooLong, SettingError
from engine.methods.base import Setup
from engine.methods.omnikv.method import OmniKV
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.needs import RING
from kernels.launch.dispatch import BACKENDS

NAME = "omnikv"
HOME = "omnikv_layer"  # attribute of the keys that a layer of the cache returns: the layer


class OmniKVCache(Cache):
    """The cache of one sequence under OmniKV; give it to `generate` or to the model's call as
    `past_key_values`.

    model: loaded with attn_implementation="omnikv". method: an OmniKV whose filter_layers are
    named, and that is not official. max_context: tokens that it can hold, reserved at once.
    backend: the launchers, as of LLM. Tokens that come one by one are decode steps, several at once
    a prompt, which is read as the method reads prompts. sparse_steps, dense_steps: decode steps so
    far, by whether the method's sparse layers were sparse. A call that breaks off leaves it
    unusable until `reset`. Raises SettingError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: OmniKV,
        max_context: int,
        backend: str = "reference",
    ) -> None:
        integer("max_context", max_context, 1)
        one_of("backend", backend, BACKENDS)
        _require(model, method)
        config = shapes(model.config, max_context, model.dtype)
        plan = method.plan(config)
        method.validate(plan)
        device = model.device
        given: dict[str, Any] = dict(device=device, dtype=model.dtype, backend=backend)
        setup = Setup.of(config, method, max_context, plan=plan, **given)
        self.runtime = method.runtime(setup)
        self.bank = DeviceBank(config, plan, max_context, model.dtype, device)
        self._ring = QueryRing(config, 1, model.dtype, device)
        self._rotary = Rotary(config, device)
        self._initial = self.runtime.state()
        itemsize = model.dtype.itemsize
        self.dense_below = method.dense_below_tokens(
            plan, config, itemsize, device.type, max_context
        )
        self.sparse_steps = self.dense_steps = 0
        self._step: Step | None = None  # of the decode step under way
        self._chose = False  # in the last step
        super().__init__(layers=[OmniKVLayer(self, number) for number in range(config.num_layers)])

    @property
    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: int64 [k]} of the last decode step, ascending; empty before a sparse one.
        As Session.selections.
        """
        return self.runtime.selections() if self._chose else {}

    @property
    def whole(self) -> bool:
        """Whether all layers hold the same tokens: no call has broken off."""
        return self.get_seq_length(0) == self.get_seq_length(len(self.layers) - 1)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.runtime.truncate(0)
        self.runtime.load(self._initial, 0)
        self.bank.rewind(0)
        self._ring.truncate(0)
        self._chose = False
        self.sparse_steps = self.dense_steps = 0

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of one layer whose rows `update` has written. q [1, Q, H, D], rotated -> [1, Q,
        H, D].
        """
        if abs(scaling - self.runtime.scale) > 1e-6 * scaling:
            raise SettingError(
                f"omnikv: found a softmax scale of {scaling}, expected {self.runtime.scale} "
                f"(1 / sqrt(head_dim)); models with another one are not supported"
            )
        count, stop = q.shape[1], self.get_seq_length(layer)
        self._keep_queries(layer, q, stop)
        last = layer == len(self.layers) - 1
        if count > 1 or stop == 1:
            if layer == 0:
                self._chose = False
                self.runtime.begin_prompt(stop - count, stop)
            out = self.runtime.attend_prompt(layer, q, self.bank, stop - count)
            if last:
                self.runtime.end_prompt(stop)
            return out
        if layer == 0:
            self._step = self._step_at(stop)
        step = self._step
        assert step is not None, "layer 0 begins a step"
        sparse = stop >= self.dense_below and bool(self.runtime.plan.sparse_layers)
        if last:
            self._chose = sparse
            self.sparse_steps += sparse
            self.dense_steps += not sparse
        attend = self.runtime.attend if sparse else self.runtime.attend_dense
        return attend(layer, q, step)

    def _keep_queries(self, layer: int, q: torch.Tensor, stop: int) -> None:
        """Keep the newest queries, rotated, for selectors with a window."""
        newest = q[:, -RING:]
        slots = self._ring.slots[layer]
        where = torch.arange(stop - newest.shape[1], stop, device=q.device) % slots.shape[1]
        slots.index_copy_(1, where, newest.to(slots.dtype))

    def _step_at(self, stop: int) -> Step:
        device = self.bank.device
        positions = torch.full((1, 1), stop - 1, device=device)
        visible = torch.full((1,), stop, dtype=torch.int32, device=device)
        bank = self.bank
        return RotatedStep(positions, visible, bank, bank.capacity, self._ring, self._rotary)


class OmniKVLayer(CacheLayerMixin):
    """One layer of an OmniKVCache: what transformers asks of it."""

    is_sliding = False

    def __init__(self, cache: OmniKVCache, number: int) -> None:
        super().__init__()
        self.cache, self.number, self.length = cache, number, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the bank is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows [1, Hkv, Q, D]; (keys, values) [1, Hkv, T, D] of all tokens."""
        bank, start = self.cache.bank, self.length
        stop = start + key_states.shape[2]
        if self.number == 0 and not self.cache.whole:
            raise SettingError("OmniKVCache: found a call that broke off, expected cache.reset()")
        if key_states.shape[0] != 1:
            raise SettingError(
                f"OmniKVCache: found {key_states.shape[0]} sequences, expected 1; make a cache for "
                f"each"
            )
        if stop > bank.capacity:
            raise ContextTooLong(
                f"{stop} tokens do not fit: this cache holds {start} and its limit is "
                f"{bank.capacity}; make it with a larger max_context"
            )
        with torch.no_grad():
            rows = key_states.transpose(1, 2), value_states.transpose(1, 2)
            bank.write_chunk(self.number, *rows, start, self.cache.runtime.setup.backend)
        self.length = stop
        keys, values = bank.kv(self.number, stop)
        keys = keys.view(keys.shape)  # an object of its own, to carry where it comes from
        setattr(keys, HOME, self)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that queries see, the first one's position)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Tokens that it can hold."""
        return self.cache.bank.capacity

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0


class RotatedStep(Step):
    """A step whose ring holds queries that are rotated already, as transformers hands them out."""

    def window_queries(self, layer: int, window: int) -> torch.Tensor:
        offsets = torch.arange(1 - window, 1, device=self.positions.device)
        positions = (self.positions[:, -1:] + offsets).clamp_(min=0)
        return self.query_ring.read(layer, positions)


def omnikv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, Q, D] -> ([1, Q, H, D], no weights).

    Raises SettingError for keys that come from no OmniKVCache, and for what is not supported.
    """
    layer = getattr(key, HOME, None)
    if layer is None:
        raise SettingError(
            "omnikv: found keys of no OmniKVCache, expected past_key_values=OmniKVCache(...) "
            "(engine.integrations.transformers)"
        )
    for name in ("sliding_window", "softcap", "s_aux"):
        if settings.get(name) is not None:
            raise SettingError(
                f"omnikv: found {name} in layer {layer.number}, expected none; this engine's own "
                f"LLM runs such models"
            )
    if query.requires_grad or dropout:
        raise SettingError(
            "omnikv: found gradients or dropout, expected torch.no_grad() and model.eval()"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layer.cache.attend(layer.number, query.transpose(1, 2), scale), None


def no_padding(*, attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    """transformers' mask function: none is needed, since every query sees all tokens up to its own.
    Raises SettingError for a mask that hides some.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise SettingError("omnikv: found padding in attention_mask, expected one whole sequence")


def shapes(config: Any, max_context: int, dtype: torch.dtype) -> ModelConfig:
    """The engine's configuration of a model of transformers, as far as attention needs it: how many
    layers, heads and elements of a head. Rotation is transformers'.
    """
    text = config.get_text_config()
    heads, hidden = text.num_attention_heads, text.hidden_size
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or hidden // heads,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return ModelConfig.from_dict(fields)


def _require(model: Any, method: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise SettingError(f"model: found {found(model)}, expected a model of transformers")
    if not isinstance(method, OmniKV) or method.official or method.filter_layers is None:
        raise SettingError(
            f"method: found {found(method)}, expected OmniKV(filter_layers=(...), ...) without "
            f"official"
        )
    # private, and the only place that says it
    implementation = model.config._attn_implementation
    if implementation != NAME:
        raise SettingError(
            f"model: found attn_implementation {implementation!r}, expected {NAME!r}: "
            f"model.set_attn_implementation({NAME!r})"
        )


AttentionInterface.register(NAME, omnikv_attention)
AttentionMaskInterface.register(NAME, no_padding)
