"""gpt-oss and Gemma 2: experts in MXFP4 are what transformers makes of them; the sinks and the cap
act in what is attended to and in what is chosen.

Stops: nibbles or scales read in the wrong order, gate and up mixed, an expert's bias forgotten; a
cap or sinks that the random models of test_families.py would not notice.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, Full, OmniKV
from engine.base.errors import SettingError
from engine.methods.evict.shared.settings import Evicting
from engine.methods.registry import methods
from engine.methods.requirements import require_windows
from engine.model.config.config import ModelConfig
from engine.plan.layers import layer_plan
from kernels.quant.rounding import few_mantissa_bits_to_int8
from tools.families.models import ids_of, make
from weights.mxfp4 import dequantise

pytest.importorskip("transformers")
MODEL = "model.safetensors"
FULL = Full()
KNOW = {"full", "quest", "tidaldecode", "brutal_offload", "window_recompute"}  # and OmniKV's kin
KNOW |= {
    f"omnikv{kin}"
    for kin in ("", "_one", "_newest", "_random", "_per_layer", "_unpacked", "_heads", "_top_p")
}
KNOW |= {"kascade", "less_is_more", "delta", "rocketkv", "shadowkv"}
KNOW |= {"hshare", "kascade", "kascade_tiles", "less_is_more", "delta"}
KNOW |= {"oracle_topk", "oracle_topp", "random_topk", "quoka"}
KNOW |= {name for name, kind in methods().items() if issubclass(kind, Evicting)}
KNOW -= {"expected_attention"}
OMNI = OmniKV(filter_layers=(1,), tokens=512, tail=64, dense_below=0)


def logits(folder, ids, method=FULL, **settings):
    """Float32 [4, vocab] after all but three of the ids and after each of those."""
    llm = LLM(folder, device="cpu", method=method, **{"chunk": 64, "max_context": 512, **settings})
    with llm.session() as session:
        found = [session.prefill(ids[:-3]), *(session.decode(token) for token in ids[-3:])]
        assert session.stats.sparse_steps == (3 if method is OMNI else 0)
    return torch.stack(found)


def packed(folder, theirs):
    """Store random MXFP4 experts in a folder, and give transformers' model their weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    weights, held = load_file(folder / MODEL), dict(theirs.named_parameters())
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = weights.pop(name).shape
        shape = count, rows, columns // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            held[name].copy_(made)
    save_file(weights, folder / MODEL, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path):
    theirs = make(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=96)
    before = logits(tmp_path, ids_of(203))
    packed(tmp_path, theirs)
    ids = ids_of(203)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0, 199:]
    for method, weights in ((FULL, "auto"), (OMNI, "auto"), (FULL, "float")):
        found = logits(tmp_path, ids, method, weights=weights)
        assert (found - wanted).abs().max() <= 2e-3
    assert (before - wanted).abs().max() > 0.1
    llm = LLM(tmp_path, device="cpu", max_context=64, weights="float")
    with llm.session() as session:
        assert session.runner.model.nbytes == 4 * llm.config.parameters
    # rounded again: what is held in few bits multiplies nearly as what was stored
    near = LLM(tmp_path, device="cpu", max_context=64, weights="int8")
    near.load()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    one, other = (made.model.layers[1].mixture.gate_up[2](x) for made in (llm, near))
    assert 0 < (one - other).norm() < 0.02 * one.norm()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_experts_in_mxfp4_are_held_in_a_byte_a_weight_without_rounding(tmp_path, backend):
    """As int8 with a scale for 32 columns: the very values, in a quarter of float32's bytes; the
    plan counts what is held.
    """
    packed(tmp_path, make(tmp_path, "gpt-oss", hidden_size=64, intermediate_size=96))
    given = dict(device="cpu", max_context=64, backend=backend)
    stored, wide = (LLM(tmp_path, weights=w, **given) for w in ("auto", "float"))
    stored.load(), wide.load()
    assert stored.model.nbytes == stored.plan().bytes_of("weights") < 0.5 * wide.model.nbytes
    assert "int8 with the values of their MXFP4" in str(stored.plan())
    for mine, theirs in zip(stored.model.layers, wide.model.layers, strict=True):
        for part in ("gate_up", "down"):
            pairs = zip(getattr(mine.mixture, part), getattr(theirs.mixture, part), strict=True)
            for one, other in pairs:
                x = torch.eye(other.shape[1])
                torch.testing.assert_close(one(x), other(x), rtol=1e-6, atol=0)


def test_every_mxfp4_value_and_scale_is_an_int8_times_a_power_of_two():
    """All 16 values under every scale of bfloat16's normal numbers, in groups with any largest
    value.
    """
    codes = torch.randint(0, 16, (4000, 32), generator=torch.Generator().manual_seed(3))
    codes[:16, 1:] = 0
    codes[:16, 0] = torch.arange(16)
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(-1, 1, 16)
    scales = torch.arange(4000).remainder(245).add(7).to(torch.uint8).view(-1, 1)
    wide = torch.empty(4000, 32, dtype=torch.bfloat16)
    dequantise(blocks, scales, wide)
    held = few_mantissa_bits_to_int8(wide, 32)
    assert torch.equal(held.dense(torch.bfloat16), wide) and held.scales.dtype == torch.bfloat16
    assert int(held.values.abs().max()) <= 96


def without_cap(folder):
    config = json.loads((folder / "config.json").read_text())
    config["attn_logit_softcapping"] = None
    (folder / "config.json").write_text(json.dumps(config))


def without_sinks(folder):
    weights = load_file(folder / MODEL)
    weights = {k: v - 100.0 * k.endswith("sinks") for k, v in weights.items()}
    save_file(weights, folder / MODEL, metadata={"format": "pt"})


@pytest.mark.parametrize("name, forget", [("gpt-oss", without_sinks), ("gemma2-cap", without_cap)])
def test_a_cap_and_sinks_act(tmp_path, name, forget):
    make(tmp_path, name)
    ids = ids_of(150)
    found = logits(tmp_path, ids)
    forget(tmp_path)
    assert (found - logits(tmp_path, ids)).abs().max() > 0.05


def test_methods_that_know_neither_are_refused():
    config = ModelConfig.from_dict(
        dict(
            architectures=["Gemma2ForCausalLM"],
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,  # no longer than the window: no layer slides
            rms_norm_eps=1e-5,
        )
    )
    assert config.block.score_cap == 50.0 and not config.windows
    for name, kind in methods().items():
        if kind.__module__.startswith("engine.") and name not in KNOW:
            with pytest.raises(SettingError, match=f"{name}: does not know the cap on attention"):
                require_windows(kind(), layer_plan(2), config)
    for more in (dict(official=True), dict(dense_layers="block_sparse")):
        with pytest.raises(SettingError, match="knows neither a cap on attention scores nor"):
            OmniKV(filter_layers=(0,), **more).plan(config)
