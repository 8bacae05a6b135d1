"""A mixture of experts runs the chosen experts and reads nothing of the others; its logits are
transformers' (tests/engine/model/test_families.py, the qwen3-moe variants).

Stops: an expert that is read for nothing, bytes of a step that count all experts, a token that gets
another one's experts.
"""

from contextlib import ExitStack
from functools import partial

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import SettingError
from engine.model.mixture import Experts, Mixture
from engine.model.tensors import random_stream
from engine.plan.exact_costs import ExactCosts
from engine.plan.layers import layer_plan
from kernels.layer.linear import Linear, pack_linear
from tests.builders import random_ids, session_config, tiny_llm
from tools.bench.floor import streamed_weights

CHOSEN, COUNT, WIDTH = 3, 7, 20
CONFIG = session_config(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=COUNT,
    num_experts_per_tok=CHOSEN,
    moe_intermediate_size=WIDTH,
    norm_topk_prob=True,
    mlp_only_layers=[2],
)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(Full(), CONFIG)


def test_a_token_gets_its_own_experts():
    """Against float64, every token by itself; the weights sum to one only where they are to."""
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(COUNT, 8, generator=generator)
    up, down = (
        torch.randn(COUNT, *shape, generator=generator) for shape in ((2 * WIDTH, 8), (8, WIDTH))
    )
    x = torch.randn(2, 11, 8, generator=generator)
    for normalise in (True, False):
        experts = Experts(COUNT, CHOSEN, WIDTH, normalise)
        mixture = Mixture(experts, router, *([pack_linear(w) for w in t] for t in (up, down)))
        found, wanted = mixture(x), torch.zeros(2, 11, 8, dtype=torch.float64)
        for b in range(2):
            for s in range(11):
                row = x[b, s].double()
                shares = torch.softmax(router.double() @ row, 0)
                best = torch.argsort(shares, descending=True)[:CHOSEN]
                for e in best.tolist():
                    gate, value = (up[e].double() @ row).chunk(2)
                    part = down[e].double() @ (torch.nn.functional.silu(gate) * value)
                    total = shares[best].sum() if normalise else 1.0
                    wanted[b, s] += part * shares[e] / total
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
        # a decode step's one row takes a way of its own
        alone = torch.stack([mixture(row.view(1, 1, -1))[0, 0] for row in x.flatten(0, 1)])
        torch.testing.assert_close(alone.view_as(wanted).double(), wanted, atol=1e-4, rtol=1e-4)


class Counted(Linear):
    """A matrix that counts the bytes that are read of it, once a product."""

    def __init__(self, matrix, read):
        self.matrix, self.read, self.nbytes = matrix, read, matrix.nbytes

    def __call__(self, x):
        self.read.append(self.nbytes)
        return self.matrix(x)


def test_one_call_reads_the_experts_that_its_token_chose(llm):
    """NaN in all other experts changes nothing of a step in C++; in a chosen one it does."""
    mixtures = [x.mixture for x in llm.model.layers if x.mixture is not None]
    with llm.session() as session, ExitStack() as restored:
        session.prefill(random_ids(50))
        chosen = []
        with pytest.MonkeyPatch.context() as patch:
            for mixture in mixtures:
                patch.setitem(mixture.__dict__, "_native", None)

                def noted(flat, route=mixture.route):
                    chosen.append(route(flat)[1].flatten().tolist())
                    return route(flat)

                patch.setattr(mixture, "route", noted)
            beside = session.decode(3)
        session.truncate(50)
        wanted = session.decode(3)
        torch.testing.assert_close(wanted, beside, atol=1e-5, rtol=1e-5)

        def poison(matrix):
            restored.callback(matrix.weight.copy_, matrix.weight.clone())
            matrix.weight.fill_(float("nan"))

        for mixture, numbers in zip(mixtures, chosen, strict=True):
            for number in set(range(COUNT)) - set(numbers):
                poison(mixture.gate_up[number])
                poison(mixture.down[number])
        session.truncate(50)
        assert torch.equal(session.decode(3), wanted)
        poison(mixtures[3].down[chosen[3][1]])
        session.truncate(50)
        assert session.decode(3).isnan().all()


