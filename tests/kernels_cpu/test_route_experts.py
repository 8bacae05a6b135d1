"""Routers that are more than a softmax (kernels/experts/route.py), against transformers' own, and
what a step's products read of their choice.

Stops: a correction that comes into a share, groups ranked by another sum, a list out of order.
"""

import pytest
import torch

from kernels.experts.choose import choose_experts_ref
from kernels.experts.route import Routing, listed, route_experts, router_logits

HIDDEN = 32


def theirs(kind, name, **settings):
    """transformers' router of a family, with random weights."""
    import transformers

    sizes = dict(
        hidden_size=HIDDEN, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=5
    )
    config = getattr(transformers, f"{kind}Config")(**sizes, **settings)
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[""])
    router = getattr(module, f"{kind}TopkRouter")(config)
    with torch.no_grad():
        router.weight.normal_()
        for key, buffer in router.named_buffers():
            assert key == "e_score_correction_bias"
            buffer.normal_(0.0, 0.3)
    return router


CASES = {
    "v2": (
        ("DeepseekV2", "deepseek_v2", dict(topk_method="greedy", routed_scaling_factor=1.7)),
        Routing(factor=1.7),
        False,
    ),
    "v2, groups": (
        (
            "DeepseekV2",
            "deepseek_v2",
            dict(topk_method="group_limited_greedy", n_group=4, topk_group=2),
        ),
        Routing(groups=4, kept=2),
        False,
    ),
    "v3": (
        ("DeepseekV3", "deepseek_v3", dict(n_group=4, topk_group=3, norm_topk_prob=True)),
        Routing(True, 4, 3, 2, 2.5, True),
        True,
    ),
    "v3, as they are": (
        ("DeepseekV3", "deepseek_v3", dict(n_group=1, topk_group=1, norm_topk_prob=False)),
        Routing(True, 1, 1, 2, 2.5, True),
        False,
    ),
    "mistral 4": (
        ("Mistral4", "mistral4", dict(n_group=2, topk_group=1, routed_scaling_factor=0.5)),
        Routing(groups=2, kept=1, ranked=2, factor=0.5),
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_choices_and_shares_are_transformers(name):
    pytest.importorskip("transformers")
    made, routing, normalise = CASES[name]
    torch.manual_seed(1)
    router = theirs(made[0], made[1], **made[2])
    x = torch.randn(200, HIDDEN)
    with torch.no_grad():
        _, wanted, chosen = router(x)
        correction = dict(router.named_buffers()).get("e_score_correction_bias")
        logits = router_logits(x, router.weight)
        shares, ids = route_experts(logits, 5, normalise, routing, correction)
    order, other = ids.argsort(1), chosen.argsort(1)
    assert torch.equal(ids.gather(1, order), chosen.gather(1, other))
    assert torch.allclose(shares.gather(1, order), wanted.gather(1, other), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("count", [5, 16, 64, 257])
def test_a_list_is_what_the_kernel_that_chooses_writes(rows, count):
    torch.manual_seed(rows)
    logits = torch.randn(rows, count)
    wanted = choose_experts_ref(logits, 4, True)
    found = listed(*route_experts(logits, 4, True, Routing()), count)
    known = int(wanted.listed)
    assert int(found.listed) == known and found.experts.shape == wanted.experts.shape
    assert torch.equal(found.experts[:known], wanted.experts[:known])
    assert torch.equal(found.members[:known], wanted.members[:known])
    assert torch.allclose(found.shares[:known], wanted.shares[:known], rtol=1e-5, atol=0)


def test_a_routing_is_its_numbers():
    """As the operator that torch.compile takes whole has it."""
    for _, routing, _ in CASES.values():
        assert Routing.of([float(number) for number in routing]) == routing
