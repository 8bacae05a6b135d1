"""A scripted model behind the command line."""

import io

import pytest

from engine.methods.full import Full
from engine.text.tokenizer import Tokenizer
from tests.engine.chat.fake_llm import FakeLLM
from tests.engine.chat.test_conversation import PLAIN, scripted
from tests.engine.text.tokenizers_made import byte_level, save


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(answers..., template=...) puts a scripted model behind --model x and returns it; its
    `made_with` are LLM's arguments.
    """
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    def make(*answers, template=PLAIN, **options):
        tokenizer = Tokenizer(
            save(byte_level(), tmp_path / "m", **({"chat_template": template} if template else {}))
        )
        llm = FakeLLM(tokenizer, **options)
        llm.script = scripted(tokenizer, *(answers or ("It is warm.",)))

        def construct(name, **arguments):
            llm.made_with = {"model": name, **arguments}
            llm.method = arguments["method"] or Full()
            return llm

        monkeypatch.setattr("engine.cli.ranked.LLM", construct)
        return llm

    return make
