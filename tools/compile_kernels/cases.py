"""The configurations of the kernels that are compiled."""

from __future__ import annotations

from dataclasses import dataclass

from engine.load.ahead.recording import TYPES
from weights.aliases import ALIASES
from weights.shapes import config_of

PREFILL_LAUNCHERS = ("columns", "gathered", "blocks", "capped", "parts")
# those that know a cap on logits, or sinks
SOFTMAX_LAUNCHERS = ("dense", "scored", "sparse", "lists", "window", "gathered", "capped")
HOST_LAUNCHERS = ("slots", "fetch", "home", "store")
STEP_LAUNCHERS = ("product", "norm", "rotate", "few_bits", "tiles", "experts", "net", "ssd")
FLOATS = ("bfloat16", "float16", "float32")
ROW_FORMS = ("int8", "int4", "fp8")  # of a bank
MOST_QUERIES = 8  # tokens of a step that exact mode checks


@dataclass(frozen=True)
class Case:
    """One shipped configuration: a launcher and the shapes that it is called with.

    launcher: dense, scored (dense with scores), ragged (heads of different counts), apart (dense
    and sparse with merges of their own), sparse, lists (sparse, of heads that choose different
    numbers of tokens), topk, window, or one of PREFILL_LAUNCHERS,
    HOST_LAUNCHERS and STEP_LAUNCHERS; net is a gated delta net's step and prompt, ssd a Mamba-2
    layer's. group: query heads per K/V head, of which there are 8; for net value heads per key
    head, of which there are 16, and head_dim is both's; for ssd heads per group, of which there are
    8, and head_dim is the state's. queries: of a step; for tiles the rows of a prompt's chunk, 512
    by default. packed: what the bank's rows are held in, one of ROW_FORMS; of few_bits and tiles
    the weights' kind, "int8", "int4" (the default, in groups of 32) or "int4:N" for groups of N; of
    experts their weights', which else are floats.
    softmax: "cap" (on logits), "sinks" or "".
    """

    launcher: str
    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 4
    queries: int = 1
    packed: str = ""
    softmax: str = ""

    @property
    def bounded(self) -> bool:
        """Whether a spill is a fault: in decode and prefill at head_dim 64 or 128, groups 1, 2, 4
        and 8, one query, 16 bits.
        """
        bounded = self.launcher in (
            "dense", "scored", "ragged", "apart", "sparse", "lists", *PREFILL_LAUNCHERS,
            *STEP_LAUNCHERS,
        )  # fmt: skip
        return (
            bounded
            and self.head_dim in (64, 128)
            and self.group in (1, 2, 4, 8)
            and (self.queries == 1 or self.launcher == "tiles")
            and self.dtype != "float32"
        )

    @property
    def what_is_packed(self) -> str:
        """What `packed` says it of."""
        return "weights" if self.launcher in ("few_bits", "tiles", "experts") else "rows"

    def __str__(self) -> str:
        if self.launcher in ("topk", *HOST_LAUNCHERS):
            return self.launcher
        many = f" q{self.queries}" if self.queries > 1 else ""
        many += f" {self.packed} {self.what_is_packed}" if self.packed else ""
        many += f" {self.softmax}" if self.softmax else ""
        return f"{self.launcher} {TYPES[self.dtype]} d{self.head_dim} g{self.group}{many}"


def shipped(everything: bool = False) -> list[Case]:
    """What users can reach: the published shapes, every dtype, form of rows and of weights, caps,
    sinks and windows, steps of several tokens. With `everything` every dtype, head size, group and
    number of queries.
    """
    if not everything:
        cases = [
            Case(name, "bfloat16", d, g)
            for name in ("dense", "scored", "ragged", "sparse", "lists")
            for d in (64, 128)
            for g in (1, 4, 8)
        ]
        cases += [Case("window", "bfloat16", d, g) for d, g in ((64, 4), (128, 4), (128, 8))]
        cases += [
            Case(name, "bfloat16", d, g)
            for name in PREFILL_LAUNCHERS
            if name not in ("capped", "parts")
            for d, g in ((64, 4), (128, 1), (128, 4), (128, 8))
        ]
        return [*cases, *_particular(), *_others(), *_steps(), *_packed(), *_published()]
    cases = [
        Case(name, dtype, d, g, q)
        for name in ("dense", "scored", "ragged", "sparse", "window", *PREFILL_LAUNCHERS)
        if name not in ("capped", "parts")
        for dtype in FLOATS
        for d in (32, 64, 80, 96, 128, 256)
        for g in (1, 4, 8, 16)
        for q in (1, 8)
        if name in ("dense", "scored", "sparse") or q == 1
    ]
    cases += [
        Case(name, dtype, d, g, q)
        for name in STEP_LAUNCHERS
        for dtype in FLOATS
        for d, g in ((64, 1), (64, 4), (80, 4), (128, 4), (128, 8))
        for q in (1, 2, 3, 8)
    ]
    return [
        *cases,
        *(Case("lists", group=group) for group in (1, 4, 8)),
        Case("apart"),
        Case("parts"),
        Case("topk"),
        *(Case(name) for name in HOST_LAUNCHERS),
    ]


