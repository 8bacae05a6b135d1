"""`weights=`: float weights are rounded as they stream, the plan counts what is then held, and a
model in few bits answers nearly as the whole one.
"""

import weakref
from dataclasses import replace

import pytest
import torch

from engine import LLM, Exact, OmniKV
from engine.base.errors import SavedFileError, SettingError
from engine.model.low_bits import OnTheWay
from engine.model.tensors import random_stream
from kernels.native.library import native
from kernels.quant.linear import QuantisedLinear
from kernels.quant.matrix import Quantised
from tests.builders import POCKET, tiny_config
from tests.no_compiler import no_compiler

SETTINGS = dict(device="cpu", max_context=256)


WIDE = dict(hidden=256, heads=4, head_dim=64, intermediate_size=256)


def model(weights, **changes):
    config = tiny_config(**dict(layers=2, hidden=64, head_dim=16) | changes)
    stream = lambda *args: random_stream(*args, seed=5)  # noqa: E731
    return LLM.from_stream(config, stream, weights=weights, **SETTINGS)


def logits(llm):
    with llm.session() as session:
        first = session.prefill(list(range(3, 90))).clone()
        return torch.stack([first.flatten(), session.decode(7).flatten().clone()])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("word", ["int8", "int4", "int4:64", "int4:128"])
def test_the_plan_counts_what_is_held_and_the_answer_stays(word, tied):
    whole, rounded = (
        model(w, tie_word_embeddings=tied, **(WIDE if ":" in word else {})) for w in ("auto", word)
    )
    assert rounded.model.nbytes == rounded.plan().bytes_of("weights")
    layer = rounded.model.layers[1]
    assert isinstance(layer.down, QuantisedLinear) and layer.down.kind == word[:4]
    assert rounded.model.lm_head.kind == "int8"  # int4 leaves the last product its bits
    assert rounded.model.embed.dtype == whole.model.embed.dtype
    expected, found = logits(whole), logits(rounded)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < (0.04 if word == "int8" else 0.4)
    note = next(note for name, _, note in rounded.plan().items if name == "weights")
    assert word[:4] in note and "products" in note
    if word[:4] == "int4":
        assert f"groups of {word[5:] or 32}," in note


@pytest.mark.parametrize("word, held", [("int8", 2), ("int4", 0)])
def test_without_a_compiler_torchs_products_run(word, held):
    """int8 then keeps a few weights of a row beside its one scale."""
    expected = logits(model("auto"))
    with no_compiler():
        alone = model(word)
        assert alone.model.nbytes == alone.plan().bytes_of("weights")
        layer = alone.model.layers[1].qkv
        assert layer.form != "native" and layer.group == (64 if held else 32)
        assert (layer.sparse.places.shape[1] if held else 0) == held
        found = logits(alone)
    assert float((found - expected).norm() / expected.norm()) < (0.04 if held else 0.4)
    if native() is not None:
        whole = model(word).model.layers[1].qkv
        assert whole.form == "native" and whole.group == 32 and whole.sparse is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("word", ["auto", "int8", "int4"])
def test_exact_mode_counts_the_bytes_that_a_step_reads(word, tied):
    """Of the weights as they are held, the table of embeddings only where it is the last product
    too.
    """
    llm = model(word, tie_word_embeddings=tied)
    table = 0 if tied and word == "auto" else llm.model.embed.nbytes
    method = Exact(OmniKV(filter_layers=(0,), wait_layers=0), chooser="drafter")
    with llm.session(method) as session:
        costs = session.runner._costs
    assert costs.weights == llm.model.nbytes - table
    planned = method.outlook(
        method.plan(llm.config), llm.config, 4, "cpu", 65536, held=llm.planner.few_bits
    )
    assert f"{costs.predicted(65536, 2304, 7)[1]:.2f} times" in planned


