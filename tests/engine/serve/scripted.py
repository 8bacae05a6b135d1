"""A model that says what a test wants, so that tool calls come from the whole server: the tokens
are chosen here, everything else is the shipped model's.
"""

import contextlib

from engine.sampling.sampler import Sampler
from engine.text.literal import Controls
from engine.text.sandbox.template import ChatTemplate

HERMES = """{{ bos_token }}{% if tools %}<|user|>You may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% elif message.role == 'tool' %}<|user|><tool_response>
{{ message.content }}
</tool_response>{% else %}<|user|>{{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""  # noqa: E501


@contextlib.contextmanager
def templated(llm, source=HERMES):
    """The model with another chat template."""
    tokenizer = llm.tokenizer
    before = tokenizer.template, tokenizer.controls
    tokenizer.template = ChatTemplate(source, before[0].variables)
    added = tokenizer.backend.get_added_tokens_decoder().values()
    tokenizer.controls = Controls(
        [token.content for token in added if token.special], ["<tool_call>", "</tool_call>"]
    )
    try:
        yield
    finally:
        tokenizer.template, tokenizer.controls = before


@contextlib.contextmanager
def saying(llm, text, monkeypatch):
    """The model says `text` to everything, and ends."""
    ids = llm.tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert llm.tokenizer.decode(ids) == text
    ids.append(
        llm.end_token_ids[0]
        if isinstance(llm.end_token_ids, (list, tuple))
        else min(llm.end_token_ids)
    )  # noqa: E501
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "greedy", False)
        for way in ("_greedy", "_draw"):
            patch.setattr(Sampler, way, lambda self, scores: ids[len(self._sampled)])
        yield len(ids)
