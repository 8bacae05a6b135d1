"""Sizes of multi-head latent attention (engine/model/heads/latent.py), and how config.json names
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.model.config.fields import Fields
from engine.model.config.rope_config import yarn_mscale

MOST_RANK, MOST_DIM = 1 << 20, 1 << 12
# FLOPs in the time of a byte of memory, of 16 bits: an H100 does 989 T of one and 3.35 T of the
# other a second, two cores with AVX512-BF16 about 0.4 T and 15 G
PER_BYTE = {"cuda": 300.0, "cpu": 30.0}
# rows that become keys and values at a time: with 512, merging them took a fifth of attention
OPENED_ROWS = 2048


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention. rank: of the latent; turned: dimensions of a key that rotate, and
    all heads share; plain: those of a head's key that do not rotate; value: of a head's value;
    query_rank: of the queries' own latent, 0: they have none. pairs: a checkpoint stores the
    rotated dimensions of a pair side by side. stretch: (beta, original positions) of queries that
    grow with their position, None: they do not.
    """

    rank: int
    turned: int
    plain: int
    value: int
    query_rank: int = 0
    pairs: bool = True
    stretch: tuple[float, int] | None = None

    @property
    def width(self) -> int:
        """Elements of a row: the head_dim of attention."""
        return self.turned + self.rank

    @property
    def head(self) -> int:
        """Elements of a head's key or query before it goes into the latent's space."""
        return self.plain + self.turned

    @property
    def partial(self) -> float:
        """The share of a row that rotates, from which Rope.width gives `turned` exactly."""
        share = self.turned / self.width
        return share if int(self.width * share) == self.turned else math.nextafter(share, 1.0)

    @property
    def opened(self) -> int:
        """Elements of a head's key, and of its value, once they are made of a row: the shorter of
        the two ends in zeros.
        """
        return max(self.head, self.value)

    def expands(self, start: int, queries: int, size: int, device_type: str) -> bool:
        """Whether `queries` at positions from `start` on cost less where every row that they see
        becomes keys and values of `size` bytes an element, than where they meet the rows.

        Counted for one head. Either way a token goes through both of its matrices: a row, to become
        a key and a value, or a query and what it attended to. What is made is written and read.
        """
        rows, pairs = start + queries, queries * (2 * start + queries + 1) / 2
        token = 2.0 * self.rank * (self.plain + self.value)
        moved = 4 * self.opened * size * PER_BYTE.get(device_type, PER_BYTE["cuda"])
        made = rows * (token + moved) + pairs * 4 * self.opened
        return made < queries * token + pairs * 4 * self.width

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's attention without biases, its norms inside included."""
        rows = self.query_rank or heads * self.head
        found = hidden * (rows + self.width) + self.rank
        found += self.rank * heads * (self.plain + self.value) + heads * self.value * hidden
        if self.query_rank:
            found += self.query_rank * (1 + heads * self.head)
        return found

    def biases(self, hidden: int) -> int:
        """Elements of one layer's biases, where attention has some."""
        return self.query_rank + self.width + hidden


def read_latent(
    fields: Fields,
    query_rank: int,
    value: int = 128,
    plain: int = 128,
    turned: int = 64,
    rank: int = 512,
) -> Latent:
    """Read the sizes of attention; all others are what they are where the file names none. A null
    q_lora_rank means that queries have no latent.
    """
    turned = fields.integer("qk_rope_head_dim", 2, MOST_DIM, default=turned)
    if turned % 2:
        fields.refuse("qk_rope_head_dim", turned, "an even number: rope rotates pairs")
    usual: int | None = None if "q_lora_rank" in fields.data else query_rank
    own = fields.integer("q_lora_rank", 1, MOST_RANK, default=usual)
    return Latent(
        fields.integer("kv_lora_rank", 1, MOST_RANK, default=rank),
        turned,
        fields.integer("qk_nope_head_dim", 1, MOST_DIM, default=plain),
        fields.integer("v_head_dim", 1, MOST_DIM, default=value),
        own or 0,
    )


def rope_fields(fields: Fields) -> Fields:
    """Return the fields of the rope, in the form that parse_rope takes."""
    name = "rope_scaling" if fields.data.get("rope_scaling") else "rope_parameters"
    inside = fields.data.get(name) or {}
    if not isinstance(inside, dict):
        fields.refuse(name, inside, "an object or null")
    return Fields(inside, fields.source, f"{fields.prefix}{name}.")


def without_share(data: dict[str, Any], sizes: Latent) -> dict[str, Any]:
    """Return config.json's content without a partial_rotary_factor in its rope that says what the
    sizes say: which share of a head's key rotates.
    """
    for name in ("rope_scaling", "rope_parameters"):
        inside = data.get(name)
        share = inside.get("partial_rotary_factor") if isinstance(inside, dict) else None
        if isinstance(inside, dict) and type(share) is float and share * sizes.head == sizes.turned:
            rest = {key: value for key, value in inside.items() if key != "partial_rotary_factor"}
            data = {**data, name: rest}
    return data


def score(fields: Fields, sizes: Latent) -> float:
    """Return the factor of q . k: YaRN's mscale_all_dim makes it larger."""
    inner = rope_fields(fields)
    all_dim = inner.number("mscale_all_dim", 0.0, 1e3, default=0.0, closed=True)
    kind = inner.text("rope_type", default=inner.text("type", default="default"))
    if kind == "default" or not all_dim:
        return float(sizes.head**-0.5)
    factor = inner.number("factor", 1.0, 1e6, closed=True)
    return float(sizes.head**-0.5 * yarn_mscale(factor, all_dim) ** 2)


def bias(fields: Fields, sizes: Latent) -> bool:
    """Return attention_bias, of the products that make latents and of the output projection."""
    found = fields.flag("attention_bias", default=False)
    if found and not sizes.query_rank:
        fields.unsupported("attention_bias", True, "false where q_lora_rank is null")
    return found
