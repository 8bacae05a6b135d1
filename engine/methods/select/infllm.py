"""InfLLM: a stream of pieces; each sees the first tokens, a local window, and the blocks of the
past that its mean query is nearest to.

Source: InfLLM (Xiao et al., NeurIPS 2024), section 3, and thunlp/InfLLM (context_manager.py);
METHODS.md row `infllm` and item 30. Published defaults (llama-3-inf-llm.yaml): blocks of 128, 128
initial tokens, a window of 4096, 16 blocks, 4 representatives, 32 cached, pieces of 512. A block's
representatives are, per query head, the rows that received most attention while they were in the
window; blocks are ranked by the sum over all query heads of mean query times mean representative,
so all heads share one choice. What is not local sits at RoPE distance `local` (the published code's
table begins at 1 and gives local - 1): rows before rotation, queries turned to `local`. Prompts and
answers are read the same way, so a session's text must be read under this method from its first
token. Pieces end at absolute multiples of `chunk` and at the end of a chunk of the prefill; a step
is a piece of one token.
"""

from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.base import Method, Runtime
from engine.methods.select.base import layers_apart
from engine.methods.select.infllm_memory import BlockMemory, Layout, attend_far_and_near
from engine.methods.settings import whole
from engine.model.rope import Rotary
from kernels.prefill import prefill_dense


@dataclass(frozen=True)
class InfLLM(Method):
    """block: tokens of a block; init: first tokens, always seen; local: window of a query, itself
    included; topk: blocks that a piece reads; representatives: rows that stand for a block; cached:
    blocks of a layer on the GPU in the published system (counted here); chunk: queries of a piece.
    """

    block: int = 128
    init: int = 128
    local: int = 4096
    topk: int = 16
    representatives: int = 4
    cached: int = 32
    chunk: int = 512

    in_parts = False  # pieces end where a call ends

    def __post_init__(self):
        for name, least, most in (
            ("block", 1, None),
            ("init", 0, None),
            ("local", 1, None),
            ("topk", 1, None),
            ("chunk", 1, self.local),
            ("representatives", 1, self.block),
            ("cached", self.topk, None),
        ):
            whole(name, getattr(self, name), least, most)

    def plan(self, config):
        """Every layer SPARSE. Rows are turned back to position 0, which a rotation that depends on
        the length does not allow.
        """
        if config.rope.kind == "dynamic":
            raise SettingError(
                "infllm: this model's rope is dynamic NTK, whose rows cannot be turned back; use another method"
            )
        return layers_apart(config.num_layers, range(config.num_layers))

    def check_switch(self, length):
        """A bank that another method has read holds neither this one's hidden states nor its
        scores.
        """
        if length:
            raise SettingError(
                f"infllm: reads a text its own way from the first token, found a session of {length} tokens read otherwise; "
                f"start a new session"
            )

    def packs(self, plan):
        """None: blocks stay in the bank, and the bank on the device."""
        return ()

    def budget_capacity(self, plan, capacity):
        """Most rows that one query sees."""
        return min(capacity, self.init + self.local + (self.topk + 1) * self.block + self.chunk)

    def runtime_bytes(self, plan, capacity, config, size):
        """Scores of the window, twice, and one mean key per block and query head."""
        slots, blocks = BlockMemory.sizes(self, capacity)
        return config.num_layers * config.num_heads * (8 * slots + blocks * config.head_dim * size)

    def runtime(self, setup):
        """Block memory of one session."""
        return InfLLMRuntime(self, setup)


