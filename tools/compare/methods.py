"""The methods of a comparison in one table, and the columns that a command line asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine import (
    A2SF,
    H2O,
    RKV,
    AdaPyramid,
    AdaSnapKV,
    Delta,
    ExpectedAttention,
    FastGen,
    Full,
    H2OPlus,
    InfiniGen,
    KascadeTiles,
    Keyformer,
    KVzip,
    LessIsMore,
    LMInfinite,
    Longformer,
    MInference,
    OmniKVHeads,
    OmniKVTopP,
    OracleTopK,
    OracleTopP,
    PyramidKV,
    Quest,
    QuoKA,
    RandomEviction,
    RandomEvictionAll,
    RandomTopK,
    RoCo,
    Scissorhands,
    SirLLM,
    SnapKV,
    SnapKVPlus,
    SparQ,
    StreamingLLM,
    TidalDecode,
    VaSE,
    Window,
    WindowRecompute,
    XAttention,
    ZigZagKV,
)
from engine.base.errors import SettingError, UsageError
from engine.methods.base import Method
from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.registry import methods
from engine.plan.layers import LayerPlan
from tools.banks.registry import shown
from tools.compare.at_read import at_read
from tools.compare.at_tokens import at_tokens
from tools.compare.build import (
    Entry,
    Facts,
    a2ats,
    bound,
    clusterkv,
    double_sparsity,
    duo,
    em_llm,
    evicting,
    evicting_at_bytes,
    evicting_while_reading,
    filters,
    hshare,
    infllm,
    infllm_within,
    kascade,
    keeps_all,
    magicpig,
    omnikv,
    omnikv_at_bytes,
    pod,
    pod_snapkv,
    pqcache,
    razor,
    recomputes,
    retroinfer,
    rocketkv,
    segments_of_budget,
    shadowkv,
    streams,
    whole_blocks,
    whole_chunks,
    whole_segments,
    whole_tiles,
)
from tools.compare.kept import KeepsDense, without
from tools.compare.own import entry as own_entry

PAPER_SHARE = 6.67  # per cent: the budget of the first hypothesis
GROUPS = ("t1", "others", "controls", "bounds")
CONTROLS = ("omnikv_random", "omnikv_newest", "omnikv_one")  # the last at one budget only
EVICTION_CONTROL = "random_eviction_all"  # beside every method that evicts, at its budgets
PROMPT_KEPT = "random_eviction"  # beside them once: its budget is of an answer


@dataclass(frozen=True)
class Variant:
    """One column: a method at one budget, for documents of one length.

    kind: "share" (of the tokens), "mem" (of the resident bytes), "read" (of the bytes that a step
    reads), "tokens" or "none"; budget in per cent, or in tokens;
    method: None where the budget cannot be reached, and `why` says the reason; alias: the label of
    an earlier variant that is the same method; kept: layers that attend to everything beside those
    of the method (`--dense-layers-kept`); bank: what it runs over (`--bank`; "": floats).
    """

    name: str
    kind: str
    budget: float
    method: Method | None = None
    why: str = ""
    alias: str = ""
    kept: tuple[int, ...] = ()
    bank: str = ""

    @property
    def label(self) -> str:
        """Name in tables: "h2o 10%", "omnikv Mem 75%", "quest Read 20%", "omnikv 2,048 tokens",
        "full", "h2o 10% +dense 0-2", "full on kivi2 (simulated)".
        """
        words = {"none": "", "share": " ", "mem": " Mem ", "read": " Read "}
        budget = {kind: word and f"{word}{self.budget:g}%" for kind, word in words.items()}
        budget["tokens"] = f" {self.budget:,.0f} tokens"
        kept = f" +dense {spans(self.kept)}" if self.kept else ""
        return (
            self.name + budget[self.kind] + kept + (f" on {shown(self.bank)}" if self.bank else "")
        )

    def at(self, capacity: int) -> str:
        """The label with its budget in tokens of a session: "h2o 10% (109 tokens)"."""
        tokens = f" ({round(self.budget * capacity / 100):,} tokens)"
        return self.label + (tokens if self.kind == "share" else "")

    @property
    def entry(self) -> Entry:
        """Its row of the table."""
        return entry_of(self.name)


REGISTRY: dict[str, Entry] = {
    "full": Entry(
        "full attention, what everything is compared with",
        lambda facts, share: Full(),
        budget=False,
        sparse=False,
    ),
    "omnikv": Entry("OmniKV, last-token selector", omnikv(), omnikv_at_bytes(omnikv())),
    "omnikv_random": Entry(
        "control: OmniKV with tokens drawn by chance, anew in every step",
        omnikv(OmniKVRandom),
        omnikv_at_bytes(omnikv(OmniKVRandom)),
        group="controls",
    ),
    "omnikv_newest": Entry(
        "control: OmniKV with the newest tokens before the tail",
        omnikv(OmniKVNewest),
        omnikv_at_bytes(omnikv(OmniKVNewest)),
        group="controls",
    ),
    "omnikv_one": Entry(
        "control: OmniKV with one token", omnikv(OmniKVOne), group="controls", budget=False
    ),
    "omnikv_uniform": Entry(
        "OmniKV, uniform selector over 16 queries",
        omnikv(selector="uniform"),
        omnikv_at_bytes(omnikv(selector="uniform")),
    ),
    "omnikv_exponential": Entry(
        "OmniKV, exponential selector over 16 queries",
        omnikv(selector="exponential"),
        omnikv_at_bytes(omnikv(selector="exponential")),
    ),
    "omnikv_residual": Entry(
        "OmniKV, a quarter of the budget drawn by chance to stand for what is not chosen",
        omnikv(residual="sample"),
        keeps_all,
        group="others",
    ),
    "omnikv_residual_tenth": Entry(
        "the same with a tenth of the budget",
        omnikv(residual="sample", residual_share=0.1),
        keeps_all,
        group="others",
    ),
    "omnikv_residual_half": Entry(
        "the same with half of the budget",
        omnikv(residual="sample", residual_share=0.5),
        keeps_all,
        group="others",
    ),
    "omnikv_unweighted": Entry(
        "control: a quarter of the budget drawn by chance, each token for itself",
        omnikv(residual="unweighted"),
        keeps_all,
        group="others",
    ),
    "omnikv_per_layer": Entry(
        "OmniKV without sharing between layers (ablation)",
        omnikv(OmniKVPerLayer),
        streams(omnikv(OmniKVPerLayer)),
    ),
    "brutal_offload": Entry(
        "exact attention, the last 20 layers in host memory (ablation)",
        lambda facts, share: BrutalOffload(),
        budget=False,
        reads="own",
        place="host",
        sparse=False,
    ),
    "h2o": evicting("H2O, the newest tokens and the heavy hitters, half each", H2O, "t1", "own"),
    "h2o_plus": evicting_while_reading(
        "H2O+, H2O that evicts while it reads, in segments of 500",
        H2OPlus,
        "t1",
        head=whole_segments,
    ),
    "streaming_llm": evicting_while_reading(
        "StreamingLLM, 4 sinks and a window, in prefill too", StreamingLLM, "t1", StreamingLLM.sink
    ),
    "streaming_llm_trim": evicting(
        "the OmniKV paper's StreamingLLM: full prefill, then trimmed to 1% sinks and a window",
        StreamingLLM,
        "t1",
        official=True,
    ),
    "infllm": Entry(
        "InfLLM, blocks of the past by representative keys, its own prefill",
        infllm,
        keeps_all,
        reads="own",
        within=infllm_within,
    ),
    "em_llm": Entry(
        "EM-LLM, events of the past that begin where a token surprises, and their neighbours",
        em_llm,
        keeps_all,
        reads="own",
        group="others",
    ),
    "minference": Entry(
        "MInference, sparse prefill, full attention in answers",
        lambda facts, share: MInference(share=share),
        keeps_all,
        reads="own",
        sparse=False,
    ),
    "quoka": Entry(
        "QuoKA, prompts by the keys that each chunk's least ordinary queries point at",
        lambda facts, share: QuoKA(share=share),
        keeps_all,
        reads="own",
        head=whole_blocks,
        sparse=False,
    ),
    "xattention": Entry(
        "XAttention, prompts by the blocks whose antidiagonals hold 90% of the attention",
        lambda facts, share: XAttention(),
        group="others",
        budget=False,
        reads="own",
        head=whole_blocks,
        sparse=False,
    ),
    "snapkv": evicting("SnapKV, chosen by the prompt's last 32 queries", SnapKV),
    "snapkv_plus": evicting_while_reading(
        "SnapKV that evicts while it reads, in segments of 500",
        partial(SnapKVPlus, segment=500),
        head=whole_segments,
    ),
    "pyramidkv": evicting("PyramidKV, SnapKV with budgets that fall with depth", PyramidKV),
    "ada_snapkv": evicting("Ada-SnapKV, SnapKV with a budget per head", AdaSnapKV),
    "ada_pyramid": evicting("Ada-Pyramid, both", AdaPyramid),
    "keyformer": evicting("Keyformer, H2O with noise and temperature", Keyformer, reads="own"),
    "scissorhands": evicting(
        "Scissorhands, above average lately, dropped many at once",
        Scissorhands,
        reads="own",
        head=whole_chunks,
    ),
    "a2sf": evicting("A2SF, H2O with forgetting", A2SF, reads="own"),
    "roco": evicting("RoCo, small mean attention goes, large deviation stays", RoCo, reads="own"),
    "zigzagkv": evicting("ZigZagKV, SnapKV with layer budgets by need", ZigZagKV),
    "expected_attention": evicting(
        "Expected Attention, chosen by the queries that are expected",
        ExpectedAttention,
        reads="own",
    ),
    "kvzip": evicting("KVzip, chosen by repeating the context", KVzip),
    "rkv": evicting("R-KV, attention less redundancy, in answers too", RKV),
    "vase": evicting("VaSE, large values and a draw by attention, in answers too", VaSE),
    "duo": Entry(
        "DuoAttention, whole heads and streaming ones; gates from duo.json "
        "(tools.studies.duo_gates)",
        duo,
        partial(duo, forget=True),
        reads="own",
        evicts=True,
    ),
    "fastgen": Entry(
        "FastGen, each head what it looks at; no budget: 5% of the attention may go",
        lambda facts, share: FastGen(),
        group="others",
        budget=False,
        evicts=True,
    ),
    "razor": Entry(
        "RazorAttention, retrieval heads and others with a mean of what they dropped; scores from "
        "razor.json (tools.studies.razor_heads)",
        razor,
        razor,
        group="others",
        evicts=True,
    ),
    EVICTION_CONTROL: evicting(
        "control: evicts by chance, in prompt and answer", RandomEvictionAll, "controls"
    ),
    PROMPT_KEPT: Entry(
        "control: evicts by chance in the answer alone, of which 4 to 7 tokens stay",
        lambda facts, share: RandomEviction(tokens=4, recent=2, every=4, forget=True),
        group="controls",
        budget=False,
        evicts=True,
        sparse=False,  # a short answer loses nothing
    ),
    "window": evicting_while_reading(
        "window attention, the newest tokens only, in prefill too", Window
    ),
    "window_recompute": Entry(
        "the window encoded anew for every token, the oracle of streams; slow",
        lambda facts, share: WindowRecompute(max(1, math.floor(share * facts.capacity))),
        recomputes,
        group="others",
        reads="own",
    ),
    "lm_infinite": evicting_while_reading(
        "LM-Infinite, 10 first tokens and a window, in prefill too",
        LMInfinite,
        sink=LMInfinite.sink,
    ),
    "longformer": evicting_while_reading(
        "Longformer's mask, a window and a global first token, in prefill too", Longformer
    ),
    "sirllm": evicting_while_reading(
        "SirLLM, 4 first tokens, the newest, and the most surprising, in prefill too",
        SirLLM,
        sink=SirLLM(share=0.5).smallest - 1,
        head=segments_of_budget,
    ),
    "pod_untrained": Entry(
        "PoD without its training; blocks from pod.json (tools.calibrate.pod_groups)",
        pod,
        keeps_all,
        group="others",
        reads="own",
    ),
    "pod_snapkv": Entry(
        "PoD without its training over what SnapKV keeps; blocks from pod.json",
        pod_snapkv,
        evicting_at_bytes(pod_snapkv),
        group="others",
        reads="own",
        evicts=True,
    ),
    "quest": Entry(
        "Quest, pages of 16 by their extremes",
        lambda facts, share: Quest(share=share),
        keeps_all,
        group="others",
    ),
    "clusterkv": Entry(
        "ClusterKV, whole clusters of keys that point alike",
        clusterkv,
        keeps_all,
        group="others",
    ),
    "retroinfer": Entry(
        "RetroInfer, the best clusters read, the next ones as a mean each",
        retroinfer,
        keeps_all,
        group="others",
    ),
    "double_sparsity": Entry(
        "Double Sparsity, by few channels found beforehand; from double_sparsity.json "
        "(tools.studies.heavy_channels)",
        double_sparsity,
        keeps_all,
        group="others",
    ),
    "pqcache": Entry(
        "PQCache, by codes of a product quantiser",
        pqcache,
        keeps_all,
        group="others",
    ),
    "rocketkv": Entry(
        "RocketKV for several turns, pages of what a prompt's last queries keep",
        rocketkv,
        keeps_all,
        group="others",
    ),
    "shadowkv": Entry(
        "ShadowKV, chunks by their mean key; K of rank 160 at most, V from the bank",
        shadowkv,
        keeps_all,
        group="others",
    ),
    "sparq": Entry(
        "SparQ, by the quarter of the channels in which the query is largest",
        lambda facts, share: SparQ(share=share),
        keeps_all,
        group="others",
    ),
    "a2ats": Entry(
        "A2ATS, by codes of keys without their positions",
        a2ats,
        keeps_all,
        group="others",
    ),
    "infinigen": Entry(
        "InfiniGen, what the layer before says by 30% of skewed columns, the budget at most",
        lambda facts, share: InfiniGen(share=share),
        keeps_all,
        group="others",
    ),
    "magicpig": Entry(
        "MagicPIG, tokens drawn by hashes and weighed by their chance, the budget at most",
        magicpig,
        keeps_all,
        group="others",
    ),
    "tidaldecode": Entry(
        "TidalDecode, two choosing layers, every query head its own",
        lambda facts, share: TidalDecode(share=share),
        keeps_all,
        group="others",
    ),
    "oracle_topk": Entry(
        "bound: the k tokens that a layer attends to most, one list for all heads",
        lambda facts, share: OracleTopK(share=share),
        keeps_all,
        group="bounds",
        granularity="layer",
    ),
    "oracle_topk_kv_head": Entry(
        "bound: the same by a list for each K/V head",
        lambda facts, share: OracleTopK(share=share, granularity="kv_head"),
        keeps_all,
        group="bounds",
        granularity="kv_head",
    ),
    "oracle_topk_query_head": Entry(
        "bound: the same by a list for each query head",
        lambda facts, share: OracleTopK(share=share, granularity="query_head"),
        keeps_all,
        group="bounds",
        granularity="query_head",
    ),
    "oracle_topp": Entry(
        "bound: per K/V head the fewest tokens with 95% of its attention, at most the budget",
        lambda facts, share: OracleTopP(share=share),
        keeps_all,
        group="bounds",
        granularity="kv_head",
    ),
    "random_topk": Entry(
        "control of the bounds: as many tokens by chance, one list for all heads",
        lambda facts, share: RandomTopK(share=share),
        keeps_all,
        group="bounds",
        granularity="layer",
        oracle="oracle_topk",
    ),
    "omnikv_heads": Entry(
        "OmniKV, filter layers choose one list per K/V head",
        omnikv(OmniKVHeads),
        keeps_all,
        group="others",
    ),
    "kascade": Entry(
        "Kascade, anchors choose per K/V head, a head map leads to their lists; from kascade.json "
        "(tools.calibrate.anchors)",
        kascade,
        keeps_all,
        group="others",
    ),
    "kascade_tiles": Entry(
        "Kascade in prompts too: 128 queries choose together; from kascade.json "
        "(tools.calibrate.anchors)",
        partial(kascade, kind=KascadeTiles),
        keeps_all,
        group="others",
        reads="own",
        head=whole_tiles,
    ),
    "hshare": Entry(
        "HShare, lists per K/V head that layers, heads and two steps share; from hshare.json "
        "(tools.calibrate.sharing)",
        hshare,
        keeps_all,
        group="others",
    ),
    "less_is_more": Entry(
        "LessIsMore, the union of what heads name in OmniKV's filter layers",
        lambda facts, share: LessIsMore(share=share, layers=filters(facts)),
        keeps_all,
        group="others",
    ),
    "omnikv_top_p": Entry(
        "OmniKV, as many tokens as hold 90% of the attention, the budget at most",
        omnikv(OmniKVTopP, least=1),
        keeps_all,
        group="others",
    ),
    "delta": Entry(
        "DELTA, pages of 16 by the attention of OmniKV's filter layers",
        lambda facts, share: Delta(share=share, layers=filters(facts)),
        keeps_all,
        group="others",
    ),
    "omnikv_unpacked": Entry(
        "OmniKV with layers that load one by one, over host memory (ablation)",
        omnikv(OmniKVUnpacked),
        group="others",
        reads="own",
        place="host",
    ),
    "omnikv_prefill": Entry(
        "OmniKV that also reads prompts sparsely, r = 2",
        omnikv(prefill_ratio=2),
        group="others",
        reads="own",
        head=whole_chunks,
    ),
}

# what chooses, the granularity of its lists, and after whom its oracle is called: those with the
# same layers, tail and granularity have one
CHOOSING = {
    "omnikv": ("layer", "omnikv"),
    "omnikv_random": ("layer", "omnikv"),
    "omnikv_newest": ("layer", "omnikv"),
    "omnikv_uniform": ("layer", "omnikv"),
    "omnikv_exponential": ("layer", "omnikv"),
    "omnikv_residual": ("layer", "omnikv"),
    "omnikv_residual_tenth": ("layer", "omnikv"),
    "omnikv_residual_half": ("layer", "omnikv"),
    "omnikv_unweighted": ("layer", "omnikv"),
    "omnikv_per_layer": ("layer", "omnikv_per_layer"),
    "quest": ("kv_head", "quest"),
    "tidaldecode": ("query_head", "tidaldecode"),
    "omnikv_heads": ("kv_head", "omnikv_heads"),
    "rocketkv": ("kv_head", "rocketkv"),
    "shadowkv": ("kv_head", "shadowkv"),
    "sparq": ("kv_head", "sparq"),
    "double_sparsity": ("kv_head", "double_sparsity"),
    "clusterkv": ("kv_head", "clusterkv"),
    "em_llm": ("layer", "em_llm"),
    "retroinfer": ("kv_head", "retroinfer"),
    "pqcache": ("kv_head", "pqcache"),
    "a2ats": ("kv_head", "a2ats"),
    "infinigen": ("kv_head", "infinigen"),
    "magicpig": ("kv_head", "magicpig"),
    "delta": ("layer", "delta"),
    "omnikv_top_p": ("layer", "omnikv_top_p"),
    "kascade": ("kv_head", "kascade"),
    "hshare": ("kv_head", "hshare"),
    "less_is_more": ("layer", "less_is_more"),
}


def bounded(name: str, granularity: str, whose: str) -> None:
    """Give a method of the table the oracle of its granularity, and put that into the table."""
    entry, oracle = REGISTRY[name], f"oracle_{whose}"
    REGISTRY[name] = replace(entry, granularity=granularity, oracle=oracle)
    note = f"bound: the best lists per {granularity.replace('_', ' ')} in {whose}'s layers"
    build = bound(REGISTRY[whose].build, granularity)
    given: dict[str, Any] = dict(group="bounds", granularity=granularity, of=REGISTRY[whose])
    REGISTRY.setdefault(oracle, Entry(note, build, keeps_all, **given))


for _name, _choice in CHOOSING.items():
    bounded(_name, *_choice)


def entry_of(name: str) -> Entry:
    """The row of a name, made where only the engine's registry knows it. Raises UsageError."""
    if name not in REGISTRY:
        known = methods()
        if name not in known:
            raise UsageError(
                f"unknown method {name!r}: one of {', '.join((*GROUPS, *REGISTRY))}, or one of "
                "your own with --import FILE"
            )
        REGISTRY[name] = own_entry(known[name])
    return REGISTRY[name]


