"""What ranks of the shipped model must do, on GPUs or on cores."""

import os
import signal
import time

import pytest
import torch

from engine import LLM, Full, OmniKV, RankedLLM, SamplingParams
from engine.base.errors import RankLost
from tests.builders import POCKET, random_ids

SPARSE = OmniKV(tokens=64, dense_below=0)
TOKENS = 24


def answers(llm, prompt):
    """{method: (greedy tokens, logits of forced steps)} of full attention and of OmniKV."""
    found = {}
    for method in (Full(), SPARSE):
        with llm.session(method=method) as session:
            session.prefill(prompt)
            forced = torch.stack([session.decode(token).float().cpu() for token in prompt[:6]])
            session.truncate(len(prompt))
            params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
            tokens = [piece.token_id for piece in session.generate([], params)]
            found[method.name] = tokens, forced
    return found


def check_same(one, many, close):
    """Ranks write one process's tokens, in steps and behind prompts; logits differ by rounding."""
    prompt = random_ids(700, 5000)
    want, found = answers(one, prompt), answers(many, prompt)
    for name, (tokens, logits) in want.items():
        assert float((found[name][1] - logits).abs().max()) < close, name
        assert found[name][0] == tokens, name


def check_answers(close, alone, **ranks):
    """As check_same, of models that are made; returns whether steps were captured."""
    settings = dict(method=Full(), max_context=1024, dtype="float32")
    many = RankedLLM(POCKET, **settings, **ranks)
    try:
        check_same(LLM(POCKET, **settings, **alone), many, close)
        return many.loaded.graphs
    finally:
        many.close()


def check_loss(**ranks):
    """A rank that is killed ends the model within seconds, with its name."""
    llm = RankedLLM(POCKET, method=Full(), max_context=512, timeout=60, **ranks)
    try:
        session = llm.session()
        session.prefill(random_ids(100, 5000))
        process = llm._meeting._followers._processes[0]
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankLost, match=rf"rank 1 \(process {process.pid}\) was ended by sig"):
            for _ in range(100000):
                session.decode(5)
        assert time.monotonic() - began < 30
    finally:
        llm.close()
