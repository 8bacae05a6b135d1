"""A conversation lives on ids: whatever happens, turns append, and the bank spells what the chat
template writes.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ContextTooLong, TemplateError
from engine.chat.talk.conversation import Conversation, common_length
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.engine.chat.fake_llm import FakeLLM
from tests.engine.text.tokenizers_made import MADE, save

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
TRIMS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] | trim }}<|end|>\n"
    "{% else %}<|user|>{{ m['content'] | trim }}\n### Answer:{% endif %}{% endfor %}"
)
SPLITS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set parts = m['content'].rstrip().split('\n\n') %}"
    "{% if parts | length > 1 %}{{ (parts[:-1] | join('\n\n')).rstrip() + '\n' }}{% endif %}"
    "{{ '<|user|>' + parts[-1].strip() }}{% else %}{{ '<s>' + m['content'].strip() + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)
FORGETS = (
    "{% for m in messages[-1:] %}<|user|>{{ messages | length }} {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>{% endif %}"
)
TEXT = st.text(
    st.one_of(st.sampled_from(" \nabT.,é你"), st.characters(codec="utf-8")), min_size=1, max_size=30
)
WORDS = st.text("abcdeé你 ", min_size=1, max_size=20).map(lambda text: "x" + text + "y")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder per (tokenizer kind, template), written once."""
    known = {}

    def get(kind, template):
        if (kind, template) not in known:
            extra = {"chat_template": template} if template else {}
            known[kind, template] = Tokenizer(
                save(MADE[kind](), tmp_path_factory.mktemp("t"), **extra)
            )
        return known[kind, template]

    return get


def spelled(conversation):
    """What the ids in the bank spell, special tokens included."""
    return conversation.tokenizer.backend.decode(
        conversation.session.ids, skip_special_tokens=False
    )


def finish(pieces):
    return "".join(piece.text for piece in pieces)


def fed(conversation):
    """Tokens that were read, all prefills together."""
    return sum(entry[1] for entry in conversation.session.log if entry[0] == "prefill")


def scripted(tokenizer, *answers, ends=True):
    """A script that gives these answers in turn, the last for ever."""
    waiting = list(answers)

    def script(ids):
        text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        new = tokenizer.encode_spans(text, special=False, continues=True)[0]
        return [*new, tokenizer.backend.token_to_id("<|end|>")] if ends else new

    return script


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("template", [PLAIN, TRIMS, SPLITS], ids=["plain", "trims", "splits"])
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, TEXT, st.booleans()), min_size=2, max_size=4))
def test_turns_only_append(folders, kind, template, turns):
    """Whatever users and models write, spaces at the ends included: no token is read twice, none is
    taken back but an end token.
    """
    tokenizer = folders(kind, template)
    llm = FakeLLM(tokenizer)
    talk = Conversation(llm)
    for question, answer, ends in turns:
        llm.script = scripted(tokenizer, answer, ends=ends)
        before, log = list(talk.session.ids), len(talk.session.log)
        finish(talk.ask(question, SamplingParams(max_tokens=500)))
        cuts = [entry for entry in talk.session.log[log:] if entry[0] == "truncate"]
        assert all(was - left <= 1 for _, was, left in cuts) and len(cuts) <= 1
        kept = len(before) - len(cuts)
        assert talk.session.ids[:kept] == before[:kept]
        assert len(talk.ends) == len(talk.session.ids) and list(talk.ends) == sorted(talk.ends)
    assert talk.messages[0] == {"role": "user", "content": turns[0][0]} and len(
        talk.messages
    ) == 2 * len(turns)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_the_bank_spells_what_the_template_writes(folders, turns):
    tokenizer = folders("byte-level", PLAIN)
    llm = FakeLLM(tokenizer)
    talk = Conversation(llm)
    for question, answer in turns:
        llm.script = scripted(tokenizer, answer)
        assert finish(talk.ask(question)) == answer
        assert spelled(talk) == tokenizer.render(talk.messages, False) == talk.text + "<|end|>"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), data=st.data())
def test_whatever_happens_the_bank_and_the_text_agree(folders, seed, data):
    """Turns, documents, retries, resets, Ctrl-C in reading and answering, in any order: then one
    more turn is as if undisturbed.
    """
    tokenizer = folders("byte-level", data.draw(st.sampled_from([PLAIN, SPLITS, None])))
    rng, llm = random.Random(seed), FakeLLM(tokenizer)
    llm.script = lambda ids: (
        [rng.randrange(5, 300) for _ in range(rng.randrange(0, 9))] + [4] * rng.randrange(0, 2)
    )
    talk = Conversation(llm)

    def countdown(steps):
        left = iter(range(steps))
        return lambda: next(left, None) is None

    def stopper(after):
        over = countdown(after)

        def progress(p):
            if over():
                raise KeyboardInterrupt

        return progress

    for action in data.draw(st.lists(st.sampled_from("aaarrdx"), min_size=1, max_size=8)):
        stop_reading, stop_answer = stopper(rng.randrange(0, 12)), countdown(rng.randrange(0, 10))
        try:
            if action == "a":
                finish(talk.ask("ask é " * rng.randrange(1, 9), None, stop_reading, stop_answer))
            elif action == "r":
                finish(talk.retry(None, stop_reading, stop_answer))
            elif action == "d":
                talk.read("A line of text, 你好. " * rng.randrange(1, 12), "doc", stop_reading)
            else:
                talk.reset()
        except KeyboardInterrupt:
            pass
        assert len(talk.ends) == len(talk.session.ids), action
        # White space apart: where a template trims an answer, the text follows the template and the
        # bank keeps what was sampled.
        whole, text = "".join(spelled(talk).split()), "".join(talk.text.split())
        assert whole.startswith(text) or "\ufffd" in whole or tokenizer.template is None
        assert all(0 <= d.start < d.stop <= len(talk.text) for d in talk.documents)
    llm.script = scripted(tokenizer, "fine")
    assert finish(talk.ask("last")) == "fine"
    if tokenizer.template:
        expected = tokenizer.render(talk.messages, False)
        assert expected.startswith(talk.text)


