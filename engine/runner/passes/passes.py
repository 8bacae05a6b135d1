"""The passes that a method asks for at a prompt's end (Runtime.passes): tokens run behind the
session's, attend to what the method says, and leave no row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.bank.chunk_bank import STEP as ROOM
from engine.bank.chunk_bank import ChunkBank
from engine.base.device import synchronize
from engine.forward.prefill import run_chunk
from engine.methods.base import Pass
from engine.plan.prefill_time import Eta, PrefillFlops, Progress
from engine.runner.state import SessionState
from engine.runner.step_runner import StepRunner

Told = Callable[[float], None]  # called with how much of the passes is done


def tell(eta: Eta, progress: Progress | None, stop: int, share: float) -> None:
    """Say how much is done of what runs again behind a prompt's end at `stop`."""
    eta.repeated(share)
    if progress is not None:
        progress(eta.progress(stop))


def run_passes(
    session: SessionState, runner: StepRunner, begin: int, told: Told | None = None
) -> None:
    """Run the passes that a method asks for before the prompt ends that began at `begin`
    (Runtime.passes). Their rows lie behind the session's, in a bank of their own, and go.
    """
    tokenizer = session.loaded.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False) if tokenizer else []

    passes = runner.runtime.passes(runner.bank, begin, session.committed, encode)
    whole, before = sum(len(one.ids) for one in passes), 0
    for one in passes:

        def ran(count: int, before: int = before) -> None:
            if told is not None:
                told((before + count) / whole)

        _run_pass(session, runner, one, ran)
        before += len(one.ids)


def run_behind(session: SessionState, runner: StepRunner, progress: Progress | None) -> None:
    """Run what the method runs again behind a prompt that another one has read."""
    flops, n = PrefillFlops.of(session.loaded.config), len(session.committed)
    # none of it is read now, so that all of the work is the passes
    eta = Eta(lambda start, stop: (0.0, 0.0), 0, n, runner.runtime.passes_flops(flops, 0, n))
    run_passes(session, runner, 0, partial(tell, eta, progress, n))


def _run_pass(
    session: SessionState, runner: StepRunner, one: Pass, ran: Callable[[int], None]
) -> None:
    """Run a pass chunk by chunk, and call `ran` after each with the tokens so far."""
    model, loaded, length = runner.model, session.loaded, len(session.committed)
    rows, device = len(one.ids), model.device
    bank = ChunkBank(loaded.config, length + rows + ROOM, loaded.dtype, device, span=rows + ROOM)
    with torch.inference_mode(), bank.preparing(length + rows):
        for at in range(0, rows, session.planner.chunk):
            ids = one.ids[at : at + session.planner.chunk]
            tokens = torch.tensor([ids], dtype=torch.int64, device=device)
            # the frequencies of the prompt, whose rows it attends to
            where = (loaded.rotary, one.attends, bank, tokens, length + at, length)
            run_chunk(model, *where, pieces=runner.prompt_pieces, backend=runner.backend)
            synchronize(device)
            ran(at + len(ids))
