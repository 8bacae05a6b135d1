"""Which methods run over several ranks: those that look at each head by itself run unchanged on a
rank's own heads, OmniKV's take the merge (engine/ranks/merge.py), the others are refused.

A method is let through where tests/programs/ranks.py has found the logits of one process; the rest
choose, share or draw across heads that no rank sees together.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.methods.split.dealt import why_not_dealt

# each head by itself, or by positions alone
OWN_HEADS = (
    "a2ats",
    "a2sf",
    "brutal_offload",
    "clusterkv",
    "expected_attention",
    "fastgen",
    "full",
    "h2o",
    "h2o_plus",
    "hshare",
    "kascade",
    "kascade_tiles",
    "keyformer",
    "kvzip",
    "lm_infinite",
    "longformer",
    "minference",
    "omnikv_heads",
    "omnikv_newest",
    "omnikv_random",
    "oracle_topk",
    "oracle_topp",
    "pod_snapkv",
    "pod_untrained",
    "pqcache",
    "pyramidkv",
    "quest",
    "quoka",
    "random_topk",
    "retroinfer",
    "rkv",
    "rocketkv",
    "roco",
    "scissorhands",
    "sirllm",
    "snapkv",
    "snapkv_plus",
    "sparq",
    "streaming_llm",
    "tidaldecode",
    "window",
    "window_recompute",
    "xattention",
)
# of those, the ones that look at each query head by itself, or at positions: they run too where
# several ranks hold a K/V head and divide its query heads
EACH_QUERY = (
    "brutal_offload",
    "full",
    "lm_infinite",
    "longformer",
    "minference",
    "omnikv_newest",
    "omnikv_random",
    "oracle_topk",
    "pod_untrained",
    "random_topk",
    "sirllm",
    "streaming_llm",
    "window",
    "window_recompute",
    "xattention",
)
# a token's score is the maximum over all heads: ranks merge their lists
MERGED = ("omnikv", "omnikv_one", "omnikv_per_layer", "omnikv_unpacked")
# why the others are refused
REFUSED = {
    "ada_pyramid": "divides a budget over all heads of a layer",
    "ada_snapkv": "divides a budget over all heads of a layer",
    "delta": "adds the scores of all heads",
    "double_sparsity": "has a table of channels for all heads",
    "duo": "has a table of all heads, of which a share keeps everything",
    "em_llm": "cuts events by the keys of all heads",
    "infinigen": "reads as many tokens as the heads of a layer want on average",
    "infllm": "ranks blocks by all heads together",
    "less_is_more": "gives all heads of a layer one list, to which every head adds",
    "magicpig": "draws its hashes for all heads at once",
    "omnikv_top_p": "takes as many tokens as the attention of all heads asks for",
    "random_eviction": "draws for all heads at once",
    "random_eviction_all": "draws for all heads at once",
    "razor": "has a table of all heads, of which some keep everything",
    "shadowkv": "finds outliers by all heads together",
    "vase": "draws for all heads at once",
    "zigzagkv": "weighs layers by all of their heads",
}


def _windowed(method: Method) -> str:
    """OmniKV's selectors of several queries add each query's maximum over all heads."""
    if getattr(method, "selector", "last") != "last":
        return "adds the maxima over all heads of several queries; use selector='last'"
    if getattr(method, "prefill_ratio", 0) or getattr(method, "dense_layers", "dense") != "dense":
        return "chooses for prompts by all heads; leave prefill_ratio and dense_layers out"
    return ""


def _tables(method: Method) -> str:
    """Lists that one head reads of another, which another rank may hold."""
    if getattr(method, "head_map", None):
        return "leads heads to the lists of others; use head_map=None"
    if getattr(method, "heads", None):
        return "leads heads to the lists of others; leave heads out"
    return ""


def _drawn(method: Method) -> str:
    return "draws noise for all heads at once; use noise=False" if method.noise else ""  # type: ignore[attr-defined]


def _across(method: Method) -> str:
    if method.across == "head":  # type: ignore[attr-defined]
        return ""
    return "divides a budget over all heads; use across='head'"


def _granular(method: Method) -> str:
    if method.granularity == "layer":  # type: ignore[attr-defined]
        return "ranks by all heads of a layer; use granularity='kv_head'"
    return ""


def _one_draw(method: Method) -> str:
    if method.granularity != "layer":  # type: ignore[attr-defined]
        return "draws for all heads at once; use granularity='layer'"
    return ""


# settings of methods that are let through otherwise: why not, or ""
SETTINGS: dict[str, Callable[[Method], str]] = {
    "kascade": _tables,
    "kascade_tiles": _tables,
    "hshare": _tables,
    "keyformer": _drawn,
    "kvzip": _across,
    "omnikv": _windowed,
    "omnikv_one": _windowed,
    "omnikv_per_layer": _windowed,
    "omnikv_unpacked": _windowed,
    "oracle_topk": _granular,
    "oracle_topp": _granular,
    "random_topk": _one_draw,
}


def why_not(method: Method, halved: bool = False) -> str:
    """Why ranks cannot run a method with these settings; "" where they can. halved: whether several
    ranks hold a K/V head and divide its query heads.
    """
    if isinstance(method, Exact):
        return why_not(method.method, halved)
    name = method.name
    if name in REFUSED:
        return REFUSED[name]
    if name not in (*OWN_HEADS, *MERGED):
        return "has not been tried over several ranks"
    if halved and name not in MERGED and (name not in EACH_QUERY or _by_group(method)):
        return "looks at all query heads of a K/V head, which ranks beyond the K/V heads divide"
    return SETTINGS[name](method) if name in SETTINGS else ""


def _by_group(method: Method) -> bool:
    return getattr(method, "granularity", "") == "kv_head"


def require_dealt(method: Method, ranks: int) -> None:
    """Raise SettingError for a method that ranks cannot run where each holds its own tokens."""
    why = why_not_dealt(method)
    if why:
        raise SettingError(
            f"method: found {method.name} with {ranks} ranks split by context, but it {why} "
            "(docs/PARALLEL.md)"
        )


def require_method(
    method: Method, ranks: int, selection: str = "global", halved: bool = False
) -> None:
    """Raise SettingError for a method that ranks cannot run. selection: "per_rank" lets a method of
    MERGED choose by each rank's own heads, whatever its selector. halved: as of `why_not`.
    """
    why = why_not(method, halved)
    chooses = method.method if isinstance(method, Exact) else method
    if why and not (selection == "per_rank" and chooses.name in MERGED):
        raise SettingError(
            f"method: found {method.name} with {ranks} ranks, but it {why} (docs/PARALLEL.md)"
        )
