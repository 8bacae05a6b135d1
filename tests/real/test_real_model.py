"""A real checkpoint runs as its makers meant it.

Stops: other tokens than transformers from the same folder, a tokenizer that loses text, a chat that
does not answer.
"""

import json

import pytest

from engine.chat.cli import main
from engine.llm import LLM
from engine.methods.full import Full
from engine.sampling.params import SamplingParams
from tests.builders import ROOT
from tools.real_model.check import NEW_TOKENS, PROMPTS, Peer, ours

TEXTS = ("README.md", "docs/METHODS.md", "weights/gguf/header.py")


@pytest.fixture(scope="module")
def llm(real):
    return LLM(str(real), device="cpu", dtype="float32", method=Full(), max_context=1024)


@pytest.fixture(scope="module")
def peer(real):
    pytest.importorskip("transformers")
    return Peer(real)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(llm, peer, prompt):
    """One forward pass over our answer: its likeliest id after each prefix is the one we wrote, so
    its own answer is ours. `make real-model` lets it write.
    """
    mine = ours(llm, prompt)
    assert mine.prompt == peer.prompt(prompt) and len(mine.tokens) > 3
    written = mine.tokens
    if len(written) < NEW_TOKENS:
        written = [*written, llm.end_token_ids[0]]
    greedy = peer.greedy(mine.prompt + written)
    assert greedy[len(mine.prompt) - 1 : -1] == written


def test_the_tokenizer_gives_every_text_back(llm):
    for name in TEXTS:
        text = (ROOT / name).read_text(encoding="utf-8") + "\n\t 0123 ½ 漢字 🎉 e\u0301\r\n"
        ids, ends = llm.tokenizer.encode_spans(text)
        assert llm.tokenizer.decode(ids) == text and ends[-1] == len(text)
        assert len(ids) > 500 and max(ids) < llm.config.vocab_size


def test_it_answers_in_a_chat(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=16))
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_the_command_line_answers_from_a_document_with_sparse_steps(real, tmp_path, capsys):
    names = "Ada Bob Carl Dora Emil Fay Gus Hana Ivo June Karl Lena Max Nora Otto Pia Quinn".split()
    lines = [f"The key of {name} is {71934 + 917 * i}." for i, name in enumerate(names)]
    (tmp_path / "keys.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = "--dtype float32 --ctx 512 -n 24 --json --quiet --dense-below 0 --tail 64 --tokens 96"
    command = [
        "--model",
        str(real),
        *flags.split(),
        "--filter-layers",
        "2,8,17",
        "--wait-layers",
        "1",
    ]
    command += ["-f", str(tmp_path / "keys.txt"), "-p", "What is the key of Carl?"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert str(71934 + 917 * 2) in answer["text"]
    assert answer["stats"]["sparse_steps"] > 5 and answer["stats"]["dense_steps"] == 0
    assert answer["context"]["used"] > 1.5 * (96 + 64)  # selected and tail: the steps read less
