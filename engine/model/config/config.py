"""The only parser of config.json: an untrusted dict in, one frozen typed ModelConfig out.

Nothing else in the project reads config.json or generation_config.json. Every field is checked
here, before anything is allocated; what only some families have is read in
engine/model/config/families/. A missing or senseless field raises BadCheckpoint; a sound model
that this engine cannot run raises UnsupportedCheckpoint. Both messages are one line that names
file, key, found and expected. Defaults are those of transformers' LlamaConfig. Rope is parsed in
engine/model/config/rope_config.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import BadCheckpoint, UnsupportedCheckpoint
from engine.model.config import families
from engine.model.config.block import LLAMA, Block
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent, without_share
from engine.model.config.names import LLAMA_NAMES, Names
from engine.model.config.rope_config import MAX_POSITIONS, Rope, parse_rope
from engine.model.config.rope_override import overridden, pins_long
from engine.model.config.share import ContextShare, Packed, Share
from engine.model.mixture import Experts
from engine.model.recurrent import Recurrent, Ssd
from kernels.launch.softmax import PLAIN, Softmax
from kernels.rows.forms import DTYPES as PACKED
from kernels.rows.forms import row_widths
from weights.jsonfile import inside, present, read_object, shown

DTYPES = ("float32", "bfloat16", "float16")

# Upper bounds: ten times any released model, so that no product of two sizes is absurd.
MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20  # hidden and intermediate size
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, rope, biases, stored dtype, special tokens and block of a model.

    Immutable and hashable. `dtype` is the stored one ("float32" | "bfloat16" | "float16").
    `attention_bias` puts a bias on q, k, v and (Block.o_bias) on o; `mlp_bias` on gate, up and
    down. `max_positions` is the context in tokens that the model was made for. `block`, `windows`,
    `layer_ropes`, `experts`, `recurrent` and `bare` are the family's
    (engine/model/config/block.py). `num_kv_heads` and `head_dim` are those of layers that see
    everything; `local_heads` has both of sliding ones where they differ. `row_layers` has the layer
    whose K and V each layer reads; empty: its own. `latent`: the sizes of latent attention, whose
    one K/V head has rows of `head_dim` elements. `prefix` begins the stored names of the layers'
    tensors, and `names` has the others. `bank` is no file's: how rows of K and V are held, "model"
    (in the model's dtype) or packed: a name of `kernels.rows.forms`. `share`: which rank's share of
    a model this is, whose heads and widths the others are then; None: the whole model. `context`:
    the tokens whose rows this process holds of the whole model; None: all. `ends`: whether these
    layers follow the embedding, and whether the head follows them: not of parts of a model
    (engine/model/parts/). `behind`: layers of the parts behind this one. `packed`: how the
    columns of matrices are stored where they are of few bits, which is no fact of the model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    model_type: str
    family: str = "Llama"
    block: Block = LLAMA
    windows: tuple[int, ...] = ()
    layer_ropes: tuple[Rope, ...] = ()
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    local_heads: tuple[int, int] | None = None
    row_layers: tuple[int, ...] = ()
    latent: Latent | None = None
    # no facts of the model: saved rows outlive a change of names
    prefix: str = field(default="model.", repr=False)
    names: Names = field(default=LLAMA_NAMES, repr=False)
    bare: tuple[int, ...] = field(default=(), repr=False)
    bank: str = "model"
    # as `names`: other heads tell shares apart
    share: Share | None = field(default=None, repr=False)
    # of a file's model it stands apart (engine/saved/model_key.py)
    context: ContextShare | None = field(default=None, repr=False)
    ends: tuple[bool, bool] = field(default=(True, True), repr=False)
    behind: int = field(default=0, repr=False)
    packed: Packed | None = field(default=None, repr=False, compare=False)

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Width of the query projection: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of what the output projection reads: the values of all query heads."""
        return self.num_heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention without biases, and without the norms of heads."""
        if self.latent:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size)

    @property
    def sides(self) -> int:
        """What a row keeps: 2, K and V, or 1, K alone, where V is the same."""
        return 1 if self.latent else 2

    # lists of layers and counts of weights are made once: a table of what fits asks 10,000 times

    @cached_property
    def local_layers(self) -> tuple[int, ...]:
        """The sliding-window layers, ascending."""
        return tuple(layer for layer, window in enumerate(self.windows) if window)

    @cached_property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that have a recurrent state in place of attention, ascending."""
        if self.recurrent is None or self.beside is not None:
            return ()
        return self.recurrent.layers

    @property
    def beside(self) -> Ssd | None:
        """What layers have that attend beside their recurrence; None where none does."""
        ssd = None if self.recurrent is None else self.recurrent.ssd
        return ssd if ssd is not None and ssd.beside else None

    @cached_property
    def attending_layers(self) -> tuple[int, ...]:
        """The layers that attend, ascending: all but the recurrent ones."""
        recurrent = set(self.recurrent_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent)

    @cached_property
    def seeing_layers(self) -> tuple[int, ...]:
        """The layers that see every token, ascending."""
        local = set(self.local_layers)
        return tuple(layer for layer in self.attending_layers if layer not in local)

    @cached_property
    def keeping_layers(self) -> tuple[int, ...]:
        """The `seeing_layers` that write rows: all but those that read another's, ascending."""
        return tuple(layer for layer in self.seeing_layers if self.rows_of(layer) == layer)

    @cached_property
    def ring_layers(self) -> tuple[int, ...]:
        """The `local_layers` that write rows, ascending."""
        return tuple(layer for layer in self.local_layers if self.rows_of(layer) == layer)

    def rows_of(self, layer: int) -> int:
        """The layer whose K and V a layer reads: itself, or one below it."""
        return self.row_layers[layer] if self.row_layers else layer

    def heads_of(self, layer: int) -> tuple[int, int]:
        """(K/V heads, head_dim) of a layer."""
        if self.local_heads is None or not self.windows[layer]:
            return self.num_kv_heads, self.head_dim
        return self.local_heads

    def sizes_of(self, layer: int) -> tuple[int, int, int, float]:
        """(query heads, K/V heads that it computes, head_dim, eps) of a layer, as `pre_attention`
        takes them; a layer that reads another's rows computes none.
        """
        kv_heads, head_dim = self.heads_of(layer)
        own = self.rows_of(layer) == layer
        return self.num_heads, kv_heads if own else 0, head_dim, self.rms_norm_eps

    @cached_property
    def other_layers(self) -> tuple[int, ...]:
        """The layers that do not see every token, sliding or recurrent, ascending."""
        return tuple(sorted((*self.local_layers, *self.recurrent_layers)))

    @property
    def window(self) -> int:
        """The longest sliding window in tokens; 0 where no layer slides."""
        return max(self.windows, default=0)

    def rows_seen(self, n: int) -> list[int]:
        """Return how many of n tokens each layer may see, by its window; a recurrent one sees no
        row.
        """
        windows, recurrent = self.windows or (0,) * self.num_layers, set(self.recurrent_layers)
        return [
            0 if layer in recurrent else min(n, window) if window else n
            for layer, window in enumerate(windows)
        ]

    @property
    def scale(self) -> float:
        """Factor of q . k before the softmax."""
        return self.head_dim**-0.5 if self.block.score is None else self.block.score

    def softmax(self, sinks: Sequence[torch.Tensor]) -> tuple[Softmax, ...]:
        """What is particular in every layer's softmax, PLAIN where nothing is; sinks: [H] of every
        layer (Llama.sinks).
        """
        assert self.block.sinks == bool(sinks), "sinks come with the model's weights"
        cap = self.block.score_cap
        if sinks:
            return tuple(Softmax(cap, some.float()) for some in sinks)
        return (Softmax(cap) if cap else PLAIN,) * self.num_layers

    @property
    def held_vocab(self) -> int:
        """Tokens whose rows of the embedding and of the head this process holds."""
        return self.vocab_size if self.share is None else self.share.vocab.size

    @property
    def o_bias(self) -> bool:
        """Whether o has a bias."""
        return self.attention_bias and self.block.o_bias

    def kv_bytes(self, dtype_bytes: int, local: bool = False) -> int:
        """Return the bytes of K and V of one token in a layer that sees everything, or with `local`
        in one that slides, for floats of `dtype_bytes`.
        """
        heads, width = self.num_kv_heads, self.head_dim
        if local and self.local_heads is not None:
            heads, width = self.local_heads
        if self.bank == "model":
            return self.sides * heads * width * dtype_bytes
        dtype = PACKED[self.bank]
        return heads * sum(row_widths(width, dtype)) * dtype.itemsize

    def bank_rows(self, tokens: int) -> int:
        """Return the rows of a layer that this process reserves for so many tokens."""
        return tokens if self.context is None else self.context.rows(tokens)

    def row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the bank's rows under a model in `dtype`."""
        return PACKED.get(self.bank, dtype)

    @property
    def context_limit(self) -> int:
        """Most positions that a caller may ask for.

        Linear and dynamic rope stretch max_positions by their factor, yarn the original maximum.
        Some of these models' files give the trained length and some the stretched one, so the
        default context stays at max_positions and this is only the limit.
        """
        stretched = {
            "linear": self.max_positions,
            "dynamic": self.max_positions,
            "yarn": self.rope.original_max_positions,
        }
        return max(self.max_positions, int(stretched.get(self.rope.kind, 0) * self.rope.factor))

    def reaching(self, positions: int) -> ModelConfig:
        """Return this configuration, made for at least so many positions."""
        return replace(self, max_positions=max(self.max_positions, positions))

    def at_context(self, tokens: int) -> ModelConfig:
        """Return this configuration for sessions of up to `tokens` tokens.

        LongRoPE has two sets of frequencies. Which one a model gets is decided here, once for all
        sessions, because rows that were rotated by one set mean nothing beside rows of the other.
        """
        if self.rope.kind != "longrope":
            return self
        long = self.rope.long or tokens > self.rope.original_max_positions
        return replace(self, rope=replace(self.rope, long=long))

    @cached_property
    def parameters(self) -> int:
        """Number of stored weights; a tied lm_head counts once."""
        return self._parameters(read=False)

    @cached_property
    def step_parameters(self) -> int:
        """Number of weights that a decode step of one token reads: of a mixture, the experts that a
        token takes.
        """
        return self._parameters(read=True)

    @property
    def mlp_width(self) -> int:
        """Width of the MLP that a token goes through: of a mixture, all its experts together."""
        if self.experts is None:
            return max(map(self.mlp_of, range(self.num_layers)))
        mixed = self.experts.per_token * self.experts.width + self.experts.shared
        mixed += self.intermediate_size if self.experts.beside else 0
        return max(mixed, self.intermediate_size) if self.experts.dense else mixed

    def mlp_of(self, layer: int) -> int:
        """Width of a layer's MLP."""
        twice = self.block.wide_readers and self.rows_of(layer) != layer
        return self.intermediate_size * (2 if twice else 1)

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture of a layer; None where it has an MLP."""
        if self.experts is None or layer in self.experts.dense or layer in self.bare:
            return None
        return self.experts

    def _parameters(self, read: bool) -> int:
        tables = 1 if self.tied_embeddings else sum(self.ends)
        embeddings = self.held_vocab * self.hidden_size * tables
        norms = self.hidden_size * (4 if self.block.norms == "both" else 2)
        attention = sum(map(self._attention_parameters, self.attending_layers))
        if self.recurrent is not None:
            attention += len(self.recurrent.layers) * self.recurrent.parameters(self.hidden_size)
        ungated = self.block.activation == "relu2"
        mlps = 0
        for layer in range(self.num_layers):
            experts, width = self.experts_of(layer), self.mlp_of(layer)
            if experts is not None:
                mlps += experts.parameters(self.hidden_size, read)
            if layer not in self.bare and (experts is None or experts.beside):
                mlps += (2 if ungated else 3) * self.hidden_size * width
                if self.mlp_bias:
                    mlps += (1 if ungated else 2) * width + self.hidden_size
        norms = self.num_layers * norms - len(self.bare) * self.hidden_size
        found = embeddings + attention + norms + mlps + self.hidden_size * self.ends[1]
        return found + self._per_layer_parameters(read)

    def _attention_parameters(self, layer: int) -> int:
        """Weights of a layer's attention, with its own norms."""
        block, hidden = self.block, self.hidden_size
        if self.latent:
            return self.attention_weights + self.latent.biases(hidden) * self.attention_bias
        heads, kv_heads, head_dim, _ = self.sizes_of(layer)
        q, k = heads * head_dim, kv_heads * head_dim
        v = 0 if block.keys_as_values and layer in self.seeing_layers else k
        found = hidden * (2 * q + k + v)
        if self.attention_bias:
            found += q * (1 + block.gated) + k + v
        found += hidden if self.o_bias else 0
        found += heads if block.sinks else 0
        found += hidden * q if block.gated else 0
        if block.qk_norm == "width":
            found += q + k
        elif block.qk_norm == "head":
            found += head_dim * (2 if kv_heads else 1)
        return found

    @property
    def per_layer_vocab(self) -> int:
        """Tokens of the table of embeddings for each layer."""
        return self.block.per_layer_vocab or self.vocab_size

    def _per_layer_parameters(self, read: bool) -> int:
        """Weights of the layers' scalars, of a token's embeddings for each layer and of its
        streams; `read`: those that one token reads.
        """
        layers, width, hidden = self.num_layers, self.block.per_layer, self.hidden_size
        found = layers if self.block.scalar else 0
        if laurel := self.block.laurel:
            found += layers * (2 * laurel * hidden + hidden)
        if streams := self.block.streams:
            found += sum(self.ends) * (streams - 1) * hidden**2
            found += layers * (streams**3 + streams**2 + streams * hidden + 2 * hidden)
        if width:
            found += layers * (2 * width * hidden + hidden)
        if width and self.ends[0]:  # for the layers of all parts
            made = (layers + self.behind) * width
            found += made * (1 if read else self.per_layer_vocab) + made * hidden + width
        return found

    @classmethod
    def from_dict(
        cls,
        data: dict[str, Any],
        source: str = "config.json",
        generation: dict[str, Any] | None = None,
        rope: str | None = None,
        quantised: bool = False,
    ) -> ModelConfig:
        """Parse the contents of config.json.

        `source` names the file in messages. `generation` is the content of generation_config.json;
        its eos wins over config.json's. `rope` overrides config.json's
        (engine/model/config/rope_override.py). quantised: whether somebody reads its
        quantization_config; otherwise one is refused. Raises BadCheckpoint (a field is missing or
        senseless), UnsupportedCheckpoint (a sound model of a kind that this engine cannot run) or
        SettingError (an override without sense).
        """
        fields = Fields(data, source)
        architecture, family = families.find(fields)
        data, inner = family.text_part(architecture, fields)
        data = data if rope is None else overridden(data, rope, family)
        fields = Fields(data, source, inner)
        _refuse_unsupported(fields, family, quantised)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        heads, kv_heads, head_dim, latent = _heads(fields, hidden, family)
        layers = _layers(fields, family)
        max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        main = _main_rope(fields, rope, max_positions, latent or head_dim, family)
        facts = family.facts(fields, Sizes(layers, hidden, head_dim, max_positions, main))
        own = kv_heads, head_dim
        kv_heads, head_dim = _whole(fields, heads, facts.seeing_heads or own)
        return cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_intermediate(fields, family.intermediate, layers),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number(family.eps, above=0.0, below=0.1),
            max_positions=min(max_positions, facts.positions or max_positions),
            rope=main,
            tied_embeddings=fields.flag("tie_word_embeddings", default=family.tied),
            attention_bias=facts.attention_bias,
            mlp_bias=facts.mlp_bias,
            dtype=_dtype(fields),
            bos_token_id=fields.integer("bos_token_id", 0, vocab - 1, default=None),
            eos_token_ids=_eos(fields, generation, vocab),
            model_type=fields.text("model_type", default=family.architectures[architecture]),
            family=family.name,
            block=facts.block,
            windows=facts.windows,
            layer_ropes=facts.layer_ropes,
            experts=facts.experts,
            recurrent=facts.recurrent,
            local_heads=own if facts.windows and own != (kv_heads, head_dim) else None,
            row_layers=facts.row_layers,
            latent=latent,
            prefix=facts.names.first or family.prefix(architecture),
            names=facts.names,
            bare=facts.bare,
        )

    @classmethod
    def from_folder(
        cls, path: str | Path, rope: str | None = None, quantised: bool = False
    ) -> ModelConfig:
        """Parse a model folder's config.json, and its generation_config.json if there is one.

        `rope` overrides config.json's; quantised: as `from_dict`. Raises BadCheckpoint,
        UnsupportedCheckpoint or SettingError.
        """
        folder = Path(path)
        generation_file = folder / "generation_config.json"
        generation = None
        if present(generation_file):
            generation = read_object(inside(folder, generation_file.name))
        source = inside(folder, "config.json")
        return cls.from_dict(read_object(source), str(source), generation, rope, quantised)


