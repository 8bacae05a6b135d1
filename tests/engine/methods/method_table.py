"""The table of methods, and the eight properties that every method has.

A row holds a method at its neutral setting, at settings that read less, and the rows that it
declares to read. tests/engine/methods/test_methods.py checks every row:

U1 identity      At its neutral setting a method gives full attention's logits, bit for bit on the
                 reference kernels.
U2 accounting    The bytes that a method declares are the bytes that the plan shows, the session
                 counts and the allocator gives.
U3 read audit    A decode step reads the declared rows and no others: NaN elsewhere changes nothing,
                 NaN in one of them is seen.
U4 determinism   The same tokens give the same bits, in another session and after a truncate.
U5 independence  A sequence in a ragged batch gets the logits that it gets alone.
U6 kernels       The fast kernels give the reference's logits and choose the same rows.
U7 chunks        How a prompt is cut into chunks or calls changes no answer.
U8 recall        Tokens that carry nearly all attention are among the rows that a step reads.

A new method is one new row. `without` names a property that a method cannot have, with the reason:
the test then prints it where it skips, or shows the opposite.
"""

from dataclasses import dataclass, field, replace

import torch

from engine.methods.controls.ablations import OmniKVPerLayer, OmniKVUnpacked
from engine.methods.controls.brutal_offload import BrutalOffload
from engine.methods.controls.controls import OmniKVNewest, OmniKVOne, OmniKVRandom
from engine.methods.evict.a2sf import A2SF
from engine.methods.evict.ada_snapkv import AdaPyramid, AdaSnapKV
from engine.methods.evict.duo import Duo
from engine.methods.evict.expected_attention import ExpectedAttention
from engine.methods.evict.fastgen import FastGen
from engine.methods.evict.h2o import H2O
from engine.methods.evict.h2o_plus import H2OPlus
from engine.methods.evict.keyformer import Keyformer
from engine.methods.evict.kvzip import KVzip
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.longformer import Longformer
from engine.methods.evict.pod_snapkv import PodSnapKV
from engine.methods.evict.pyramidkv import PyramidKV
from engine.methods.evict.random_eviction import RandomEvictionAll
from engine.methods.evict.razor import Razor
from engine.methods.evict.rkv import RKV
from engine.methods.evict.roco import RoCo
from engine.methods.evict.scissorhands import Scissorhands
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.sirllm import SirLLM
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.snapkv_plus import SnapKVPlus
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.vase import VaSE
from engine.methods.evict.window import Window
from engine.methods.evict.zigzagkv import ZigZagKV
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.oracle.random_topk import RandomTopK
from engine.methods.oracle.topk import OracleTopK
from engine.methods.oracle.topp import OracleTopP
from engine.methods.prompts.kascade_tiles import KascadeTiles
from engine.methods.prompts.quoka import QuoKA
from engine.methods.prompts.xattention import XAttention
from engine.methods.select.across.delta import Delta
from engine.methods.select.across.hshare import HShare
from engine.methods.select.across.kascade import Kascade
from engine.methods.select.across.less_is_more import LessIsMore
from engine.methods.select.across.omnikv_heads import OmniKVHeads
from engine.methods.select.across.omnikv_top_p import OmniKVTopP
from engine.methods.select.events.em_llm import EMLLM
from engine.methods.select.index.clusterkv import ClusterKV
from engine.methods.select.index.double_sparsity import DoubleSparsity
from engine.methods.select.index.pqcache import PQCache
from engine.methods.select.index.sparq import SparQ
from engine.methods.select.infllm import InfLLM
from engine.methods.select.minference import MInference
from engine.methods.select.pod import PodUntrained
from engine.methods.select.quest import Quest
from engine.methods.select.rocket.rocketkv import RocketKV
from engine.methods.select.shadow.shadowkv import ShadowKV
from engine.methods.select.taught.a2ats import A2ATS
from engine.methods.select.tidaldecode import TidalDecode
from engine.methods.select.varying.infinigen import InfiniGen
from engine.methods.select.varying.magicpig import MagicPIG
from engine.methods.select.wave.retroinfer import RetroInfer
from engine.methods.window_recompute import WindowRecompute
from engine.plan.layers import tail_start
from tests.builders import SESSION_MODEL

