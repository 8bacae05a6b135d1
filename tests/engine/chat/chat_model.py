"""A random model with a chat template, in Hugging Face layout: the chat's tests run the real engine
on it.
"""

import json
from pathlib import Path

from tests.engine.text.tokenizers_made import byte_fallback, byte_level, save
from tests.tiny_model import CONFIG, SINGLE, joined, packed, tensors

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def base_model(folder: Path) -> Path:
    """Write the same over a byte-fallback vocabulary and without a template: it completes text."""
    chat_model(folder)
    save(byte_fallback(), folder)
    return folder


def chat_model(folder: Path, **changes) -> Path:
    """Write 2 layers of hidden size 32 over a byte-level vocabulary of 512 rows; 8192 positions."""
    config = {
        **CONFIG,
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 4,
        **changes,
    }
    save(byte_level(), folder, chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / SINGLE).write_bytes(joined(*packed(tensors(config))))
    return folder
