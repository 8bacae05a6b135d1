"""The shipped model's folder: transformers gives the same tokens; template, fingerprint, skills.

Stops: weights, calibration and tokenizer that do not belong together.
"""

import json

import pytest
import torch

from engine import LLM, Full, SamplingParams
from tests.builders import POCKET
from tools.calibrate.pod_groups import read_blocks, saving
from tools.tasks import make_sample
from tools.tasks.talk import REFUSAL
from weights.fingerprint import fingerprint


def test_the_folder_is_complete_and_small():
    assert (POCKET / "model.safetensors").stat().st_size <= 20_000_000
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "omnikv.json",
        "MODEL_CARD.md",
        "welcome.txt",
    ):
        assert (POCKET / name).is_file(), name
    config = json.loads((POCKET / "config.json").read_text())
    assert (
        config["num_hidden_layers"] >= 8
        and config["num_key_value_heads"] < config["num_attention_heads"]
    )


def test_calibration_belongs_to_these_weights():
    data = json.loads((POCKET / "omnikv.json").read_text())
    assert data["format"] == 1 and data["fingerprint"] == fingerprint(POCKET)


def test_blocks_belong_to_these_weights_and_save_what_the_card_says():
    assert saving(read_blocks(POCKET), 8) >= 0.35


@pytest.fixture(scope="module")
def llm():
    return LLM(str(POCKET), device="cpu", dtype="float32", method=Full(), max_context=4096)


def test_template_puts_the_document_first(llm):
    render = llm.tokenizer.render
    want = "<|bos|>Alice lives in Rome.\n\nBen too.\n<|user|>Where does Alice live?<|assistant|>"
    assert (
        render(
            [
                {
                    "role": "user",
                    "content": "Alice lives in Rome.\n\nBen too.\n\nWhere does Alice live?",
                }
            ]
        )
        == want
    )
    system = [
        {"role": "system", "content": "Alice lives in Rome.\n\nBen too."},
        {"role": "user", "content": "Where does Alice live?"},
    ]
    assert render(system) == want
    turns = [
        *system,
        {"role": "assistant", "content": "Alice lives in Rome."},
        {"role": "user", "content": "Thanks"},
    ]
    assert render(turns) == want + "Alice lives in Rome.<|end|><|user|>Thanks<|assistant|>"


def test_same_greedy_tokens_as_transformers(llm):
    transformers = pytest.importorskip("transformers")

    ends = llm.end_token_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    for task in ("kv", "facts", "two_stage"):
        sample = make_sample(task, 600, lambda t: len(llm.tokenizer.encode(t, special=False)), 3)
        text = llm.tokenizer.render(
            [{"role": "user", "content": sample.document + "\n\n" + sample.questions[0]}]
        )
        ids = llm.tokenizer.encode(text, special=False)
        ours = llm.generate(ids, SamplingParams(max_tokens=40)).token_ids
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[
            0, len(ids) :
        ].tolist()
        assert [t for t in ours if t not in ends] == [t for t in out if t not in (*ends, 0)]


def test_answers_and_refuses(llm):

    def ask(text):
        prompt = llm.tokenizer.render([{"role": "user", "content": text}])
        ids = llm.tokenizer.encode(prompt, special=False)
        return llm.generate(ids, SamplingParams(max_tokens=40)).text.strip()

    right = 0
    for seed in range(4):
        sample = make_sample(
            "passkey", 800, lambda t: len(llm.tokenizer.encode(t, special=False)), seed
        )
        right += ask(sample.document + "\n\n" + sample.questions[0]) == sample.answers[0]
    assert right >= 3
    assert ask("Alice lives in Rome.\n\nWrite a poem about rivers.") == REFUSAL