CAPACITY = 512  # of the sessions that the table is run on
PLANTED = 8  # tokens that U8 plants: every budget in the table has room for them


@dataclass(frozen=True)
class Row:
    """One method. neutral: the setting at which its logits equal full attention's (for contexts up
    to CAPACITY). sparse: settings that read less at 300 tokens. reads(runtime, n): {layer: one
    ascending list of positions per K/V head} that a step at n tokens has read beside what every
    layer reads; layers it leaves out read everything. offload: where U1 and U2 put the bank.
    tolerance: of U1 where it is not bitwise (0).
    """

    name: str
    neutral: object
    sparse: tuple = ()
    reads: object = None
    # as `reads`, with what a step reads elsewhere than in the bank, where it does
    everything: object = None
    selects: bool = False  # chooses rows by score in every step
    # (plan, layer) -> whether this partial layer reads every key to choose, and the values of the
    # chosen ones only
    scans: object = lambda plan, layer: False  # noqa: E731
    by_head: bool = False  # some heads keep every row
    # rows of a layer's heads that are no token's: (runtime, layer) -> number
    beside: object = lambda runtime, layer: 0  # noqa: E731
    evicts: bool = False  # forgets rows: what it dropped is never read again
    # its prefill is not full attention even where nothing was dropped before
    approximate: bool = False
    # going back runs the steps since again, which have read other rows
    replays: bool = False
    random: bool = False  # takes a seed
    stays: str = ""  # why the bank lies on the device whatever was asked, where it does
    chunk_defined: str = ""  # why the result depends on how a prompt is cut, where it does
    one_prompt: str = ""  # why a session has one prompt only
    offload: str = "device"
    tolerance: float = 0.0
    without: dict = field(default_factory=dict)  # {"U5": reason}


def shared_rows(runtime, n):
    """OmniKV: a group's selection and the tail, shared by all its layers and heads."""
    start, heads = tail_start(n, runtime.method.tail), runtime.setup.config.num_kv_heads
    chosen = runtime.selections()
    return {
        layer: [[*chosen[group.filter_layer].tolist(), *range(start, n)]] * heads
        for group in runtime.plan.groups
        for layer in group.layers
    }


def retained_rows(runtime, n):
    """Evicting methods: what each K/V head's store holds, in every layer."""
    return {layer: runtime.positions(layer) for layer in range(runtime.plan.num_layers)}


def means(runtime, layer):
    """RazorAttention: the row of what a head has dropped, in each head that drops."""
    store = runtime.store(layer)
    return 0 if store is None or not store.dropped.count else len(store.few)


def lists_and_tail(runtime, n):
    """OmniKV with a list per K/V head: that, and the tail."""
    start = tail_start(n, runtime.method.tail)
    return {
        layer: [[*rows.tolist(), *range(start, n)] for rows in runtime.chosen_rows(layer)]
        for layer in partial_layers(runtime.plan)
    }


def official_rows(runtime, n):
    """The published code: a group's selection and everything generated."""
    heads, chosen = runtime.setup.config.num_kv_heads, runtime.selections()
    return {
        layer: [[*chosen[group.filter_layer].tolist(), *range(runtime.prompt, n)]] * heads
        for group in runtime.plan.groups
        for layer in group.layers
    }


def rows_by_head(runtime, n):
    """Methods whose heads choose apart: what any query head of a K/V head chose, and everything
    from the runtime's own tail on.
    """
    heads, found = runtime.setup.config.num_kv_heads, {}
    tail = range(int(runtime.tail_start(Length(n))[0]), n)
    for layer in partial_layers(runtime.setup.plan):
        rows = runtime.chosen_rows(layer)
        rows = rows.expand(heads, -1) if rows.dim() == 1 or len(rows) == 1 else rows.view(heads, -1)
        found[layer] = [sorted({*own[own >= 0].tolist(), *tail}) for own in rows]
    return found


