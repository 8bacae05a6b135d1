"""How the methods of a comparison are built, at a share of the prompt's tokens or of full
attention's resident bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine
from engine import LLM
from engine.base.errors import BadCheckpoint, SettingError
from engine.methods.base import Method
from engine.methods.oracle.settings import ByGranularity
from engine.methods.select.across import sharing
from engine.methods.select.across.head_map import NAME
from tools.calibrate.pod_groups import read_blocks
from tools.compare.bytes import device_share

# (facts, share or part) -> the method, or a text why there is none
Build = Callable[..., Any]
# of full attention's bytes: a share and a resident budget that differ by less are one run
NEAR = 0.005


@dataclass(frozen=True)
class Facts:
    """The model, one session's capacity in tokens, and OmniKV's settings.

    filters, wait: filter and wait layers, None for those the model comes with; tail: newest tokens
    that every layer sees, outside the budget (64, the least there is, so that budgets say what is
    read). kept: layers that every method keeps dense, as numbers, or "omnikv" for those that OmniKV
    reads whole. banks: other banks that full attention and OmniKV run over once more.
    """

    llm: LLM
    capacity: int
    filters: tuple[int, ...] | None = None
    wait: int | None = None
    tail: int = 64
    kept: tuple[int, ...] | str = ()
    banks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One method of the table.

    note: one line for --help. group: "t1" (the paper's own and its baselines), "others" or
    "controls" (OmniKV and eviction without their choice).
    build(facts, share) -> the method that reads `share` of the prompt, or a text why there is none.
    at_bytes(facts, part) -> the method with resident K/V bytes of at most `part` of full
    attention's, or a text why there is none. budget: whether it has one. reads: "shared" where the
    method leaves prefill alone, so that one reading of a document by full attention serves all;
    "own" where it must read the document itself. head(llm, method, length): how many first tokens
    of a document of `length` such a method may read once for all questions; the rest goes with each
    question (None: the whole document is read once). evicts: whether it gives tokens up for good.
    place: "device" or "host", where the bank is while it answers. sparse: whether every decode step
    must have been sparse. granularity: of a method that chooses, who has a list of its own ("layer"
    | "kv_head" | "query_head"; "": it does not choose, or not so); oracle: the entry that bounds
    it, with as many tokens, in the same layers, by lists of the same granularity; of: the entry
    that this one bounds. within(part): `build` for a budget of so many of full attention's bytes
    per step, where it depends on them.
    """

    note: str
    build: Build
    at_bytes: Build | None = None
    group: str = "t1"
    budget: bool = True
    reads: str = "shared"
    head: Callable[[LLM, Any, int], int] | None = None
    evicts: bool = False
    place: str = "device"
    sparse: bool = True
    granularity: str = ""
    oracle: str = ""
    of: Entry | None = None
    within: Callable[[float], Build] | None = None


def omnikv(cls: type[engine.OmniKV] = engine.OmniKV, **more: Any) -> Build:
    """Build OmniKV, or a variation of it, at a share of the tokens."""

    def build(facts: Facts, share: float | None) -> engine.OmniKV:
        return cls(
            filter_layers=facts.filters,
            share=share,
            wait_layers=facts.wait,
            tail=facts.tail,
            dense_below=0,
            **more,
        )

    return build


def bound(build: Build, granularity: str, cls: type[ByGranularity] = engine.OracleTopK) -> Build:
    """Build what bounds another method: at its budget and with its tail, in the layers that read a
    choice of its, the best (or, by RandomTopK, any) lists of this granularity.
    """

    def made(facts: Facts, share: float) -> Method | str:
        other = build(facts, share)
        if isinstance(other, str):
            return other
        method, plan = facts.llm.resolve_method(other)
        # a list of each query head has no tail, and neither have those who choose such lists
        tail = 0 if granularity == "query_head" else getattr(method, "tail", 0)
        layers = plan.sparse_layers or None
        return cls(share=share, granularity=granularity, sparse_layers=layers, tail=tail)

    return made


def omnikv_at_bytes(build: Build) -> Build:
    """Build OmniKV over an offloaded bank: with the most tokens that fit as slots beside the dense
    layers and the tails.
    """

    def at_bytes(facts: Facts, part: float) -> engine.OmniKV | str:
        def resident(tokens: int) -> float:
            return device_share(
                facts.llm, replace(build(facts, None), tokens=tokens), facts.capacity
            )

        least = resident(1)
        if least > part:
            _, plan = facts.llm.resolve_method(build(facts, 0.5))
            return (
                f"its {plan.num_layers - len(plan.sparse_layers)} dense layers of "
                f"{plan.num_layers} and the tails of the others hold {100 * least:.1f}% "
                "before a token is chosen"
            )
        most = largest(1, facts.capacity, lambda tokens: resident(tokens) <= part)
        return replace(build(facts, None), tokens=most)

    return at_bytes


