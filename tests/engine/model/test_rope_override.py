"""`rope=` means what transformers means by the same config.json edited by hand; a context beyond
the model's own is refused with the way out.
"""

import json
import math
import warnings

import pytest
import torch

from engine import LLM, Full
from engine.base.errors import EngineError, SettingError
from engine.chat import main
from engine.methods.evict.lm_infinite import LMInfinite
from engine.methods.evict.snapkv import SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.evict.window import Window
from engine.model.config.config import ModelConfig
from engine.model.config.families import BY_ARCHITECTURE
from engine.model.config.rope_config import Rope
from engine.model.config.rope_override import overridden
from tests.tiny_model import CONFIG, sound
from tools.families.models import PHI_ROPE, ids_of, make

# override: (base model, rope_parameters edited by hand)
EDITS = {
    "yarn:4": ("mistral", dict(rope_type="yarn", factor=4.0)),
    "yarn:4:512,theta:1e6": (
        "qwen3",
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, rope_theta=1e6),
    ),
    "linear:2": ("smollm3", dict(rope_type="linear", factor=2.0)),
    "dynamic:4": ("qwen2", dict(rope_type="dynamic", factor=4.0)),
    "theta:1e6": ("granite", dict(rope_type="default", rope_theta=1e6)),
    "default": ("qwen2-yarn", dict(rope_type="default", rope_theta=1e6)),
    # the long factors at every length; the file's rope takes the short ones up to 512 tokens
    "longrope": (
        "phi3-longrope",
        {
            **PHI_ROPE,
            "short_factor": PHI_ROPE["long_factor"],
            "original_max_position_embeddings": 512,
        },
    ),
}


@pytest.mark.parametrize("text", EDITS)
def test_as_transformers_with_the_config_edited(tmp_path, text):
    """Dynamic rope is read beyond the model's own positions."""
    import transformers

    name, edit = EDITS[text]
    small = {"max_position_embeddings": 256} if text.startswith("dynamic") else {}
    theirs, n = make(tmp_path, name, **small), 300
    base = json.loads((tmp_path / "config.json").read_text())
    edited = {**base, "rope_parameters": {**base["rope_parameters"], **edit}}
    for key in set(edited["rope_parameters"]) - set(edit) - {"rope_theta"}:
        del edited["rope_parameters"][key]
    other = transformers.AutoConfig.for_model(edited.pop("model_type"), **edited)
    other._attn_implementation = "eager"
    reference = type(theirs)(other).float().eval()
    reference.load_state_dict(theirs.state_dict())
    ids = ids_of(n)
    with torch.inference_mode():
        wanted = reference(torch.tensor([ids])).logits[0, -1]
        plain = theirs(torch.tensor([ids])).logits[0, -1]
    llm = LLM(tmp_path, device="cpu", rope=text, method=Full(), chunk=64, max_context=n)
    with llm.session() as session:
        found = session.prefill(ids)
    assert (found - wanted).abs().max() <= 2e-3 < (wanted - plain).abs().max()


@pytest.mark.parametrize(
    ("changes", "text", "expected"),
    [
        ({}, "yarn:2", Rope("yarn", 1e4, 2.0, 256, attention_factor=0.1 * math.log(2) + 1)),
        ({}, "dynamic:8", Rope("dynamic", 1e4, 8.0, 256)),
        ({"rope_scaling": {"type": "linear", "factor": 9.0}}, "default", Rope("default", 1e4)),
        ({"rope_theta": 5e5}, "linear:3", Rope("linear", 5e5, 3.0)),
        ({"rope_parameters": {"rope_theta": 7e5}}, "linear:3", Rope("linear", 7e5, 3.0)),
        ({}, "theta:2e6, linear:2", Rope("linear", 2e6, 2.0)),
    ],
)
def test_the_words(changes, text, expected):
    assert ModelConfig.from_dict({**CONFIG, **changes}, rope=text).rope == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found ''"),
        ("ntk:4", "found 'ntk:4', expected yarn:4"),
        ("yarn", "found 'yarn', expected a form such as"),
        ("yarn:4:2:1", "expected a form"),
        ("default:1", "expected a form"),
        ("yarn:four", "expected a number after the colon"),
        ("yarn:0.5", "factor: found 0.5"),
        ("linear:nan", "factor: found nan"),
        ("theta:0", "rope_theta: found 0"),
        ("yarn:2:0", "original_max_position_embeddings: found 0"),
        ("yarn:2:inf", "expected whole tokens"),
        ("longrope", "found longrope, expected a model that has its factors"),
    ],
)
def test_an_override_that_makes_no_sense_is_one_line(tmp_path, text, words):
    sound(tmp_path / "m")
    with pytest.raises(EngineError) as caught:
        LLM(tmp_path / "m", device="cpu", rope=text)
    line = str(caught.value)
    assert words in line and "\n" not in line, line
    with pytest.raises(SettingError, match="rope: found 4"):
        LLM(tmp_path / "m", device="cpu", rope=4)


