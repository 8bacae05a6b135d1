"""The steps of a session under `window_recompute`: the newest tokens go through the model together,
as a text of their own, and leave nothing behind.
"""

from __future__ import annotations

import weakref

import torch

from engine.bank.base import Bank
from engine.bank.device import DeviceBank
from engine.forward.decode import Decoder
from engine.forward.prefill import Outputs, run_chunk
from engine.methods.window_recompute import WindowRecompute
from engine.plan.layers import LayerPlan
from engine.runner.state import SessionState
from engine.runner.step_runner import StepRunner


class RecomputeRunner(StepRunner):
    """Runs every step as full attention to the newest `window` tokens, from position 0 on. A chunk
    of a prompt is noted and no more; its end is a step.
    """

    batchable = False
    needs_rows = False

    def __init__(
        self,
        session: SessionState,
        method: WindowRecompute,
        plan: LayerPlan,
        backend: str,
        bank: Bank,
    ):
        loaded = session.loaded
        super().__init__(loaded, method, plan, bank.capacity, backend, bank, session.query_ring)
        self.window, self._chunk = method.tokens, session.planner.chunk
        self._dense_plan = self.dense_runtime.plan
        # not the session, which holds this runner: one that is dropped is freed at once
        self._of = weakref.ref(session)
        self._fed = -1

    def runs_ahead(self, n: int) -> bool:
        """Never: the host gathers the tokens."""
        return False

    def feed(self, token_id: int, n: int) -> None:
        """Note the n-th token."""
        self._fed = token_id
        super().feed(token_id, n)

    def feed_argmax(self, logits: torch.Tensor | None, n: int) -> None:
        """Feed the argmax of `logits`, and read it at once."""
        super().feed_argmax(logits, n)
        self._fed = self.argmax.read()

    def run(self, n: int, own: bool) -> torch.Tensor:
        """The logits [vocab] behind the token that was fed, the n-th."""
        return self.encode([*self._before(n - 1), self._fed])

    def run_with(self, decoder: Decoder) -> torch.Tensor:
        """As `run`: there are no rows for another decoder."""
        return self.run(int(self.length) + 1, True)

    def logits_again(self, n: int) -> torch.Tensor | None:
        """Those of the newest of n tokens, anew."""
        return self.encode(self._before(n, self.window))

    def read(
        self, tokens: torch.Tensor, first: int, stop: int, every: Outputs | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Encode at the prompt's end; where all outputs are asked for, a window for each token."""
        ids, none = tokens[0].tolist(), self._query_ring.slots[:, :, :0]
        known = [*self._before(first), *ids]
        ends = range(len(known) - len(ids) + 1, len(known) + 1)
        if every is not None:
            outputs: list[torch.Tensor] = []
            for end in ends:
                self.encode(known[max(0, end - self.window) : end], outputs)
            every(torch.cat(outputs, 1), first)
        if first + len(ids) < stop:
            return None, none
        return self.encode(known[-self.window :]).unsqueeze(0), none

    def _before(self, n: int, count: int | None = None) -> list[int]:
        """The newest `count` of the session's first n tokens; None: those that one more leaves."""
        session = self._of()
        assert session is not None  # whoever runs a session's step holds the session
        count = self.window - 1 if count is None else count
        return list(session.committed[max(0, n - count) : n])

    def encode(self, ids: list[int], outputs: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Return full attention's logits float32 [vocab] behind `ids`, a text that begins with
        them. outputs: takes the last layer's output [1, 1, hidden] of the last one.
        """
        model, n = self.model, len(ids)
        given = model.config, self._dense_plan, n, self._loaded.dtype, model.device
        bank, found, logits = DeviceBank(*given, chunk=self._chunk), [], None
        every = None if outputs is None else lambda x, start: found.append(x[:, -1:])
        with torch.inference_mode(), bank.preparing(n):
            for first in range(0, n, self._chunk):
                tokens = torch.tensor([ids[first : first + self._chunk]], device=model.device)
                logits, _ = run_chunk(
                    model,
                    self._rotary,
                    self.dense_runtime,
                    bank,
                    tokens,
                    first,
                    n,
                    last_logits=first + tokens.shape[1] == n,
                    pieces=self.prompt_pieces,
                    backend=self.backend,
                    every=every,
                )
        if outputs is not None:
            outputs.append(found[-1])
        bank.close()
        assert logits is not None
        return logits[0]
