"""Messages and texts to token ids, in one thread beside the event loop.

A chat template writes special tokens between turns. What a user writes must not be taken for them,
or a document could end its own turn and speak as the system. So each special token's text in a
message is replaced by a mark before the template runs, and encoded as plain text after it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

import tokenizers

from engine.errors import EngineError
from engine.serve.errors import ApiError
from engine.text.tokenizer import Tokenizer


class Prompts:
    """Encodes for one model. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._plain = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._plain.encode_special_tokens = True  # the tokenizers' name for: do not recognise them
        spelled = (tokenizer.token(i) or "" for i in tokenizer.special_ids)
        texts = sorted(filter(None, spelled), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the answer."""
        found: list[str] = []
        nonce = secrets.token_hex(8)  # nobody can write a mark

        def mark(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"\ue000{nonce}.{len(found) - 1}\ue001"

        if self._special is not None:
            messages = [{**m, "content": self._special.sub(mark, m["content"])} for m in messages]
        try:
            text = self.tokenizer.render(messages, add_generation_prompt=True)
        except EngineError as error:
            raise ApiError(400, str(error), "messages", "template_error") from None
        ids: list[int] = []
        for number, part in enumerate(re.split(f"\ue000{nonce}\\.(\\d+)\ue001", text)):
            if number % 2:
                ids += self.text(found[int(part)], special=False)
            elif part:
                ids += self.tokenizer.encode(part, special=False)
        return ids

    def text(self, text: str, special: bool) -> list[int]:
        """Ids of a text. special: special tokens written in it are recognised, and the model's
        start tokens go in front.
        """
        if special:
            return self.tokenizer.encode(text)
        return self._plain.encode(text, add_special_tokens=False).ids
