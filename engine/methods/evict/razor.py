"""RazorAttention: retrieval heads keep every token, the others the first, the newest, and one token
that stands for all between.

Source: Tang et al., RazorAttention (2024): its abstract and settings as others quote them, and the
code of its authors' company (MindSpore Golden Stick). Heads are told apart without data, by a
text of random tokens that repeats (tools/studies/razor_heads.py): echo heads look at the same token
before, induction heads at the one behind it. A K/V head has the largest score of its query heads;
the highest 14% by induction and 1% by echo are retrieval heads. The others keep 4 sinks, the newest
max(4,000, a fifth of the prompt) tokens, and the mean of the K and of the V that they have dropped,
which counts in the softmax as often as there were tokens. A prompt is read by full attention and
cut at its end. Differs: the window holds in answers too, where what leaves it joins the mean; the
code keeps 256 newest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import found, fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.by_head.compensated import Compensated, Dropped
from engine.methods.evict.by_head.kinds import HeadKinds, highest, no_budget
from engine.methods.evict.razor_heads import HOW, SCORES, checked_heads, read_heads
from engine.methods.evict.shared.ragged import TABLES
from engine.methods.evict.shared.runtime import Chooser, EvictingRuntime
from engine.methods.evict.shared.store import ROOM, Part, Rows, reserved
from engine.methods.tables.head_table import Facts, checked_facts, require_model
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.launch.softmax import PLAIN
from kernels.prefill.dense import prefill_dense_lse
from kernels.prefill.merge import merge


@dataclass(frozen=True)
class Razor(HeadKinds):
    """heads: echo and induction scores, two tables [layer][K/V head], or a file that holds them.
    induction, echo: of the model's K/V heads, those of the highest scores keep every token. sinks:
    first tokens that the others keep; recent: newest tokens that they see, at least; compression:
    or the prompt's length over this. made_for: numbers of the model that the file names. tokens,
    share: none.
    """

    full_prompts = True
    named = True

    heads: tuple[Any, ...] | str | Path | None = None
    induction: float = 0.14
    echo: float = 0.01
    sinks: int = 4
    recent: int = 4000
    compression: int = 5
    made_for: Facts = ()

    def __post_init__(self) -> None:
        if self.tokens is not None or self.share is not None:
            name, instead = "razor", "induction and echo (the heads that keep everything), recent"
            if self.tokens is not None:
                raise no_budget(name, self.tokens, instead)
            raise SettingError(
                f"share: found {found(self.share)}, but razor has none; set {instead}"
            )
        super().__post_init__()
        fraction("induction", self.induction, zero=True)
        fraction("echo", self.echo, zero=True)
        integer("sinks", self.sinks, 0)
        integer("recent", self.recent, 1)
        integer("compression", self.compression, 1)
        facts, heads = self.made_for, self.heads
        if isinstance(heads, (str, Path)):
            heads, facts = read_heads(Path(heads))
        object.__setattr__(self, "made_for", checked_facts(facts))
        object.__setattr__(self, "heads", None if heads is None else checked_heads(heads))

    def default_budget(self) -> dict[str, Any]:
        return {}

    @cached_property
    def whole(self) -> tuple[tuple[bool, ...], ...]:
        """Whether each K/V head of each layer is a retrieval head; empty without scores."""
        if self.heads is None:
            return ()
        assert isinstance(self.heads, tuple)
        echo, induction = self.heads
        chosen = highest(induction, self.induction) | highest(echo, self.echo)
        return tuple(tuple((i, j) in chosen for j in range(len(r))) for i, r in enumerate(echo))

    def few(self, length: int) -> int:
        """The sinks and the newest: a step sees itself as one of these."""
        return self.sinks + max(self.recent, length // self.compression) - 1

    def few_reserved(self, prompt: int, generated: int) -> int:
        """With the row of the mean, and never more than that of a step beside what is kept."""
        most = self.few(prompt)
        base = min(prompt, most)
        return 1 + reserved(base, min(base + generated, most), most + 1)

    def few_most(self, capacity: int) -> int:
        return 1 + min(capacity + ROOM, self.few(capacity) + 1)

    def extra_bytes(self, config: ModelConfig, rows: int, layer: int) -> int:
        """Tables; of a layer with others than retrieval heads logs, sums and where means lie."""
        _, few = self.heads_of(layer)
        tables = 8 * ((TABLES + 1) * config.num_kv_heads + 3 * few)
        return tables + (4 * rows + 8 * few * config.head_dim if few else 0)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError for another model's scores."""
        if self.heads is not None:
            assert isinstance(self.heads, tuple)
            require_model(self.heads[0], self.made_for, config, SCORES)
        return super().plan(config)

    def validate(self, plan: LayerPlan) -> None:
        """Raise SettingError without scores."""
        if self.heads is None:
            raise SettingError(f"heads: found none, expected a file or tables of scores; {HOW}")

    def runtime(self, setup: Setup) -> Runtime:
        return RazorRuntime(self, setup)


