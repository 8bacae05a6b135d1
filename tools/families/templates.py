"""A chat template in the form of every family, short: its turns, its control tokens, and what of
Jinja its released templates use (namespaces, slices, raise_exception, dates, trimmed blocks).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from engine.base.errors import EngineError
from engine.text.tokenizer import Tokenizer
from tools.families.models import word_tokenizer

_CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{%- endif %}{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ "
    "'<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set text = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_TURNS = (
    "{{ bos_token }}{% set first = '' %}{% set talk = messages %}"
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set talk = messages[1:] %}{% endif %}{% for m in talk %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and model must take turns') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + (m['content'] | trim) }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_ROLES = (
    "{%- for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + "
    "m['content'] + '<|end_of_text|>\n' }}{%- if loop.last and add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"
)
_BARS = (
    "{{ bos_token }}{%- set ns = namespace(system='') %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{%- set ns.system = m['content'] %}{%- endif %}{%- endfor %}"
    "{{ ns.system }}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{{- '<|User|>' + m['content'] }}{%- elif m['role'] == 'assistant' %}"
    "{%- set text = m['content'].split('</think>')[-1] %}"
    "{{- '<|Assistant|>' + text + eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{%- endif %}"
)
# by the name of the family in engine/model/config/families
TEMPLATES = {
    "Llama": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "Mistral": (
        "{%- set system = '' %}{%- set talk = messages %}{%- if messages[0].role == 'system' %}"
        "{%- set system = messages[0].content + '\n\n' %}{%- set talk = messages[1:] %}"
        "{%- endif %}{{- bos_token }}{%- for m in talk %}{%- if m.role == 'user' %}"
        "{{- '[INST] ' + (system if loop.last else '') + m.content + ' [/INST]' }}"
        "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "Qwen2": _CHATML,
    "Qwen3": _THINKING,
    "Qwen3-MoE": _THINKING,
    "MiniMax-M2": _THINKING,
    "Qwen3.5": _THINKING,
    "Qwen3.5-MoE": _THINKING,
    "Qwen3-Next": _THINKING,
    "SmolLM3": (
        "{%- set today = strftime_now('%d %B %Y') -%}"
        "{{- '<|im_start|>system\nToday: ' ~ today ~ '\n' -}}"
        "{%- if messages[0].role == 'system' -%}{{- messages[0].content | trim }}{%- endif -%}"
        "{{- '<|im_end|>\n' -}}{%- for m in messages if m.role != 'system' -%}"
        "{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' }}{%- endif -%}"
    ),
    "Phi-3": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>' + "
        "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
    "Granite": _ROLES,
    "Granite 4": _ROLES,
    "Nemotron-H": (
        "{{- '<SPECIAL_10>System\n' }}{%- set talk = messages %}"
        "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}"
        "{%- set talk = messages[1:] %}{%- endif %}{%- for m in talk %}"
        "{%- if m.role == 'user' %}{{- '\n<SPECIAL_11>User\n' + m.content | trim }}{%- else %}"
        "{{- '\n<SPECIAL_11>Assistant\n' + m.content | trim }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '\n<SPECIAL_11>Assistant\n' }}{%- endif %}"
    ),
    "Falcon-H1": _CHATML,
    "Bamba": _CHATML,
    "OLMo 2": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' + m['content'] + eos_token }}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}"
        "{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        "{% endfor %}"
    ),
    "OLMo 3": (
        "{%- set asked = messages | selectattr('role', 'equalto', 'system') | list -%}"
        "{%- if not asked -%}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif -%}"
        "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{%- if m['role'] == 'assistant' and loop.last -%}{{ eos_token }}{%- else -%}"
        "{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    ),
    "DeepSeek-V2": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ 'User: ' + m['content'] + '\n\n' }}{% elif m['role'] == 'assistant' %}"
        "{{ 'Assistant: ' + m['content'] + eos_token }}{% else %}"
        "{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "DeepSeek-V3": _BARS,
    "GLM-4.7-Flash": (
        "[gMASK]<sop>{%- for m in messages %}{{- '<|' + m.role + '|>' }}"
        "{%- if m.role == 'assistant' %}{{- '</think>' + m.content.split('</think>')[-1].strip() }}"
        "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|><think>' }}{%- endif %}"
    ),
    "MiniCPM3": _CHATML,
    "Mistral 4": (
        "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}"
        "{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}"
        "{{- '[INST]' + m.content + '[/INST]' }}{%- else %}{{- m.content + eos_token }}"
        "{%- endif %}{%- endfor %}"
    ),
    "Gemma 3": _TURNS,
    "Gemma 2": _TURNS,
    "Gemma 4": _TURNS,
    "Gemma 3n": _TURNS,
    "gpt-oss": (
        "{%- macro turn(role, text, channel) %}{{- '<|start|>' + role }}"
        "{%- if channel %}{{- '<|channel|>' + channel }}{%- endif %}"
        "{{- '<|message|>' + text + '<|end|>' }}{%- endmacro %}"
        "{{- turn('system', 'Today: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: low', '') }}"
        "{%- for m in messages %}{%- if m.role == 'system' %}"
        "{{- turn('developer', m.content, '') }}"
        "{%- elif m.role == 'assistant' %}{{- turn('assistant', m.content, 'final') }}"
        "{%- else %}{{- turn(m.role, m.content, '') }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
    ),
}
TALK = [
    {"role": "user", "content": " What is <b> & 'c'? \n"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nIt is."},
    {"role": "user", "content": "Sûre? 你好"},
]


def renders_alike(family: str) -> str:
    """Render a family's template here and by transformers, with and without a system message and
    the prompt for an answer. Returns "", or what differs.
    """
    from transformers import PreTrainedTokenizerFast

    source = TEMPLATES[family]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        word_tokenizer(folder, 8)
        config: dict[str, Any] = {"bos_token": "w1", "eos_token": "w2", "chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="w1", eos_token="w2"
        )
        theirs.chat_template = source
        ours = Tokenizer(folder).template
        assert ours is not None
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            for prompt in (False, True):
                talk = system + TALK
                wanted = theirs.apply_chat_template(
                    talk, tokenize=False, add_generation_prompt=prompt
                )
                try:
                    found = ours.render(talk, prompt)
                except EngineError as error:
                    return str(error)
                if found != wanted:
                    return "differs from transformers"
    return ""
