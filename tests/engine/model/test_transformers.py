"""Full attention gives transformers' logits and greedy tokens, for every architecture variant,
prompt length and chunk size.

Stops: a wrong rope kind, a bias forgotten, heads grouped in the wrong order, a chunk boundary off
by one.
"""

import json

import pytest
import torch

from engine import LLM, Full, SamplingParams
from tools.families.models import word_tokenizer

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
VARIANTS = {
    "gqa": {},
    "mha": dict(num_key_value_heads=4),
    "mqa": dict(num_key_value_heads=1),
    "head_dim": dict(head_dim=20),
    "wide_heads": dict(head_dim=32, num_attention_heads=3, num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "attention_bias": dict(attention_bias=True),
    "mlp_bias": dict(mlp_bias=True, attention_bias=True),
    "eps": dict(rms_norm_eps=1e-2),
    "theta": dict(rope_theta=5e6),
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "dynamic": dict(
        rope_scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=512
    ),
    "llama3": dict(rope_scaling=LLAMA3, rope_theta=5e5),
    "yarn": dict(rope_scaling=YARN),
    "yi": dict(architecture="YiForCausalLM", rope_theta=5e6),
    "mistral": dict(architecture="MistralForCausalLM"),
}
LENGTHS = (1, 2, 200, 1500)
CHUNKS = (1, 7, 64, 512, 4096)


def make_pair(folder, name, newer_form):
    """(folder with a random checkpoint, transformers' model of it). Query and key weights are
    scaled so that attention is peaky.
    """
    variant = dict(VARIANTS[name])
    architecture = variant.pop("architecture", "LlamaForCausalLM")
    theta, scaling = variant.pop("rope_theta", 10000.0), variant.pop("rope_scaling", {})
    rope = {"rope_type": "default", **scaling, "rope_theta": theta}
    torch.manual_seed(sum(map(ord, name)))
    mistral = architecture.startswith("Mistral")
    maker = transformers.MistralConfig if mistral else transformers.LlamaConfig
    theirs_config = maker(
        **{**SMALL, **variant},
        rope_parameters=dict(rope),
        bos_token_id=1,
        eos_token_id=2,
        **({"sliding_window": None} if mistral else {}),
    )
    theirs = (
        transformers.AutoModelForCausalLM.from_config(theirs_config, attn_implementation="eager")
        .float()
        .eval()
    )
    with torch.no_grad():
        for key, weight in theirs.named_parameters():
            if "norm" in key:
                weight.normal_(1.0, 0.2)
            elif key.endswith("bias"):
                weight.normal_(0.0, 0.3)
            else:
                weight.normal_(
                    0.0,
                    weight.shape[-1] ** -0.5 * (3.0 if "q_proj" in key or "k_proj" in key else 1.0),
                )
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # greedy tokens are compared to the end
    found = json.loads((folder / "config.json").read_text())
    found["architectures"] = [architecture]
    if architecture.startswith("Yi"):
        found["model_type"] = "Yi"
    if not newer_form:
        del found["rope_parameters"]
        found |= {"rope_theta": theta, "rope_scaling": dict(scaling) or None}
    (folder / "config.json").write_text(json.dumps(found))
    word_tokenizer(folder, SMALL["vocab_size"])
    return theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens(tmp_path, name):
    theirs = make_pair(tmp_path, name, newer_form=len(name) % 2 == 0)
    stretched = VARIANTS[name].get("max_position_embeddings", 2048) < 2048
    # 1000 of 512 * 2: the frequencies are those of the whole prompt
    lengths = (1, 2, 200, 1000) if stretched else LENGTHS
    ids = torch.randint(
        0, SMALL["vocab_size"], (max(lengths),), generator=torch.Generator().manual_seed(7)
    ).tolist()
    with torch.inference_mode():
        wanted = {n: theirs(torch.tensor([ids[:n]])).logits[0, -1] for n in lengths}
    for chunk in CHUNKS:
        llm = LLM(
            tmp_path,
            device="cpu",
            chunk=chunk,
            method=Full(),
            max_context=1024 if stretched else None,
        )
        for n in lengths:
            with llm.session() as session:
                found = session.prefill(ids[:n])
                assert found.dtype == torch.float32
                assert (found - wanted[n]).abs().max() <= 2e-3, (name, chunk, n)
                assert found.argmax() == wanted[n].argmax()
    prompt = ids[:200]
    reference = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, use_cache=True
    )
    answer = llm.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    assert answer.token_ids == reference[0, 200:].tolist()


def test_dynamic_rope_follows_transformers_beyond_its_original_length(tmp_path):
    """Decode steps past the original maximum use the growing length, as transformers' own loop
    does.
    """
    theirs = make_pair(tmp_path, "dynamic", newer_form=True)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["max_position_embeddings"] == 512
    ids = torch.randint(
        0, SMALL["vocab_size"], (505,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    reference = theirs.generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False)[
        0, 505:
    ].tolist()
    answer = LLM(tmp_path, device="cpu", max_context=600).generate(
        ids, SamplingParams(max_tokens=7, ignore_eos=True)
    )
    assert answer.token_ids == reference
