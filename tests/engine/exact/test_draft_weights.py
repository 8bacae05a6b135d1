"""Exact mode that drafts by an int8 copy of the weights.

Stops: a verification by the copy, a copy for every session, memory that no plan shows.
"""

from dataclasses import replace

import pytest
import torch

from engine import LLM, Exact, Full, OmniKV
from engine.base.errors import SettingError
from engine.plan.exact_costs import ExactCosts
from engine.session.generate import generate
from kernels.quant.linear import QuantisedLinear
from kernels.quant.native import usable
from tests.builders import random_ids, random_stream, session_config, tiny_llm
from tests.engine.exact.test_exact import GREEDY, SAMPLED, assert_drafts_were_judged
from tools.bench.shapes import shape_config, shape_filters

OMNIKV = OmniKV(filter_layers=(0,), tokens=40, tail=64, dense_below=0)
EXACT = Exact(OMNIKV, draft=3, lookup=False, draft_weights="int8")
CONFIG = session_config(layers=4, hidden=64, vocab_size=23)

pytestmark = pytest.mark.skipif(not usable(), reason="no C++ kernels here")


def model(config=CONFIG, method=EXACT, **options):
    return tiny_llm(method, config, max_context=512, sharpness=2.0, **options)


def matrices_of(step):
    """The model of a step, and its matrices."""
    found = step._decoder.model
    return found, [m for layer in found.layers for m in layer.matrices] + [found.lm_head]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chooser", ["drafter", "verifier"])
def test_text_is_full_attention_s_and_drafts_alone_read_the_copy(chooser, tied, backend):
    llm = model(replace(CONFIG, tied_embeddings=tied), backend=backend)
    ids, weights = random_ids(170, 23, seed=3), None
    method = replace(EXACT, chooser=chooser)
    with llm.session(method) as exact, llm.session(Full()) as full:
        for step in (exact.runner._own_draft, exact.runner._kept_draft):
            copy, matrices = matrices_of(step)
            assert all(isinstance(m, QuantisedLinear) and m.form == "native" for m in matrices)
            assert copy.embed is llm.loaded.model.embed
        own, matrices = matrices_of(exact.runner._dense_step)
        assert own is exact.runner.model and own.layers is not copy.layers
        assert not any(isinstance(m, QuantisedLinear) for m in matrices)
        weights = [m.weight.clone() for m in matrices]
        for params in (GREEDY, SAMPLED):
            prompt, ids = ids, []
            for mine, theirs in zip(
                generate(exact, prompt, params), generate(full, prompt, params), strict=True
            ):
                assert mine.token_id == theirs.token_id
                if backend == "reference":
                    assert torch.equal(exact.last_logits, full.last_logits)
        assert_drafts_were_judged(exact)
        assert matrices_of(exact.runner._verify_step(4, False))[0] is own
        assert all(map(torch.equal, weights, (m.weight for m in matrices)))


def test_the_copy_s_logits_are_near_the_models_and_not_equal():
    """As int8 weights are: a draft that read the model's own would hide a copy that is wrong."""
    llm = model()
    with llm.session(EXACT) as exact:
        exact.prefill(random_ids(60, 23))
        runner = exact.runner
        runner.feed(3, 61)
        own = runner._dense_step(61)[0, -1].clone()
        runner.feed(3, 61)
        copy = runner._own_draft(61)[0, -1]
        far = float((own - copy).norm() / own.norm())
        assert 1e-5 < far < 0.03


def test_sessions_share_one_copy_that_the_plan_counts():
    llm = model()
    with llm.session() as one, llm.session() as two:
        first, matrices = matrices_of(one.runner._kept_draft)
        assert first is matrices_of(two.runner._own_draft)[0]
        assert llm.plan().bytes_of("draft weights") == sum(m.nbytes for m in matrices)
    assert "draft weights" in str(llm.plan())
    assert "draft weights" not in str(model(method=Exact(OMNIKV)).plan())


def test_costs_count_the_copy():
    """A draft's weights have 1.06 bytes each, a verification's two."""
    config = shape_config("llama-3.2-1b")
    plan = OmniKV(filter_layers=shape_filters("llama-3.2-1b")).plan(config)
    own, copy = (ExactCosts.of(config, plan, 2, "cpu", int8=int8) for int8 in (False, True))
    rows = [2304] * config.num_layers
    saved = own.draft(rows, False) - copy.draft(rows, False)
    assert saved == pytest.approx(own.weights * (1 - 1.0625 / 2), rel=1e-6)
    assert own.full(rows, 3) == copy.full(rows, 3)
    given = 131072, 2304, 7
    assert copy.predicted(*given, verifier=True)[1] > own.predicted(*given, verifier=True)[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exact(OMNIKV, draft_weights="int4"), "draft_weights: found 'int4', expected"),
        (
            lambda: LLM.from_stream(
                CONFIG, random_stream, device="cpu", weights="int8", max_context=512
            ).session(EXACT),
            "draft_weights: found 'int8', but the weights are in few bits already; leave",
        ),
    ],
)
def test_refused(make, words):
    with pytest.raises(SettingError) as refused:
        make()
    assert words in str(refused.value) and "\n" not in str(refused.value)
