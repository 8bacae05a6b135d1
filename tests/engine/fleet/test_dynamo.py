"""The worker that Dynamo drives, where its package is installed, driven without a cluster: what
its own worker calls, in the same order.
"""

import asyncio

import pytest

pytest.importorskip(
    "dynamo.common.backend", reason="ai-dynamo is not installed", exc_type=ImportError
)

from dynamo._core import Context

from engine import LLM, SamplingParams
from engine.base.errors import SettingError
from engine.fleet.dynamo import DynamoEngine, params_of
from tests.builders import POCKET, random_ids

FLAGS = "--ctx 2K --slots 2 --threads 1 --dtype float32 --discovery-backend mem".split()


async def written(engine, ids, context=None, **stops):
    request = {"token_ids": ids, "sampling_options": {"temperature": 0.0}}
    request["stop_conditions"] = stops
    return [chunk async for chunk in engine.generate(request, context or Context())]


def driven(work):
    async def all_of_it():
        engine, config = await DynamoEngine.from_args(FLAGS)
        try:
            registered = await engine.start(7)
            return await work(engine, config, registered)
        finally:
            await engine.cleanup()
            await engine.cleanup()  # a second one does nothing

    return asyncio.run(all_of_it())


def test_tokens_are_those_of_the_library_and_what_is_held_is_counted():
    prompts = [random_ids(n, 4096) for n in (40, 333)]
    llm = LLM(POCKET, max_context=2048, threads=1, dtype="float32")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [llm.generate(ids, params).token_ids for ids in prompts]

    async def work(engine, config, registered):
        assert config.model_name == registered.model and registered.llm.context_length == 2048
        assert registered.llm.total_kv_blocks * registered.llm.kv_cache_block_size == 2 * 2048
        for held in (0, 1):
            answers = await asyncio.gather(
                *(written(engine, ids, max_tokens=12, ignore_eos=True) for ids in prompts)
            )
            for ids, chunks, tokens in zip(prompts, answers, expected):
                assert [t for c in chunks for t in c["token_ids"]] == tokens
                assert all(c["index"] == 0 for c in chunks)
                assert [c.get("finish_reason") for c in chunks[:-1]] == [None] * (len(chunks) - 1)
                usage = chunks[-1]["completion_usage"]
                assert chunks[-1]["finish_reason"] == "length"
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 12)
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert (cached >= len(ids) - 1) if held else cached == 0
        probe = await engine.health_check_payload()
        assert [c async for c in engine.generate(probe, Context())][-1]["finish_reason"] == "length"
        packed = b"".join(i.to_bytes(4, "little") for i in prompts[0])
        chunks = await written(engine, packed, max_tokens=12, ignore_eos=True)
        assert [t for c in chunks for t in c["token_ids"]] == expected[0]

    driven(work)


def test_an_aborted_answer_ends_with_a_word_and_frees_its_slot():
    async def work(engine, *_):
        context, count = Context(), 0
        request = {"token_ids": random_ids(50, 4096), "stop_conditions": {"ignore_eos": True}}
        async for chunk in engine.generate(request, context):
            count += len(chunk["token_ids"])
            if count == 3:
                await engine.abort(context)
        assert chunk["finish_reason"] == "cancelled" and count < 200
        assert chunk["completion_usage"]["completion_tokens"] == count
        for _ in range(500):
            if not engine._many.running:
                break
            await asyncio.sleep(0.01)
        assert not engine._many.running

    driven(work)


def test_what_a_request_asks_for_and_what_is_refused():
    asked = {
        "sampling_options": {"temperature": 0.5, "top_k": -1, "top_p": None, "seed": 3, "n": 1},
        "stop_conditions": {"max_tokens": 99, "stop_token_ids_hidden": [2], "stop": ["."]},
        "output_options": {"logprobs": 0},
    }
    params = params_of(asked, 50)
    assert (params.max_tokens, params.temperature, params.seed) == (50, 0.5, 3)
    assert (params.top_k, params.stop_token_ids, params.logprobs) == (0, (2,), 1)
    for bad, words in (
        ({"sampling_options": {"n": 2}}, "n: found 2"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "multi_modal_data"),
        ({"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_options": {"top_p": 7.0}}, "top_p"),
    ):
        with pytest.raises(SettingError, match=words):
            params_of(bad, 50)
    with pytest.raises(SettingError, match="token_ids: found 4 too many"):
        params_of({}, -3)
