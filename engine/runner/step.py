"""One decode step of a session, in three parts: prepare, run, commit.

`step` does one after the other. A batch (engine/batch/batch.py) prepares several sessions, runs
them together, and has each commit its own. Before `commit` only rows beyond the session's length
change, so that an interrupted step can be prepared and run once more.
"""

from __future__ import annotations

import torch

from engine.bank.row_origins import FULL
from engine.forward.decode import Decoder
from engine.methods.mass_meter import Watch
from engine.methods.requirements import validate_parts
from engine.runner.prompt import close_latest, restore_window
from engine.runner.ranks.led import led
from engine.runner.rollback import exclusive, rewound_on_error
from engine.runner.state import SessionState
from engine.runner.step_runner import StepKind


class DecodeStep:
    """One decode step of a session, to length n. token_id: validated id to append, or None for the
    argmax of `last_logits`, which is read after the step is launched. Construct and call inside
    `exclusive()` and `rewound_on_error()`.

    batchable: whether it may join a batched step; otherwise call `run`.
    """

    def __init__(self, session: SessionState, token_id: int | None) -> None:
        self.session, self.token_id = session, token_id
        self.n = len(session.committed) + 1
        self._end_open_prompt()
        restore_window(session)
        self._began = session.clock.began()
        self.kind, self._watch = watched(session, session.runner.kind(self.n))

    @property
    def batchable(self) -> bool:
        """Whether it may join a batched step."""
        return self.session.runner.batchable and self._watch is None

    def _end_open_prompt(self) -> None:
        """End the open prompt, if there is one."""
        session = self.session
        if session.history.prompt_is_open(self.n - 1):
            validate_parts(session.method, session.runtime.needs, True, 0)
            close_latest(session)

    def prepare(self) -> None:
        """Write the token to the step's input, and prepare the bank. May be called again."""
        session = self.session
        if self.token_id is None:
            session.runner.feed_argmax(session.last_logits, self.n)
        else:
            session.runner.feed(self.token_id, self.n)
        session.bank.before_step(self.n)

    def run(self) -> torch.Tensor:
        """Run the step by itself; float32 logits [vocab]."""
        if self._watch:
            return metered(self.session, self._watch)
        return self.session.runner.run(self.n, self.kind.own)

    def commit(self, logits: torch.Tensor) -> torch.Tensor:
        """Append the token, store the logits of the step that ran, and count it. Returns them."""
        session, runner = self.session, self.session.runner
        session.bank.after_step(self.n)
        token_id = runner.argmax.read() if self.token_id is None else self.token_id
        # before the token is there: an older note of its row would be taken for true
        session.origins.add(self.n - 1, [(self.n, None if self.kind.sparse else FULL)])
        if session.runtime.needs.outputs:
            session.runtime.hear([token_id], lambda first, stop: logits.unsqueeze(0))
        session.commit([token_id], 1, logits, runner.left_selection(self.kind))
        session.clock.ends(self._began)
        rows = runner.rows_read(self.n, self.kind.sparse)
        session.counters.count_step(rows, session.plan.roles, session.row_bytes, self.kind.sparse)
        session.take_time()
        return logits


def watched(session: SessionState, kind: StepKind) -> tuple[StepKind, Watch | None]:
    """Return (the step that runs, the session's watch if it is to meter that step)."""
    watch = session.watch
    if watch is None or not kind.sparse or not session.plan.sparse_layers or session.bank.forgets:
        return kind, None
    if watch.due():
        return kind, watch
    if watch.exact:
        watch.ran_exact()
        return StepKind(False, False), None
    return kind, None


def metered(session: SessionState, watch: Watch) -> torch.Tensor:
    """Run the sparse step that was fed to the session's runner, and record in `watch` the attention
    mass that it keeps; float32 logits [vocab].
    """
    meter = watch.meter(session.runtime)
    decoder = Decoder(session.runner.model, session.loaded.rotary, meter, session.query_ring)
    logits = session.runner.run_with(decoder)
    watch.saw(meter.mass)
    return logits


@led
def step(session: SessionState, token_id: int | None) -> torch.Tensor:
    """Decode a validated token; float32 logits [vocab]. None: the argmax of `last_logits`, which is
    read after the step is launched and is then the last of `ids`.
    """
    with exclusive(session.loaded), rewound_on_error(session):
        decode_step = DecodeStep(session, token_id)
        decode_step.prepare()
        return decode_step.commit(decode_step.run())