def test_longrope_is_pinned_to_its_long_frequencies():
    small = dict(architectures=["Phi3ForCausalLM"], model_type="phi3", head_dim=16)
    scaling = {**PHI_ROPE, "original_max_position_embeddings": 64}
    data = {**CONFIG, **small, "rope_parameters": scaling}
    pinned, free = (ModelConfig.from_dict(data, rope=text) for text in ("longrope", None))
    assert pinned.rope.long and pinned.at_context(10).rope.long
    assert not free.at_context(64).rope.long and free.at_context(65).rope.long
    with pytest.raises(SettingError, match="Phi-3 files mean longrope by yarn"):
        ModelConfig.from_dict(data, rope="yarn:4")


def test_an_override_leaves_the_file_and_the_sliding_layers_alone():
    family = BY_ARCHITECTURE["Gemma3ForCausalLM"]
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    data = {"rope_parameters": nested}
    found = overridden(data, "yarn:8", family)["rope_parameters"]
    assert found["sliding_attention"] is nested["sliding_attention"]
    assert found["full_attention"] == {"rope_theta": 1e6, "rope_type": "yarn", "factor": 8.0}
    assert nested["full_attention"] == {"rope_theta": 1e6}


def test_a_context_beyond_the_model_is_refused_with_the_way_out(tmp_path, capsys):
    folder = tmp_path / "m"
    sound(folder)
    with pytest.raises(SettingError, match=r"at most 256 .*rope yarn:4 .*--rope.*--beyond"):
        LLM(folder, device="cpu", max_context=1000)
    assert LLM(folder, device="cpu", max_context=1000, rope="yarn:4").max_context == 1000
    with pytest.warns(UserWarning, match="1000 is beyond the 256 positions"):
        assert LLM(folder, device="cpu", max_context=1000, beyond=True).max_context == 1000
    with pytest.warns(UserWarning, match="3000 is beyond the 512 positions"):
        llm = LLM(folder, device="cpu", max_context=3000, rope="dynamic:2")
    assert len(llm.session().prefill([3] * 600)) == 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folder, device="cpu", max_context=512, rope="dynamic:2")
    given = ["--model", str(folder), "-p", "a", "--device", "cpu", "-n", "2", "--ctx", "600"]
    assert main(given) == 1 or main(given) == 2
    assert "--ctx: found 600" in capsys.readouterr().err
    assert main([*given, "--rope", "yarn:4"]) == 0


def test_no_warning_where_a_method_keeps_distances_within_the_rope(tmp_path):
    """StreamingLLM and its kin read prompts and answers within sinks and window, however far the
    text goes; a window that is longer than the rope, or full attention to a prompt, does not.
    """
    folder = tmp_path / "m"
    sound(folder)
    given = dict(device="cpu", max_context=1000, beyond=True, load=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in (StreamingLLM(tokens=64), LMInfinite(tokens=64), Window(tokens=256)):
            assert LLM(folder, method=method, **given).max_context == 1000
    for method in (StreamingLLM(official=True), Window(tokens=400), Window(share=0.5), SnapKV()):
        with pytest.warns(UserWarning, match="1000 is beyond the 256 positions"):
            LLM(folder, method=method, **given)


def test_the_largest_context_is_not_below_one_beyond_the_model_that_fits(tmp_path):
    folder = tmp_path / "m"
    sound(folder)
    with pytest.warns(UserWarning, match="answers get worse"):
        plan = LLM(folder, device="cpu", max_context=1000, beyond=True, load=False).plan()
    assert plan.fits and plan.largest_context == 1000
    assert "largest context that fits here: 1000 tokens" in str(plan)
    assert LLM(folder, device="cpu", load=False).plan().largest_context == 256