def spans(layers: Sequence[int]) -> str:
    """Layer numbers for people: "0-2,5"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def wanted(
    words: Sequence[str], shares: Sequence[float], mems: Sequence[float], controls: bool = False
) -> list[tuple[str, str, float]]:
    """[(name, kind, budget)] for words such as "t1", "quest", "others@30", "omnikv@3,6.67,m75",
    "omnikv@t2048": shares and resident bytes in per cent, tokens by their number.

    "full" comes first whether asked for or not; "t1" and "omnikv" without an @ include the share of
    the first hypothesis. controls: beside OmniKV and what evicts, at their budgets; and beside what
    chooses its oracle.
    """
    found: dict[tuple[str, str, float], None] = {("full", "none", 100.0): None}
    for word in words:
        base, at, own = word.partition("@")
        names = [n for n, e in REGISTRY.items() if e.group == base] if base in GROUPS else [base]
        for name in names:
            entry = entry_of(name)
            if not entry.budget:
                found[name, "none", 100.0] = None
                continue
            budgets = (
                _budgets(word, own)
                if at
                else [("share", s) for s in shares] + [("mem", m) for m in mems]
            )
            if name == "omnikv" and not at:
                budgets.append(("share", PAPER_SHARE))
            for kind, value in sorted(set(budgets), key=lambda b: (b[0] == "mem", b[1])):
                if kind != "mem" or entry.at_bytes is not None:
                    found[name, kind, checked(value, kind)] = None
    beside = [(kind, value) for name, kind, value in found if name == "omnikv" and controls]
    for control in CONTROLS if beside else ():
        for budget in beside if REGISTRY[control].budget else [("none", 100.0)]:
            found[(control, *budget)] = None
    for name, kind, value in list(found) if controls else ():
        if entry_of(name).oracle and kind in ("share", "read", "tokens"):
            found[entry_of(name).oracle, kind, value] = None
    for name, *budget in list(found) if controls else ():
        if entry_of(name).evicts and name != PROMPT_KEPT:
            found[(EVICTION_CONTROL, *budget)] = None
            found[(PROMPT_KEPT, "none", 100.0)] = None
    return list(found)


def _budgets(word: str, text: str) -> list[tuple[str, float]]:
    out = []
    for part in text.split(","):
        kind = {"m": "mem", "r": "read", "t": "tokens"}.get(part[:1], "share")
        digits = part if kind == "share" else part[1:]
        try:
            out.append((kind, float(digits)))
        except ValueError:
            raise UsageError(
                f"{word}: found the budget {part!r}, expected per cent such as 30 (of the "
                "tokens), m30 (of the resident bytes) or r30 (of the bytes that a step reads), or "
                "tokens such as t2048"
            ) from None
    return out


def checked(value: float, kind: str = "share") -> float:
    """A budget in per cent, or in tokens, or UsageError."""
    if kind == "tokens":
        if not (math.isfinite(value) and value >= 1 and value == int(value)):
            raise UsageError(f"budget: found t{value:g}, expected whole tokens, 1 at least")
        return float(value)
    if not (math.isfinite(value) and 0 < value <= 100):
        raise UsageError(f"budget: found {value:g}, expected per cent above 0 and at most 100")
    return float(value)


def variants(facts: Facts, names: Sequence[tuple[str, str, float]]) -> list[Variant]:
    """Variants of all `names` [(name, kind, budget)] for one capacity. Raises SettingError where a
    method does not fit the model.
    """
    out: list[Variant] = []
    seen: dict[tuple[str, str, str], str] = {}
    for name, kind, budget in names:
        entry, variant = entry_of(name), Variant(name, kind, budget)
        made = built(facts, variant)
        if isinstance(made, str):
            out.append(replace(variant, why=made))
            continue
        method, plan = facts.llm.resolve_method(made)
        if entry.sparse and not plan.partial_layers:
            raise SettingError(
                f"{name}: the plan of this model has no sparse layer ({plan.describe()}): "
                "choose other filter layers"
            )
        found = replace(variant, method=method)
        beside = keeping(facts, variant, method, plan)
        for one in (found, *beside, *over_banks(facts, found)):
            key = (name, repr(one.method), one.bank)
            out.append(replace(one, alias=seen.get(key, "")) if one.method else one)
            seen.setdefault(key, out[-1].label)
    return out


def built(facts: Facts, variant: Variant) -> Method | str:
    """The method of a column at its budget, or a text why there is none."""
    entry, part = variant.entry, variant.budget / 100
    if variant.kind == "read":
        return at_read(facts, entry, part)
    if variant.kind == "tokens":
        return at_tokens(facts, entry, int(variant.budget))
    build = entry.at_bytes if variant.kind == "mem" else entry.build
    assert build is not None  # `wanted` asks for no other budgets
    made: Method | str = build(facts, part)
    return made


def keeping(facts: Facts, variant: Variant, method: Method, plan: LayerPlan) -> list[Variant]:
    """The variant with the layers of `--dense-layers-kept`, where they would change it; with the
    reason where nothing sparse is left.
    """
    whole, kept = variant.name == "full" or variant.kind == "mem", kept_layers(facts)
    whole |= getattr(method, "forget", False)  # a kept layer's rows would be gone
    left = without(plan, kept)
    unchanged = left == plan and (variant.entry.reads == "shared" or not variant.entry.budget)
    if whole or not kept or unchanged:
        return []
    variant = replace(variant, kept=kept)
    if variant.entry.sparse and not left.partial_layers:
        return [replace(variant, why="no sparse layer is left beside those that are kept dense")]
    return [replace(variant, method=KeepsDense(method, kept))]


def over_banks(facts: Facts, variant: Variant) -> list[Variant]:
    """The variant over the banks of `--bank`: full attention and OmniKV read nothing but the bank,
    so that what they say of rounded rows is the rows' doing.
    """
    if variant.name not in ("full", "omnikv") or variant.kind == "mem":
        return []
    return [replace(variant, bank=bank) for bank in facts.banks]


def kept_layers(facts: Facts) -> tuple[int, ...]:
    """The layers of `--dense-layers-kept`: those given, or all that OmniKV reads whole."""
    if facts.kept == "omnikv":
        _, plan = facts.llm.resolve_method(REGISTRY["omnikv"].build(facts, 0.5))
        return tuple(sorted(set(range(plan.num_layers)) - set(plan.sparse_layers)))
    layers = tuple(sorted({int(layer) for layer in facts.kept}))
    count = facts.llm.config.num_layers
    wrong = next((layer for layer in layers if not 0 <= layer < count), None)
    if wrong is not None:
        raise SettingError(
            f"--dense-layers-kept: found {wrong}, expected numbers from 0 to {count - 1} "
            f"(the model has {count} layers)"
        )
    return layers