class RazorRuntime(EvictingRuntime):
    """One session's stores: in each layer a run with a mean in every head of few tokens."""

    method: Razor

    def store(self, layer: int, b: int = 0) -> Compensated | None:
        """A layer's store; None while everything is in the bank."""
        layers = self.sequences[b].layers
        if layers is None:
            return None
        found = layers[layer]
        assert isinstance(found, Compensated)
        return found

    @property
    def nbytes(self) -> int:
        stores = [self.store(i, b) for b in range(len(self.sequences)) for i in self.evicting]
        return sum(store.nbytes for store in stores if store is not None)

    def rows_read(self, n: int) -> list[int]:
        """With the rows of the means."""
        seen = super().rows_read(n)
        for layer in self.evicting:
            store = self.store(layer)
            if store is not None and store.dropped.count:
                rows = sum(part.held for part in store) + len(store.few)
                seen[layer] = rows // self.heads
        return seen

    def _made(self, b: int, layer: int, step: Step | None, choose: Chooser | None) -> list[Rows]:
        """Of heads of few tokens the ends; what lies between joins what they had dropped."""
        sequence, old, parts = self.sequences[b], self.store(layer, b), []
        assert self.bank is not None
        whole, full = self.method.whole[layer], self.method.few(sequence.prompt)
        few = len(whole) - sum(whole)
        device, dim = self.setup.device, self.setup.config.head_dim
        dropped = Dropped.nothing(few, dim, device) if old is None else old.dropped.clone()
        gone, at = 0, 0
        for number, (heads, k, v, held) in enumerate(
            self.live(layer, self.bank, sequence.length, b)
        ):
            positions = sequence.positions(layer, number, held, len(k), device)
            whole_part = Part(heads, k, v, positions, None)
            for i in range(len(k)):
                part = whole_part.head(i)
                if whole[part.heads.start]:
                    count = part.k.shape[1]
                    parts.append(Rows(part.heads, *part[1:4], None, count))
                    continue
                ends, between = self._cut(part, full)
                dropped.with_rows(slice(at, at + 1), part.k[:, between], part.v[:, between])
                gone, at = len(between), at + 1
                parts.append(Rows.gather(part, ends))
        dropped.count += gone
        return Compensated(parts, whole, dropped, self.method.sinks, full)

    def _cut(self, part: Part, full: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(index [1, n] of the first and the newest tokens of one head, index [m] of the others),
        ascending by position.
        """
        order, sinks = torch.argsort(part.positions[0]), self.method.sinks
        newest = max(sinks, len(order) - (full - sinks))
        return torch.cat([order[:sinks], order[newest:]])[None], order[sinks:newest]

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A later prompt's heads of few tokens see their mean too."""
        store, since = self.store(layer), self.sequences[0].since
        if store is None or not store.dropped.count:
            return super().attend_prompt(layer, q, bank, start)
        self.bank, out = bank, []
        for number, (heads, k, v, held) in enumerate(self.live(layer, bank, start + q.shape[1])):
            part, first = self.queries(q, heads), held + start - since
            if self.method.whole[layer][number]:
                out.append(self.attend_rows(layer, part, k, v, first, start, PLAIN))
                continue
            given = part, k[None], v[None], first, self.scale
            rows = prefill_dense_lse(*given, backend=self.setup.backend)
            out.append(merge([rows, self._one_row(part, store, number)], q.dtype)[0])
        return torch.cat(out, 2)

    def _one_row(
        self, q: torch.Tensor, store: Compensated, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [1, C, G, D] to a head's mean alone, and its log-sum-exp [1, C, G]."""
        k, v = store.mean(number)
        lse = (q.float() @ k) * self.scale + store.often
        return v.expand(q.shape), lse

    # ---------------------------------------------------------------- going back

    def state(self) -> Any:
        """With what each layer has dropped."""
        state = super().state()
        if state is None:
            return None
        stores = [self.store(layer) for layer in self.evicting]
        dropped = [
            None if store is None else (store.dropped.sums.clone(), store.dropped.count)
            for store in stores
        ]
        return (*state, dropped)

    def load(self, state: Any, length: int | None) -> None:
        *rest, dropped = state
        super().load(tuple(rest), length)
        sequence, method = self.sequences[0], self.method
        if sequence.layers is None:
            return
        full = method.few(sequence.prompt)
        for layer, (sums, count) in zip(self.evicting, dropped):
            gone, parts = Dropped(sums, count), sequence.layers[layer]
            made = Compensated(parts, method.whole[layer], gone, method.sinks, full)
            sequence.replace(layer, made)

    def restored(self, state: Any, length: int) -> Any:
        """Of both kinds no other rows than they keep, and sums of as many as are missing."""
        *rest, dropped = state
        rest = super().restored(tuple(rest), length)
        if rest[3] is None:
            return (*rest, dropped)
        full, found = self.method.few(rest[1][1]), []
        for layer, (sums, count) in zip(self.evicting, dropped, strict=True):
            whole, few = self.method.whole[layer], 0
            if type(count) is not int or count < 0:
                raise ValueError("dropped")
            for number, part in enumerate(rest[3][layer]):
                held, every = part[2].shape[1], whole[number]
                few += not every
                wanted = length if every else length - count
                if (
                    part[:2] != (number, number + 1)
                    or held != wanted
                    or not (every or held <= full)
                ):
                    raise ValueError("heads")
            if sums.shape != (few, 2, self.setup.config.head_dim) or sums.dtype != torch.float32:
                raise ValueError("dropped")
            found.append((sums.to(self.setup.device), count))
        return (*rest, found)
