"""What channels weigh (tools/studies/heavy_channels.py) is a mean over tokens, each counted once.

Stops: the newest token's query, which the last layer is asked for once more, counted twice.
"""

import pytest
import torch

from engine.model.rope import apply_rope
from tests.builders import random_ids, tiny_llm
from tools.studies.heavy_channels import weigh


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 37])
def test_a_channel_weighs_the_mean_of_its_products(count):
    llm, ids = tiny_llm(chunk=8), random_ids(count)
    found = weigh(llm, [ids])
    with llm.session() as session:
        session.prefill(ids)
        at = torch.arange(count)[None]
        for layer, weights in enumerate(found):
            turns = session.loaded.rotary.at(at)
            q = apply_rope(session.query_ring.read(layer, at), *turns)[0].double()
            k = session.bank.kv(layer, count)[0][0].double()
            products = q.view(count, len(k), -1, q.shape[-1]) * k.transpose(0, 1).unsqueeze(2)
            # of all query heads of a K/V head
            torch.testing.assert_close(weights, products.abs().sum(2).mean(0), rtol=1e-5, atol=1e-7)
