"""MagicPIG: tokens are drawn by locality-sensitive hashing, and what is drawn stands for the rest.

Source: Chen et al., MagicPIG, ICLR 2025, sections 4.1 and 4.2, Algorithm 1, and
Infini-AI-Lab/MagicPIG (models/cache.py, refs/hf_cache_ref.py). A key, less the mean of all keys,
has in each of L tables the signs of K random directions; a token is read whose signs are those of
the query in two tables or more. Each query head then adds to a drawn token's logit minus the log
of the probability with which it is drawn: attention is estimated, not cut. First and newest tokens
are read with certainty. Published: K 10, L 150 (8 and 75 to 10 and 300 tried), 4 first and 64
newest tokens, layer 0 and the middle one dense, 1e-4 added to probabilities.

The mean is that of the first `train` keys behind the first tokens, not of the whole prompt, and
everything is read until there are so many: so an index is made while rows are on the device, does
not depend on chunks, and follows the text back; tokens of the answer are hashed as well. One set of
directions per K/V head serves all layers (there: 16). A K/V head's list is what any of its query
heads has drawn; each weighs its own draws only. Where more are drawn than the budget has room for,
those that agree in most tables are read, and the estimate leans to them. Signatures are on the
device, 2 bytes a table: at the published L more than K itself. Prompts are read densely.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import boolean, integer, one_of
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer, Selection
from engine.methods.select.index.base import Indexed, grouped
from engine.methods.select.varying.base import VaryingRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, single_layer_groups
from kernels.rows.forms import key_floats
from kernels.sketch.agreement import agreement
from kernels.sketch.drawn import Draws, attend_drawn

AGREE = 2  # tables in which a token and a query must agree
PIECE = 256  # tokens hashed at a time: 12 MB of signs at K 10, L 150 and 8 heads


@dataclass(frozen=True)
class MagicPIG(Indexed):
    """Budget as Budgeted's: the most that a list takes, first and newest tokens included. bits: K,
    signs of a table; tables: L. sink: first tokens, always read; recent: newest ones. train: tokens
    behind the first whose keys make the mean. seed: of the directions. middle: whether the middle
    layer reads everything too. dense_layers: as Indexed's.
    """

    full_prompts = True

    bits: int = 10
    tables: int = 150
    sink: int = 4
    recent: int = 64
    train: int = 1024
    seed: int = 0
    middle: bool = True
    dense_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("bits", self.bits, 1, 15)
        integer("tables", self.tables, AGREE, 255)
        integer("sink", self.sink, 0)
        integer("recent", self.recent, 1)
        integer("train", self.train, 1)
        integer("seed", self.seed, 0)
        boolean("middle", self.middle)
        one_of("gqa_reduce", self.gqa_reduce, ("max",))

    def budget(self, length: int) -> int:
        """The first and the newest tokens, and one more at least."""
        return max(self.sink + self.recent + 1, super().budget(length))

    def newest(self, budget: int) -> int:
        return self.recent

    @property
    def ready(self) -> int:
        """Tokens from which on there is a mean."""
        return self.sink + self.train

    def since(self, length: int) -> int:
        """Behind the first tokens, where the mean is still to be made."""
        return length if length >= self.ready else min(length, self.sink)

    def grows(self, known: int, length: int) -> bool:
        """Where there is a mean."""
        return length >= self.ready

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers` and in the middle."""
        layers = config.num_layers
        also = {layers // 2} if self.middle else set()
        chosen = [i for i in range(self.dense_layers, layers) if i not in also]
        return single_layer_groups(layers, chosen, config.local_layers, config.recurrent_layers)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Every token's signs, of which directions, in how many tables a query head agrees, and
        which of the chosen tokens it has drawn.
        """
        layers, heads, dim = len(plan.sparse_layers), config.num_kv_heads, config.head_dim
        rows, signs = (capacity, self.bits * self.tables) if layers else (0, 0)
        given = super().buffers(plan, config, capacity, batch)
        most = given["index"].shape[2]
        return given | {
            "codes": Buffer((layers, batch, heads, self.tables, capacity), torch.int16),
            "means": Buffer((layers, batch, heads, dim), torch.float32),
            "directions": Buffer((heads, dim, signs), torch.float32),
            "agreed": Buffer((batch * config.num_heads, rows), torch.uint8),
            "drawn": Buffer((layers, batch, heads, config.group, most), torch.bool),
        }

    def runtime(self, setup: Setup) -> Runtime:
        return MagicPIGRuntime(self, setup)


@dataclass(frozen=True)
class Drawn(Selection):
    """A choice of which every query head has drawn some tokens, and the first ones with certainty:
    drawn [B, Hkv, G, K] bool. means float32 [B, Hkv, D]: of keys.
    """

    drawn: torch.Tensor = field(kw_only=True)
    means: torch.Tensor = field(kw_only=True)


class MagicPIGRuntime(VaryingRuntime):
    """No CUDA graph: the host knows which rows are new."""

    method: MagicPIG
    codes: torch.Tensor
    means: torch.Tensor
    directions: torch.Tensor
    agreed: torch.Tensor
    drawn: torch.Tensor
    apart = True
    _drawn: torch.Tensor  # int32 [B, Hkv]: tokens between first and newest that any head draws

    def __init__(self, method: MagicPIG, setup: Setup):
        super().__init__(method, setup)
        generator = torch.Generator().manual_seed(method.seed)
        self.directions.copy_(torch.randn(self.directions.shape, generator=generator))

    # ---------------------------------------------------------------- the index

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        method, start = self.method, max(first, self.method.sink)
        keys, mean = key_floats(k[:, start - first :]), self.means[group, b]
        if start < method.ready:
            # contiguous: the order of a sum, and so its last bit, is that of strides, which differ
            # between tiers
            mean.copy_(keys[:, : method.train].contiguous().mean(1))
        for at in range(0, keys.shape[1], PIECE):
            some = keys[:, at : at + PIECE] - mean.unsqueeze(1)
            codes = self.hashed(some).transpose(1, 2)
            self.codes[group, b, :, :, start + at : start + at + some.shape[1]] = codes

    def hashed(self, rows: torch.Tensor) -> torch.Tensor:
        """The signs of rows float32 [Hkv, n, D] in every table: int16 [Hkv, n, L]."""
        signs = (rows @ self.directions > 0).unflatten(2, (self.method.tables, -1))
        powers = 2 ** torch.arange(self.method.bits, dtype=torch.int16, device=rows.device)
        return (signs * powers).sum(-1, dtype=torch.int16)

    def score(self, group: int, q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """In how many tables a token and any query head agree; in self.agreed each head's."""
        method, heads = self.method, self.codes.shape[2]
        scores = self.scores.view(len(q), heads, -1)
        scores[:, :, : method.sink] = float("inf")
        agreed = self.agreed.view(len(q), heads, -1, self.agreed.shape[1])
        agreed[..., : method.sink] = AGREE
        self._drawn = torch.zeros(len(q), heads, dtype=torch.int32, device=q.device)
        for b, n in enumerate(lengths):
            last = max(method.sink, n - method.recent)
            if n < method.ready:
                continue
            part = slice(method.sink, last)
            given = agreed[b, :, :, part], scores[b, :, part], AGREE, self.setup.backend
            asked = self.hashed(grouped(q[b], heads))
            self._drawn[b] = agreement(asked, self.codes[group, b, :, :, part], *given)
        return self.scores

    def wanted(self, stop: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """What any query head has drawn, and the first tokens."""
        drawn = self._drawn.flatten() + stop.clamp(max=self.method.sink)
        return torch.minimum(drawn, room)

    def completed(self, group: int, chosen: Selection, lengths: list[int]) -> Selection:
        assert chosen.index is not None
        index = chosen.index
        agreed = self.agreed.view(*index.shape[:2], -1, self.agreed.shape[1])
        at = index.long().clamp_(0, self.agreed.shape[1] - 1).unsqueeze(2)
        drawn = self.drawn[group]
        torch.ge(agreed.gather(3, at.expand(-1, -1, agreed.shape[2], -1)), AGREE, out=drawn)
        own = index, chosen.counts, chosen.tail_start
        return Drawn(*own, drawn=drawn, means=self.means[group])

    # ---------------------------------------------------------------- a step

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Every query head attends to what it has drawn, weighed by how probable that was."""
        if not isinstance(chosen, Drawn):
            return super().attend_selection(layer, q, step, chosen)
        rows = step.bank.picked(layer, *chosen.rows(), chosen.tail_start, step)
        ends = zip(rows.tail_start.tolist(), rows.stop.tolist())
        method, found = self.method, []
        for b, (first, stop) in enumerate(ends):
            own = rows.index[b], rows.counts[b], chosen.drawn[b], chosen.means[b]
            draws = Draws(*own, method.sink, method.bits, method.tables)
            given = first, stop, self.scale, self.setup.backend
            found.append(attend_drawn(q[b], rows.k[b], rows.v[b], draws, *given))
        return torch.stack(found)

    def choice(self) -> Any:
        return {
            group: replace(chosen, drawn=chosen.drawn.clone(), means=chosen.means.clone())
            if isinstance(chosen, Drawn)
            else chosen
            for group, chosen in super().choice().items()
        }

    # ---------------------------------------------------------------- what a step reads

    def covers(self, lengths: list[int]) -> bool:
        """Where there is no mean yet, or nothing between the first and the newest tokens."""
        return all(self.choosable(n) == 0 for n in lengths)

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest tokens; all, where there is no mean yet."""
        hashed = step.visible >= self.method.ready
        return torch.where(hashed, super().tail_start(step), 0).to(step.visible.dtype)

    def beside(self, n: int) -> int:
        return super().beside(n) if n >= self.method.ready else n

    def choosable(self, n: int) -> int:
        """Tokens between the first and the newest, where there is a mean."""
        method = self.method
        return max(0, n - method.sink - method.recent) if n >= method.ready else 0

    def tokens_read(self, n: int) -> int:
        return super().tokens_read(n) if n >= self.method.ready else n

    def choosing_bytes(self, n: int) -> int:
        """Signs of every token."""
        return 0 if self.covers([n]) else len(self.plan.sparse_layers) * self.index_bytes(n)

    def index_bytes(self, n: int) -> int:
        """The signs of every token in every table."""
        heads, tables = self.codes.shape[2:4]
        return heads * tables * n * self.codes.element_size()