def test_a_step_reads_the_experts_that_its_token_chose(llm, monkeypatch):
    """Counted as the floor counts, and NaN in all others changes nothing. Without C++ kernels."""
    read, mixtures = [], [x.mixture for x in llm.model.layers if x.mixture is not None]
    assert len(mixtures) == CONFIG.num_layers - 1 and llm.model.layers[2].gate_up is not None
    for mixture in mixtures:
        monkeypatch.setitem(mixture.__dict__, "_native", None)
    with llm.session() as session:
        session.prefill(random_ids(50))
        wanted = session.decode(3)
        session.truncate(50)
        for mixture in mixtures:
            for part in ("gate_up", "down"):
                counted = [Counted(m, read) for m in getattr(mixture, part)]
                monkeypatch.setattr(mixture, part, counted)
        assert torch.equal(session.decode(3), wanted)
        step = sum(read)
        one = 3 * CONFIG.hidden_size * WIDTH * 4
        assert step == len(mixtures) * CHOSEN * one and len(read) == len(mixtures) * CHOSEN * 2
        unread = (CONFIG.parameters - CONFIG.step_parameters) * 4
        assert unread == len(mixtures) * (COUNT - CHOSEN) * one
        assert (
            streamed_weights(CONFIG, 4)
            == llm.model.nbytes - unread - (CONFIG.vocab_size - 1) * CONFIG.hidden_size * 4
        )
        session.truncate(50)
        chosen = []
        for mixture in mixtures:
            route = mixture.route

            def noted(flat, route=route):
                chosen.append(route(flat)[1])
                return route(flat)

            monkeypatch.setattr(mixture, "route", noted)
        session.decode(3)
        for mixture, numbers in zip(mixtures, chosen, strict=True):
            for number in set(range(COUNT)) - set(numbers.flatten().tolist()):
                bad = torch.full((2 * WIDTH, CONFIG.hidden_size), float("nan"))
                mixture.gate_up[number].matrix = pack_linear(bad)
        session.truncate(50)
        assert torch.equal(session.decode(3), wanted)


def test_the_plan_counts_all_experts_and_exact_mode_the_read_ones():
    llm = tiny_llm(Full(), CONFIG)
    items = {name: size for name, size, _ in llm.plan().items}
    assert items["weights"] == llm.model.nbytes == CONFIG.parameters * 4
    costs = ExactCosts.of(CONFIG, layer_plan(8, (1,)), 4, "cpu")
    rows = [0] * 8
    one = costs.full(rows, 2) - costs.full(rows, 1)
    assert one > costs.experts == 7 * CHOSEN * 3 * CONFIG.hidden_size * WIDTH * 4
    assert costs.draft(rows, False) == (
        (CONFIG.step_parameters - CONFIG.vocab_size * CONFIG.hidden_size) * 4
    )


def test_omnikv_and_few_bits_run_over_a_mixture(llm):
    ids = random_ids(300)
    omni = OmniKV(filter_layers=(1,), tokens=512, tail=64, dense_below=0)
    with llm.session() as full, llm.session(omni) as sparse:
        assert torch.allclose(full.prefill(ids), sparse.prefill(ids), atol=1e-4)
        wanted = full.decode(5)
        assert torch.allclose(wanted, sparse.decode(5), atol=1e-4)
    stream = partial(random_stream, seed=0, sharpness=2.5)
    eight = LLM.from_stream(CONFIG, stream, device="cpu", weights="int8", max_context=512)
    with eight.session() as session:
        session.prefill(ids)
        found = session.decode(5)
    assert 0 < (found - wanted).abs().max() < 0.5
    items = {name: size for name, size, _ in eight.plan().items}
    assert items["weights"] == eight.model.nbytes


def test_a_mixture_is_not_compiled():
    with pytest.raises(SettingError, match="compile: found True, but here the host chooses"):
        tiny_llm(Full(), CONFIG, compile=True)
