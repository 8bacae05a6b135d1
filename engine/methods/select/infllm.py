"""InfLLM: a stream of pieces; each sees the first tokens, a local window, and the blocks of the
past that its mean query is nearest to.

Source: InfLLM (Xiao et al., NeurIPS 2024), section 3, and thunlp/InfLLM (context_manager.py).
Published defaults (llama-3-inf-llm.yaml): blocks of 128, 128 initial tokens, a window of 4096, 16
blocks, 4 representatives, 32 cached, pieces of 512. A block's representatives are, per query head,
the tokens that received most attention while they were in the window; blocks are ranked by the sum
over all query heads of mean query times mean representative, so all heads share one choice. What is
not local sits at RoPE distance `local` (the published code's table begins at 1 and gives local -
1): K before rotation, queries turned to `local`. Prompts and answers are read the same way, so a
session's text must be read under this method from its first token. Pieces end at absolute multiples
of `chunk` and at the end of a chunk of the prefill; a step is a piece of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.select.infllm_memory import BlockMemory, Layout, attend_far_and_near
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from kernels.launch.on_device import on_device
from kernels.prefill.dense import prefill_dense
from kernels.rows.forms import key_floats


@dataclass(frozen=True)
class InfLLM(Method):
    """block: tokens of a block. init: first tokens, always seen. local: window of a query, itself
    included. topk: blocks that a piece reads. representatives: tokens that stand for a block.
    cached: blocks of a layer on the GPU in the published system (counted here). chunk: queries of a
    piece.
    """

    block: int = 128
    init: int = 128
    local: int = 4096
    topk: int = 16
    representatives: int = 4
    cached: int = 32
    chunk: int = 512

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block", 1, None),
            ("init", 0, None),
            ("local", 1, None),
            ("topk", 1, None),
            ("chunk", 1, self.local),
            ("representatives", 1, self.block),
            ("cached", self.topk, None),
        ):
            integer(name, getattr(self, name), least, most)

    @property
    def cannot_draft(self) -> str:
        return "it must read the prompt its own way"

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Every layer SPARSE. K is turned back to position 0, which a rotation that depends on the
        length does not allow.
        """
        if config.rope.kind == "dynamic":
            raise SettingError(
                "infllm: this model's rope is dynamic NTK, whose rotations cannot be undone; use "
                "another method"
            )
        if config.layer_ropes:
            raise SettingError(
                f"infllm: turns rows back by one rope, found layers with different ones "
                f"({config.family}); use another method"
            )
        return single_layer_groups(config.num_layers, range(config.num_layers))

    def validate_switch(self, length: int) -> None:
        """A bank that another method has read holds neither this one's hidden states nor its
        scores.
        """
        if length:
            raise SettingError(
                f"infllm: reads a text its own way from the first token, found a session of "
                f"{length} tokens read otherwise; start a new session"
            )

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Device bytes: scores of the window, twice, and one mean key per block and query head."""
        slots, blocks = BlockMemory.sizes(self, capacity)
        heads = config.num_layers * config.num_heads
        seen = self.init + self.local + (self.topk + 1) * self.block + self.chunk
        return Needs(
            selected=min(capacity, seen),  # the most that one query sees
            device_bytes=heads * (8 * slots + blocks * config.head_dim * itemsize),
            every_query=slots > 0,  # every query's attention counts for the representatives
            tail=self.local,
            offload=plan.each_layer,
            step_rows=self.init + (self.topk + 2) * self.block,
            final_call=None,  # pieces end where a call ends
            history="rerun",  # what tokens have received cannot be taken back
        )

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """What every piece sees, its own tokens included, and the blocks that form."""
        pieces = (stop - 1) // self.chunk - begin // self.chunk + 1
        seen = self.init + self.local + (self.topk + 1) * self.block + 2 * self.chunk
        dense = min(stop, self.local) if begin < self.local else 0
        return pieces * (min(stop, seen) + dense) + stop - begin + 2 * self.block

    def runtime(self, setup: Setup) -> Runtime:
        return InfLLMRuntime(self, setup)


class InfLLMRuntime(Runtime):
    """Attention in plain torch, one K/V head's weights at a time: 4 x group x chunk x (what a piece
    sees) bytes. No CUDA graph: the host knows which blocks are read.
    """

    method: InfLLM

    def __init__(self, method: InfLLM, setup: Setup):
        super().__init__(method, setup)
        self.memory, self.rotary = BlockMemory(method, setup), Rotary(setup.config, setup.device)
        # layer -> (first position, last position + 1, blocks) of sequence 0's newest piece
        self.read: dict[int, tuple[int, int, list[int]]] = {}
        # (layer, stop, output of the last query) of the chunk under way
        self._newest: tuple[int, int, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def k(self) -> int:
        return self.needs.selected

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Drop what is left of an interrupted chunk."""
        self._newest = None

    def commit(self, count: int) -> None:
        self.memory.commit()
        self._newest = None

    def state(self) -> Any:
        return self.memory.state()

    def load(self, state: Any, length: int | None) -> None:
        self.memory.load(state)

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        self.memory.load(other.memory.state(), sequence)
        self.memory.means[:, sequence] = other.memory.means[:, 0]

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A chunk, piece by piece. The last layer comes twice, with all queries and with the newest
        alone, which counts once.
        """
        stop = start + q.shape[1]
        if q.shape[1] == 1 and self._newest is not None and self._newest[:2] == (layer, stop):
            if stop > self.method.local:
                return self._newest[2]
            return super().attend_prompt(layer, q, bank, start)
        out = self._pieces(layer, q, bank, [start] * len(q))
        self._newest = layer, stop, out[:, -1:]
        return out

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        return self._pieces(layer, q, step.bank, step.positions[:, 0].tolist())

    def _pieces(self, layer: int, q: torch.Tensor, bank: Bank, starts: list[int]) -> torch.Tensor:
        out, size = torch.empty_like(q), self.method.chunk
        self.memory.open(layer)
        for b, start in enumerate(starts):
            stop = start + q.shape[1]
            for first in [start, *range((start // size + 1) * size, stop, size)]:
                last = min(stop, (first // size + 1) * size)
                part = slice(first - start, last - start)
                out[b, part] = self._piece(layer, b, q[b, part], bank, first)
        return out

    def _piece(self, layer: int, b: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """One piece q [C, H, D] at positions start .. start+C-1: attention, then what its window
        received, then the blocks that form.
        """
        local, stop, memory = self.method.local, start + len(q), self.memory

        def plain_keys(first: int, last: int) -> torch.Tensor:
            k = bank.rows(layer, first, last)[0][b]
            return self.rotary.rotate_by(
                key_floats(k).transpose(0, 1), -torch.arange(first, last, device=q.device)
            ).transpose(0, 1)

        memory.form(layer, b, start, plain_keys)
        layout = Layout.at(self.method, start)
        positions = torch.arange(start, stop, device=q.device)
        distant = self.rotary.rotate_by(
            self.rotary.rotate_by(q.float(), -positions), torch.full_like(positions, local)
        )
        blocks, first = memory.rank(layer, b, distant.mean(0), layout), max(0, start - local + 1)
        far = self._far_rows(start, stop, blocks)
        far_k, far_v = (t[b] for t in bank.listed(layer, far))
        turned = self.rotary.rotate_by(key_floats(far_k).transpose(0, 1), -far).transpose(0, 1)
        k, v = (t[b] for t in bank.rows(layer, first, stop))
        out, received = attend_far_and_near(
            q, distant, turned, far_v, k, v, far, first, positions, local, self.scale
        )
        memory.collect(layer, b, first, start, stop, received)
        memory.form(layer, b, stop, plain_keys)
        if b == 0:
            self.read[layer] = start, stop, blocks
        if stop <= local:  # only the window: the dense launcher, to the bit
            k, v = (t[b] for t in bank.rows(layer, 0, stop))
            return prefill_dense(
                q[None], k[None], v[None], start, self.scale, backend=self.setup.backend
            )[0]
        return out.to(q.dtype)

    def _far_rows(self, start: int, stop: int, blocks: list[int]) -> torch.Tensor:
        """Positions that some query of a piece sees outside its window: initial ones, the chosen
        blocks', the remainder's; ascending int64.
        """
        size, device = self.method.block, self.setup.device
        layout, edge = Layout.at(self.method, start), stop - self.method.local
        chosen = self.method.init + size * on_device(blocks, torch.int64, device)
        return torch.cat(
            [
                torch.arange(layout.initial, device=device),
                (chosen.unsqueeze(1) + torch.arange(size, device=device)).flatten(),
                torch.arange(layout.rest, max(layout.rest, edge), device=device),
            ]
        )

    def tail_start(self, step: Step) -> torch.Tensor:
        """The window."""
        return (step.visible - self.method.local).clamp(min=0)

    def chosen_rows(self, layer: int) -> torch.Tensor:
        return self._far_rows(*self.read.get(layer, (0, 0, [])))

    def selections(self) -> dict[int, torch.Tensor]:
        return {layer: self.chosen_rows(layer).cpu() for layer in self.read}

    def choice(self) -> Any:
        return dict(self.read)

    def load_choice(self, choice: Any) -> None:
        self.read = choice

    def rows_read(self, n: int) -> list[int]:
        """Initial tokens, chosen blocks, remainder and window, the same in every layer."""
        layout, method = Layout.at(self.method, n - 1), self.method
        blocks = min(layout.blocks, method.topk) * method.block
        old = layout.initial + blocks + max(0, n - method.local - layout.rest)
        return [old + min(n, method.local)] * self.setup.config.num_layers