def evicting_at_bytes(build: Build) -> Build:
    """Build an evicting method that forgets, so that a session holds no more than its store: at the
    share itself where that is this part within NEAR, else with the largest budget in tokens that
    fits.
    """

    def at_bytes(facts: Facts, part: float) -> Method | str:
        built = build(facts, part)
        if isinstance(built, str):  # of a model's own file that is not there
            return built
        method = replace(built, forget=True)
        if abs(device_share(facts.llm, method, facts.capacity) - part) <= NEAR:
            return method
        # SnapKV's queries, a window beside the sinks
        least = max(getattr(method, "window", 1), getattr(method, "sink", 0) + 1)
        least = getattr(method, "smallest", least)

        def resident(tokens: int) -> float:
            smaller = replace(method, share=None, tokens=tokens)
            return device_share(facts.llm, smaller, facts.capacity)

        share = resident(least)
        if share > part:
            return f"the least it can keep, {least} tokens per head, takes {100 * share:.1f}%"
        most = largest(least, facts.capacity, lambda tokens: resident(tokens) <= part)
        return replace(method, share=None, tokens=most)

    return at_bytes


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of low .. high that fits, where everything below one that fits does too; `low` is
    not asked.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def evicting(
    note: str,
    cls: Callable[..., Method],
    group: str = "others",
    reads: str = "shared",
    head: Callable[[LLM, Any, int], int] | None = None,
    **settings: Any,
) -> Entry:
    """An Entry for a method that evicts by a budget in tokens or as a share."""

    def build(facts: Facts, share: float) -> Method:
        return cls(share=share, forget=False, **settings)

    return Entry(note, build, evicting_at_bytes(build), group, reads=reads, head=head, evicts=True)


def evicting_while_reading(
    note: str,
    cls: Callable[..., Method],
    group: str = "others",
    sink: int = 0,
    head: Callable[[LLM, Any, int], int] | None = None,
) -> Entry:
    """An Entry for a method that evicts while it reads. Its budget is a share of the planned
    length: the same for a document as for the question after it, so that reading them one after the
    other changes nothing.
    """

    def build(facts: Facts, share: float) -> Method:
        tokens = max(sink + 1, math.floor(share * facts.capacity))
        return cls(tokens=tokens, forget=False)

    return Entry(note, build, evicting_at_bytes(build), group, reads="own", head=head, evicts=True)


def whole_chunks(llm: LLM, method: Method, length: int) -> int:
    """Tokens of the whole chunks that end before what the method must read with the question. Cut
    at the same places, they are read the same.
    """
    layers = llm.resolve_method(method)[1]
    needs = method.needs(layers, llm.config, llm.max_context, llm.dtype.itemsize)
    return max(0, length - (needs.final_call or 0)) // llm.chunk * llm.chunk


def whole_blocks(llm: LLM, method: engine.QuoKA | engine.XAttention, length: int) -> int:
    """Tokens of the whole chunks that are whole blocks too: cut there, no block chooses twice."""
    both = math.lcm(llm.chunk, method.block)
    return length // both * both


def whole_tiles(llm: LLM, method: engine.KascadeTiles, length: int) -> int:
    """As `whole_blocks`, of tiles."""
    both = math.lcm(llm.chunk, method.tile)
    return length // both * both


def whole_segments(llm: LLM, method: engine.H2OPlus | engine.SnapKVPlus, length: int) -> int:
    """Tokens of the whole segments of a method that evicts while it reads."""
    segment = method.segment
    assert isinstance(segment, int)  # of a variant that was built
    return length // segment * segment


def segments_of_budget(llm: LLM, method: engine.SirLLM, length: int) -> int:
    """Tokens of SirLLM's whole segments."""
    assert method.tokens is not None  # of a variant that was built
    segment = method.parts(method.tokens).segment
    return length // segment * segment


def keeps_all(facts: Facts, part: float) -> str:
    """Why a method that drops nothing has no budget in bytes."""
    return "every key and value stays on the device, 100% at any budget"


def recomputes(facts: Facts, part: float) -> str:
    """Why a method that keeps no K and V has no budget in bytes."""
    return "it keeps 0 bytes of K and V from one step to the next, at any budget"


def streams(build: Build) -> Build:
    """Why a method that fetches by layer has no budget in bytes."""

    def at_bytes(facts: Facts, part: float) -> str:
        held = device_share(facts.llm, build(facts, 0.5), facts.capacity)
        return (
            f"its budget changes what is read, not what is held: {100 * held:.1f}%, "
            "the keys come over in every step"
        )

    return at_bytes