def without_outliers(runtime, n):
    """ShadowKV: outliers are read where they are held, not in the bank."""
    found, size = rows_by_head(runtime, n), runtime.method.chunk
    for layer, heads in found.items():
        held = runtime.outliers[runtime.plan.group_of[layer], 0].tolist()
        found[layer] = [
            [row for row in rows if row // size not in own] for rows, own in zip(heads, held)
        ]
    return found


@dataclass(frozen=True)
class Length:
    """Of an engine.bank.base.Step what `tail_first` looks at."""

    n: int

    @property
    def visible(self):
        """Rows that the step sees, [1] int32."""
        return torch.tensor([self.n], dtype=torch.int32)

    @property
    def lengths(self):
        """`visible`, on the host."""
        return [self.n]

    def tail_start(self, tail):
        """Where the tail begins, [1] int32."""
        return tail_start(self.visible, tail)


def duo_gates(layers=7, kv_heads=2):
    """Gates that differ from layer to layer: of two neighbouring heads one is of each kind."""
    return tuple(
        tuple(abs((layer + head) % 2 - 0.1 - 0.01 * layer) for head in range(kv_heads))
        for layer in range(layers)
    )


def crossed_heads(layers=7, kv_heads=2):
    """A head map that leads each head to another one, and another one in each layer."""
    return tuple(
        tuple((layer + 2 * head) % kv_heads for head in range(kv_heads)) for layer in range(layers)
    )


def heavy_channels(layers=7, kv_heads=2):
    """Eight channels of every head, which differ from head to head and from layer to layer; the
    first is the one that U8 plants.
    """

    def of(layer, head):
        first, others = (1 + 3 * head) % 8, [i for i in range(8) if i != (1 + 3 * head) % 8]
        return (first, *others[layer % 7 :], *others[: layer % 7])

    return tuple(tuple(of(layer, head) for head in range(kv_heads)) for layer in range(layers))


def sharing(layers=7, kv_heads=2):
    """Of four layers the third reads the first's lists, and of two K/V heads the odd the even's in
    every layer but the first, of those that choose.
    """
    heads = tuple(tuple(h - (h % 2 and i > 0) for h in range(kv_heads)) for i in range(layers))
    return dict(layers=tuple(i - 2 * (i % 4 == 2) for i in range(layers)), heads=heads)


def fitted(method, layers, kv_heads):
    """The method for a model of another shape than the table's."""
    if isinstance(method, Kascade) and method.head_map:
        return replace(method, head_map=crossed_heads(layers, kv_heads))
    if type(method) is HShare:
        given = sharing(layers, kv_heads).items()
        return replace(method, **{key: value for key, value in given if getattr(method, key)})
    if type(method) is DoubleSparsity:
        return replace(method, channels=heavy_channels(layers, kv_heads))
    if type(method) is Razor:
        heads = (duo_gates(layers, kv_heads),) * 2
        # of one head per layer none is whole, so that every layer reads less
        some = method.induction if kv_heads > 1 or method.induction == 1 else 0.0
        return replace(method, heads=heads, induction=some)
    if type(method) is not Duo:
        return method
    share = method.share if kv_heads > 1 or method.share == 1 else 0.0
    return replace(method, gates=duo_gates(layers, kv_heads), share=share)


SPARSE = dict(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
EVERYTHING = dict(SPARSE, tokens=CAPACITY)
BY_POSITION = {"U8": "it chooses by position, whatever the scores"}
OFFICIAL = dict(filter_layers=(1, 4), official=True)

ROWS = (
    Row("full", Full()),
    Row(
        "omnikv",
        OmniKV(**EVERYTHING),
        (
            OmniKV(**SPARSE),
            OmniKV(**SPARSE | dict(tokens=None, share=0.1, wait_layers=0)),
            OmniKV(scores="raw", sink=4, **SPARSE),
        ),
        shared_rows,
        selects=True,
    ),
    Row(
        "omnikv_residual",
        OmniKV(residual="sample", **EVERYTHING),
        (
            OmniKV(residual="sample", sink=4, **SPARSE),
            OmniKV(residual="sample", residual_share=0.5, **SPARSE | dict(tokens=None, share=0.1)),
            OmniKV(residual="unweighted", **SPARSE),
        ),
        shared_rows,
        selects=True,
    ),
    Row(
        "omnikv_uniform",
        OmniKV(selector="uniform", **EVERYTHING),
        (OmniKV(selector="uniform", **SPARSE),),
        shared_rows,
        selects=True,
    ),
    Row(
        "omnikv_exp",
        OmniKV(selector="exponential", **EVERYTHING),
        (OmniKV(selector="exponential", sink=2, **SPARSE),),
        shared_rows,
        selects=True,
    ),
    Row(
        "omnikv_prefill",
        OmniKV(prefill_ratio=8, prefill_block=64, **EVERYTHING),
        (OmniKV(prefill_ratio=1, prefill_block=64, prefill_dense_end=64, **SPARSE),),
        shared_rows,
        selects=True,
        approximate=True,
        tolerance=5e-5,
        chunk_defined="a block of queries ends where its chunk ends, and chooses for itself",
    ),
    Row(
        "official",
        OmniKV(tokens=CAPACITY, **OFFICIAL),
        (OmniKV(tokens=20, **OFFICIAL), OmniKV(share=0.2, scores="softmax", **OFFICIAL)),
        official_rows,
        selects=True,
        one_prompt="the published code breaks on a second prompt, here it is refused",
        without={
            "U5": "the published code flattens its index and counts steps on the host, so that it "
            "takes one sequence only"
        },
    ),
    Row(
        "omnikv_per_layer",
        OmniKVPerLayer(**EVERYTHING),
        (OmniKVPerLayer(**SPARSE),),
        shared_rows,
        selects=True,
        scans=lambda plan, layer: True,
    ),
    Row(
        "omnikv_unpacked",
        OmniKVUnpacked(**EVERYTHING),
        (OmniKVUnpacked(**SPARSE),),
        shared_rows,
        selects=True,
        offload="host",
    ),
    Row(
        "omnikv_random",
        OmniKVRandom(**EVERYTHING),
        (OmniKVRandom(**SPARSE), OmniKVRandom(seed=7, **SPARSE | dict(tokens=None, share=0.1))),
        shared_rows,
        random=True,
        without={"U8": "it chooses by chance, whatever the scores"},
    ),
    Row(
        "omnikv_one",
        OmniKVOne(**SPARSE | dict(tail=CAPACITY)),
        (OmniKVOne(**SPARSE),),
        shared_rows,
        selects=True,
        without={"U8": "it chooses one token"},
    ),
    Row(
        "omnikv_newest",
        OmniKVNewest(**EVERYTHING),
        (OmniKVNewest(**SPARSE),),
        shared_rows,
        without=BY_POSITION,
    ),
    Row(
        "h2o",
        H2O(tokens=CAPACITY),
        (H2O(tokens=40), H2O(share=0.2, cut="prefill", gqa_reduce="sum")),
        retained_rows,
        evicts=True,
    ),
    Row(
        "a2sf",
        A2SF(tokens=CAPACITY),
        (A2SF(tokens=40), A2SF(share=0.2, forgetting=0.5)),
        retained_rows,
        evicts=True,
    ),
    Row(
        "keyformer",
        Keyformer(tokens=CAPACITY),
        (Keyformer(tokens=40), Keyformer(share=0.2, noise=False, every=1)),
        retained_rows,
        evicts=True,
        random=True,
    ),
    Row(
        "scissorhands",
        Scissorhands(tokens=CAPACITY),
        (Scissorhands(tokens=40), Scissorhands(share=0.2, history=7, drop=0.1)),
        retained_rows,
        evicts=True,
    ),
    Row(
        "h2o_plus",
        H2OPlus(tokens=CAPACITY, segment=CAPACITY),
        (H2OPlus(tokens=40, segment=50), H2OPlus(share=0.2, segment="auto_70b")),
        retained_rows,
        evicts=True,
        approximate=True,
    ),
    Row(
        "window",
        Window(tokens=CAPACITY),
        (Window(tokens=40), Window(share=0.2)),
        retained_rows,
        evicts=True,
        approximate=True,
        without=BY_POSITION,
    ),
    Row(
        "streaming_llm",
        StreamingLLM(tokens=CAPACITY),
        (StreamingLLM(tokens=40), StreamingLLM(share=0.2, sink=20), StreamingLLM(official=True)),
        retained_rows,
        evicts=True,
        approximate=True,
        without=BY_POSITION,
    ),
    Row(
        "lm_infinite",
        LMInfinite(tokens=CAPACITY),
        (LMInfinite(tokens=40), LMInfinite(share=0.1, sink=20)),
        retained_rows,
        evicts=True,
        approximate=True,
        without=BY_POSITION,
    ),
    Row(
        "sirllm",
        SirLLM(tokens=CAPACITY + 64, segment=64),
        (SirLLM(tokens=40), SirLLM(share=0.2, sink=0, recent=0, segment=9, decay=0.7)),
        retained_rows,
        evicts=True,
        approximate=True,
        # a prompt's last layer is computed whole, for the logits of all tokens
        tolerance=5e-5,
        without={
            "U5": "a session tells it of tokens and logits, a bare step does not",
            "U8": "it chooses by surprise, whatever the scores",
        },
    ),
    Row(
        "longformer",
        Longformer(tokens=CAPACITY),
        (
            Longformer(tokens=20, dilation=3, positions=(9, 50, 51)),
            Longformer(share=0.1, dilation=2, first=4),
        ),
        retained_rows,
        evicts=True,
        approximate=True,
        without=BY_POSITION,
    ),
    Row(
        "snapkv",
        SnapKV(tokens=CAPACITY),
        (SnapKV(tokens=96), SnapKV(share=0.2, window=4, kernel=5, pool="mean", gqa_reduce="max")),
        retained_rows,
        evicts=True,
    ),
    Row(
        "snapkv_plus",
        SnapKVPlus(tokens=CAPACITY, segment=CAPACITY),
        (SnapKVPlus(tokens=96, segment=50), SnapKVPlus(share=0.2, window=8, segment=33)),
        retained_rows,
        evicts=True,
        approximate=True,
    ),
    Row(
        "pyramidkv",
        PyramidKV(tokens=CAPACITY),
        (PyramidKV(tokens=100, beta=4), PyramidKV(share=0.3, beta=3)),
        retained_rows,
        evicts=True,
    ),
    Row(
        "ada_snapkv",
        AdaSnapKV(tokens=CAPACITY),
        (AdaSnapKV(tokens=128), AdaSnapKV(share=0.35, alpha=0.8)),
        retained_rows,
        evicts=True,
    ),
    Row(
        "ada_pyramid",
        AdaPyramid(tokens=CAPACITY),
        (AdaPyramid(tokens=80, kernel=1),),
        retained_rows,
        evicts=True,
    ),
    Row(
        "zigzagkv",
        ZigZagKV(tokens=CAPACITY),
        (ZigZagKV(tokens=120),),
        retained_rows,
        evicts=True,
    ),
    Row(
        "pod_snapkv",
        PodSnapKV(tokens=CAPACITY),
        (
            PodSnapKV(blocks=(0, 2, 5), first=8, recent=40, tokens=90),
            PodSnapKV(blocks=(0, 3), first=4, recent=64, share=0.5),
        ),
        retained_rows,
        evicts=True,
        approximate=True,
        stays="a layer attends with the K of several layers at once",
    ),
    Row(
        "rkv",
        RKV(tokens=CAPACITY),
        (RKV(tokens=80, every=8),),
        retained_rows,
        evicts=True,
    ),
    Row(
        "vase",
        VaSE(tokens=CAPACITY),
        (VaSE(tokens=100, window=16, every=16),),
        retained_rows,
        evicts=True,
        random=True,
    ),
    Row(
        "expected_attention",
        ExpectedAttention(tokens=CAPACITY),
        (ExpectedAttention(tokens=96),),
        retained_rows,
        evicts=True,
    ),
    Row(
        "kvzip",
        KVzip(tokens=CAPACITY),
        (KVzip(tokens=60, chunk=100), KVzip(share=0.3, across="head", least=20, sink=0)),
        retained_rows,
        evicts=True,
        stays="its passes read everything that is held again and again",
    ),
    Row(
        "fastgen",
        FastGen(eps=0.0),
        (
            FastGen(eps=0.8, special=(1, 2), punctuation=(3, 4, 5)),
            FastGen(eps=0.8, frequent=0.2, local=0.4, window=8, every=16),
        ),
        retained_rows,
        evicts=True,
        by_head=True,
        without={"U2": "what its heads keep, they alone know: the plan says the most"},
    ),
    Row("roco", RoCo(tokens=CAPACITY), (RoCo(tokens=40),), retained_rows, evicts=True),
    Row(
        "random_eviction_all",
        RandomEvictionAll(tokens=CAPACITY),
        (RandomEvictionAll(tokens=40, every=5),),
        retained_rows,
        evicts=True,
        random=True,
        without={"U8": "it chooses by chance, whatever the scores"},
    ),
    Row(
        "duo",
        Duo(gates=duo_gates(), share=1.0),
        (
            Duo(gates=duo_gates(), sinks=8, recent=40),
            Duo(gates=duo_gates(), share=0.0, sinks=0, recent=70),
        ),
        retained_rows,
        evicts=True,
        approximate=True,
        by_head=True,
        without=BY_POSITION,
    ),
    Row(
        "razor",
        Razor(heads=(duo_gates(),) * 2, induction=1.0),
        (
            Razor(heads=(duo_gates(),) * 2, induction=0.5, echo=0.0, recent=40, compression=9),
            Razor(heads=(duo_gates(),) * 2, induction=0.0, echo=0.0, sinks=0, recent=70),
        ),
        retained_rows,
        beside=means,
        evicts=True,
        by_head=True,
        without=BY_POSITION,
    ),
    Row(
        "window_recompute",
        WindowRecompute(tokens=CAPACITY),
        (WindowRecompute(tokens=40),),
        approximate=True,
        stays="it keeps no rows",
        # what is a step elsewhere runs as a chunk
        tolerance=5e-5,
        without={"U5": "a session's runner gathers the tokens, a bare step has one"},
    ),
    Row("brutal_offload", BrutalOffload(layers=3, ahead=2), offload="host"),
    Row(
        "infllm",
        InfLLM(local=CAPACITY),
        (InfLLM(block=8, init=8, local=64, topk=9, representatives=2, cached=12, chunk=32),),
        rows_by_head,
        selects=True,
        approximate=True,
        replays=True,
        chunk_defined="pieces end where a chunk ends",
    ),
    Row(
        "minference",
        MInference(),
        (MInference(("vertical_slash", 30, 100)), MInference(("a_shape", 30, 50))),
        approximate=True,
        # a prompt is one chunk here and several there, whose products round apart
        tolerance=5e-5,
    ),
    Row(
        "quoka",
        QuoKA(tokens=CAPACITY),
        (QuoKA(tokens=24, queries=4, block=40), QuoKA(share=0.2, queries=2, block=20)),
        approximate=True,
        chunk_defined="a block of queries ends where its chunk ends, and chooses for itself",
    ),
    Row(
        "xattention",
        XAttention(threshold=1.0),
        (XAttention(threshold=0.3, stride=4, block=20), XAttention(0.6, stride=8, block=40)),
        approximate=True,
        chunk_defined="a block of queries ends where its chunk ends, and chooses for itself",
    ),
    Row(
        "pod_untrained",
        PodUntrained(),
        (PodUntrained((0, 2, 5), first=8, recent=64), PodUntrained((0, 3), 8, 64, 0.7)),
        approximate=True,
        stays="a layer attends with the K of several layers at once",
    ),
    Row(
        "quest",
        Quest(tokens=CAPACITY),
        (Quest(tokens=80, page=8, gqa_reduce="sum"), Quest(share=0.5)),
        rows_by_head,
        selects=True,
    ),
    Row(
        "clusterkv",
        ClusterKV(tokens=CAPACITY),
        (
            ClusterKV(tokens=40, sink=4, segment=40, per=4),
            ClusterKV(share=0.2, sink=0, segment=33, per=3, gqa_reduce="sum", dense_layers=1),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "em_llm",
        EMLLM(tokens=CAPACITY, local=64, most=32),
        (
            EMLLM(tokens=130, sink=4, local=32, least=4, most=8, representatives=2, window=24),
            EMLLM(
                share=0.4,
                sink=0,
                local=40,
                least=3,
                most=9,
                representatives=1,
                gamma=0.5,
                refine="conductance",
                contiguity=0.2,
                reach=2,
                dense_layers=2,
            ),
        ),
        rows_by_head,
        selects=True,
        replays=True,
        # a prompt's last layer is computed whole, for the logits of all tokens
        tolerance=5e-5,
    ),
    Row(
        "retroinfer",
        RetroInfer(tokens=CAPACITY),
        (
            RetroInfer(tokens=48, sink=4, segment=40, per=4),
            RetroInfer(share=0.2, sink=0, segment=33, per=3, estimate=1.0, gqa_reduce="sum"),
            RetroInfer(tokens=48, segment=60, per=5, estimate=0.0, dense_layers=1),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "double_sparsity",
        DoubleSparsity(tokens=CAPACITY, channels=heavy_channels()),
        (
            DoubleSparsity(tokens=20, channels=heavy_channels(), count=8),
            DoubleSparsity(
                share=0.1,
                channels=heavy_channels(),
                count=5,
                gqa_reduce="max",
                dense_layers=1,
            ),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "pqcache",
        PQCache(tokens=CAPACITY),
        (
            PQCache(tokens=40, sink=4, bits=5, train=60, rounds=4),
            PQCache(
                share=0.2,
                sink=0,
                parts=4,
                bits=4,
                train=33,
                rounds=2,
                gqa_reduce="max",
                dense_layers=1,
            ),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "rocketkv",
        RocketKV(tokens=CAPACITY),
        (RocketKV(tokens=80, page=4, window=16, kernel=3, channels=5, answer=24),),
        rows_by_head,
        selects=True,
    ),
    Row(
        "shadowkv",
        ShadowKV(tokens=CAPACITY),
        (ShadowKV(tokens=64, rank=6, chunk=4, outliers=5, recent=9, answer=10, dense_layers=1),),
        without_outliers,
        selects=True,
        everything=rows_by_head,
    ),
    Row(
        "sparq",
        SparQ(tokens=CAPACITY),
        (
            SparQ(tokens=40, r=8),
            SparQ(share=0.2, r=8, gqa_reduce="max", dense_layers=2, mean=False),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "a2ats",
        A2ATS(tokens=CAPACITY),
        (
            A2ATS(tokens=60, bits=5, train=90, rounds=2, window=10, distance=100),
            A2ATS(share=0.3, bits=4, train=64, rounds=2, window=40, sink=0, dense_layers=2),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "infinigen",
        InfiniGen(tokens=CAPACITY, alpha=float("inf")),
        (
            InfiniGen(tokens=20, columns=3, alpha=0.4),
            InfiniGen(share=0.1, columns=8, alpha=float("inf"), gqa_reduce="mean", dense_layers=3),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "magicpig",
        MagicPIG(recent=CAPACITY),
        (
            MagicPIG(
                tokens=120, bits=4, tables=12, sink=3, recent=17, train=60, middle=False, seed=1
            ),
            MagicPIG(share=0.4, bits=6, tables=40, recent=8, train=100, dense_layers=2),
        ),
        rows_by_head,
        selects=True,
    ),
    Row(
        "tidaldecode",
        TidalDecode(tokens=CAPACITY),
        (TidalDecode(tokens=20), TidalDecode(share=0.1, gqa_reduce="max", correction_layer=5)),
        rows_by_head,
        selects=True,
    ),
    Row(
        "oracle_topk",
        OracleTopK(tokens=CAPACITY),
        (
            OracleTopK(tokens=20, tail=64),
            OracleTopK(tokens=20, granularity="query_head", sparse_layers=(1, 4)),
        ),
        rows_by_head,
        selects=True,
        scans=lambda plan, layer: True,
    ),
    Row(
        "oracle_topp",
        OracleTopP(tokens=CAPACITY, p=1.0),
        (
            OracleTopP(tokens=40, p=0.8, floor=10),
            OracleTopP(share=0.3, p=0.99, granularity="layer", tail=64),
        ),
        rows_by_head,
        selects=True,
        scans=lambda plan, layer: True,
    ),
    Row(
        "random_topk",
        RandomTopK(tokens=CAPACITY, granularity="kv_head"),
        (
            RandomTopK(tokens=20, tail=64),
            RandomTopK(share=0.1, granularity="kv_head", seed=7),
        ),
        rows_by_head,
        random=True,
        without={"U8": "it chooses by chance, whatever the scores"},
    ),
    Row(
        "kascade",
        Kascade(tokens=CAPACITY, anchors=(0, 2, 5)),
        (
            Kascade(tokens=20, anchors=(0, 2, 5), head_map=crossed_heads()),
            Kascade(share=0.1, least=8, anchors=(1, 4)),
        ),
        rows_by_head,
        selects=True,
        scans=lambda plan, layer: plan.groups[plan.group_of[layer]].filter_layer == layer,
    ),
    Row(
        "kascade_tiles",
        KascadeTiles(tokens=CAPACITY, anchors=(0, 2, 5)),
        (
            KascadeTiles(tokens=24, tile=40, anchors=(0, 2, 5), head_map=crossed_heads()),
            KascadeTiles(share=0.1, least=8, tile=20, anchors=(1, 4)),
        ),
        rows_by_head,
        selects=True,
        scans=lambda plan, layer: plan.groups[plan.group_of[layer]].filter_layer == layer,
        approximate=True,
        stays="a prompt's layers gather from it, head by head",
        chunk_defined="a tile of queries ends where its chunk ends, and chooses for itself",
    ),
    Row(
        "hshare",
        HShare(tokens=CAPACITY),
        (
            HShare(tokens=40, recent=9, sinks=3, **sharing()),
            HShare(share=0.2, recent=4, sinks=0, steps=3, layers=sharing()["layers"]),
        ),
        rows_by_head,
        selects=True,
        scans=lambda plan, layer: plan.groups[plan.group_of[layer]].filter_layer == layer,
    ),
    Row(
        "less_is_more",
        LessIsMore(tokens=CAPACITY),
        (LessIsMore(share=0.2, layers=(0, 3), recent=0.1, sinks=2),),
        rows_by_head,
        selects=True,
    ),
    Row(
        "delta",
        Delta(tokens=CAPACITY),
        (Delta(tokens=100, page=7, newest=1),),
        rows_by_head,
        selects=True,
    ),
    Row(
        "omnikv_top_p",
        OmniKVTopP(**EVERYTHING, mass=1.0),
        (OmniKVTopP(**SPARSE, mass=0.9, least=9),),
        shared_rows,
        selects=True,
    ),
    Row(
        "omnikv_heads",
        OmniKVHeads(**EVERYTHING),
        (
            OmniKVHeads(scores="raw", sink=4, **SPARSE),
            OmniKVHeads(selector="exponential", **SPARSE),
        ),
        lists_and_tail,
        selects=True,
    ),
)


def with_bank(method):
    """A method that evicts, whose bank stays beside its store; others as they are."""
    return replace(method, forget=False) if isinstance(method, Evicting) else method


def changed(change):
    """The rows, each of their methods changed."""
    return tuple(
        replace(row, neutral=change(row.neutral), sparse=tuple(map(change, row.sparse)))
        for row in ROWS
    )


TABLE = changed(with_bank)  # for tests that look at a bank or spoil it


def rows_for(layers, kv_heads=2):
    """The methods as users have them, for a model of so many layers and K/V heads."""
    return changed(lambda method: fitted(method, layers, kv_heads))


OF_SESSIONS = rows_for(SESSION_MODEL["layers"])  # for the model of `tiny_llm(method)`


def every(kind=lambda row: True):
    """(id, row, method) of every setting of the table's rows of a kind that reads less; a row
    without any counts by its neutral one.
    """
    return [
        (f"{row.name}-{i}", row, method)
        for row in TABLE
        if kind(row)
        for i, method in enumerate(row.sparse or (row.neutral,))
    ]


def partial_layers(plan):
    """Layers that read less than everything."""
    return list(plan.partial_layers)