def test_biases_are_added_and_a_forced_backend_dequantises():
    changes = dict(attention_bias=True, mlp_bias=True)
    expected, found = logits(model("auto", **changes)), logits(model("int8", **changes))
    assert float((found - expected).norm() / expected.norm()) < 0.02
    config = tiny_config(layers=2, hidden=64, head_dim=16)
    llm = LLM.from_stream(config, random_stream, weights="int8", backend="reference", **SETTINGS)
    assert llm.model.layers[0].qkv.form == "blocks"
    assert llm.model.nbytes == llm.plan().bytes_of("weights")


def test_only_one_tensor_lives_beside_what_is_rounded():
    config = tiny_config(layers=2, hidden=64, head_dim=16, tie_word_embeddings=True)
    matrices = []

    def watched():
        for name, tensor in random_stream(config, torch.float32, "cpu"):
            assert sum(one() is not None for one in matrices) <= 1
            if tensor.dim() == 2 and name != "embed":
                matrices.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    found = list(OnTheWay("int8", 0).stream(watched(), tied=True))
    kinds = {name: isinstance(tensor, Quantised) for name, tensor in found}
    assert len(matrices) == 8 and len(kinds) == len(found)
    assert kinds["0.down"] and kinds["lm_head"] and not kinds["embed"] and not kinds["norm"]


@pytest.mark.parametrize("word", ["int3", "INT8", "fp8", 8, None])
def test_an_unknown_word_is_refused_before_anything_is_read(word):
    with pytest.raises(SettingError, match="weights: found .* expected one of auto, int8, int4"):
        LLM(str(POCKET), weights=word, load=False)


def test_longer_groups_take_fewer_bytes_and_lose_more():
    words = ("int4", "int4:64", "int4:128")
    expected, held, errors = logits(model("auto", **WIDE)), [], []
    for word in words:
        llm = model(word, **WIDE)
        held.append(llm.model.layers[0].down.nbytes)
        errors.append(float((logits(llm) - expected).norm()))
    assert held[0] > held[1] > held[2] and errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("word, instead", [("int4:64", "int4"), ("int4:128", "int4")])
def test_rows_that_longer_groups_do_not_divide_name_the_shorter(word, instead):
    config = tiny_config(layers=1, hidden=96, head_dim=16, intermediate_size=160)
    with pytest.raises(SettingError, match=f"groups of {word[5:]}; use weights='{instead}'"):
        LLM.from_stream(config, random_stream, weights=word, **SETTINGS)


def test_rows_that_no_group_divides_are_refused():
    with pytest.raises(SettingError, match="rows of 48 are no multiple of its groups of 32"):
        LLM.from_stream(
            tiny_config(layers=1, hidden=48, head_dim=16), random_stream, weights="int4", **SETTINGS
        )


def test_the_shipped_model_speaks_in_eight_bits(capsys):
    from engine.chat import main

    arguments = ["--weights", "int8", "-p", "hello", "-n", "4", "--device", "cpu", "--ctx", "256"]
    assert main(arguments) == 0 and capsys.readouterr().out.strip()


def test_a_session_in_few_bits_is_not_continued_on_the_whole_weights(tmp_path):
    with model("int8").session() as session:
        session.prefill([3, 4, 5])
        session.save(tmp_path / "saved")
    with pytest.raises(SavedFileError, match="int8"):
        model("auto").restore(tmp_path / "saved")


def test_saved_rows_are_those_of_the_products_that_made_them(tmp_path):
    """Products of another form round differently; files of before named the word alone."""
    here = model("int8")
    form = here.load().model.layers[1].qkv.form
    assert model("auto").load().held == "auto" and here.load().held == f"int8, {form}"
    with here.session() as session:
        session.prefill(list(range(3, 90)))
        session.save(tmp_path / "now.session")
    elsewhere = model("int8")
    elsewhere.loaded = replace(elsewhere.load(), held="int8, blocks")
    with pytest.raises(SavedFileError, match="another model: held: found int8"):
        elsewhere.restore(tmp_path / "now.session")
    old = model("int8")
    old.loaded = replace(old.load(), held="int8")
    with old.session() as session:
        session.prefill(list(range(3, 90)))
        session.save(tmp_path / "old.session")
    session, _ = here.restore(tmp_path / "old.session")
    assert len(session.ids) == 87
    session.close()
