"""The engine as a worker of NVIDIA's Dynamo, whose frontend writes token ids and reads token ids.

    python -m engine.fleet.dynamo --model NAME --ctx 32K --namespace dynamo

Takes the flags of python -m engine.serve that say what runs (its address, keys and cache have no
effect), and Dynamo's own. Written for ai-dynamo 1.6: `LLMEngine` of dynamo.common.backend.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from dynamo._core import Context
from dynamo.common.backend import (
    EngineConfig,
    GenerateChunk,
    GenerateRequest,
    LLMEngine,
    LlmRegistration,
    WorkerConfig,
)
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.utils.token_ids import token_ids_to_list

from engine.asynchronous.answer import Answer
from engine.asynchronous.llm import AsyncLLM
from engine.base.errors import SettingError
from engine.llm import LLM
from engine.sampling.params import SamplingParams
from engine.serve.cli import open_model, slots_of
from engine.serve.flags import parser
from engine.session.results import Piece

PIECE = 16  # tokens; what Dynamo's router cuts prompts into
DRAWN = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed"),
)
# what would change an answer and is not done: refused where a request sets it
NOT_DONE = ("guided_decoding", "use_beam_search")
MEDIA = ("multi_modal_data", "encoder_result", "prefill_result")
ENDS = {"context": "length", "interrupted": "cancelled"}


class DynamoEngine(LLMEngine):
    """One model for Dynamo's worker: prompts that begin as an earlier one did are read from there
    on, and `completion_usage` says how many tokens that were. llm: planned; `start` loads it.
    """

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self._many: AsyncLLM | None = None
        self._answers: dict[str, Answer] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """An engine that is not loaded, and where Dynamo finds it. Raises typed errors."""
        flags = parser()
        add = flags.add_argument
        add("--namespace", default="dynamo", help="Dynamo's (default dynamo)")
        add("--component", default="omnikv", help="Dynamo's (default omnikv)")
        add("--discovery-backend", default="etcd", help="Dynamo's (default etcd)")
        add("--request-plane", default="tcp", help="Dynamo's (default tcp)")
        add("--event-plane", help="Dynamo's")
        args = flags.parse_args(argv)
        llm = open_model(args)
        slots_of(args, llm).require_fit()
        engine = cls(llm, args)
        return engine, WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            model_name=str(llm.folder),
            served_model_name=engine.name,
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            enable_kv_routing=False,  # no events are sent: its router goes by what it has sent
        )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return str(self.args.alias or Path(self.llm.name).name)

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model and begin to serve."""
        self.llm.load()
        args, context = self.args, self.llm.max_context
        self._many = AsyncLLM(self.llm, args.slots, args.queue, args.pause or None)
        return EngineConfig(
            model=str(self.llm.folder),
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=context,
                kv_cache_block_size=PIECE,
                total_kv_blocks=args.slots * context // PIECE,
                max_num_seqs=args.slots,
            ),
        )

    async def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """A chunk for every token; the last has the reason and the usage. Raises typed errors."""
        assert self._many is not None, "Dynamo starts an engine before it asks"
        ids = token_ids_to_list(request["token_ids"])
        params = params_of(request, self.llm.max_context - len(ids))
        answer = self._answers[context.id()] = self._many.stream(ids, params)
        written, cached, reason = 0, 0, "cancelled"
        try:
            async for piece in answer:
                cached = piece.stats.cached_tokens
                chunk = _chunk(piece, params.logprobs)
                written += len(chunk["token_ids"])
                if piece.finish_reason is None:
                    yield chunk
                    continue
                reason = ENDS.get(piece.finish_reason, piece.finish_reason)
                yield chunk | _end(reason, len(ids), written, cached)  # type: ignore[misc]
                return
            yield {"token_ids": [], "index": 0} | _end(reason, len(ids), written, cached)  # type: ignore[misc]
        finally:
            answer.close()
            self._answers.pop(context.id(), None)

    async def abort(self, context: Context) -> None:
        """End an answer before its next step."""
        if (answer := self._answers.get(context.id())) is not None:
            answer.close()

    async def cleanup(self) -> None:
        """Let answers under way go on for --grace seconds, then end; once or more often."""
        many, self._many = self._many, None
        if many is not None:
            await many.aclose(self.args.grace)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One token, which an idle worker writes."""
        return build_health_check_payload(self.llm.encode("a")[0])


def params_of(request: Mapping[str, Any], room: int) -> SamplingParams:
    """How a request wants its tokens drawn. room: tokens that fit behind its prompt. Strings that
    end an answer are Dynamo's to find. Raises SettingError.
    """
    drawn = request.get("sampling_options") or {}
    stops = request.get("stop_conditions") or {}
    for name in MEDIA:
        if request.get(name):
            raise SettingError(f"{name}: this worker reads texts, and reads them itself")
    for name in NOT_DONE:
        if drawn.get(name):
            raise SettingError(f"{name}: not done by this worker")
    for name in ("n", "best_of"):
        if (drawn.get(name) or 1) != 1:
            raise SettingError(f"{name}: found {drawn[name]}, expected 1")
    if room < 1:
        raise SettingError(f"token_ids: found {1 - room} too many for this worker's context")
    logprobs, prompt = parse_logprob_options(request.get("output_options") or {})
    if prompt is not None:
        raise SettingError("prompt_logprobs: not done by this worker")
    given = {name: drawn[name] for name in DRAWN if drawn.get(name) is not None}
    given["temperature"] = given.get("temperature", 1.0)  # OpenAI's default
    given["top_k"] = max(0, given.get("top_k", 0))  # -1 is off there
    hidden = stops.get("stop_token_ids_hidden") or ()
    return SamplingParams(
        **given,
        max_tokens=min(stops.get("max_tokens") or room, room),
        min_tokens=stops.get("min_tokens") or 0,
        stop_token_ids=tuple({*hidden, *(stops.get("stop_token_ids") or ())}),
        ignore_eos=bool(stops.get("ignore_eos")),
        logprobs=0 if logprobs is None else max(1, logprobs),
    )


def _chunk(piece: Piece, logprobs: int) -> GenerateChunk:
    """What one step wrote."""
    chunk: GenerateChunk = {"token_ids": [], "index": 0}
    if piece.token_id is not None:
        chunk["token_ids"] = [piece.token_id]
        if logprobs and piece.logprob is not None:
            chunk["log_probs"] = [piece.logprob]
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, "token": None, "logprob": value}
                    for rank, (token, value) in enumerate(piece.top_logprobs, 1)
                ]
            ]
    return chunk


def _end(reason: str, prompt: int, written: int, cached: int) -> dict[str, Any]:
    return {
        "finish_reason": reason,
        "completion_usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


if __name__ == "__main__":
    from dynamo.common.backend.run import run

    run(DynamoEngine)