def _refuse_unsupported(fields: Fields, family: Family, quantised_too: bool) -> None:
    """Refuse what would load but compute something else: quantised weights, another activation."""
    for key in ("quantization_config", "compression_config"):
        quantised = fields.data.get(key)
        if quantised is not None and not quantised_too:
            method = quantised
            if _method(quantised) in family.quantised:
                continue
            if isinstance(quantised, dict):
                method = quantised.get("quant_method", "unnamed")
            raise UnsupportedCheckpoint(
                f"{fields.source}: {key}: quantised formats not supported yet: {shown(method)}; "
                "expected float32, bfloat16 or float16 weights"
            )
    key, names = family.activation
    activation = fields.text(key, default=names[0])
    if activation not in names:  # several names of one function in transformers
        fields.unsupported(key, activation, names[0])


def _method(quantised: object) -> object:
    return quantised.get("quant_method") if isinstance(quantised, dict) else None


def _whole(fields: Fields, heads: int, seeing: tuple[int, int]) -> tuple[int, int]:
    """Require that query heads share the K/V heads of the layers that see everything."""
    if heads % seeing[0]:
        fields.refuse("num_attention_heads", heads, f"a multiple of {seeing[0]} K/V heads")
    return seeing


def _intermediate(fields: Fields, key: str, layers: int) -> int:
    """Return the width of an MLP, which may be given for each layer if all are alike."""
    found = fields.data.get(key)
    if isinstance(found, list) and len(found) > 1:
        if len(found) != layers or any(width != found[0] for width in found):
            fields.unsupported(key, found, f"one width, or {layers} that are alike")
        fields = Fields({key: found[0]}, fields.source, fields.prefix)
    return fields.integer(key, 1, MAX_WIDTH)


