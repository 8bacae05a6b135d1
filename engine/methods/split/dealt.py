"""Which methods run over tokens that lie on several ranks, and their runtimes there."""

from __future__ import annotations

from typing import Any

from engine.methods.base import Method, Runtime, Setup
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.evict.shared.settings import Evicting
from engine.methods.exact import Exact, ExactRuntime
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.oracle.random_topk import RandomTopK
from engine.methods.oracle.settings import ByGranularity
from engine.methods.oracle.topk import OracleTopK
from engine.methods.split.context_bounds import ContextOracle, ContextRandomTopK
from engine.methods.split.context_runtime import (
    ContextNewest,
    ContextOmniKV,
    ContextPerLayer,
    ContextRandom,
    Everything,
)


def context_runtime(method: Method, setup: Setup) -> Runtime:
    """The runtime of a method that runs over rows of several ranks (`why_not_dealt`)."""
    assert not why_not_dealt(method), "a method that reads rows by position"
    return RUNTIMES[type(method)](method, setup)


def why_not_dealt(method: Method) -> str:
    """Why a method cannot run where each rank holds the rows of its own tokens; "" where it can."""
    if isinstance(method, Exact):
        if method.chooser == "verifier":
            return "has verifications choose, by rows of one rank; leave chooser out"
        return why_not_dealt(method.method)
    if isinstance(method, Evicting):
        return "evicts: what it keeps needs no second rank; use one process or split_by='heads'"
    if type(method) not in RUNTIMES:
        return "has not been built over tokens that lie on several ranks; use full or omnikv"
    if isinstance(method, ByGranularity) and method.granularity != "layer":
        return "has lists of several lengths on each rank; use granularity='layer'"
    if not isinstance(method, OmniKV):
        return ""
    if method.official:
        return "follows the published code, which knows one bank; leave official out"
    if method.prefill_ratio is not None or method.dense_layers != "dense":
        return "chooses for prompts by rows of all; leave prefill_ratio and dense_layers out"
    if method.residual != "none":
        return "draws from what is not chosen, of all tokens together; leave residual out"
    return ""


class ContextExact(Everything, ExactRuntime):
    """Full attention over the rows of all ranks, and a drafter over them."""

    def _drafting(self, method: Method, setup: Setup) -> Runtime:
        return context_runtime(method, setup)


RUNTIMES: dict[type[Method], Any] = {
    Full: Everything,
    Exact: ContextExact,
    OmniKV: ContextOmniKV,
    OmniKVOne: ContextOmniKV,
    OmniKVUnpacked: ContextOmniKV,
    OmniKVPerLayer: ContextPerLayer,
    OmniKVNewest: ContextNewest,
    OmniKVRandom: ContextRandom,
    OracleTopK: ContextOracle,
    RandomTopK: ContextRandomTopK,
}
