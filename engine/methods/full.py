"""Full attention: every layer reads every K and V. The baseline of every comparison.

Any layer may live in host memory: every step then brings all of it over, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.methods.base import Method
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class Full(Method):
    """Dense attention in every layer. No settings."""

    full_prompts = True

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # over an offloaded bank a step streams blocks that the host counts: `fetches` forbids a
        # captured graph there
        return Needs(
            offload=plan.each_layer,
            cuda_graph=True,
            sliding=True,
            capped=True,
            recurrent=True,
            latent=True,
        )