def _layers(fields: Fields, family: Family) -> int:
    if family.layers is not None:
        return family.layers(fields)
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def _kv_heads(fields: Fields, heads: int) -> int:
    """Return num_key_value_heads, else as many as query heads."""
    found = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=heads)
    if heads % found:
        fields.refuse("num_key_value_heads", found, f"a divisor of num_attention_heads = {heads}")
    return found


def _main_rope(
    fields: Fields, override: str | None, max_positions: int, head: Latent | int, family: Family
) -> Rope:
    """Parse the rope, into which `override` has been worked. head: head_dim, or the sizes of latent
    attention, of whose rows the part that rotates is a head to the file.
    """
    data, inner, where = fields.data, fields.prefix, fields.source
    where = where if override is None else f"{where} with rope {override[:60]}"
    width = head if isinstance(head, int) else head.turned
    data = data if isinstance(head, int) else without_share(data, head)
    found = parse_rope(data, where, max_positions, width, family.rope, inner)
    partial = found.partial if isinstance(head, int) else head.partial
    return replace(found, long=pins_long(override), partial=partial)


def _heads(fields: Fields, hidden: int, family: Family) -> tuple[int, int, int, Latent | None]:
    """Return (query heads, K/V heads, head_dim, the sizes of latent attention, whose heads share
    one row, or None).
    """
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = _kv_heads(fields, heads)
    if family.latent is None:
        return heads, kv_heads, _head_dim(fields, hidden, heads, family.head_dim), None
    if kv_heads != heads:
        fields.unsupported("num_key_value_heads", kv_heads, f"num_attention_heads = {heads}")
    latent = family.latent(fields)
    if latent.width > MAX_HEAD_DIM:
        most = f"at most {MAX_HEAD_DIM - latent.turned} beside qk_rope_head_dim = {latent.turned}"
        fields.refuse("kv_lora_rank", latent.rank, most)
    return heads, 1, latent.width, latent


