"""Checkpoints that come quantised, over several devices: one device's bits, each part the matrices
of its own layers, and the bytes that its plan says. Their forms are listed by layer, and a layer
that looked up another's would be held as that one is.
"""

import pytest
import torch

from engine import LLM, Full
from engine.base.errors import SettingError
from engine.load.split.refused import require_roundable
from engine.model.low_bits import AsStored, OnTheWay
from kernels.quant.linear import QuantisedLinear
from tests.builders import tiny_weights
from tests.engine.split.test_plan import held
from tests.tools.gguf_files import TOKENS, llama_config, write_llama
from tests.weights.quantised_files import FORMATS, write

IDS = list(range(5, 60))
GIVEN = dict(max_context=128, method=Full())
DEVICES = ("cpu",) * 3


def logits(llm):
    """Logits of a prompt and of steps."""
    with llm.session() as session:
        found = [session.prefill(IDS), session.decode(7), session.decode(8)]
        return torch.stack(found)


def compared(path, **settings):
    """Require the bits of one device over three; the LLM over three."""
    one = LLM(str(path), device="cpu", **GIVEN, **settings)
    several = LLM(str(path), devices=DEVICES, **GIVEN, **settings)
    assert torch.equal(logits(several), logits(one))
    return several


def counted(llm):
    """Require of each part the bytes of its plan, within 2%, and no table that another has."""
    model, tied = llm.model, llm.config.tied_embeddings
    for number, (plan, part) in enumerate(zip(llm.plan().by_device, model.parts, strict=True)):
        tables = [model.embed] if number == 0 else []
        tables += [model.norm, model.lm_head] if number == len(model.parts) - 1 else []
        items = {name: size for name, size, _ in plan.items}
        assert held(part.layers, tables) == pytest.approx(items["weights"], rel=0.02), number
        assert part.nbytes == pytest.approx(items["weights"], rel=0.02)
    assert not tied or model.embed is not model.lm_head


@pytest.mark.parametrize(
    "name, word",
    [
        ("gptq, act-order", "auto"),
        ("gptq, act-order", "int8"),
        ("awq", "auto"),
        ("nf4, nested", "auto"),
        ("nf4, nested", "float"),
    ],
)
def test_a_format_gives_one_device_s_bits(tmp_path, name, word):
    assert name in FORMATS
    write(tmp_path / "model", name, layers=4)
    for dtype in ("float32", "bfloat16"):
        llm = compared(tmp_path / "model", weights=word, dtype=dtype)
        assert llm.planner.cut.starts[0] == 0 and len(llm.planner.cut.starts) == 4
        counted(llm)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_gguf_file_gives_one_device_s_bits(tmp_path, kind, tied):
    """Of the third layer and the head other kinds than of the rest."""
    pytest.importorskip("gguf", reason="the package gguf is in requirements-dev.txt")
    config = llama_config(layers=5, intermediate_size=512)
    kinds = {"blk.2.ffn_down.weight": "Q8_0", "blk.2.attn_v.weight": "F32"}
    without = ("output.weight",) if tied else ()
    path = tmp_path / "model.gguf"
    write_llama(path, config, tiny_weights(config), kind, kinds=kinds, without=without)
    llm = compared(path)
    assert llm.config.tied_embeddings == tied and len(TOKENS) == llm.config.vocab_size
    counted(llm)
    few = [isinstance(layer.down, QuantisedLinear) for layer in llm.model.layers]
    assert few == [True] * 5
    for word in ("float", "int8"):
        compared(path, weights=word)


def test_what_one_kind_of_device_keeps_is_not_another_s():
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    stored = AsStored({}, "auto", torch.float32, False, False, "GPTQ")
    for devices in ((cpu, cpu), (gpu, gpu)):
        require_roundable(stored, devices)
    require_roundable(OnTheWay("int8", 0), (cpu, gpu))
    with pytest.raises(SettingError, match="found cpu, cuda:0 for a quantised checkpoint"):
        require_roundable(stored, (cpu, gpu))