class InfLLMRuntime(Runtime):
    """Attention in plain torch, one K/V head's weights at a time: 4 x group x chunk x (what a piece
    sees) bytes.
    """

    capturable = False  # which blocks are read is the host's knowledge
    replays = True  # what rows have received cannot be taken back

    def __init__(self, method, setup):
        super().__init__(method, setup)
        self.memory, self.rotary = BlockMemory(method, setup), Rotary(setup.config, setup.device)
        # every query's attention counts for the representatives
        self.reads_every_query = self.memory.slots > 0
        # layer -> (first position, last position + 1, blocks) of sequence 0's newest piece
        self.read = {}
        self._newest = None  # (layer, stop, output of the last query) of the chunk under way

    @property
    def nbytes(self):
        """Bytes of the block memory."""
        return self.memory.nbytes

    @property
    def k(self):
        """Most rows that a step reads."""
        return self.method.budget_capacity(self.setup.plan, self.setup.capacity)

    def begin_prefill(self, start, stop, more=False):
        """Nothing is left of a chunk that broke off."""
        self._newest = None

    def advance(self, count):
        """Scores and the cache's order hold from here on."""
        self.memory.advance()
        self._newest = None

    def snapshot(self):
        """What rows have received."""
        return self.memory.state()

    def restore(self, state, length):
        """Bring it back."""
        self.memory.load(state)

    def copy_from(self, other, sequence=0):
        """Scores and representatives of a session's runtime."""
        self.memory.load(other.memory.state(), sequence)
        self.memory.means[:, sequence] = other.memory.means[:, 0]

    def prefill_attend(self, layer, q, bank, start):
        """Attention of a chunk at positions start .. start+C-1, piece by piece. q [B, C, H, D] ->
        the same.

        The last layer comes twice, with all queries and with the newest alone, which counts once.
        """
        stop = start + q.shape[1]
        if q.shape[1] == 1 and self._newest is not None and self._newest[:2] == (layer, stop):
            if stop > self.method.local:
                return self._newest[2]
            return super().prefill_attend(layer, q, bank, start)
        out = self._pieces(layer, q, *bank.kv(layer), [start] * len(q))
        self._newest = layer, stop, out[:, -1:]
        return out

    def attend(self, layer, q, step):
        """Attention of a step. q [B, Q, H, D] -> the same."""
        return self._pieces(
            layer, q, *step.bank.kv(layer, step.bucket), step.positions[:, 0].tolist()
        )

    def _pieces(self, layer, q, k, v, starts):
        out, size = torch.empty_like(q), self.method.chunk
        self.memory.open(layer)
        for b, start in enumerate(starts):
            stop = start + q.shape[1]
            for first in [start, *range((start // size + 1) * size, stop, size)]:
                last = min(stop, (first // size + 1) * size)
                part = slice(first - start, last - start)
                out[b, part] = self._piece(layer, b, q[b, part], k[b], v[b], first)
        return out

    def _piece(self, layer, b, q, k, v, start):
        """One piece q [C, H, D] at positions start .. start+C-1: attention, then what its window
        received, then the blocks that form.
        """
        local, stop, memory = self.method.local, start + len(q), self.memory

        def plain_keys(first, last):
            return self.rotary.rotate_by(
                k[:, first:last].transpose(0, 1).float(),
                -torch.arange(first, last, device=k.device),
            ).transpose(0, 1)

        memory.form(layer, b, start, plain_keys)
        layout, positions = (
            Layout.at(self.method, start),
            torch.arange(start, stop, device=q.device),
        )
        distant = self.rotary.rotate_by(
            self.rotary.rotate_by(q.float(), -positions), torch.full_like(positions, local)
        )
        blocks, first = memory.rank(layer, b, distant.mean(0), layout), max(0, start - local + 1)
        far = self._far_rows(start, stop, blocks)
        turned = self.rotary.rotate_by(k[:, far].transpose(0, 1).float(), -far).transpose(0, 1)
        out, received = attend_far_and_near(
            q, distant, turned, k, v, far, first, positions, local, self.scale
        )
        memory.collect(layer, b, first, start, stop, received)
        memory.form(layer, b, stop, plain_keys)
        if b == 0:
            self.read[layer] = start, stop, blocks
        if stop <= local:  # nothing but the window: the dense launcher, to the bit
            return prefill_dense(
                q[None], k[None], v[None], start, self.scale, backend=self.setup.backend
            )[0]
        return out.to(q.dtype)

    def _far_rows(self, start, stop, blocks):
        """Rows that some query of a piece sees outside its window: initial ones, the chosen
        blocks', the remainder's; ascending int64.
        """
        size, device, layout, edge = (
            self.method.block,
            self.setup.device,
            Layout.at(self.method, start),
            stop - self.method.local,
        )
        chosen = self.method.init + size * torch.tensor(blocks, dtype=torch.int64).to(device)
        return torch.cat(
            [
                torch.arange(layout.initial, device=device),
                (chosen.unsqueeze(1) + torch.arange(size, device=device)).flatten(),
                torch.arange(layout.rest, max(layout.rest, edge), device=device),
            ]
        )

    def tail_first(self, step):
        """First row of the window, [B] int32."""
        return (step.visible - self.method.local).clamp(min=0)

    def chosen_rows(self, layer):
        """Rows int64 that the last step saw outside the window, sequence 0, ascending."""
        return self._far_rows(*self.read.get(layer, (0, 0, [])))

    def selections(self):
        """{layer: those rows}."""
        return {layer: self.chosen_rows(layer).cpu() for layer in self.read}

    def rows_read(self, n):
        """Initial rows, chosen blocks, remainder and window, the same in every layer."""
        layout = Layout.at(self.method, n - 1)
        old = (
            layout.initial
            + min(layout.blocks, self.method.topk) * self.method.block
            + max(0, n - self.method.local - layout.rest)
        )
        return [old + min(n, self.method.local)] * self.setup.config.num_layers
