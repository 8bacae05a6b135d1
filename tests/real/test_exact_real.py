"""Exact mode on a real checkpoint: full attention's tokens, most drafts right, some wrong.

Stops: a budget so small that drafts are often wrong and a token that differs for it.
"""

import pytest

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.session.generate import generate
from tools.common.documents import texts

TOKENS = 14


@pytest.mark.parametrize(
    ("offload", "budget", "temperature"), [("device", 64, 0.0), ("host", 8, 0.7)]
)
def test_answers_are_full_attentions_token_by_token(real, offload, budget, temperature):
    """Equal in float32, although products over several rows round otherwise than over one."""
    llm = LLM(str(real), device="cpu", dtype="float32", method=Full(), max_context=512)
    llm.load()
    method = OmniKV(filter_layers=(2, 8, 17), tokens=budget, tail=64, dense_below=0)
    (text,) = texts(llm.tokenizer, "held-out", 300, 1, ("prose",))
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    with llm.session(Full()) as session:
        wanted = [p.token_id for p in generate(session, text.ids, params)]
    with llm.session(Exact(method, draft=4, lookup=False), offload=offload) as session:
        assert [p.token_id for p in generate(session, text.ids, params)] == wanted
        assert session.counters.accepted > 0
        if temperature:
            assert session.counters.accepted < session.counters.drafted
