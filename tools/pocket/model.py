"""The shipped model while it trains: the Llama architecture with all layers' matrices in stacks,
and its structured start.

The structured start writes an induction circuit into the first weights (two heads that look one and
two tokens back, and matching heads that look for tokens whose previous token is mine); without it a
run of an hour on two cores does not begin to retrieve (docs of the model card).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MATCH_LAYERS = (2, 4)
PLAIN_UNTIL = 512
# how strongly layer 0 writes what stood before beside the token itself; 0.2 drowned it
# (docs/LOG.md)
BACK = 0.14
LOWEST_PAIR = (
    # rotary pairs from here on turn less than one radian over 8,000 positions: matching at distance
    # lives there
    14
)


@dataclass(frozen=True)
class Shape:
    """Sizes; the names of config.json in short."""

    vocab: int = 5120
    hidden: int = 256
    inner: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    theta: float = 1e9
    eps: float = 1e-5
    positions: int = 32768


class Pocket(nn.Module):
    """Causal language model, tied embeddings. Matrices are [layers, out, in], as Muon takes them."""

    def __init__(self, shape: Shape):
        super().__init__()
        s = self.shape = shape
        self.dtype = torch.float32  # of the products; compute_dtype() says what is fast
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        zeros = lambda *size: nn.Parameter(torch.zeros(s.layers, *size))  # noqa: E731
        self.embed = nn.Parameter(torch.zeros(s.vocab, s.hidden))
        self.q, self.k, self.v, self.o = (
            zeros(q, s.hidden),
            zeros(kv, s.hidden),
            zeros(kv, s.hidden),
            zeros(s.hidden, q),
        )
        self.gate, self.up, self.down = (
            zeros(s.inner, s.hidden),
            zeros(s.inner, s.hidden),
            zeros(s.hidden, s.inner),
        )
        self.norm1 = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.norm2 = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.norm = nn.Parameter(torch.ones(s.hidden))

    def matrices(self) -> list[nn.Parameter]:
        """The stacks that Muon trains."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def others(self) -> list[nn.Parameter]:
        """What AdamW trains: embeddings and norms."""
        return [self.embed, self.norm1, self.norm2, self.norm]

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Final normed states [B, L, hidden] (self.dtype) of tokens [B, L] at positions [B, L]."""
        s = self.shape
        table = tuple(t.to(self.dtype) for t in rope_table(positions, s))
        # what the layers add up stays float32; products are in self.dtype
        x = F.embedding(tokens, self.embed).flatten(0, 1)
        stacks = [m.to(self.dtype).unbind(0) for m in self.matrices()] + [
            self.norm1.unbind(0),
            self.norm2.unbind(0),
        ]
        for weights in zip(*stacks, strict=True):
            x = block(x, tokens.shape[0], table, s, *weights)
        return rms(x, self.norm, s.eps).to(self.dtype).view(*tokens.shape, -1)

    def logits(self, states: Tensor) -> Tensor:
        """[..., vocab] float32."""
        return (states @ self.embed.to(self.dtype).T).float()


def compute_dtype(device: str) -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32: without AMX one core makes 31
    GFLOP/s of bfloat16 and 150 of float32.
    """
    fast = device != "cpu" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, statistics in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_table(positions: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [B * L, 1, head_dim] float32 for the half-split layout."""
    half = s.head_dim // 2
    frequency = s.theta ** (
        -torch.arange(half, dtype=torch.float32, device=positions.device) / half
    )
    angle = positions.reshape(-1, 1, 1).float() * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [B * L, H, D]."""
    a, b = x.chunk(2, -1)
    return x * table[0] + torch.cat((-b, a), -1) * table[1]


def before(
    x: Tensor, table, s: Shape, q: Tensor, k: Tensor, v: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention, on flat tokens x [N, hidden]: rotated queries [N, H, D], keys
    and values [N, Hkv, D].

    Flat, so that one compiled form serves every row length of the same number of tokens (a
    compilation takes minutes on a busy CPU).
    """
    h = rms(x, norm, s.eps).to(q.dtype)
    query, key, value = ((h @ w.T).view(x.shape[0], -1, s.head_dim) for w in (q, k, v))
    return rotate(query, table), rotate(key, table), value


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention: query [B, Hkv, G, L, D], key and value [B, Hkv, L, D] -> the shape of
    query.
    """
    length = query.shape[3]
    scores = query @ (key.unsqueeze(2).transpose(-1, -2) * query.shape[-1] ** -0.5)
    mask = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    return (scores + mask).softmax(-1) @ value.unsqueeze(2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in the shapes of plain_attention, by whichever form trains faster.

    On a CPU that is the plain one to 512 tokens, torch's fused one above (measured at 1,024: 62
    against 80 ms a layer).
    """
    batch, kv_heads, group, length, dim = query.shape
    if length > PLAIN_UNTIL or query.is_cuda:
        flat = [
            x.unsqueeze(2).expand_as(query).reshape(batch, kv_heads * group, length, dim)
            for x in (key, value)
        ]
        return F.scaled_dot_product_attention(query.flatten(1, 2), *flat, is_causal=True).view_as(
            query
        )
    return plain_attention(query, key, value)


def after(
    x: Tensor,
    mixed: Tensor,
    s: Shape,
    o: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor,
) -> Tensor:
    """The rest of a layer on flat tokens: x [N, hidden], mixed [N, H * D]."""
    x = x + mixed @ o.T
    h = rms(x, norm, s.eps).to(gate.dtype)
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def block(
    x: Tensor, batch: int, table, s: Shape, q, k, v, o, gate, up, down, norm1, norm2
) -> Tensor:
    """One decoder layer on x [batch * L, hidden]."""
    query, key, value = before(x, table, s, q, k, v, norm1)
    key, value = (y.view(batch, -1, s.kv_heads, s.head_dim).transpose(1, 2) for y in (key, value))
    query = query.view(batch, -1, s.heads, s.head_dim).transpose(1, 2)
    mixed = attend(query.unflatten(1, (s.kv_heads, s.heads // s.kv_heads)), key, value)
    mixed = mixed.flatten(1, 2).transpose(1, 2).reshape(x.shape[0], s.heads * s.head_dim)
    return after(x, mixed, s, o, gate, up, down, norm2)


def _orthonormal(rows: int, cols: int, gen: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(cols, rows, generator=gen))[0].T


@torch.no_grad()
def structured_start(model: Pocket, spelled: list[str], seed: int) -> None:
    """Fill the weights. spelled[i] is token i's text: tokens of one to three digits get vectors of
    their digits and places.
    """
    s, gen = model.shape, torch.Generator().manual_seed(seed)
    d, hd = s.hidden, s.head_dim
    mean = F.normalize(torch.randn(d, generator=gen), dim=0)
    project = torch.eye(d) - mean[:, None] * mean[None, :]
    content = F.normalize(
        (torch.randn(s.vocab, d, generator=gen) + word_vectors(spelled, d, gen)) @ project, dim=1
    )
    content = F.normalize(content + 0.8 * digit_vectors(spelled, d, gen) @ project, dim=1)
    model.embed.copy_(content + mean)
    for stack, scale in (
        (model.q, 0.5),
        (model.k, 0.5),
        (model.v, 0.5),
        (model.gate, 0.7),
        (model.up, 0.7),
    ):
        stack.copy_(torch.randn(stack.shape, generator=gen) * scale / math.sqrt(d))
    model.o.copy_(torch.randn(model.o.shape, generator=gen) * 0.02 / math.sqrt(d))
    model.down.zero_()
    # dims that hardly turn
    low = [i + side * hd // 2 for side in (0, 1) for i in range(LOWEST_PAIR, hd // 2)]
    code = torch.zeros(hd, d)
    code[low] = _orthonormal(len(low), d, gen) @ project
    outs = [torch.zeros(hd, d) for _ in range(4)]
    for out in outs:
        out[low] = _orthonormal(len(low), d, gen) @ project
    _look_back(model, mean, code, outs)
    turns = [torch.zeros(hd, hd) for _ in range(3)]
    for turn in turns:
        turn[torch.tensor(low)[:, None], torch.tensor(low)[None, :]] = _orthonormal(
            len(low), len(low), gen
        )
    _match(model, code, outs, turns, project, gen)


def _look_back(model: Pocket, mean: Tensor, code: Tensor, outs: list[Tensor]) -> None:
    """Layer 0: constant keys; three heads' queries are turned by one, two and three positions, the
    fourth sees the last few alike; each writes the code of what it sees into a subspace of its own.
    """
    s, hd, half = model.shape, model.shape.head_dim, model.shape.head_dim // 2
    frequency = s.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    fast, near = (frequency > 0.03).float(), ((frequency > 0.03) & (frequency < 0.2)).float()
    norm_mean = math.sqrt(s.hidden / 2)  # length of the mean part of a normed embedding
    strength = 2.6 * math.sqrt(math.sqrt(hd))
    constant = torch.cat((fast, torch.zeros(half)))
    for kv in range(2):
        model.k[0, kv * hd : (kv + 1) * hd] = (
            strength * constant[:, None] * mean[None, :] / norm_mean
        )
        model.v[0, kv * hd : (kv + 1) * hd] = code
    for head, (offset, weight) in enumerate(((1, fast), (2, fast), (3, fast), (0, near))):
        turned = torch.cat(
            (weight * torch.cos(offset * frequency), -weight * torch.sin(offset * frequency))
        )
        model.q[0, head * hd : (head + 1) * hd] = (
            strength * turned[:, None] * mean[None, :] / norm_mean
        )
        model.o[0, :, head * hd : (head + 1) * hd] = BACK * outs[head].T


def _match(
    model: Pocket,
    code: Tensor,
    outs: list[Tensor],
    turns: list[Tensor],
    project: Tensor,
    gen: torch.Generator,
) -> None:
    """The matching layers: head 0 finds tokens whose previous token is mine; head 2 those that have
    my last two tokens one place further back, behind one separator; head 3 those with the same
    words near. Each comparison in a random basis of its own, so that a key's two tokens are told
    from one.
    """
    hd, gain = model.shape.head_dim, 1.75
    second, third, around = turns
    offered = second @ outs[1] + third @ outs[2] + around @ outs[3]
    for layer in MATCH_LAYERS:
        asked = {0: code, 2: second @ outs[0] + third @ outs[1], 3: around @ outs[3]}
        for head, query in asked.items():
            model.q[layer, head * hd : (head + 1) * hd] = gain * query
        for kv, key in ((0, outs[0]), (1, offered)):
            copy = _orthonormal(hd, model.shape.hidden, gen) @ project
            model.k[layer, kv * hd : (kv + 1) * hd] = gain * key
            model.v[layer, kv * hd : (kv + 1) * hd] = copy
            model.o[layer, :, 2 * kv * hd : (2 * kv + 1) * hd] = 0.2 * copy.T


def word_vectors(spelled: list[str], width: int, gen: torch.Generator) -> Tensor:
    """[vocab, width]: normal vectors, one for all tokens that are the same word but for spaces: "
    k" is asked for as "k".
    """
    names = [
        text.strip() if text.strip().isalpha() else str(index) for index, text in enumerate(spelled)
    ]
    places = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return torch.randn(len(places), width, generator=gen)[
        torch.tensor([places[name] for name in names])
    ]


def digit_vectors(spelled: list[str], width: int, gen: torch.Generator) -> Tensor:
    """[vocab, width]: for a token of one to three digits the sum of vectors of (place, digit), with
    the digit also as a point on circles.
    """
    places = torch.randn(3, 10, width, generator=gen) / math.sqrt(width)
    circle = torch.randn(3, 6, width, generator=gen) / math.sqrt(width)
    length = torch.randn(3, width, generator=gen) / math.sqrt(width)
    out = torch.zeros(len(spelled), width)
    for index, text in enumerate(spelled):
        if text.isascii() and text.isdigit() and len(text) <= 3:
            for place, char in enumerate(reversed(text)):
                angle = 2 * math.pi * int(char) / 10 * torch.tensor([1.0, 2.0, 5.0])
                turn = torch.cat((angle.cos(), angle.sin()))
                out[index] += places[place, int(char)] + turn @ circle[place]
            out[index] += 0.5 * length[len(text) - 1]
    return out / 2


def config_json(s: Shape) -> dict:
    """The model's config.json, a plain LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "max_position_embeddings": s.positions,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
    }


NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}


