"""Chunked prefill: the prompt goes through the model chunk by chunk; activations are O(chunk),
logits those of the last token only.
"""

import torch

from engine.model.llama import post_attention, pre_attention

# newest queries of a chunk that go into the query ring: the largest selector window
WINDOW_KEPT = 64


def run_chunk(model, rotary, runtime, bank, tokens, start, total, write=True, last_logits=False):
    """One chunk through all layers. tokens [B, C] int64 at positions start .. start+C-1, total: the
    prompt's whole length.

    Returns (logits [B, vocab] float32 or None, newest q_pre_rope queries [layers, B, min(C,
    WINDOW_KEPT), H, D]). With write=False the rows in the bank stay as they are (they are this
    chunk's own already) and only the queries are wanted.
    """
    config = model.config
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
    cos, sin = rotary.at(positions[:1], total)
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    x = model.embed[tokens]
    newest = []
    for number, layer in enumerate(model.layers):
        q, k, v, q_pre_rope = pre_attention(layer, x, cos, sin, *sizes)
        newest.append(q_pre_rope[:, -WINDOW_KEPT:].clone())
        del q_pre_rope
        if write:
            bank.write_chunk(number, k, v, start)
        del k, v
        first = start
        if number == config.num_layers - 1:
            if runtime.reads_every_query:
                runtime.prefill_attend(number, q, bank, first)
            if not last_logits:
                # the last layer's output is wanted for the prompt's last token only
                break
            x, q, first = x[:, -1:], q[:, -1:], start + tokens.shape[1] - 1
        attended = runtime.prefill_attend(number, q, bank, first)
        del q
        x = post_attention(layer, x, attended, config.rms_norm_eps)
    return model.logits(x[:, -1]) if last_logits else None, torch.stack(newest)
