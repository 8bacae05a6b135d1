"""The methods of a comparison in one table: how each is built at a token share and at a share of
resident bytes, and how it reads prompts.

A `Variant` is one column of the comparison: a method at one budget, for documents of one length.
Where a budget cannot be reached, the variant has no method and says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine import (
    A2SF,
    H2O,
    AdaPyramid,
    AdaSnapKV,
    Full,
    H2OPlus,
    InfLLM,
    Keyformer,
    LMInfinite,
    MInference,
    OmniKV,
    PodUntrained,
    PyramidKV,
    Quest,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    TidalDecode,
    Window,
)
from engine.errors import BadCheckpoint, SettingError, UsageError
from engine.methods.brutal_offload import BrutalOffload
from engine.methods.omnikv.ablations import OmniKVPerLayer, OmniKVUnpacked
from tools.compare.bytes import device_share, offloaded
from tools.pod_groups import read_blocks

PAPER_SHARE = 6.67  # per cent: what the first hypothesis is about
# of full attention's bytes: a share and a resident budget that differ by less are one run
NEAR = 0.005


@dataclass(frozen=True)
class Facts:
    """What a variant is built from: the model, one session's capacity in tokens, and OmniKV's
    settings.

    filters, wait: filter and wait layers, None for those the model comes with; tail: newest tokens
    that every layer sees, outside the budget (64, the least there is, so that budgets say what is
    read).
    """

    llm: object
    capacity: int
    filters: tuple | None = None
    wait: int | None = None
    tail: int = 64


@dataclass(frozen=True)
class Entry:
    """One method of the table.

    note: one line for --help. group: "t1" (the paper's own and its baselines) or "others".
    build(facts, share) -> the method that reads `share` of the prompt (None for methods without a
    budget). at_bytes(facts, part) -> the method whose resident KV bytes are at most `part` of full
    attention's, or a text why there is none. reads: "shared" where the method leaves prefill alone,
    so that one reading of a document by full attention serves; "own" where it must see the document
    itself. head(llm, method, length): how many tokens of a document of `length` such a method may
    read once for all questions, to read the rest with each of them (None: all). evicts: whether it
    gives tokens up for good. place: "device" or "host", where answers are given. sparse: whether
    every decode step must have been sparse.
    """

    note: str
    build: Callable
    at_bytes: Callable | None = None
    group: str = "t1"
    budget: bool = True
    reads: str = "shared"
    head: Callable | None = None
    evicts: bool = False
    place: str = "device"
    sparse: bool = True


@dataclass(frozen=True)
class Variant:
    """A method at a budget. kind: "share" | "mem" | "none"; budget in per cent; alias: the variant
    that is the same method, if any.
    """

    name: str
    kind: str
    budget: float
    method: object = None
    why: str = ""
    alias: str = ""

    @property
    def label(self):
        """Name in tables: "h2o 10%", "omnikv Mem 75%", "full"."""
        return (
            self.name
            + {"none": "", "share": f" {self.budget:g}%", "mem": f" Mem {self.budget:g}%"}[
                self.kind
            ]
        )

    @property
    def entry(self):
        """Its row of the table."""
        return REGISTRY[self.name]


# -------------------------------------------------------------------- how methods are built


def _omnikv(cls=OmniKV, **more):
    def build(facts, share):
        return cls(
            filter_layers=facts.filters,
            share=share,
            wait_layers=facts.wait,
            tail=facts.tail,
            dense_below=0,
            **more,
        )

    return build


def _omnikv_bytes(build):
    """OmniKV over an offloaded bank: the most tokens whose slots, with the dense layers and the
    tails, fit.
    """

    def at_bytes(facts, part):
        def resident(tokens):
            return device_share(
                facts.llm, replace(build(facts, None), tokens=tokens), facts.capacity
            )

        least = resident(1)
        if least > part:
            _, plan = facts.llm.resolve_method(build(facts, 0.5))
            return (
                f"its {plan.num_layers - len(plan.sparse_layers)} dense layers of {plan.num_layers} and the tails of the others hold "
                f"{100 * least:.1f}% before a token is chosen"
            )
        low, high = 1, facts.capacity
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if resident(middle) <= part else (low, middle - 1)
        return replace(build(facts, None), tokens=low)

    return at_bytes


def _evicting_bytes(build):
    """A method that evicts: the share itself where its store is that part within NEAR, else the
    largest budget in tokens that fits.
    """

    def at_bytes(facts, part):
        method = build(facts, part)
        if abs(device_share(facts.llm, method, facts.capacity) - part) <= NEAR:
            return method
        # SnapKV's queries, a window beside the sinks
        least = max(getattr(method, "window", 1), getattr(method, "sink", 0) + 1)
        share = device_share(facts.llm, replace(method, share=None, tokens=least), facts.capacity)
        if share > part:
            return f"the least it can keep, {least} tokens per head, takes {100 * share:.1f}%"
        low, high = least, facts.capacity
        while low < high:
            middle = (low + high + 1) // 2
            fits = (
                device_share(facts.llm, replace(method, share=None, tokens=middle), facts.capacity)
                <= part
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return replace(method, share=None, tokens=low)

    return at_bytes


def _evicting(note, cls, group="others", reads="shared", head=None, **settings):
    """An Entry for a method that evicts by a budget in tokens or as a share."""

    def build(facts, share):
        return cls(share=share, **settings)

    return Entry(note, build, _evicting_bytes(build), group, reads=reads, head=head, evicts=True)


def _as_it_reads(note, cls, group="others", sink=0, head=None):
    """An Entry for a method that evicts while it reads. Its budget is in tokens of the planned
    length: the same for a document as for the question after it, so that reading them apart changes
    nothing.
    """

    def build(facts, share):
        return cls(tokens=max(sink + 1, math.floor(share * facts.capacity)))

    return Entry(note, build, _evicting_bytes(build), group, reads="own", head=head, evicts=True)


def _whole_chunks(llm, method, length):
    """Chunks that end before what the method must read with the question: cut at the same places,
    they are read the same.
    """
    return max(0, length - method.last_part) // llm.chunk * llm.chunk


def _whole_segments(llm, method, length):
    """H2O+'s segments."""
    return length // method.segment * method.segment


def _keeps_all(facts, part):
    return "every key and value stays on the device, 100% at any budget"


def _streams(build):
    def at_bytes(facts, part):
        held = device_share(facts.llm, build(facts, 0.5), facts.capacity)
        return f"its budget changes what is read, not what is held: {100 * held:.1f}%, the keys come over in every step"

    return at_bytes


def _infllm(facts, share):
    """Initial rows, window and blocks as 1 to 8 to 8, as in the OmniKV paper's LongBench setting
    (128, 1024, 8 blocks of 128); blocks are halved until there is room for eight.
    """
    rows = max(34, round(share * facts.capacity))
    block = next((size for size in (128, 64, 32, 16, 8, 4) if 17 * size <= rows), 2)
    local = max(8, rows * 8 // 17)
    topk = max(1, (rows - rows // 17 - local) // block)
    return InfLLM(
        block=block,
        init=rows // 17,
        local=local,
        topk=topk,
        representatives=min(4, block),
        cached=4 * topk,
        chunk=min(512, local),
    )


def _pod(facts, share):
    """The proximal tokens are the share; without blocks a text says how to make them."""
    try:
        blocks = read_blocks(facts.llm.folder)
    except BadCheckpoint as error:
        return str(error)
    return PodUntrained(blocks, recent=max(1, round(share * facts.capacity) - PodUntrained.first))


REGISTRY = {
    "full": Entry(
        "full attention, what everything is compared with",
        lambda facts, share: Full(),
        budget=False,
        sparse=False,
    ),
    "omnikv": Entry("OmniKV, last-token selector", _omnikv(), _omnikv_bytes(_omnikv())),
    "omnikv_uniform": Entry(
        "OmniKV, uniform selector over 16 queries",
        _omnikv(selector="uniform"),
        _omnikv_bytes(_omnikv(selector="uniform")),
    ),
    "omnikv_exponential": Entry(
        "OmniKV, exponential selector over 16 queries",
        _omnikv(selector="exponential"),
        _omnikv_bytes(_omnikv(selector="exponential")),
    ),
    "omnikv_per_layer": Entry(
        "OmniKV without sharing between layers (ablation)",
        _omnikv(OmniKVPerLayer),
        _streams(_omnikv(OmniKVPerLayer)),
    ),
    "brutal_offload": Entry(
        "exact attention, the last 20 layers in host memory (ablation)",
        lambda facts, share: BrutalOffload(),
        budget=False,
        reads="own",
        place="host",
        sparse=False,
    ),
    "h2o": _evicting("H2O, the newest tokens and the heavy hitters, half each", H2O, "t1", "own"),
    "h2o_plus": _as_it_reads(
        "H2O+, H2O that evicts while it reads, in segments of 500",
        H2OPlus,
        "t1",
        head=_whole_segments,
    ),
    "streaming_llm": _as_it_reads(
        "StreamingLLM, 4 sinks and a window, in prefill too", StreamingLLM, "t1", StreamingLLM.sink
    ),
    "streaming_llm_trim": _evicting(
        "the OmniKV paper's StreamingLLM: full prefill, then trimmed to 1% sinks and a window",
        StreamingLLM,
        "t1",
        official=True,
    ),
    "infllm": Entry(
        "InfLLM, blocks of the past by representative keys, its own prefill",
        _infllm,
        _keeps_all,
        reads="own",
    ),
    "minference": Entry(
        "MInference, sparse prefill, full attention in answers",
        lambda facts, share: MInference(share=share),
        _keeps_all,
        reads="own",
        head=_whole_chunks,
        sparse=False,
    ),
    "snapkv": _evicting("SnapKV, chosen by the prompt's last 32 queries", SnapKV),
    "pyramidkv": _evicting("PyramidKV, SnapKV with budgets that fall with depth", PyramidKV),
    "ada_snapkv": _evicting("Ada-SnapKV, SnapKV with a budget per head", AdaSnapKV),
    "ada_pyramid": _evicting("Ada-Pyramid, both", AdaPyramid),
    "keyformer": _evicting("Keyformer, H2O with noise and temperature", Keyformer, reads="own"),
    "scissorhands": _evicting(
        "Scissorhands, above average lately, dropped many at once",
        Scissorhands,
        reads="own",
        head=_whole_chunks,
    ),
    "a2sf": _evicting("A2SF, H2O with forgetting", A2SF, reads="own"),
    "window": _as_it_reads("window attention, the newest tokens only, in prefill too", Window),
    "lm_infinite": _as_it_reads(
        "LM-Infinite, 10 first tokens and a window, in prefill too",
        LMInfinite,
        sink=LMInfinite.sink,
    ),
    "pod_untrained": Entry(
        "PoD without its training; blocks from pod.json beside the model (tools.pod_groups)",
        _pod,
        _keeps_all,
        group="others",
        reads="own",
    ),
    "quest": Entry(
        "Quest, pages of 16 by their extremes",
        lambda facts, share: Quest(share=share),
        _keeps_all,
        group="others",
    ),
    "tidaldecode": Entry(
        "TidalDecode, two choosing layers, every query head its own",
        lambda facts, share: TidalDecode(share=share),
        _keeps_all,
        group="others",
    ),
    "omnikv_unpacked": Entry(
        "OmniKV whose layers load one by one, over host memory (ablation)",
        _omnikv(OmniKVUnpacked),
        group="others",
        reads="own",
        place="host",
    ),
    "omnikv_prefill": Entry(
        "OmniKV that also reads prompts sparsely, r = 2",
        _omnikv(prefill_ratio=2),
        group="others",
        reads="own",
        head=_whole_chunks,
    ),
}
GROUPS = ("t1", "others")


# ---------------------------------------------------------------- what the command line asks for


def wanted(words, shares, mems):
    """[(name, kind, budget)] for words such as "t1", "quest", "others@30", "omnikv@3,6.67,m75":
    shares and resident bytes in per cent.

    "full" comes first whether asked for or not; "t1" and "omnikv" without an @ include the share of
    the first hypothesis.
    """
    found = {("full", "none", 100.0): None}
    for word in words:
        base, at, own = word.partition("@")
        names = [n for n, e in REGISTRY.items() if e.group == base] if base in GROUPS else [base]
        if base not in REGISTRY and base not in GROUPS:
            raise UsageError(f"unknown method {base!r}: one of {', '.join((*GROUPS, *REGISTRY))}")
        for name in names:
            entry = REGISTRY[name]
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
                if kind == "share" or entry.at_bytes is not None:
                    found[name, kind, checked(value)] = None
    return list(found)


def _budgets(word, text):
    out = []
    for part in text.split(","):
        kind, digits = ("mem", part[1:]) if part[:1] == "m" else ("share", part)
        try:
            out.append((kind, float(digits)))
        except ValueError:
            raise UsageError(
                f"{word}: found the budget {part!r}, expected per cent such as 30 (of the tokens) or m30 (of the resident "
                "bytes)"
            ) from None
    return out


def checked(value):
    """A budget in per cent, or UsageError."""
    if not (math.isfinite(value) and 0 < value <= 100):
        raise UsageError(f"budget: found {value:g}, expected per cent above 0 and at most 100")
    return float(value)


def variants(facts, names):
    """Variants of all `names` [(name, kind, budget)] for one capacity. Raises SettingError where a
    method does not fit the model.
    """
    out, seen = [], {}
    for name, kind, budget in names:
        entry = REGISTRY[name]
        made = (
            entry.at_bytes(facts, budget / 100)
            if kind == "mem"
            else entry.build(facts, budget / 100)
        )
        variant = Variant(name, kind, budget)
        if isinstance(made, str):
            out.append(replace(variant, why=made))
            continue
        method, plan = facts.llm.resolve_method(made)
        if entry.sparse and not plan.partial_layers:
            raise SettingError(
                f"{name}: the plan of this model has no sparse layer ({plan.describe()}): choose other filter layers"
            )
        key = (name, repr(method))
        out.append(replace(variant, method=method, alias=seen.get(key, "")))
        seen.setdefault(key, out[-1].label)
    return out


def memory_session(variant, facts):
    """A session in the form in which a method saves memory, and its LLM's plan: offloaded where it
    lets layers go.
    """
    return offloaded(facts.llm, variant.method, facts.capacity)
