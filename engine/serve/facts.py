"""What clients ask before they ask for an answer: the model and its context, its tokenizer, what
this server does not do. One set of figures under the names of several servers' interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.base.checks import is_integer
from engine.base.version import VERSION
from engine.serve.errors import ApiError
from engine.serve.guards import Guard
from engine.serve.page.example import example_of
from engine.serve.request.values import refuse, text_of
from engine.serve.service import Service

# the field that has a text, and the one beside it that asks for start tokens, with its default;
# special tokens in it are recognised in the last two
TEXTS = {
    "text": ("special", False),
    "prompt": ("add_special_tokens", True),  # vLLM
    "content": ("add_special", False),  # llama.cpp
}


class Facts:
    """The handlers of one service."""

    def __init__(self, service: Service, guard: Guard) -> None:
        self._service, self._guard = service, guard

    def _model(self) -> dict[str, Any]:
        llm, context = self._service.llm, self._service.llm.max_context
        return {
            "id": self._service.settings.alias,
            "object": "model",
            "created": self._service.started,
            "owned_by": "omnikv-engine",
            "max_model_len": context,
            "context_length": context,
            "max_context_length": context,
            "meta": {
                "n_ctx": context,
                "n_ctx_train": llm.config.max_positions,
                "n_vocab": llm.config.vocab_size,
                "sparse": self._service.sparse,
                "method": self._service.own,
                "example": example_of(llm.folder) is not None,
            },
        }

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of a name."""
        self._service.named({"model": request.path_params["name"]})
        return JSONResponse(self._model())

    async def props(self, request: Request) -> Response:
        """llama.cpp's facts of a server. Of the model's path only the last name is told."""
        llm, tokenizer = self._service.llm, self._service.prompts.tokenizer
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": llm.max_context},
                "total_slots": self._service.settings.slots,
                "model_alias": self._service.settings.alias,
                "model_path": llm.folder.name if llm.folder else llm.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": tokenizer.template.source if tokenizer.template else "",
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "build_info": f"omnikv-engine {VERSION}",
            }
        )

    # ---------------------------------------------------------------- texts

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's facts of a tokenizer, for clients that have none of their own."""
        tokenizer = self._service.prompts.tokenizer
        found = {
            name: value if isinstance(value, str) else value.get("content")
            for name, value in tokenizer.settings.items()
            if name.endswith("_token") and isinstance(value, (str, Mapping))
        }
        kind = tokenizer.settings.get("tokenizer_class")
        return JSONResponse(
            found
            | {
                "tokenizer_class": kind if isinstance(kind, str) else "PreTrainedTokenizerFast",
                "bos_token": tokenizer.bos_token or None,
                "eos_token": tokenizer.eos_token or None,
                "add_bos_token": bool(tokenizer.prefix_ids),
                "model_max_length": self._service.llm.max_context,
                "chat_template": tokenizer.template.source if tokenizer.template else None,
            }
        )

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text."""
        body = await self._guard.body(request)
        name = next((n for n in TEXTS if n in body), "text")
        field, default = TEXTS[name]
        special = default if body.get(field) is None else body[field]
        if not isinstance(special, bool):
            raise refuse(field, special, "true or false")
        text, service = text_of(body.get(name), name), self._service
        service.may_fit([text], name)
        known = special or name != "text"
        ids = await service.text(request, service.prompts.text, text, special, known)
        context = service.llm.max_context
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": context})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, under each interface's name."""
        body = await self._guard.body(request)
        ids, vocab = body.get("tokens"), self._service.llm.config.vocab_size
        if not isinstance(ids, list) or not all(is_integer(i) and 0 <= i < vocab for i in ids):
            raise refuse("tokens", "something else", f"a list of ids from 0 to {vocab - 1}")
        text = await self._service.text(request, self._service.prompts.tokenizer.decode, ids)
        return JSONResponse(dict.fromkeys(TEXTS, text))

    # ---------------------------------------------------------------- what is not done

    async def no_vectors(self, request: Request) -> Response:
        """Refuse embeddings and ranking: the server writes texts alone."""
        raise ApiError(
            501,
            "this server writes texts: it has no embeddings and ranks no documents",
            code="not_supported",
            headers={"x-should-retry": "false"},
        )
