"""A checkpoint on disk whose chat template has tools, in the form of Qwen and Hermes or in that of
Qwen3-Coder: the shipped model's weights and tokenizer under another template.
"""

import json
import shutil

from tests.builders import POCKET

QWEN = """{{- bos_token }}
{%- if tools %}
    {{- '<|user|># Tools\\n\\nYou may call one or more functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, write a JSON object within tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
    {%- else %}
        {{- '<|user|>' + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


CALL = """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}"""
FUNCTION = """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
CODER = QWEN.replace(CALL, FUNCTION).replace(
    """{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}""",
    """{{- '<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n' }}
    {{- '</tool_call>\\n' }}""",
)
assert CODER.count("<function=") == 2


def tool_checkpoint(folder, template=QWEN):
    """Write it into an empty folder; the folder."""
    for source in POCKET.iterdir():
        if source.name != "tokenizer_config.json":
            shutil.copy(source, folder / source.name)
    settings = json.loads((POCKET / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder
