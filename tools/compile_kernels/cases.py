"""The configurations of the kernels that are compiled."""

from __future__ import annotations

from dataclasses import dataclass

TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
    "int64": "i64",
}
PREFILL_LAUNCHERS = ("columns", "gathered", "blocks", "capped", "parts")
# those that know a cap on logits, or sinks
SOFTMAX_LAUNCHERS = ("dense", "scored", "sparse", "window", "gathered", "capped")
HOST_LAUNCHERS = ("slots", "fetch", "home", "store")
STEP_LAUNCHERS = ("product", "norm", "rotate", "few_bits", "tiles", "experts")


@dataclass(frozen=True)
class Case:
    """One shipped configuration: a launcher and the shapes that it is called with.

    launcher: dense, scored (dense with scores), apart (dense and sparse with merges of their own),
    sparse, topk, window, or one of PREFILL_LAUNCHERS, HOST_LAUNCHERS and STEP_LAUNCHERS. group:
    query heads per K/V head, of which there are 8. queries: of a step; for tiles the rows of a
    prompt's chunk, 512 by default. packed: what the bank's rows are held in, int8 or int4; of
    few_bits and tiles "int8" for the weights, which else are int4; of experts for their weights,
    which else are floats. softmax: "cap" (on logits),
    "sinks" or "".
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
            "dense", "scored", "apart", "sparse", *PREFILL_LAUNCHERS, *STEP_LAUNCHERS
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
    """The configurations compiled by default, or with `everything` every supported dtype, head
    size, group and number of queries.
    """
    if not everything:
        cases = [
            Case(name, "bfloat16", d, g)
            for name in ("dense", "scored", "sparse")
            for d in (64, 128)
            for g in (1, 4, 8)
        ]
        cases += [Case("window", "bfloat16", d, g) for d, g in ((64, 4), (128, 4), (128, 8))]
        cases += [
            Case(name, dtype, 128, 4)
            for name in ("dense", "sparse")
            for dtype in ("float16", "float32")
        ]
        cases += [
            Case(name, "bfloat16", d, g)
            for name in PREFILL_LAUNCHERS
            if name not in ("capped", "parts")
            for d, g in ((64, 4), (128, 1), (128, 4), (128, 8))
        ]
        return [
            *cases,
            *_particular(),
            Case("dense", "bfloat16", 128, 4, 8),
            Case("sparse", "bfloat16", 128, 4, 8),
            *(Case(name) for name in ("apart", "parts", "topk", *HOST_LAUNCHERS, *STEP_LAUNCHERS)),
            Case("product", queries=8),
            Case("few_bits", queries=8),
            Case("tiles", queries=32),
            *(Case(name, packed="int8") for name in ("few_bits", "tiles")),
            Case("few_bits", queries=8, packed="int8"),
            Case("tiles", queries=32, packed="int8"),
            *(Case("experts", packed=form) for form in ("int8", "int4")),
            *(Case(name, "float32") for name in ("product", "experts")),
            *_packed(),
        ]
    cases = [
        Case(name, dtype, d, g, q)
        for name in ("dense", "scored", "sparse", "window", *PREFILL_LAUNCHERS)
        if name not in ("capped", "parts")
        for dtype in TYPES
        if dtype[0] in "bf"
        for d in (32, 64, 80, 96, 128, 256)
        for g in (1, 4, 8, 16)
        for q in (1, 8)
        if name in ("dense", "scored", "sparse") or q == 1
    ]
    cases += [
        Case(name, dtype, d, g, q)
        for name in STEP_LAUNCHERS
        for dtype in TYPES
        if dtype[0] in "bf"
        for d, g in ((64, 1), (64, 4), (80, 4), (128, 4), (128, 8))
        for q in (1, 2, 3, 8)
    ]
    return [
        *cases,
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


def _packed() -> list[Case]:
    """Rows of the bank in 8 bits, and in 5 and 4."""
    prefill = ("columns", "gathered", "blocks")
    names = ("dense", "scored", "sparse", *prefill, "window", "rotate")
    return [
        *(Case(name, packed=form) for form in ("int8", "int4") for name in names),
        *(
            Case(name, "bfloat16", 64, 8, packed=form)
            for form in ("int8", "int4")
            for name in ("dense", "sparse", "blocks")
        ),
    ]
