"""The methods of a comparison in one table, and the columns that a command line asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import engine
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
    Build,
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

PREFILL = re.compile("omnikv_prefill_r([1-9][0-9]{0,3})")
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

    def asked(self, task: str, length: int, seed: int, question: int, turn: int) -> dict[str, Any]:
        """What a record says of who was asked what."""
        own = {name: getattr(self, name) for name in ("name", "kind", "budget", "bank")}
        where = dict(task=task, length=length, seed=seed, question=question, turn=turn)
        return {"variant": self.label, **own, "kept": list(self.kept), **where}

    @property
    def entry(self) -> Entry:
        """Its row of the table."""
        return entry_of(self.name)


def by_share(cls: Callable[..., Method], **settings: Any) -> Build:
    """Build a method whose budget is a share of the tokens."""
    return lambda facts, share: cls(share=share, **settings)


def chooses(note: str, build: Build, granularity: str = "", **more: Any) -> Entry:
    """An Entry for a method that keeps everything and reads what it chooses."""
    return Entry(note, build, keeps_all, **dict(group="others", granularity=granularity) | more)


def whole(note: str, build: Callable[[], Method], group: str = "others", **more: Any) -> Entry:
    """An Entry for a method without a budget."""
    return Entry(note, lambda facts, share: build(), group=group, budget=False, **more)


def of_omnikv(
    note: str, cls: type[Method] = engine.OmniKV, group: str = "t1", **more: Any
) -> Entry:
    """An Entry for OmniKV, or a variation of it, with budgets in bytes."""
    build = omnikv(cls, **more)
    return Entry(note, build, omnikv_at_bytes(build), group, granularity="layer")


def bounds(note: str, cls: Callable[..., Method], granularity: str, **more: Any) -> Entry:
    """An Entry that is told what to read."""
    build = by_share(cls, granularity=granularity) if granularity != "layer" else by_share(cls)
    return chooses(note, build, granularity, group="bounds", **more)


REGISTRY: dict[str, Entry] = {
    "full": whole(
        "full attention, what everything is compared with", engine.Full, "t1", sparse=False
    ),
    "omnikv": of_omnikv("OmniKV, last-token selector"),
    "omnikv_random": of_omnikv(
        "control: OmniKV with tokens drawn by chance, anew in every step", OmniKVRandom, "controls"
    ),
    "omnikv_newest": of_omnikv(
        "control: OmniKV with the newest tokens before the tail", OmniKVNewest, "controls"
    ),
    "omnikv_one": Entry(
        "control: OmniKV with one token", omnikv(OmniKVOne), group="controls", budget=False
    ),
    "omnikv_uniform": of_omnikv("OmniKV, uniform selector over 16 queries", selector="uniform"),
    "omnikv_exponential": of_omnikv(
        "OmniKV, exponential selector over 16 queries", selector="exponential"
    ),
    "omnikv_residual": chooses(
        "OmniKV, a quarter of the budget drawn by chance to stand for what is not chosen",
        omnikv(residual="sample"),
        "layer",
    ),
    "omnikv_residual_tenth": chooses(
        "the same with a tenth of the budget",
        omnikv(residual="sample", residual_share=0.1),
        "layer",
    ),
    "omnikv_residual_half": chooses(
        "the same with half of the budget", omnikv(residual="sample", residual_share=0.5), "layer"
    ),
    "omnikv_unweighted": chooses(
        "control: a quarter of the budget drawn by chance, each token for itself",
        omnikv(residual="unweighted"),
        "layer",
    ),
    "omnikv_per_layer": Entry(
        "OmniKV without sharing between layers (ablation)",
        omnikv(OmniKVPerLayer),
        streams(omnikv(OmniKVPerLayer)),
        granularity="layer",
    ),
    "brutal_offload": whole(
        "exact attention, the last 20 layers in host memory (ablation)",
        BrutalOffload,
        "t1",
        reads="own",
        place="host",
        sparse=False,
    ),
    "h2o": evicting(
        "H2O, the newest tokens and the heavy hitters, half each", engine.H2O, "t1", "own"
    ),
    "h2o_plus": evicting_while_reading(
        "H2O+, H2O that evicts while it reads, in segments of 500",
        engine.H2OPlus,
        "t1",
        head=whole_segments,
    ),
    "streaming_llm": evicting_while_reading(
        "StreamingLLM, 4 sinks and a window, in prefill too",
        engine.StreamingLLM,
        "t1",
        engine.StreamingLLM.sink,
    ),
    "streaming_llm_trim": evicting(
        "the OmniKV paper's StreamingLLM: full prefill, then trimmed to 1% sinks and a window",
        engine.StreamingLLM,
        "t1",
        official=True,
    ),
    "infllm": chooses(
        "InfLLM, blocks of the past by representative keys, its own prefill",
        infllm,
        group="t1",
        reads="own",
        within=infllm_within,
    ),
    "em_llm": chooses(
        "EM-LLM, events of the past that begin where a token surprises, and their neighbours",
        em_llm,
        "layer",
        reads="own",
    ),
    "minference": chooses(
        "MInference, sparse prefill, full attention in answers",
        by_share(engine.MInference),
        group="t1",
        reads="own",
        sparse=False,
    ),
    "quoka": chooses(
        "QuoKA, prompts by the keys that each chunk's least ordinary queries point at",
        by_share(engine.QuoKA),
        group="t1",
        reads="own",
        head=whole_blocks,
        sparse=False,
    ),
    "xattention": whole(
        "XAttention, prompts by the blocks whose antidiagonals hold 90% of the attention",
        engine.XAttention,
        reads="own",
        head=whole_blocks,
        sparse=False,
    ),
    "snapkv": evicting("SnapKV, chosen by the prompt's last 32 queries", engine.SnapKV),
    "snapkv_plus": evicting_while_reading(
        "SnapKV that evicts while it reads, in segments of 500",
        partial(engine.SnapKVPlus, segment=500),
        head=whole_segments,
    ),
    "pyramidkv": evicting("PyramidKV, SnapKV with budgets that fall with depth", engine.PyramidKV),
    "ada_snapkv": evicting("Ada-SnapKV, SnapKV with a budget per head", engine.AdaSnapKV),
    "ada_pyramid": evicting("Ada-Pyramid, both", engine.AdaPyramid),
    "keyformer": evicting(
        "Keyformer, H2O with noise and temperature", engine.Keyformer, reads="own"
    ),
    "scissorhands": evicting(
        "Scissorhands, above average lately, dropped many at once",
        engine.Scissorhands,
        reads="own",
        head=whole_chunks,
    ),
    "a2sf": evicting("A2SF, H2O with forgetting", engine.A2SF, reads="own"),
    "roco": evicting(
        "RoCo, small mean attention goes, large deviation stays", engine.RoCo, reads="own"
    ),
    "zigzagkv": evicting("ZigZagKV, SnapKV with layer budgets by need", engine.ZigZagKV),
    "expected_attention": evicting(
        "Expected Attention, chosen by the queries that are expected",
        engine.ExpectedAttention,
        reads="own",
    ),
    "kvzip": evicting("KVzip, chosen by repeating the context", engine.KVzip),
    "rkv": evicting("R-KV, attention less redundancy, in answers too", engine.RKV),
    "vase": evicting("VaSE, large values and a draw by attention, in answers too", engine.VaSE),
    "duo": Entry(
        "DuoAttention, whole heads and streaming ones; gates from duo.json "
        "(tools.studies.duo_gates)",
        duo,
        partial(duo, forget=True),
        reads="own",
        evicts=True,
    ),
    "fastgen": whole(
        "FastGen, each head what it looks at; no budget: 5% of the attention may go",
        engine.FastGen,
        evicts=True,
    ),
    "razor": Entry(
        "RazorAttention, retrieval heads and others with a mean of what they dropped; scores from "
        "razor.json (tools.studies.razor_heads)",
        razor,
        razor,
        "others",
        evicts=True,
    ),
    EVICTION_CONTROL: evicting(
        "control: evicts by chance, in prompt and answer", engine.RandomEvictionAll, "controls"
    ),
    PROMPT_KEPT: whole(
        "control: evicts by chance in the answer alone, of which 4 to 7 tokens stay",
        partial(engine.RandomEviction, tokens=4, recent=2, every=4, forget=True),
        "controls",
        evicts=True,
        sparse=False,  # a short answer loses nothing
    ),
    "window": evicting_while_reading(
        "window attention, the newest tokens only, in prefill too", engine.Window
    ),
    "window_recompute": Entry(
        "the window encoded anew for every token, the oracle of streams; slow",
        lambda facts, share: engine.WindowRecompute(max(1, math.floor(share * facts.capacity))),
        recomputes,
        "others",
        reads="own",
    ),
    "lm_infinite": evicting_while_reading(
        "LM-Infinite, 10 first tokens and a window, in prefill too",
        engine.LMInfinite,
        sink=engine.LMInfinite.sink,
    ),
    "longformer": evicting_while_reading(
        "Longformer's mask, a window and a global first token, in prefill too", engine.Longformer
    ),
    "sirllm": evicting_while_reading(
        "SirLLM, 4 first tokens, the newest, and the most surprising, in prefill too",
        engine.SirLLM,
        sink=engine.SirLLM(share=0.5).smallest - 1,
        head=segments_of_budget,
    ),
    "pod_untrained": chooses(
        "PoD without its training; blocks from pod.json (tools.calibrate.pod_groups)",
        pod,
        reads="own",
    ),
    "pod_snapkv": Entry(
        "PoD without its training over what SnapKV keeps; blocks from pod.json",
        pod_snapkv,
        evicting_at_bytes(pod_snapkv),
        "others",
        reads="own",
        evicts=True,
    ),
    "quest": chooses("Quest, pages of 16 by their extremes", by_share(engine.Quest), "kv_head"),
    "clusterkv": chooses(
        "ClusterKV, whole clusters of keys that point alike", clusterkv, "kv_head"
    ),
    "retroinfer": chooses(
        "RetroInfer, the best clusters read, the next ones as a mean each", retroinfer, "kv_head"
    ),
    "double_sparsity": chooses(
        "Double Sparsity, by few channels found beforehand; from double_sparsity.json "
        "(tools.studies.heavy_channels)",
        double_sparsity,
        "kv_head",
    ),
    "pqcache": chooses("PQCache, by codes of a product quantiser", pqcache, "kv_head"),
    "rocketkv": chooses(
        "RocketKV for several turns, pages of what a prompt's last queries keep",
        rocketkv,
        "kv_head",
    ),
    "shadowkv": chooses(
        "ShadowKV, chunks by their mean key; K of rank 160 at most, V from the bank",
        shadowkv,
        "kv_head",
    ),
    "sparq": chooses(
        "SparQ, by the quarter of the channels in which the query is largest",
        by_share(engine.SparQ),
        "kv_head",
    ),
    "a2ats": chooses("A2ATS, by codes of keys without their positions", a2ats, "kv_head"),
    "infinigen": chooses(
        "InfiniGen, what the layer before says by 30% of skewed columns, the budget at most",
        by_share(engine.InfiniGen),
        "kv_head",
    ),
    "magicpig": chooses(
        "MagicPIG, tokens drawn by hashes and weighed by their chance, the budget at most",
        magicpig,
        "kv_head",
    ),
    "tidaldecode": chooses(
        "TidalDecode, two choosing layers, every query head its own",
        by_share(engine.TidalDecode),
        "query_head",
    ),
    "oracle_topk": bounds(
        "bound: the k tokens that a layer attends to most, one list for all heads",
        engine.OracleTopK,
        "layer",
    ),
    "oracle_topk_kv_head": bounds(
        "bound: the same by a list for each K/V head", engine.OracleTopK, "kv_head"
    ),
    "oracle_topk_query_head": bounds(
        "bound: the same by a list for each query head", engine.OracleTopK, "query_head"
    ),
    "oracle_topp": bounds(
        "bound: per K/V head the fewest tokens with 95% of its attention, at most the budget",
        engine.OracleTopP,
        "kv_head",
    ),
    "random_topk": bounds(
        "control of the bounds: as many tokens by chance, one list for all heads",
        engine.RandomTopK,
        "layer",
        oracle="oracle_topk",
    ),
    "omnikv_heads": chooses(
        "OmniKV, filter layers choose one list per K/V head", omnikv(engine.OmniKVHeads), "kv_head"
    ),
    "kascade": chooses(
        "Kascade, anchors choose per K/V head, a head map leads to their lists; from kascade.json "
        "(tools.calibrate.anchors)",
        kascade,
        "kv_head",
    ),
    "kascade_tiles": chooses(
        "Kascade in prompts too: 128 queries choose together; from kascade.json "
        "(tools.calibrate.anchors)",
        partial(kascade, kind=engine.KascadeTiles),
        reads="own",
        head=whole_tiles,
    ),
    "hshare": chooses(
        "HShare, lists per K/V head that layers, heads and two steps share; from hshare.json "
        "(tools.calibrate.sharing)",
        hshare,
        "kv_head",
    ),
    "less_is_more": chooses(
        "LessIsMore, the union of what heads name in OmniKV's filter layers",
        lambda facts, share: engine.LessIsMore(share=share, layers=filters(facts)),
        "layer",
    ),
    "omnikv_top_p": chooses(
        "OmniKV, as many tokens as hold 90% of the attention, the budget at most",
        omnikv(engine.OmniKVTopP, least=1),
        "layer",
    ),
    "delta": chooses(
        "DELTA, pages of 16 by the attention of OmniKV's filter layers",
        lambda facts, share: engine.Delta(share=share, layers=filters(facts)),
        "layer",
    ),
    "omnikv_unpacked": Entry(
        "OmniKV with layers that load one by one, over host memory (ablation)",
        omnikv(OmniKVUnpacked),
        group="others",
        reads="own",
        place="host",
    ),
    "omnikv_prefill": Entry(
        "OmniKV, prompts read sparsely too, r = 2; omnikv_prefill_r8: r = 8, uniform selector",
        omnikv(prefill_ratio=2),
        group="others",
        reads="own",
        head=whole_chunks,
    ),
}
# whose oracle is omnikv's: the same layers, tail and granularity
LIKE_OMNIKV = (
    "omnikv",
    *("omnikv_random", "omnikv_newest", "omnikv_uniform", "omnikv_exponential"),
    *("omnikv_residual", "omnikv_residual_tenth", "omnikv_residual_half", "omnikv_unweighted"),
)


def bounded(name: str) -> None:
    """Give a method of the table the oracle of its granularity, and put that into the table."""
    entry, whose = REGISTRY[name], "omnikv" if name in LIKE_OMNIKV else name
    granularity, oracle = entry.granularity, f"oracle_{whose}"
    REGISTRY[name] = replace(entry, oracle=oracle)
    note = f"bound: the best lists per {granularity.replace('_', ' ')} in {whose}'s layers"
    build = bound(REGISTRY[whose].build, granularity)
    bounding = chooses(note, build, granularity, group="bounds", of=REGISTRY[whose])
    REGISTRY.setdefault(oracle, bounding)


for _name in [name for name, row in REGISTRY.items() if row.granularity and row.group != "bounds"]:
    bounded(_name)


@cache
def prefill_entry(ratio: int) -> Entry:
    """OmniKV as Table 14 of its paper has it: prompts read sparsely with r = ratio, answers by the
    uniform selector.
    """
    return replace(
        REGISTRY["omnikv_prefill"],
        note=f"OmniKV, prompts read sparsely too, r = {ratio}, uniform selector",
        build=omnikv(prefill_ratio=ratio, selector="uniform"),
    )


def entry_of(name: str) -> Entry:
    """The row of a name, made where only the engine's registry knows it, or where it names an r
    (omnikv_prefill_r8). Raises UsageError.
    """
    if name not in REGISTRY and (found := PREFILL.fullmatch(name)):
        return prefill_entry(int(found[1]))
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
