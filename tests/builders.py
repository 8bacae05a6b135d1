"""Tiny models, sessions and runtimes for the tests: one builder each.

Two kinds of LLM. `tiny_llm(method)` is a session as users have it: the engine's random weights, the
fast CPU kernels, chunks of 64. `tiny_llm(method, config, weights)` runs weights that an oracle can
hold too, on the reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Step
from engine.bank.device import DeviceBank
from engine.bank.query_ring import QueryRing
from engine.forward.decode import Decoder
from engine.llm import LLM
from engine.methods.base import SAMPLED, Found, Method, Sample, Setup
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.model.tensors import random_stream, targets
from engine.runner.sample.text import sampled
from engine.session.session import Session

ROOT = Path(__file__).resolve().parents[1]
POCKET = ROOT / "weights" / "pocket"  # a trained checkpoint: 8 layers, bfloat16
JUDGE = ROOT / "weights" / "judge"  # another, whose answers hang on what is chosen

VOCAB = 97
SESSION_MODEL = dict(layers=8, hidden=48, head_dim=16, max_positions=8192)
SESSION_SETTINGS = dict(max_context=2048, chunk=64)
ORACLE_SETTINGS = dict(backend="reference")
WORLD_LAYERS = 4
GROUPS = ((4, 4), (8, 2), (8, 1))  # heads, K/V heads: groups of 1, 4 and 8


def tiny_config(
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 64,
    head_dim: int | None = None,
    max_positions: int = 4096,
    **changes: Any,
) -> ModelConfig:
    """A float32 model of a few thousand weights; `changes` are fields of config.json."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    given = {key: value for key, value in {**fields, **changes}.items() if value is not ...}
    return ModelConfig.from_dict(given)


def session_config(**changes: Any) -> ModelConfig:
    """The model of `tiny_llm(method)`; `changes` are arguments of `tiny_config`."""
    return tiny_config(**{**SESSION_MODEL, **changes})


MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 24}
# architecture and fields of the models with recurrent layers, of which every fourth one attends;
# in Falcon-H1's all do
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
    "granite": (
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "mamba_n_groups": 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "nemotron": (
        "NemotronHForCausalLM",
        {
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "falcon": (
        "FalconH1ForCausalLM",
        {**MAMBA, "mamba_d_ssm": 96, "key_multiplier": 0.5, "ssm_out_multiplier": 0.5},
    ),
    "bamba": ("BambaForCausalLM", MAMBA),
}


def latent_config(layers: int = 8, **changes: Any) -> ModelConfig:
    """A model with latent attention and no mixture (DeepSeek-V2's), whose chunks of 64 tokens make
    keys and values and shorter ones do not; changes: fields of config.json.
    """
    sizes = {"kv_lora_rank": 120, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    plain = {"q_lora_rank": 20, "first_k_dense_replace": layers, "n_routed_experts": 4}
    fields = {**sizes, **plain, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **changes}
    given = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": ...,
        "head_dim": ...,
        **fields,
    }
    return tiny_config(layers, kv_heads=4, hidden=48, **given)


def hybrid_config(layers: int = 8, family: str = "qwen3.5", **changes: Any) -> ModelConfig:
    """A model with recurrent layers, of a family of HYBRIDS; changes: fields of config.json."""
    architecture, fields = HYBRIDS[family]
    attends = [(i + 1) % 4 == 0 for i in range(layers)]
    named = {
        "granite": {"layer_types": ["attention" if full else "mamba" for full in attends]},
        "nemotron": {
            "hybrid_override_pattern": "".join("*-" if full else "M-" for full in attends)
        },
        "bamba": {"attn_layer_indices": [i for i, full in enumerate(attends) if full]},
    }.get(family, {})
    if family == "nemotron":  # an MLP is a layer of its own, and one layer has none
        named["hybrid_override_pattern"] = named["hybrid_override_pattern"].replace(
            "M-M-", "MM-", 1
        )
        named |= {"num_hidden_layers": 2 * layers - 1, "mlp_hidden_act": "relu2"}
    given = {"architectures": [architecture], "model_type": ..., **fields, **named, **changes}
    return tiny_config(layers, hidden=48, head_dim=16, **given)


def tiny_weights(
    config: ModelConfig, seed: int = 0, sharpness: float = 1.5
) -> dict[str, torch.Tensor]:
    """Random float32 weights under their Hugging Face names: activations and norms near one, q and
    k scaled by `sharpness` so that attention is peaky.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for target in targets(config):
        for name, shape in target.parts:
            noise = torch.randn(shape, generator=generator)
            if len(shape) == 1:
                found[name] = (1.0 if "norm" in name else 0.0) + 0.1 * noise
                continue
            scale = 1.0 if "embed" in name else shape[1] ** -0.5
            sharp = sharpness if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            found[name] = noise * scale * sharp
    return found


def stream_of(
    weights: dict[str, torch.Tensor],
) -> Callable[..., Iterator[tuple[str, torch.Tensor]]]:
    """The stream of (target name, fused tensor) that LLM.from_stream takes, over such weights."""

    def stream(
        config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for target in targets(config):
            parts = torch.cat([weights[name] for name, _ in target.parts])
            yield target.name, parts.to(device, dtype)

    return stream


def tiny_llm(
    method: Method | None = None,
    config: ModelConfig | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    sharpness: float = 2.5,
    **settings: Any,
) -> LLM:
    """An LLM on the CPU (see above); seed and sharpness are of the engine's random weights."""
    stream: Callable[..., Any] = partial(random_stream, seed=seed, sharpness=sharpness)
    defaults: dict[str, Any] = SESSION_SETTINGS
    if weights is not None:
        stream, defaults = stream_of(weights), ORACLE_SETTINGS
    settings = {"device": "cpu", **defaults, **settings}
    return LLM.from_stream(config or session_config(), stream, method=method, **settings)


def random_ids(count: int, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    """`count` token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def setup_of(
    config: ModelConfig,
    method: Method,
    capacity: int,
    batch: int = 1,
    backend: str = "reference",
    dtype: torch.dtype = torch.float32,
    sample: Sample | None = None,
) -> Setup:
    """The Setup of a runtime outside a session. sample: None for queries and keys of no model."""
    given = dict(dtype=dtype, batch=batch, queries=8, backend=backend)
    setup = Setup.of(config, method, capacity, **given)
    return replace(setup, sample=sample or partial(random_sample, config))


def random_sample(config: ModelConfig, name: str, found: Found) -> dict[int, Any]:
    """What a method finds in queries and keys of chance, of which few columns carry most."""
    generator, made = torch.Generator().manual_seed(5), {}
    for layer in range(config.num_layers):
        kv_heads, dim = config.heads_of(layer)
        sizes = torch.arange(dim, 0, -1.0) ** 2
        q = torch.randn(SAMPLED, config.num_heads, dim, generator=generator) * sizes
        k = torch.randn(kv_heads, SAMPLED, dim, generator=generator)
        made[layer] = found(layer, q, k)
    return made


def batched(
    llm: LLM, sessions: Sequence[Session], backend: str, capacity: int
) -> tuple[Decoder, DeviceBank]:
    """A decoder and a bank that hold what these sessions hold, one sequence each; beyond their
    lengths the rows are NaN.
    """
    config, method, batch = llm.config, sessions[0].method, len(sessions)
    sample = partial(sampled, sessions[0].loaded)
    setup = setup_of(config, method, capacity, batch, backend, sample=sample)
    bank = DeviceBank(config, setup.plan, capacity, torch.float32, "cpu", batch)
    ring = QueryRing(config, batch, torch.float32, "cpu")
    runtime = method.runtime(setup)
    runtime.end_prompt(max(map(len, sessions)))
    for number, session in enumerate(sessions):
        ring.slots[:, number] = session.query_ring.slots[:, 0]
        for layer in range(config.num_layers):
            for mine, theirs in zip(bank.kv(layer), session.bank.kv(layer)):
                mine[number].fill_(float("nan"))
                mine[number, :, : len(session)] = theirs[0, :, : len(session)]
        runtime.copy_from(session.runtime, number)
    return Decoder(llm.model, llm.rotary, runtime, ring), bank


class World:
    """A runtime of `method` outside a session, head_dim 16, and a bank of NaN that `fill` writes.

    shape: (heads, K/V heads); `config` are arguments of `tiny_config`.
    """

    def __init__(
        self,
        method: Method,
        shape: tuple[int, int],
        capacity: int,
        batch: int = 1,
        backend: str = "reference",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        layers: int = WORLD_LAYERS,
        **config: Any,
    ) -> None:
        heads, kv_heads = shape
        self.config = tiny_config(layers, heads, kv_heads, hidden=16 * heads, **config)
        setup = setup_of(self.config, method, capacity, batch, backend, dtype)
        self.plan, self.capacity, self.batch, self.dtype = setup.plan, capacity, batch, dtype
        self.rotary, self.generator = Rotary(self.config), torch.Generator().manual_seed(seed)
        self.bank = DeviceBank(self.config, self.plan, capacity, dtype, "cpu", batch)
        self.ring = QueryRing(self.config, batch, dtype, "cpu")
        for layer in range(layers):
            for part in self.bank.kv(layer):
                part.fill_(float("nan"))
        self.runtime = method.runtime(setup)

    def random(self, *shape: int) -> torch.Tensor:
        """Normal values in the bank's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def queries(self, count: int = 1) -> torch.Tensor:
        """q [B, count, H, D]."""
        return self.random(self.batch, count, self.config.num_heads, 16)

    def fill(self, layer: int, start: int, stop: int, b: int | None = None) -> None:
        """Random rows start .. stop-1 of one layer, of one sequence or all."""
        for part in self.bank.kv(layer):
            rows = self.random(self.batch, self.config.num_kv_heads, stop - start, 16)
            part[slice(None) if b is None else slice(b, b + 1), :, start:stop] = (
                rows if b is None else rows[:1]
            )

    def step(self, *lengths: int) -> Step:
        """The Step of one token per sequence that makes them this long; its rows must have been
        written.
        """
        visible = torch.tensor(lengths, dtype=torch.int32)
        return Step(
            (visible - 1).long()[:, None], visible, self.bank, self.capacity, self.ring, self.rotary
        )
