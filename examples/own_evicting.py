"""An evicting method of your own: keep the tokens with the smallest keys (KNorm, Devoto et al.,
2024).
"""

from dataclasses import dataclass

from engine.methods.evict.base import EvictingRuntime
from engine.methods.evict.settings import Evicting


@dataclass(frozen=True)
class KNorm(Evicting):
    def runtime(self, setup):
        return KNormRuntime(self, setup)


class KNormRuntime(EvictingRuntime):
    def rank(self, sequence, layer, part, step):
        return -part.k.float().norm(dim=-1)
