"""A decode step in the form of the published OmniKV code, as a contestant: what its Hugging Face
path asks of torch for one token, over our weights.

Written in our words from that code's behaviour (antgroup/OmniKV at 5c33cb5, under transformers
4.41.2), which OmniKV(official=True) reproduces choice by choice; a test holds the two together.
Its form, which is what is timed:

- every operator is a launch of its own; q, k, v, gate and up are five products;
- a filter layer normalises its input, projects q and rotates it once more for the choice, scores
  the prompt's keys (repeated to all query heads) by the largest raw logit of any head, takes the
  top k and sorts them; then it attends to everything;
- the rows of each sparse layer are then gathered, layer by layer: two index_select. Offloaded, they
  run on the host, the index visits it, and two copies from unpinned memory follow;
- K and V of a layer that reads everything grow by torch.cat in every step, as do the tails; a
  sparse layer attends to the chosen rows and its tail, joined by another torch.cat;
- K and V are repeated to all query heads before attention, which is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

from engine import LLM, OmniKV
from engine.base.figures import human
from engine.load.loaded import Loaded
from engine.model.config.block import LLAMA
from engine.model.llama import rms_norm
from engine.plan.free_memory import HEADROOM, available_bytes
from engine.plan.layers import Role
from kernels.layer.linear import Linear
from tools.bench.run import Missing

Rows = tuple[torch.Tensor, torch.Tensor]  # K and V, [1, Hkv, T, D] each


class PublishedStep:
    """One request at the end of its prompt. prompt: K and V of every layer. offloaded: the sparse
    layers' prompt rows are in host memory (`real_offload`).

    chosen: {filter layer: int64 [k]} of the last step. Raises Missing where the model or the method
    is none that the published code has.
    """

    def __init__(self, llm: Loaded, method: OmniKV, prompt: Iterable[Rows], offloaded: bool):
        self._require(llm, method)
        self.llm, self.model, self.config = llm, llm.model, llm.config
        self.plan = method.plan(llm.config)
        self.name = "published, offloaded" if offloaded else "published"
        self.settings = f"plain torch, eager; filters {method.filter_layers}"
        self._sparse = [role is Role.SPARSE for role in self.plan.roles]
        self._prompt: list[Rows] = []
        for (k, v), apart in zip(prompt, self._sparse):
            self._prompt.append((k.cpu(), v.cpu()) if offloaded and apart else (k, v))
        self.n = self._prompt[0][0].shape[2]
        self.k = min(method.budget(self.plan, self.n), self.n)
        self.chosen: dict[int, torch.Tensor] = {}
        self._picked: dict[int, Rows] = {}
        self._products = [self._split(layer) for layer in self.model.layers]
        self.token = 0
        self.rewind()

    @staticmethod
    def _require(llm: LLM | Loaded, method: OmniKV) -> None:
        if llm.config.block != LLAMA or llm.config.windows or not method.official:
            raise Missing("the published code runs Llama's block and OmniKV(official=True)")
        if llm.model is not None and llm.model.staged is not None:
            raise Missing("the published form needs weights that stay on the device")
        if (method.selector, method.kind) != ("last", "raw"):
            raise Missing(f"selector: found {method.selector}, {method.kind}, expected last, raw")

    def _split(self, layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The seven products of a layer, over views of the weights that the engine holds fused."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        inner = layer.down.shape[1]
        return {
            "q": _rows_of(layer.qkv, 0, q),
            "k": _rows_of(layer.qkv, q, q + kv),
            "v": _rows_of(layer.qkv, q + kv, q + 2 * kv),
            "gate": _rows_of(layer.gate_up, 0, inner),
            "up": _rows_of(layer.gate_up, inner, 2 * inner),
        }

    def rewind(self) -> None:
        """Back to the prompt."""
        c = self.config
        none = torch.empty(
            1, c.num_kv_heads, 0, c.head_dim, dtype=self.model.dtype, device=self.model.device
        )
        self.length = self.n
        # K and V that grow: all rows, or those generated
        self._grown = [
            (none, none) if apart else rows for rows, apart in zip(self._prompt, self._sparse)
        ]

    # ---------------------------------------------------------------- a step

    def step(self) -> int:
        """One greedy step; reading the token waits for the device."""
        self.token = int(self.forward(self.token).argmax())
        return self.token

    @torch.inference_mode()
    def forward(self, token: int) -> torch.Tensor:
        """Feed a token; logits float32 [vocab]."""
        model, eps = self.model, self.config.rms_norm_eps
        x = model.embedded(torch.tensor([[token]], device=model.device))
        at = torch.tensor([[self.length]], device=model.device)
        for number, layer in enumerate(model.layers):
            assert layer.input_norm is not None and layer.post_norm is not None
            products = self._products[number]
            group = next((g for g in self.plan.groups if g.filter_layer == number), None)
            if group is not None and group.layers:
                self._choose(number, rms_norm(x, layer.input_norm, eps), at)
                self._load(group.layers, self.chosen[number])
            h = rms_norm(x, layer.input_norm, eps)
            q, k, v = (self._heads(products[name](h)) for name in "qkv")
            q, k = self._turned(q, number, at), self._turned(k, number, at)
            x = x + layer.o(self._attend(number, q, k, v))
            h = rms_norm(x, layer.post_norm, eps)
            x = x + layer.down(F.silu(products["gate"](h)) * products["up"](h))
        self.length += 1
        return model.logits(x)[0, -1]

    def _choose(self, layer: int, h: torch.Tensor, at: torch.Tensor) -> None:
        """The k prompt tokens whose keys have the largest logit under any head, ascending."""
        q = self._turned(self._heads(self._products[layer]["q"](h)), layer, at)
        keys = self._repeated(self._grown[layer][0][:, :, : self.n])
        logits = torch.matmul(q, keys.transpose(2, 3)) * self.config.scale
        best = logits.amax(dim=1).flatten()
        self.chosen[layer] = best.topk(self.k).indices.sort().values

    def _load(self, layers: Sequence[int], index: torch.Tensor) -> None:
        """Gather the chosen rows of a group's layers."""
        for layer in layers:
            k, v = self._prompt[layer]
            where = index.to(k.device)
            self._picked[layer] = (
                k.index_select(2, where).to(index.device, non_blocking=True),
                v.index_select(2, where).to(index.device, non_blocking=True),
            )

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        before = self._grown[layer]
        rows = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        self._grown[layer] = rows
        if self._sparse[layer]:
            picked = self._picked[layer]
            rows = torch.cat((picked[0], rows[0]), 2), torch.cat((picked[1], rows[1]), 2)
        keys, values = self._repeated(rows[0]), self._repeated(rows[1])
        out = F.scaled_dot_product_attention(q, keys, values, scale=self.config.scale)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, heads * D] -> [1, heads, 1, D]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _repeated(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, Hkv, T, D] -> [1, H, T, D], copied."""
        group = self.config.num_heads // self.config.num_kv_heads
        return rows if group == 1 else rows.repeat_interleave(group, 1)

    def _turned(self, x: torch.Tensor, layer: int, at: torch.Tensor) -> torch.Tensor:
        """Rotate [1, heads, 1, D] to a position; angles are computed for every layer again."""
        cos, sin = (
            torch.cat((t, t), -1).to(x.dtype).unsqueeze(1)
            for t in self.llm.rotary.at(at, layer=layer)
        )
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def close(self) -> None:
        """Drop all rows."""
        self._prompt, self._grown, self._picked = [], [], {}


def _rows_of(weight, first: int, stop: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with rows first .. stop-1 of a weight."""
    if not isinstance(weight, Linear) or weight.form == "packed":
        raise Missing("the published form needs weights that are held plain")
    bias = None if weight.bias is None else weight.bias[first:stop]
    if weight.form == "narrow":
        part = weight.weight[:, first:stop]
        return lambda x: x @ part if bias is None else x @ part + bias
    part = weight.weight[first:stop]
    return lambda x: F.linear(x, part, bias)


