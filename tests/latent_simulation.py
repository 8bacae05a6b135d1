"""Latent attention in float64 as its papers write it: keys and values of every head are expanded
from the latents of all tokens. OmniKV's decode steps over it, token by token.

Weights, norms and MLPs are those of transformers' model; nothing is absorbed, nothing is joined.
"""

import math

import torch

from engine.plan.layers import tail_start


def _rotate(x, positions, rope, pairs):
    """Rotate x [T, .., R] to positions [T]; pairs: rotated dimensions lie side by side."""
    angle = positions.float()[:, None] * rope[0]
    cos, sin = (t.double() * rope[1] for t in (angle.cos(), angle.sin()))
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Simulation:
    """transformers' model `theirs` of a family with latent attention."""

    def __init__(self, theirs):
        theirs.set_experts_implementation("eager")  # the faster ones know no float64
        self.model, self.config = theirs.double(), theirs.config
        turns = self.model.model.rotary_emb
        self.rope = turns.inv_freq.float(), turns.attention_scaling
        self.pairs = self.config.model_type != "minicpm3"
        self.residual = getattr(self.model.model.layers[0], "residual_scale", 1.0)
        parameters = self.config.rope_parameters
        self.beta = parameters.get("llama_4_scaling_beta", 0.0)
        self.original = parameters.get("original_max_position_embeddings", 1)

    def _latents(self, layer, x, positions):
        """(latents [T, rank], rotated keys [T, R]) of normed x [T, hidden]."""
        attention, config = layer.self_attn, self.config
        both = attention.kv_a_proj_with_mqa(x)
        latent, key = both.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        return attention.kv_a_layernorm(latent), _rotate(key, positions, self.rope, self.pairs)

    def _attend(self, layer, x, latent, key, position, kept):
        """Attention of one token, normed x [hidden], to the rows `kept` of latents and keys: (its
        output [hidden], weights [H, kept]).
        """
        attention, config = layer.self_attn, self.config
        if attention.q_lora_rank is None:
            q = attention.q_proj(x)
        else:
            q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
        heads, plain = config.num_attention_heads, config.qk_nope_head_dim
        q_plain, q_turned = q.view(heads, -1).split([plain, config.qk_rope_head_dim], -1)
        at = torch.tensor([position])
        q_turned = _rotate(q_turned[None], at, self.rope, self.pairs)[0]
        made = attention.kv_b_proj(latent[kept]).view(len(kept), heads, -1)
        k_plain, v = made.split([plain, config.v_head_dim], -1)
        times = 1 + self.beta * math.log(1 + position // self.original) if self.beta else 1.0
        logits = torch.einsum("hd,thd->ht", q_plain, k_plain) + q_turned @ key[kept].T
        weights = torch.softmax(logits * attention.scaling * times, -1)
        return attention.o_proj(torch.einsum("ht,thd->hd", weights, v).flatten()), weights

    @torch.inference_mode()
    def steps(self, ids, n, count, method):
        """Decode ids[n : n + count] behind a prompt ids[:n] that is read fully. method: OmniKV with
        one filter layer, 0; None: full attention. Returns (logits [count, vocab], each step's
        chosen positions).
        """
        model, layers = self.model.model, self.model.model.layers
        positions = torch.arange(n)
        inputs = self.model(torch.tensor([ids[:n]]), output_hidden_states=True).hidden_states
        past = [
            self._latents(layer, layer.input_layernorm(inputs[number][0]), positions)
            for number, layer in enumerate(layers)
        ]
        found, chosen = [], []
        for position in range(n, n + count):
            x = model.embed_tokens(torch.tensor([ids[position]]))[0]
            everything = torch.arange(position + 1)
            kept = everything
            for number, layer in enumerate(layers):
                normed = layer.input_layernorm(x)
                fresh = self._latents(layer, normed[None], torch.tensor([position]))
                past[number] = tuple(torch.cat(both) for both in zip(past[number], fresh))
                seen = everything if number == 0 or method is None else kept
                out, weights = self._attend(layer, normed, *past[number], position, seen)
                if number == 0 and method is not None:
                    tail = int(tail_start(position + 1, method.tail))
                    best = weights.amax(0)[:tail].topk(min(method.tokens, tail)).indices
                    chosen.append(best)
                    kept = torch.cat((best.sort().values, torch.arange(tail, position + 1)))
                x = x + out * self.residual
                y = layer.mlp(layer.post_attention_layernorm(x)[None, None])[0, 0]
                x = x + y * self.residual
            x = model.norm(x)
            if hasattr(self.config, "logits_scaling"):
                x = x / self.config.logits_scaling
            found.append(self.model.lm_head(x))
        return torch.stack(found).float(), chosen
