"""Hugging Face transformers as a peer: random weights of the same shape, its caches filled at
depth, timed like one `generate` step.
"""

import time

import torch

from tools.bench.floor import sync
from tools.bench.run import Missing

PATIENCE = 5.0  # seconds that a step may take; slower ones are left out and say so
VARIANTS = (("static", "sdpa"), ("dynamic", "sdpa"), ("dynamic", "eager"), ("static", "eager"))


def load_model(config, dtype, device, seed=0):
    """LlamaForCausalLM of an engine ModelConfig with random weights; raises Missing where
    transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise Missing("transformers is not installed (pip install transformers)") from error
    transformers.logging.set_verbosity_error()
    rope = config.rope
    if rope.kind != "default":
        raise Missing(
            f"this benchmark builds transformers models with default rope only, found {rope.kind!r}"
        )
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shape)
    model = model.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(shape).to(device)
    return model


class Transformers:
    """One model with one cache and attention form at depth n. The cache is written through its own
    update().
    """

    name = "transformers"

    def __init__(self, model, n, room, variant=VARIANTS[0]):
        import transformers

        self.model, self.n, self.device = model, n, model.device
        self.kind, attention = variant
        model.set_attn_implementation(attention)
        self._attention = attention
        self.settings = (
            f"transformers {transformers.__version__}, {self.kind} cache, {attention}, eager"
        )
        if self.kind == "static":
            self.cache = transformers.StaticCache(config=model.config, max_cache_len=n + room)
        elif self.kind == "offloaded":
            self.cache = transformers.DynamicCache(config=model.config, offloading=True)
        else:
            self.cache = transformers.DynamicCache(config=model.config)
        self._fill(n)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    def _fill(self, n):
        config, generator = self.model.config, torch.Generator(device=self.device).manual_seed(0)
        shape = (1, config.num_key_value_heads, n, config.head_dim)
        noise = torch.randn(shape, generator=generator, device=self.device, dtype=self.model.dtype)
        for layer in range(config.num_hidden_layers):
            self.cache.update(
                noise.clone() if self.kind != "static" else noise, noise.flip(2), layer
            )

    def rewind(self):
        """Back to n tokens."""
        if self.kind == "static":
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.n)
            return
        extra = int(self.cache.get_seq_length()) - self.n
        if extra > 0:
            for layer in self.cache.layers:
                # crop() leaves a slice: its next cat would copy it either way
                layer.keys = layer.keys[:, :, : self.n].contiguous()
                layer.values = layer.values[:, :, : self.n].contiguous()

    def step(self):
        """One greedy step as in `generate`: forward with the cache, argmax of the last logits."""
        if self.model.config._attn_implementation != self._attention:
            self.model.set_attn_implementation(self._attention)
        with torch.inference_mode():
            logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits[
                :, -1
            ]
            self.token = logits.argmax(-1, keepdim=True)
        return int(self.token)

    def prefill(self, ids):
        """Seconds to read a prompt into a fresh cache, logits of the last token only."""
        import transformers

        tokens = torch.tensor([ids], device=self.device)
        start = time.perf_counter()
        with torch.inference_mode():
            cache = transformers.DynamicCache(config=self.model.config)
            self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        sync(self.device)
        return time.perf_counter() - start

    def close(self):
        """Drop the cache."""
        self.cache = None


def best_variant(model, n, room, variants=None, steps=2):
    """The variant with the fastest steps at this depth, by a short trial, with the trial's
    milliseconds: (variant, {text: ms}).
    """
    found, slow = {}, []
    for variant in variants or VARIANTS:
        try:
            peer = Transformers(model, n, room, variant)
            start = time.perf_counter()
            peer.step()
            best = time.perf_counter() - start
            if best > PATIENCE:
                slow.append(best)
                peer.close()
                continue
            for _ in range(steps):
                start = time.perf_counter()
                peer.step()
                best = min(best, time.perf_counter() - start)
            found[variant] = best
            peer.close()
        except (RuntimeError, MemoryError, ValueError):
            continue
    if not found and slow:
        raise Missing(f"left out: a step takes {min(slow):.0f} s")
    if not found:
        raise Missing("no cache and attention form of transformers ran at this depth")
    return min(found, key=found.get), {"/".join(v): round(1e3 * s, 2) for v, s in found.items()}
