"""Run `python -m tools.compare --import examples/own_evicting.py --methods knorm@30` from the
repository's root: an evicting method of your own that keeps the tokens with the smallest keys
(KNorm, Devoto et al., 2024).
"""

from dataclasses import dataclass

from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting


@dataclass(frozen=True)
class KNorm(Evicting):
    def runtime(self, setup):
        return KNormRuntime(self, setup)


class KNormRuntime(EvictingRuntime):
    def rank(self, sequence, layer, part, step):
        return -part.k.float().norm(dim=-1)
