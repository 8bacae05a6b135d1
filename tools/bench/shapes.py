"""Model shapes that benchmarks make from random weights, without a download; and the spellings of
sizes.
"""

from engine.model.config.config import ModelConfig
from weights.aliases import ALIASES
from weights.shapes import config_of

# room for a bank of a million tokens and the steps after it, whatever the released model was
# trained for
POSITIONS = 2**21
_LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": POSITIONS}
_SHAPES = {
    # name: ((layers, hidden, intermediate, heads, kv heads, head dim), filter layers, other fields
    # of config.json)
    "pocket": ((8, 256, 512, 4, 2, 64), (0, 2), {"vocab_size": 5120, "tie_word_embeddings": True}),
    "160m": ((12, 768, 3072, 12, 4, 64), (2, 5, 8), {"vocab_size": 32000}),
    "deep": ((32, 512, 1536, 8, 4, 64), (2, 8, 18), {"vocab_size": 32000}),
    "llama-3.2-1b": (
        (16, 2048, 8192, 32, 8, 64),
        (2, 6, 10),
        {**_LLAMA3, "tie_word_embeddings": True},
    ),
    # a quarter of everything in it, for machines on which a whole one takes too long
    "quarter-1b": (
        (4, 2048, 8192, 32, 8, 64),
        (1,),
        {**_LLAMA3, "vocab_size": 32064, "tie_word_embeddings": True},
    ),
    "llama-3-8b": ((32, 4096, 14336, 32, 8, 128), (2, 8, 18), _LLAMA3),
    "yi-9b": ((48, 4096, 11008, 32, 4, 128), (6, 11, 30), {"vocab_size": 64000}),
    "llama-3.1-70b": ((80, 8192, 28672, 64, 8, 128), (4, 19, 41), _LLAMA3),
    "tiny": ((6, 64, 96, 4, 2, 16), (1, 3), {"vocab_size": 256}),
    # heads that a packed bank takes, for rehearsals
    "small": ((6, 128, 192, 4, 2, 32), (1, 3), {"vocab_size": 256}),
}
SHAPES = tuple(_SHAPES)


def shape_config(name):
    """ModelConfig of a shape."""
    (layers, hidden, intermediate, heads, kv_heads, head_dim), _, more = _SHAPES[name]
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }
    return ModelConfig.from_dict(data, source=f"shape {name}")


def mixture_config(alias, layers=4, small=False):
    """ModelConfig of a few layers of a named mixture of experts, its weights as floats. small: for
    rehearsals, with the same number of experts that a token takes.
    """
    data = {**config_of(ALIASES[alias]), "num_hidden_layers": layers, "vocab_size": 8192}
    data.pop("quantization_config", None)
    if small:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        experts = {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 64}
        known = {name: value for name, value in experts.items() if name in data}
        data |= {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 256, **heads, **known}
    return ModelConfig.from_dict(data, source=f"{alias}, {layers} layers")


def shape_filters(name):
    """Filter layers that benchmarks of a shape use: published where there are any, else of the same
    spread.
    """
    return _SHAPES[name][1]


def parse_size(text):
    """ "4K" -> 4096, "1M" -> 1048576, "131072" -> 131072; ValueError for anything else."""
    text = text.strip().upper()
    scale = {"K": 1024, "M": 1024**2}.get(text[-1:], 1)
    number = text[:-1] if scale > 1 else text
    if not number.isdecimal() or int(number) == 0:
        raise ValueError(f"found {text!r}, expected a number of tokens such as 4096, 32K or 1M")
    return int(number) * scale


def short_size(n):
    """131072 -> "128K" where exact, else the number itself."""
    for scale, letter in ((1024**2, "M"), (1024, "K")):
        if n >= scale and n % scale == 0:
            return f"{n // scale}{letter}"
    return str(n)