@torch.no_grad()
def load(folder: Path) -> Pocket:
    """A folder that export wrote (or another tied Llama without biases), ready to train."""
    from safetensors.torch import load_file

    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        c["vocab_size"],
        c["hidden_size"],
        c["intermediate_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["rope_theta"],
        c["rms_norm_eps"],
        c["max_position_embeddings"],
    )
    model, tensors = Pocket(shape), load_file(folder / "model.safetensors")
    model.embed.copy_(tensors["model.embed_tokens.weight"])
    model.norm.copy_(tensors["model.norm.weight"])
    for short, long in NAMES.items():
        for layer in range(shape.layers):
            getattr(model, short)[layer].copy_(tensors[f"model.layers.{layer}.{long}.weight"])
    return model


def export(model: Pocket, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bf16, Hugging Face names), each
    written beside and renamed.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for short, long in NAMES.items():
        for layer in range(model.shape.layers):
            tensors[f"model.layers.{layer}.{long}.weight"] = getattr(model, short)[layer]
    tensors = {
        name: tensor.detach().bfloat16().contiguous().clone() for name, tensor in tensors.items()
    }
    save_file(tensors, str(folder / "model.safetensors.part"), metadata={"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")
    generation = {
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    for name, data in (
        ("config.json", config_json(model.shape)),
        ("generation_config.json", generation),
    ):
        (folder / (name + ".part")).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (folder / (name + ".part")).replace(folder / name)
