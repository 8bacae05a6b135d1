"""The cost of a cycle of exact mode beside a step of full attention: counted bytes, both tiers.

A cycle is d draft steps and one step of full attention over d + 1 tokens. On a GPU bytes are all
that counts. On a CPU a further token of a step costs arithmetic, and a byte of K and V more than a
byte of weights: measured, by instruction set (engine/plan/cpu_costs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.model.config.config import ModelConfig
from engine.model.low_bits import FewBits
from engine.plan.cpu_costs import CpuCosts, cpu_costs
from engine.plan.layers import LayerPlan, Role

# device bytes that pass while one passes the link to host memory: 2 TB/s beside 50 GB/s
LINK = 40.0
# share of a draft's selected rows that no slot holds (docs/OFFLOAD.md: 0.2 to 0.3 at 4 slots)
MISSES = 0.3
# shares of drafts whose first 1, 2, ... 7 tokens are accepted, where four in five are; and what is
# left of each token's where verification chose what it reads (docs/EXACT.md)
FOUR_IN_FIVE = tuple(0.8**i for i in range(1, 8))
CHOSEN_BEFORE = 0.945
INT8 = 1 + 2 / 32  # bytes of a weight of a copy in int8: a scale of 16 bits for 32 of them


@dataclass(frozen=True)
class ExactCosts:
    """Costs of one model under one method, in bytes of weights. weights: bytes that a step reads of
    them; row: bytes of a row of a layer that sees everything; offloaded: layers in host memory of a
    GPU.
    """

    layers: LayerPlan
    weights: int
    row: int
    group: int  # query heads of a K/V head
    factors: CpuCosts
    offloaded: frozenset[int] = frozenset()
    experts: int = 0  # bytes of the experts that a token takes: another one takes others
    windows: tuple[int, ...] = ()  # tokens that each layer sees, 0 for all of them; (): all see all
    local: float = 1.0  # bytes of a sliding layer's row beside `row`
    drafted: int = 0  # bytes of weights that a draft step reads; 0: as every step
    early: int = 0  # layers that a draft step runs; 0: all

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layers: LayerPlan,
        itemsize: int,
        device_type: str,
        offloaded: Collection[int] = (),
        held: FewBits | None = None,
        early: int = 0,
        int8: bool = False,
    ) -> ExactCosts:
        """Costs on a device ("cpu" or "cuda"); on a CPU host memory is no other memory.

        held: weights in few bits; None: all in elements of `itemsize` bytes, as the bank. early:
        layers of a draft step, after which the head follows; 0: all. int8: whether drafts read a
        copy of the weights in int8.
        """
        mixture = config.experts
        weights = config.step_parameters * itemsize if held is None else held.read
        if held is None and not config.tied_embeddings:
            weights -= config.vocab_size * config.hidden_size * itemsize  # one row of it is read
        on_cpu = device_type == "cpu"
        kind = held.kind if held is not None else ""
        factors = cpu_costs(itemsize, kind=kind) if on_cpu else CpuCosts(filter=1, row=1)
        far = frozenset() if on_cpu else frozenset(offloaded)
        size = config.kv_bytes(itemsize)
        experts = 0
        if mixture is not None:
            one = 3 * config.hidden_size * mixture.width * mixture.per_token
            experts = one * (config.num_layers - len(mixture.dense)) * itemsize
        local = config.kv_bytes(itemsize, local=True) / size
        windows = config.windows
        head = config.vocab_size * config.hidden_size
        share = head / (config.step_parameters - (0 if config.tied_embeddings else head))
        part = int(weights * (share + (1 - share) * early / config.num_layers)) if early else 0
        if int8:
            part = int((part or weights) * INT8 / itemsize)
        of_rows = size, config.group, factors, far, experts, windows, local
        return cls(layers, weights, *of_rows, part, early)

    def full(self, rows: Sequence[int], tokens: int = 1, chooses: bool = False) -> float:
        """A step of full attention over `tokens` tokens. rows: bank rows by layer. chooses: whether
        its filter layers do, by the last token's scores.
        """
        more, f = tokens - 1, self.factors
        read = sum(
            n * (LINK if layer in self.offloaded else 1.0)
            for layer, n in enumerate(self._wide(rows))
        )
        attention = self.row * read * f.attention(self.group, tokens)
        if chooses:
            roles = zip(rows, self.layers.roles)
            scored = sum(n for n, role in roles if role is Role.FILTER)
            attention += self.row * scored * f.attention(self.group) * f.scored
        return self.weights * f.products(tokens) + self.experts * more + attention

    def draft(self, rows: Sequence[int], chooses: bool) -> float:
        """A draft step. chooses: whether its filter layers do, and fetch what they chose."""
        f, read = self.factors, 0.0
        for layer, n in enumerate(self._wide(rows)):
            role = self.layers.roles[layer]
            if chooses and role is not Role.SPARSE:
                read += n * (f.filter if role is Role.FILTER else 1.0)
                continue
            read += n * (f.kept or f.row)
            if chooses and layer in self.offloaded:
                read += n * MISSES * LINK
        return (self.drafted or self.weights) + self.row * read * f.attention(self.group)

    def drafts(self, rows: Sequence[int]) -> list[int]:
        """Rows that a draft step of the first layers reads, of those that all layers would."""
        return [n if layer < self.early else 0 for layer, n in enumerate(rows)]

    def predicted(
        self,
        context: int,
        read: int,
        most: int,
        fixed: bool = False,
        reached: Sequence[float] = FOUR_IN_FIVE,
        verifier: bool = False,
    ) -> tuple[int, float]:
        """(drafts, times full attention's speed) of the length up to `most` that pays best at
        `context` tokens; fixed: of `most` drafts.

        read: rows that a sparse layer reads. reached: shares of drafts whose first 1, 2, ... 7
        tokens are all accepted. verifier: whether verifications choose what drafts read.
        """
        dense, first, later = self._steps(context, read)
        if verifier:
            first, fewer = later, (CHOSEN_BEFORE**i for i in range(1, len(reached) + 1))
            reached = [share * left for share, left in zip(reached, fewer)]

        def gain(drafts: int) -> float:
            tokens = 1 + sum(reached[:drafts])
            cost = self.full(dense, drafts + 1, verifier and drafts > 0)
            if drafts:
                cost += first + later * (drafts - 1)
            return tokens * self.full(dense) / cost

        best = most if fixed else max(range(most + 1), key=gain)
        return best, gain(best)

    def alone(self, context: int, read: int) -> float:
        """Times full attention's speed of the drafting method by itself."""
        dense, first, _ = self._steps(context, read)
        return self.full(dense) / first

    def _wide(self, rows: Sequence[int]) -> list[float]:
        """Rows by layer, each counted by its bytes beside those of a layer that sees everything."""
        roles = self.layers.roles
        return [n * (self.local if role is Role.LOCAL else 1.0) for role, n in zip(roles, rows)]

    def _steps(self, context: int, read: int) -> tuple[list[int], float, float]:
        """(rows of a full step by layer, cost of the first draft step, of a later one)."""
        roles = self.layers.roles
        windows = self.windows or (0,) * len(roles)
        rows = [
            0 if role is Role.RECURRENT else min(context, window) if window else context
            for role, window in zip(roles, windows)
        ]
        if self.early:
            cost = self.draft(self.drafts(rows), True)
            return rows, cost, cost
        own = [read if role is Role.SPARSE else n for role, n in zip(roles, rows)]
        kept = [min(read, n) for n in rows]
        return rows, self.draft(own, True), self.draft(kept, False)
