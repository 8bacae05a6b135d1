"""Chat templates: the same text as transformers, and untrusted code that cannot hang, exhaust or
reach this process.
"""

import json
import os
import threading
import time

import pytest

from engine.base.errors import BadCheckpoint, TemplateError
from engine.text.sandbox.template import RENDER_SECONDS, ChatTemplate
from engine.text.tokenizer import Tokenizer, read_settings
from tests.engine.text.tokenizers_made import byte_level, save

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\n' + system_message + "
    "'\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
ODD = (
    "{%- for m in messages %}\n    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
    "    {%- if loop.last %}{% break %}{% endif %}\n{%- endfor %}"
    " {{ strftime_now('%d %b %Y') }} {{ messages | length }}\n"
)
TALK = [
    {"role": "user", "content": " What is <b> & 'c'? 你好 "},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "Sure?"},
]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, LLAMA2, ODD])
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_rendered_text_is_that_of_transformers(source, system, prompt, tmp_path):
    from transformers import PreTrainedTokenizerFast

    save(byte_level(), tmp_path, chat_template=source)
    messages = ([{"role": "system", "content": "Be brief."}] if system else []) + TALK
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>"
    )
    theirs.chat_template = source
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert Tokenizer(tmp_path).template.render(messages, prompt) == expected


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(s='ab') %}"
    "{% for i in range(70) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
)
HOSTILE = {
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    LOOPS: "did not end within 2 s",
    "{{ 10**(10**9) }}": "did not end|memory",
    "{{ 'a' * 10**11 }}": "memory",
    "{{ 'a'.ljust(10**11) }}": "memory",
    "{{ '%99999999999d' % 1 }}": "memory|failed",
    DOUBLING: "memory|did not end",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "wrote more than",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "not safe",
    "{{ messages.append(1) }}": "not safe",
    "{{ cycler.__init__.__globals__ }}": "not safe|refuses",
    "{% include '/etc/passwd' %}": "failed|refuses",
    "{{ raise_exception('no system role here') }}": "refuses: no system role here",
    "{% if %}": "not valid.*line 1",
    "{{ nothing.at.all }}": "refuses",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[7]['content'] }}": "refuses|failed",
}


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_ends_as_a_template_error_in_time(source):
    start = time.monotonic()
    with pytest.raises(TemplateError, match=HOSTILE[source]) as caught:
        ChatTemplate(source).render(TALK)
    assert "\n" not in str(caught.value)
    # the child's start on a loaded machine included
    assert time.monotonic() - start < RENDER_SECONDS + 10


def test_after_a_stopped_render_the_next_one_works():
    template = ChatTemplate(
        "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}fine"
    )
    with pytest.raises(TemplateError):
        template.render(TALK)
    assert template.render(TALK[:1]) == "fine"


def test_the_child_is_reused_and_ends_with_its_template():
    template = ChatTemplate(LLAMA3, {"bos_token": "<s>"})
    template.render(TALK)
    process = template._worker._process
    template.render(TALK)
    assert template._worker._process is process and process.poll() is None
    del template
    assert process.poll() is not None


def test_threads_get_their_own_text():
    """Two threads of a server once got each other's prompt."""
    template, wrong = ChatTemplate("{{ messages[0].content }}"), []

    def render(name):
        for number in range(60):
            text = f"{name} {number}"
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_child_that_ends_with_the_thread_that_started_it_is_replaced():
    """As Linux ends it: also where it ends between the look at it and the question."""
    template = ChatTemplate("{{ messages | length }}")
    first = threading.Thread(target=template.render, args=(TALK,))
    first.start()
    first.join()
    assert template.render(TALK) == "3"
    ask, asked = type(template._worker).ask, []

    def killed(self, *arguments):
        asked.append(self)
        if len(asked) == 1:
            self._process.kill()
        return ask(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(template._worker), "ask", killed)
        assert template.render(TALK) == "3"
    assert len(asked) == 2 and asked[0] is not asked[1]


def test_a_document_of_millions_of_characters_passes():
    document = "A line of a long book, with 你好.\n" * 100_000
    assert (
        ChatTemplate(CHATML).render([{"role": "user", "content": document}]).count("book")
        == 100_000
    )


def test_the_child_sees_nothing_of_the_engine(tmp_path, monkeypatch):
    """A file named like a standard module, beside the engine or in the current folder, must not run
    in the child.
    """
    (tmp_path / "signal.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("{{ messages | length }}").render(TALK) == "3"
    assert os.listdir(tmp_path) == ["signal.py"]


def test_where_templates_are_found(tmp_path):
    def load(**settings):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return ChatTemplate.load(tmp_path, read_settings(tmp_path))

    assert load() is None
    assert load(chat_template="a").source == "a"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(chat_template=named).source == "d"
    assert load(chat_template=named[:1]).source == "t"
    for wrong in [3, {"a": 1}, [], [{"name": "x"}], [named[0], {"name": "rag", "template": "r"}]]:
        with pytest.raises(BadCheckpoint, match="chat_template: found"):
            load(chat_template=wrong)
    variables = load(
        chat_template="a", bos_token={"content": "<s>"}, eos_token="</s>", pad_token=None
    ).variables
    assert variables == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load(chat_template="a").source == "from the file"
