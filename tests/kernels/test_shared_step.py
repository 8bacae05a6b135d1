"""A step of several sequences on our own kernels, interpreted.

Stops: a fused step that rotates, stores or multiplies one sequence as another.
"""

import torch

from engine import Full
from tests.builders import random_ids, session_config, tiny_llm


def test_a_fused_step_of_several():
    config = session_config(
        layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=32
    )
    llm = tiny_llm(Full(), config, backend="reference", step="fused", max_context=64, seed=3)
    with llm.batch() as batch:
        sessions = [batch.session() for _ in range(3)]
        for seed, session in enumerate(sessions):
            session.prefill(random_ids(5 + 9 * seed, seed=seed))
        alone = [session.fork() for session in sessions]
        for session in sessions:
            session.set_backend("triton")
            assert session.runner.fused and session.runner.batchable
        for token in (5,):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for session, other in zip(sessions, alone):
                torch.testing.assert_close(
                    found[session], other.decode(token), rtol=1e-4, atol=1e-4
                )