def test_a_document_is_read_once_and_questions_append(folders):
    tokenizer = folders("byte-level", SPLITS)
    llm = FakeLLM(tokenizer, scripted(folders("byte-level", SPLITS), "It is."))
    talk, document = Conversation(llm), "The sun was warm.\n" * 20
    done = talk.read(document, "notes.txt")
    read = len(talk.session)
    assert done.tokens == done.total == read and done.characters == len(document.strip("\n"))
    assert talk.text.startswith("<s>The sun") and talk.text.endswith("\n<|user|>")
    finish(talk.ask("What is warm?"))
    finish(talk.ask("Sure?"))
    assert not [
        entry for entry in talk.session.log if entry[0] == "truncate" and entry[1] - entry[2] > 1
    ]
    assert fed(talk) < read + 40
    d = talk.documents[0]
    assert talk.text[d.start : d.stop] == document.strip("\n") and d.name == "notes.txt"


def test_an_interrupted_reading_stays_and_retry_reads_on(folders):
    tokenizer = folders("byte-level", PLAIN)
    llm = FakeLLM(tokenizer, scripted(tokenizer, "Yes."))
    talk, calls = Conversation(llm), []

    def stop_at_third(p):
        calls.append(p)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(talk.ask("Is it warm outside today, and why? " * 5, None, stop_at_third))
    assert len(talk.session) == 12 and talk.can_retry
    assert finish(talk.retry()) == "Yes."
    # every prompt token once
    assert fed(talk) == len(talk.session) - len(tokenizer.encode("Yes.", special=False)) - 1


def test_retry_answers_the_same_prompt_again(folders):
    for template in (PLAIN, None):
        tokenizer = folders("byte-level", template)
        llm = FakeLLM(tokenizer, scripted(tokenizer, "one", "two"))
        talk = Conversation(llm)
        assert not talk.can_retry and finish(talk.retry()) == ""
        assert finish(talk.ask("count: ")) == "one"
        read = fed(talk)
        assert finish(talk.retry()) == "two"
        assert fed(talk) == read  # the prompt is not read again
        assert spelled(talk).count("count") == 1 and "one" not in spelled(talk)


def test_a_template_that_rewrites_history_is_announced_and_right(folders):
    tokenizer = folders("byte-level", FORGETS)
    lines = []
    llm = FakeLLM(tokenizer, scripted(tokenizer, "Once upon a time there was a little girl."))
    talk = Conversation(llm, announce=lines.append)
    finish(talk.ask("A rather long first question about the girl named Lily."))
    finish(talk.ask("Next?"))
    assert len(lines) == 1 and "read again" in lines[0]
    assert spelled(talk).startswith(
        tokenizer.render([{"role": "user"}, {}, {"role": "user", "content": "Next?"}], True)
    )


def test_another_end_token_than_the_templates_is_taken_back(folders):
    tokenizer = folders("byte-level", PLAIN)
    llm = FakeLLM(
        tokenizer, lambda ids: [*tokenizer.encode("Hm", special=False), 2], ends=("</s>", "<|end|>")
    )
    talk = Conversation(llm)
    finish(talk.ask("a"))
    assert talk.session.ids[-1] == 2
    finish(talk.ask("b"))
    assert "Hm<|end|>" in spelled(talk) and "Hm</s>" not in spelled(talk)[:-4]


def test_a_base_model_completes_and_goes_on(folders):
    for kind in ("byte-level", "byte-fallback", "metaspace"):
        tokenizer = folders(kind, None)
        llm = FakeLLM(tokenizer, scripted(tokenizer, " there was a girl"))
        talk = Conversation(llm)
        assert finish(talk.ask("Once upon a time")) == " there was a girl", kind
        finish(talk.ask(" named Lily,"))
        assert tokenizer.decode(talk.session.ids) == talk.text
        assert talk.text == "Once upon a time there was a girl named Lily, there was a girl"
        with pytest.raises(TemplateError, match="no chat template"):
            Conversation(llm, system="Be brief.")


def test_too_long_a_message_is_refused_whole(folders):
    tokenizer = folders("byte-level", PLAIN)
    llm = FakeLLM(tokenizer, scripted(tokenizer, "ok"), max_context=60)
    talk = Conversation(llm)
    finish(talk.ask("short"))
    held = list(talk.session.ids)
    with pytest.raises(ContextTooLong):
        finish(talk.ask("long " * 100))
    assert talk.session.ids == held and len(talk.ends) == len(held)
    assert finish(talk.ask("short again")) == "ok"


@given(one=st.text("ab"), other=st.text("ab"))
def test_common_length(one, other):
    n = common_length(one, other)
    assert one[:n] == other[:n] and (n == min(len(one), len(other)) or one[n] != other[n])