def infllm(facts: Facts, share: float, block: int = 0) -> engine.InfLLM:
    """Build InfLLM: initial rows, window and blocks as 1 to 8 to 8, as in the OmniKV paper's
    LongBench setting (128, 1024, 8 blocks of 128). A larger budget reads more blocks, not larger
    ones. block: tokens of one, 0 for what the length says.
    """
    rows = max(34, round(share * facts.capacity))
    block = block or block_size(facts.capacity)
    init, topk = rows // 17, max(1, rows * 8 // 17 // block)
    local = max(8, rows - init - topk * block)
    return engine.InfLLM(
        block=block,
        init=init,
        local=local,
        topk=topk,
        representatives=4,
        cached=4 * topk,
        chunk=min(512, local),
    )


def infllm_within(part: float) -> Build:
    """Build InfLLM with the smallest blocks whose mean keys, one for each query head, are at most a
    quarter of `part` of full attention's bytes.
    """

    def build(facts: Facts, share: float) -> engine.InfLLM:
        means = facts.llm.config.group / 2  # tokens' worth of K and V
        block = block_size(facts.capacity)
        while block < 128 and means / block > part / 4:
            block *= 2
        return infllm(facts, share, block)

    return build


def block_size(length: int) -> int:
    """Tokens of an InfLLM block: the published 128 at 128K tokens, as much less as a text is
    shorter, in powers of two and at least 4, of which its 4 representatives are all.
    """
    return min(128, max(4, 1 << max(0, (length // 1024).bit_length() - 1)))


def or_why(build: Build) -> Build:
    """`build`, which returns why there is none where a model's own file is missing or unfit."""

    @functools.wraps(build)
    def made(*given: Any, **more: Any) -> Method | str:
        try:
            return build(*given, **more)  # type: ignore[no-any-return]
        except (BadCheckpoint, SettingError) as error:
            return str(error)

    return made


@or_why
def pod(facts: Facts, share: float) -> engine.PodUntrained | str:
    """Build PoD: the proximal tokens are the share. Without blocks: how to make them."""
    blocks = read_blocks(facts.llm.folder)
    recent = max(1, round(share * facts.capacity) - engine.PodUntrained.first)
    return engine.PodUntrained(blocks, recent=recent, forget=False)


def pod_snapkv(facts: Facts, share: float) -> engine.PodSnapKV | str:
    """Build PoD over what SnapKV keeps: the budget is the share, and so are the proximal tokens.
    Without blocks: how to make them.
    """
    near = pod(facts, share)
    if isinstance(near, str):
        return near
    return engine.PodSnapKV(share=share, forget=False, blocks=near.blocks, recent=near.recent)


def filters(facts: Facts) -> tuple[int, ...] | None:
    """OmniKV's filter layers for the model, so that other methods choose in as many; None: none."""
    if facts.filters is not None:
        return facts.filters
    method, _ = facts.llm.resolve_method(engine.OmniKV())
    return method.filter_layers if isinstance(method, engine.OmniKV) else None


@or_why
def kascade(facts: Facts, share: float, kind: type[engine.Kascade] = engine.Kascade) -> Method:
    """Build Kascade at a share of the tokens. Without anchors: how to make them."""
    method = kind(head_map=Path(facts.llm.folder) / NAME, share=share, least=1)
    facts.llm.resolve_method(method)
    return method


@or_why
def hshare(facts: Facts, share: float) -> Method:
    """Build HShare at a share of the tokens, a quarter of them newest ones. Without a file of what
    is shared: how to make it.
    """
    recent = max(1, min(engine.HShare.recent, round(share * facts.capacity) // 4))
    given = dict(share=share, recent=recent, sinks=min(engine.HShare.sinks, recent))
    method = engine.HShare(sharing=Path(facts.llm.folder) / sharing.NAME, **given)
    facts.llm.resolve_method(method)
    return method


@or_why
def duo(facts: Facts, part: float, forget: bool = False) -> Method | str:
    """Build DuoAttention with the most retrieval heads whose K and V, those of streaming heads
    included, are at most `part` of full attention's. Without gates: how to make them.
    """
    method = engine.Duo(gates=Path(facts.llm.folder) / "duo.json", forget=forget)
    few = f"its streaming heads alone, {method.sinks} + {method.recent} tokens, take"
    return _most_heads(facts, part, method, "share", few)


@or_why
def razor(facts: Facts, part: float) -> Method | str:
    """Build RazorAttention with the most retrieval heads, by induction, whose K and V, those of the
    others included, are at most `part` of full attention's; the others see a 20th of the text, 64
    tokens at least. Without scores: how to make them.
    """
    heads = Path(facts.llm.folder) / "razor.json"
    method = engine.Razor(heads=heads, recent=64, compression=20, echo=0.0)
    return _most_heads(facts, part, method, "induction", "its heads of few tokens alone take")


def clusterkv(facts: Facts, share: float) -> engine.ClusterKV:
    """Build ClusterKV with segments of a 16th of the text, 320 tokens at most: what waits for its
    segment is read beside the budget.
    """
    segment = min(engine.ClusterKV.segment, max(16, facts.capacity // 16))
    return engine.ClusterKV(
        share=share, segment=segment, per=min(engine.ClusterKV.per, segment // 4)
    )


def em_llm(facts: Facts, share: float) -> engine.EMLLM:
    """Build EM-LLM: first tokens, window and events as 1 to 4 to 12, of events as much smaller as
    the budget is, so that some tens of them fit into it.
    """
    rows = max(64, round(share * facts.capacity))
    most = min(engine.EMLLM.most, max(4, 1 << max(0, (rows // 16).bit_length() - 1)))
    least = min(engine.EMLLM.least, most // 2)
    local, few = max(2 * most, rows * 4 // 17), min(engine.EMLLM.representatives, least)
    given = dict(sink=rows // 17, local=local, least=least, most=most, representatives=few)
    # the window does not grow with the text, which is shorter than the capacity by an answer
    beside = local / (facts.capacity * 7 // 8)
    return engine.EMLLM(share=max(share - beside, 1 / facts.capacity), **given)


def retroinfer(facts: Facts, share: float) -> engine.RetroInfer:
    """Build RetroInfer with segments of a 16th of the text, 8,192 tokens at most."""
    segment = min(engine.RetroInfer.segment, max(16, facts.capacity // 16))
    return engine.RetroInfer(
        share=share, segment=segment, per=min(engine.RetroInfer.per, segment // 4)
    )


def pqcache(facts: Facts, share: float) -> engine.PQCache:
    """Build PQCache with centroids of the first half of the text, 2,048 tokens at most."""
    train = min(engine.PQCache.train, max(32, facts.capacity // 2))
    return engine.PQCache(share=share, train=train, bits=engine.PQCache.bits if train >= 512 else 5)


def rocketkv(facts: Facts, share: float) -> engine.RocketKV:
    """Build RocketKV with a window and exact tokens of an answer of a 64th of the text, the
    published 32 and 128 at most, which are taken from its share, and pages of 16 tokens at most.
    """
    exact = max(1, facts.capacity // 64)
    window, answer = min(engine.RocketKV.window, exact), min(engine.RocketKV.answer, exact)
    page = min(engine.RocketKV.page, max(1, facts.capacity // 128))
    chosen = max(page, share * facts.capacity - max(window, answer)) / facts.capacity
    return engine.RocketKV(share=chosen, window=window, page=page, answer=answer)


def shadowkv(facts: Facts, share: float) -> engine.ShadowKV:
    """Build ShadowKV with outliers and exact tokens of a 64th of the text each, the published 384
    and 256 at most, which are taken from its share.
    """
    exact = min(engine.ShadowKV.answer, max(engine.ShadowKV.chunk, facts.capacity // 64))
    outliers = min(engine.ShadowKV.outliers, facts.capacity // 64 // engine.ShadowKV.chunk)
    beside = exact + outliers * engine.ShadowKV.chunk
    chosen = max(engine.ShadowKV.chunk, share * facts.capacity - beside) / facts.capacity
    recent = min(engine.ShadowKV.recent, exact)
    return engine.ShadowKV(share=chosen, outliers=outliers, recent=recent, answer=exact)


def a2ats(facts: Facts, share: float) -> engine.A2ATS:
    """Build A2ATS with a codebook of the first half of the text, 2,048 tokens at most."""
    train = min(engine.A2ATS.train, max(32, facts.capacity // 2))
    return engine.A2ATS(share=share, train=train, bits=engine.A2ATS.bits if train >= 512 else 5)


def magicpig(facts: Facts, share: float) -> engine.MagicPIG:
    """Build MagicPIG with the mean key of the first half of the text, 1,024 tokens at most."""
    return engine.MagicPIG(
        share=share, train=min(engine.MagicPIG.train, max(32, facts.capacity // 2))
    )


@or_why
def double_sparsity(facts: Facts, share: float) -> Method:
    """Build Double Sparsity; without channels: how to find them."""
    channels = Path(facts.llm.folder) / "double_sparsity.json"
    return engine.DoubleSparsity(share=share, channels=channels)


def _most_heads(facts: Facts, part: float, method: Method, of: str, few: str) -> Method | str:
    """The method with the most whole heads, a share in the field `of`, at which it holds at most
    `part`; `few` and what it holds without any where that is more.
    """
    _, layers = facts.llm.resolve_method(method)
    heads = layers.num_layers * facts.llm.config.num_kv_heads

    def held(count: int) -> float:
        return device_share(facts.llm, replace(method, **{of: count / heads}), facts.capacity)

    if held(0) > part:
        return f"{few} {held(0):.1%}"
    return replace(method, **{of: largest(0, heads, lambda n: held(n) <= part) / heads})