def _head_dim(fields: Fields, hidden: int, heads: int, usual: int | None) -> int:
    """Return the explicit head_dim, else the family's usual one, else hidden_size / heads; even,
    because rope rotates pairs.
    """
    head_dim = fields.integer("head_dim", 1, MAX_HEAD_DIM, default=usual)
    if head_dim is None:
        if hidden % heads:
            fields.refuse(
                "num_attention_heads",
                heads,
                f"a divisor of hidden_size = {hidden}, or an explicit head_dim",
            )
        head_dim = hidden // heads
        if head_dim > MAX_HEAD_DIM:
            fields.refuse(
                "hidden_size / num_attention_heads",
                head_dim,
                f"a head_dim of at most {MAX_HEAD_DIM}",
            )
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "an even number: rope rotates pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    """Return the stored dtype, from `dtype` (newer) or `torch_dtype`.

    float32 if neither is given, as transformers' own files leave it out.
    """
    key = "dtype" if fields.data.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, default="float32").removeprefix("torch.")
    if name not in DTYPES:
        fields.unsupported(key, name, "one of " + ", ".join(DTYPES))
    return name


def _eos(fields: Fields, generation: dict[str, Any] | None, vocab: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids: generation_config.json's if it has any, else config.json's.

    The field holds an int or a list of ints.
    """
    data, source = fields.data, fields.source
    if generation is not None and generation.get("eos_token_id") is not None:
        data, source = generation, str(Path(fields.source).with_name("generation_config.json"))
    found = data.get("eos_token_id")
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadCheckpoint(
                f"{source}: eos_token_id: found {shown(token)}, "
                f"expected an id from 0 to {vocab - 1} (vocab_size {vocab})"
            )
    return tuple(dict.fromkeys(ids))
