"""Evicting methods against dense float64 simulations of their rules: logits, and what every head of
every layer holds, step by step.

Stops: a score summed over the wrong queries or in the wrong order of heads, a token kept or dropped
one step early, a softmax over what is gone, a distance that is not the method's.
"""

from dataclasses import replace

import numpy as np
import pytest

from engine.methods.evict.a2sf import A2SF
from engine.methods.evict.ada_snapkv import AdaSnapKV
from engine.methods.evict.h2o import H2O
from engine.methods.evict.keyformer import Keyformer
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.scissorhands import Scissorhands
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.full import Full
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
METHODS = {
    "h2o": (H2O(tokens=20), Rule("h2o", 20, recent=10)),
    "h2o uneven": (H2O(tokens=31, recent_share=0.2), Rule("h2o", 31, recent=6)),
    "a2sf": (A2SF(tokens=20, newest=4, forgetting=0.8), Rule("a2sf", 20, recent=4, forgetting=0.8)),
    "keyformer": (
        Keyformer(tokens=20, noise=False, tau_delta=0.5, every=1),
        Rule("keyformer", 20, recent=6, tau_delta=0.5),
    ),
    "scissorhands": (
        Scissorhands(tokens=20, newest=3, history=2, drop=0.2),
        Rule("scissorhands", 20, recent=3, history=2, most=25),
    ),
    "scissorhands, a long history": (
        Scissorhands(tokens=20, newest=1, history=70, drop=0.1),
        Rule("scissorhands", 20, recent=1, history=70, most=22),
    ),
    "streaming_llm": (StreamingLLM(tokens=24), Rule("streaming_llm", 24, sink=4)),
    "lm_infinite": (LMInfinite(tokens=24, sink=5), Rule("lm_infinite", 24, sink=5)),
    "lm_infinite, more sinks than window": (
        LMInfinite(tokens=24, sink=20),
        Rule("lm_infinite", 24, sink=20),
    ),
    "snapkv": (SnapKV(tokens=30, window=8), Rule("snapkv", 30, window=8, kernel=7)),
    "snapkv unpooled": (SnapKV(tokens=20, window=16, kernel=1), Rule("snapkv", 20, window=16)),
    "ada_snapkv": (
        AdaSnapKV(tokens=30, window=8),
        Rule("ada_snapkv", 30, window=8, kernel=7, alpha=0.5),
    ),
    "ada_snapkv, all adaptive": (
        AdaSnapKV(tokens=21, window=5, kernel=3, alpha=1.0),
        Rule("ada_snapkv", 21, window=5, kernel=3, alpha=1.0),
    ),
}


def assert_scores(rows, expected):
    """Scores of what is held, per query head, are the simulation's [H, T]."""
    positions, mine = rows.positions[:, : rows.held].numpy(), rows.scores[:, :, : rows.held].numpy()
    expected = expected.reshape(*mine.shape[:2], -1)
    for head, where in enumerate(positions):
        np.testing.assert_allclose(mine[head], expected[head][:, where], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("backend", "forget"), [("reference", False), ("auto", False), ("auto", True)]
)
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (4, 4)])
@pytest.mark.parametrize("name", METHODS)
def test_rows_and_logits_are_the_simulations(name, heads, backend, forget):
    """Two turns: a prompt of 90 tokens, an answer, a second prompt over what is left, an answer."""
    method, rule = METHODS[name]
    method = replace(method, forget=forget)
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=37)
    oracle = Conversation(Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights), rule)
    with llm.session(method) as session:
        for turn, (prompt, answer) in enumerate(((90, 6), (25, 3))):
            ids = random_ids(prompt + answer, seed=turn)
            np.testing.assert_allclose(
                session.prefill(ids[:prompt]).numpy(), oracle.prompt(ids[:prompt]), atol=1e-4
            )
            for token in ids[prompt:]:
                np.testing.assert_allclose(
                    session.decode(token).numpy(), oracle.step(token), atol=1e-4
                )
                for layer in range(LAYERS):
                    assert session.runtime.positions(layer) == oracle.kept(layer), (turn, layer)
                    if rule.summed:
                        assert_scores(
                            session.runtime.sequences[0].layers[layer][0], oracle.scores[layer]
                        )
        assert session.bank.forgets == forget
        assert session.stats.sparse_steps == 9 and session.runtime.rows_read(len(session))[0] < len(
            session
        )