class PublishedPeer:
    """Makes the contestant at a depth, for tools.bench.suite."""

    def __init__(self, llm: LLM, method: OmniKV, offloaded: bool):
        self.llm, self.method, self.offloaded = llm, method, offloaded
        self.name = "published, offloaded" if offloaded else "published"
        self.settings, self.trials = "plain torch, eager", {}
        self._row = llm.config.kv_bytes(llm.dtype.itemsize)
        self._away = len(method.plan(llm.config).sparse_layers) if offloaded else 0

    def bytes_at(self, n: int) -> int:
        """Rows on the device, and those of a layer that grows: twice, and repeated to all heads."""
        config = self.llm.config
        once = 2 + 2 * config.num_heads // config.num_kv_heads
        return n * self._row * (config.num_layers - self._away + once)

    def host_bytes_at(self, n: int) -> int:
        """Rows in host memory."""
        return n * self._row * self._away

    def at(self, n: int, room: int) -> Callable[[], PublishedStep]:
        """A maker of the contestant with a prompt of n random rows."""
        if self.host_bytes_at(n) > HEADROOM * available_bytes(torch.device("cpu"))[0]:
            raise Missing(f"needs {human(self.host_bytes_at(n))} of host memory")

        def make() -> PublishedStep:
            c, device = self.llm.config, self.llm.device
            noise = torch.randn(
                1, c.num_kv_heads, n, c.head_dim, device=device, dtype=self.llm.dtype
            )
            # one layer at a time, since an offloaded one leaves the device
            rows = ((noise.clone(), noise.flip(2)) for _ in range(c.num_layers))
            return PublishedStep(self.llm.load(), self.method, rows, self.offloaded)

        return make

    def prefill(self, ids: Sequence[int]) -> float:
        """Not timed: it reads prompts as transformers does."""
        raise Missing("reads prompts by full attention, as transformers does")

    def close(self) -> None:
        """Nothing is held between depths."""


def published_peers(
    filters: Sequence[int], tokens: int, offloaded: Sequence[bool] = (False, True)
) -> list[Callable[[LLM], PublishedPeer]]:
    """Makers of the published form's contestants, on the device and offloaded."""
    method = OmniKV(filter_layers=tuple(filters), wait_layers=1, tokens=tokens, official=True)
    return [lambda llm, away=away: PublishedPeer(llm, method, away) for away in offloaded]
