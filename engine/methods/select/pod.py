"""PoD without its training: blocks of similar layers share, per K/V head, the attention logits of
distant tokens.

Source: "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer Attention Similarity"
(PoD), Eq. 3-4 and Algorithm 1; METHODS.md section 4. Proximal tokens (the first `first` and the
newest `recent` of every query; 16 and 4080 published) are attended by the layer's own queries and
keys. For the others, the distant ones, the logits of the block's lowest layer serve, with the
layer's own values; the two parts are merged by the exact gate g = sum exp(proximal) / sum exp(all).
Distant keys of the layers above a block's lowest are never read. Published models are trained so;
this one is measured without, hence the name. Which layers make a block: `python -m
tools.pod_groups`. Prompts are read the same way, chunk by chunk, and the result does not depend on
the chunks.
"""

from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.base import Method, Runtime
from engine.methods.select.base import layers_apart
from engine.methods.select.spans import attend_span
from engine.methods.settings import whole
from kernels.prefill import merge


@dataclass(frozen=True)
class PodUntrained(Method):
    """blocks: for every K/V head the first layers of its blocks, ascending from 0, as ((0, 2, 7),
    (0, 3), ...), or one such tuple for all heads; None: every layer alone, which is full attention.
    first, recent: proximal tokens. skip: tau of the paper; where the gate would be at least this,
    the distant part is not read (it is known from the block's lowest layer); 1.0 never skips. Over
    a group nothing is reduced: query heads share with the same query head of the lower layer, and a
    K/V head's blocks hold for its whole group.
    """

    blocks: tuple | None = None
    first: int = 16
    recent: int = 4080
    skip: float = 1.0

    def __post_init__(self):
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _blocks(self.blocks))
        whole("first", self.first, 0)
        whole("recent", self.recent, 1)
        if (
            isinstance(self.skip, bool)
            or not isinstance(self.skip, (int, float))
            or not 0 < self.skip <= 1
        ):
            raise SettingError(f"skip: found {self.skip!r}, expected a number in (0, 1]")

    @property
    def name(self):
        """Name in tables."""
        return "pod_untrained"

    def lowest(self, config):
        """For every layer a tuple: from which layer each K/V head has its distant logits (its own
        number: not shared).
        """
        layers, heads = config.num_layers, config.num_kv_heads
        if self.blocks is None:
            return [(layer,) * heads for layer in range(layers)]
        blocks = self.blocks if isinstance(self.blocks[0], tuple) else (self.blocks,) * heads
        if len(blocks) != heads or max(map(max, blocks)) >= layers:
            raise SettingError(
                f"blocks: found {len(blocks)} heads and layers up to {max(map(max, blocks))}, expected {heads} K/V heads "
                f"and layers below {layers} (this model); group it anew: python -m tools.pod_groups"
            )
        return [
            tuple(max(low for low in firsts if low <= layer) for firsts in blocks)
            for layer in range(layers)
        ]

    def plan(self, config):
        """SPARSE where any head shares its logits: that layer does not read all keys."""
        return layers_apart(
            config.num_layers, [i for i, lows in enumerate(self.lowest(config)) if min(lows) < i]
        )

    def packs(self, plan):
        """None: keys are missing by head, so no rows travel together."""
        return ()

    def key_rows(self, config, n):
        """Keys that are needed at n tokens, one count per layer and K/V head: all in a block's
        lowest layer, else the proximal ones.
        """
        return [
            [n if low == layer else min(n, self.first + self.recent) for low in lows]
            for layer, lows in enumerate(self.lowest(config))
        ]

    def runtime(self, setup):
        """Queries of the lower layers travel up within a step."""
        return PodRuntime(self, setup)