def _particular() -> list[Case]:
    """The shapes of Gemma 2 27B and 9B, and of gpt-oss."""
    return [
        Case(name, "bfloat16", d, g, softmax=softmax)
        for name in (*SOFTMAX_LAUNCHERS, "columns")
        for d, g, softmax in ((128, 2, "cap"), (256, 2, "cap"), (64, 8, "sinks"))
        if name != "columns" or softmax == "cap"
    ]


def _others() -> list[Case]:
    """The other dtypes of a model, and steps of 2 to 8 tokens, as exact mode checks them."""
    prefill = [name for name in PREFILL_LAUNCHERS if name != "capped"]
    return [
        *(
            Case(name, dtype)
            for dtype in ("float16", "float32")
            for name in (
                "dense",
                "scored",
                "ragged",
                "sparse",
                "lists",
                "window",
                *prefill,
                "product",
                "norm",
            )
        ),
        *(Case(name, dtype) for dtype in ("float16", "float32") for name in ("rotate", "few_bits")),
        *(
            Case(name, queries=queries)
            for name in ("dense", "sparse")
            for queries in range(2, MOST_QUERIES + 1)
        ),
        # latent attention's rows, under the query heads that a program takes
        *(
            Case(name, "bfloat16", d, g)
            for name in ("dense", "scored", "sparse")
            for d, g in ((576, 16), (320, 16), (288, 10))
        ),
        # the heads of Gemma 4 that see everything, and what chooses among rows as wide as these
        *(Case(name, "bfloat16", 512, 8) for name in ("dense", "scored", "sparse", "rotate")),
        *(
            Case(name, "bfloat16", d, g)
            for name in ("window", "gathered", "columns")
            for d, g in ((512, 8), (576, 16))
        ),
    ]


def _steps() -> list[Case]:
    """The kernels around attention, the host tier's, and products with weights of few bits. The
    kernel of a product of 16 rows knows that they are a multiple of 16.
    """
    kinds = ("int4", "int4:64", "int4:128", "int8")
    return [
        *(Case(name) for name in ("apart", "parts", "topk", *HOST_LAUNCHERS, *STEP_LAUNCHERS)),
        *(Case(name, queries=8) for name in ("product", "norm", "rotate", "few_bits")),
        *(Case(name, queries=16) for name in ("product", "few_bits")),
        *(Case(name, packed=kind) for name in ("few_bits", "tiles") for kind in kinds),
        Case("few_bits", queries=8, packed="int8"),
        *(Case("tiles", queries=32, packed=kind) for kind in ("int4", "int8")),
        *(Case("experts", packed=form) for form in ("int8", "int4")),
        *(Case(name, dtype) for name in ("net", "ssd") for dtype in ("float16", "float32")),
        Case("ssd", head_dim=256),
    ]


def _packed() -> list[Case]:
    """Rows of the bank in 8 bits, and in 6 and 4."""
    prefill = ("columns", "gathered", "blocks")
    names = ("dense", "scored", "ragged", "sparse", "lists", *prefill, "window", "rotate")
    return [
        *(Case(name, packed=form) for form in ROW_FORMS for name in names),
        *(Case(name, "bfloat16", 64, 8, packed=form) for form in ROW_FORMS for name in names),
        *(Case(name, "float16", packed="int8") for name in ("dense", "scored", "sparse", "rotate")),
    ]


def _published() -> list[Case]:
    """Head sizes and groups of the models that have a name (weights/aliases.py), as far as no list
    above has them.
    """
    return [
        Case(name, "bfloat16", d, g)
        for d, g in sorted(published_heads())
        for name in ("dense", "scored", "ragged", "sparse", "lists", "rotate")
    ]


def published_heads() -> set[tuple[int, int]]:
    """Return (head size, query heads per K/V head) of the models that have a name."""
    found = set()
    for alias in ALIASES.values():
        sizes = config_of(alias)
        heads = sizes["num_attention_heads"]
        head_dim = sizes["head_dim"] or sizes["hidden_size"] // heads
        found.add((head_dim, heads // sizes["num_key_value_heads"]))
    return found
