"""Which methods run over a model whose layers lie on several devices.

A method is let through where tests/programs/devices.py has found one device's logits to the bit:
its layers look at their own rows, or choose for layers of their own group, whose list crosses where
the group is cut. The others keep tables or stores by the numbers of all layers, or run layers
twice.
"""

from __future__ import annotations

from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.methods.exact import Exact

RUN = (
    "brutal_offload",
    "clusterkv",
    "delta",
    "full",
    "less_is_more",
    "magicpig",
    "omnikv",
    "omnikv_heads",
    "omnikv_newest",
    "omnikv_one",
    "omnikv_per_layer",
    "omnikv_random",
    "omnikv_top_p",
    "omnikv_unpacked",
    "oracle_topk",
    "oracle_topp",
    "pqcache",
    "quest",
    "quoka",
    "random_topk",
    "retroinfer",
    "shadowkv",
    "sparq",
    "tidaldecode",
    "xattention",
)

# whose stores are each part's own, beside its part of the bank or in place of it
EVICT = (
    "a2sf",
    "ada_pyramid",
    "ada_snapkv",
    "expected_attention",
    "h2o",
    "h2o_plus",
    "keyformer",
    "lm_infinite",
    "pyramidkv",
    "random_eviction",
    "random_eviction_all",
    "rkv",
    "roco",
    "scissorhands",
    "snapkv",
    "snapkv_plus",
    "streaming_llm",
    "vase",
    "window",
)


def why_not(method: Method) -> str:
    """Why several devices cannot run a method with these settings; "" where they can."""
    if isinstance(method, Exact):
        if method.early_exit:
            return "drafts by the first layers and the head, which lie on two; let omnikv draft"
        if method.draft_weights != "model":
            return "drafts by a copy of the weights, which is made of one device's; leave it out"
        if method.chooser == "verifier":
            return "has verifications choose, whose lists do not cross; leave chooser out"
        return why_not(method.method)
    if method.name not in (*RUN, *EVICT):
        return "goes by what it finds in all layers, or by their numbers"
    return ""


def divides(method: Method) -> bool:
    """Whether what a layer chooses may cross to the devices behind it: not where a prompt's blocks
    choose too.
    """
    return not getattr(method, "prefill_ratio", None)


def require_split(method: Method) -> None:
    """Raise SettingError for a method that several devices cannot run."""
    if why := why_not(method):
        raise SettingError(
            f"method: found {method.name} over several devices, but it {why} (docs/PARALLEL.md)"
        )