class PodRuntime(Runtime):
    """Nothing outlives a chunk or step. gates, skipped: (query, head) pairs of sharing layers that
    tau judged, and those skipped.
    """

    capturable = False  # where spans end, and which heads skip, is the host's knowledge

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.lowest = method.lowest(setup.config)
        # layers that others share
        self.used = {low for layer, lows in enumerate(self.lowest) for low in lows if low < layer}
        # layer -> (queries, lse of their distant parts) of the chunk or step under way
        self.shared = {}
        self.gates = self.skipped = 0

    def advance(self, count):
        """What travelled between the layers of the chunk or step is not needed any more."""
        self.shared = {}

    def prefill_attend(self, layer, q, bank, start):
        """Attention of a chunk at positions start .. start+C-1. q [B, C, H, D] -> the same."""
        positions = torch.arange(start, start + q.shape[1], device=q.device).expand(q.shape[0], -1)
        return self._attend(
            layer,
            q,
            bank,
            positions,
            start + q.shape[1],
            lambda: super(PodRuntime, self).prefill_attend(layer, q, bank, start),
        )

    def attend(self, layer, q, step):
        """Attention of a step. q [B, Q, H, D] -> the same."""
        return self._attend(
            layer,
            q,
            step.bank,
            step.positions,
            int(step.visible.max()),
            lambda: self.attend_dense(layer, q, step),
        )

    def _attend(self, layer, q, bank, positions, stop, dense):
        """dense() where nothing is distant or shared by this layer, else head by head, each from
        its block's lowest layer.
        """
        lows, judged = self.lowest[layer], self.method.skip < 1.0 and layer in self.used
        if stop <= self.method.first + self.method.recent:
            return dense()
        if min(lows) == layer and not judged:
            self.shared[layer] = q, None
            return dense()
        (k, v), out, far = (
            bank.kv(layer),
            torch.empty_like(q),
            torch.empty(q.shape[:3], device=q.device),
        )
        group = q.shape[2] // len(lows)
        for b in range(len(q)):
            sink, recent, distant = proximal_spans(
                positions[b], self.method.first, self.method.recent
            )
            for head, low in enumerate(lows):
                own, keys, values = (
                    slice(head * group, (head + 1) * group),
                    k[b, head : head + 1],
                    v[b, head : head + 1],
                )
                near = merge(
                    [
                        attend_span(q[b, :, own], keys, values, *span, self.scale)
                        for span in (sink, recent)
                    ],
                    torch.float32,
                )
                asked, known = q, None
                if low < layer:
                    (asked, known), keys = self.shared[low], bank.kv(low)[0][b, head : head + 1]
                    asked, known = (
                        asked[:, -q.shape[1] :],
                        None if known is None else known[b, -q.shape[1] :, own],
                    )
                skip = self._skip(near[1], known)
                if skip is None or not skip.all():
                    part = attend_span(asked[b, :, own], keys, values, *distant, self.scale)
                    mixed, far[b, :, own] = merge([near, part], torch.float32)[0], part[1]
                    near = (
                        (
                            mixed
                            if skip is None
                            else torch.where(skip.unsqueeze(-1), near[0], mixed)
                        ),
                        None,
                    )
                out[b, :, own] = near[0]
        if layer in self.used:
            self.shared[layer] = q, far if judged else None
        return out

    def _skip(self, near, known):
        """Which (query, head) pairs leave their distant part out: bool [C, G], or None where tau
        has nothing to judge.
        """
        if known is None:
            return None
        skip = torch.sigmoid(near - known) >= self.method.skip
        self.gates += int((known > float("-inf")).sum())
        self.skipped += int((skip & (known > float("-inf"))).sum())
        return skip

    def rows_read(self, n):
        """A row is a key and a value: all values, and of the keys those that `key_rows` counts,
        mean over the heads.
        """
        return [
            -(-(sum(keys) + len(keys) * n) // (2 * len(keys)))
            for keys in self.method.key_rows(self.setup.config, n)
        ]

    def tail_first(self, step):
        """Values of all rows are read, so nothing is left out: [B] int32 zeros."""
        return torch.zeros_like(step.visible)

    def chosen_rows(self, layer):
        """None beside what `tail_first` says."""
        return torch.zeros(0, dtype=torch.int64, device=self.setup.device)


def proximal_spans(positions, first, recent):
    """(low, high) int64 [C] of every query's first tokens, newest tokens, and of the distant ones
    between them.
    """
    edge = (positions + 1 - recent).clamp(min=first)
    none = torch.zeros_like(positions)
    return (none, (positions + 1).clamp(max=first)), (edge, positions + 1), (none + first, edge)


def _blocks(value):
    """The blocks as a tuple, or a tuple of tuples, checked."""
    found = (
        tuple(tuple(x) if isinstance(x, list) else x for x in value)
        if isinstance(value, (tuple, list))
        else ()
    )
    nested = bool(found) and all(isinstance(firsts, tuple) for firsts in found)
    for firsts in found if nested else (found,):
        whole_numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in firsts)
        if (
            not firsts
            or not whole_numbers
            or firsts[0] != 0
            or any(a >= b for a, b in zip(firsts, firsts[1:]))
        ):
            raise SettingError(
                f"blocks: found {str(value)[:60]}, expected for every K/V head the first layers of its blocks, ascending "
                f"from 0, such as ((0, 2, 5), (0, 4))"
            )
    return found
