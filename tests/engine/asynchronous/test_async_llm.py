"""Callers on an event loop share one model: each gets its answer, in turn, and may leave.

Stops: an answer that depends on its neighbours, a caller who is overtaken, a slot that a cancelled
task keeps, a caller who waits for ever, a thread that outlives its AsyncLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from engine import LLM, AsyncLLM, EngineError, OmniKV, SamplingParams
from engine.base.errors import Busy, ContextTooLong, SettingError, WorkerClosed
from engine.batch.slots import Slots
from engine.batch.step import BatchedStep
from engine.plan.prefill_time import PrefillProgress
from tests.builders import POCKET, random_ids, tiny_llm

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


def short(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(SPARSE, backend="reference", max_context=1024, threads=1)


@pytest.fixture
def released(monkeypatch):
    """The lengths of sessions when their slots became free."""
    lengths, release = [], Slots.release

    def noted(self, slot):
        lengths.append(len(slot.session))
        release(self, slot)

    monkeypatch.setattr(Slots, "release", noted)
    return lengths


async def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.002)


def held(many: AsyncLLM) -> int:
    """Tokens in the one slot."""
    (slot,) = many._worker.slots.slots
    return len(slot.session)


# ---------------------------------------------------------------- fifty callers


def test_fifty_callers_are_answered_in_turn_and_share_steps(llm, monkeypatch):
    prompts = [random_ids(20 + 7 * (n % 9), seed=n) for n in range(50)]
    wanted = [llm.generate(ids, short(5 + n % 7)).token_ids for n, ids in enumerate(prompts)]
    assert all(any(a != b for a, b in zip(wanted[0], w)) for w in wanted[1:])
    widths, run, first = [], BatchedStep.run, []

    def counted(self, steps):
        widths.append(len(steps))
        return run(self, steps)

    monkeypatch.setattr(BatchedStep, "run", counted)

    async def caller(many, n):
        found = []
        async for piece in many.stream(prompts[n], short(5 + n % 7)):
            if not found:
                first.append(n)
            found.append(piece.token_id)
        assert piece.finish_reason == "length" and piece.stats.new_tokens == len(found)
        return found

    async def main():
        async with AsyncLLM(llm, slots=4) as many:
            answers = await asyncio.gather(*(caller(many, n) for n in range(50)))
            assert many.waiting == many.running == 0
            return answers

    assert asyncio.run(main()) == wanted
    # four slots: nobody is overtaken by more than those who got a slot with him
    assert all(abs(place - n) < 4 for place, n in enumerate(first))
    assert max(widths) == 4 and sum(widths) > 2.5 * len(widths)


def test_who_asks_first_begins_first_although_his_text_takes_long(llm, monkeypatch):
    begun, texts = [], {"slow": random_ids(30), "quick": random_ids(31)}

    def encode(self, prompt):
        time.sleep(0.2 if prompt == "slow" else 0.0)
        return list(texts[prompt])

    monkeypatch.setattr(LLM, "encode", encode)

    async def caller(many, text):
        async for _ in many.stream(text, short(3)):
            begun.append(text)

    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            await asyncio.gather(caller(many, "slow"), caller(many, "quick"))

    asyncio.run(main())
    assert begun == ["slow"] * 3 + ["quick"] * 3


def test_a_list_is_answered_whole_and_what_it_shares_is_read_once(llm):
    common = random_ids(200, seed=5)
    prompts = [[*common, *random_ids(9, seed=n)] for n in range(5)]

    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            return await many.generate(prompts, short(4))

    found = asyncio.run(main())
    assert [c.token_ids for c in found] == [llm.generate(p, short(4)).token_ids for p in prompts]
    cached = [c.stats.cached_tokens for c in found]
    assert cached[0] == 0 and all(n >= 200 for n in cached[1:])
    assert [c.stats.cached_tokens + c.stats.prompt_tokens for c in found] == [209] * 5


# ---------------------------------------------------------------- leaving


async def cancelled_while_it_waits(answer, some):
    task = asyncio.ensure_future(whole(answer, some))
    await some.wait()
    task.cancel()
    return task


async def cancelled_in_its_body(answer, some):
    async def body():
        async for _ in answer:
            some.set()
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(body())
    await some.wait()
    task.cancel()
    return task


async def failed_in_its_body(answer, some):
    async def body():
        async for _ in answer:
            some.set()
            raise ValueError("the caller's own")

    task = asyncio.ensure_future(body())
    await some.wait()
    return task


async def closed(answer, some):
    async with contextlib.aclosing(answer):
        async for _ in answer:
            some.set()
            break


async def dropped(answer, some):
    async def body(answer):
        async for _ in answer:
            some.set()
            break

    holder = [answer]
    del answer
    await body(holder.pop())


async def out_of_time(answer, some):
    await anext(answer)
    some.set()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(whole(answer, some), 0.05)


async def whole(answer, some):
    async for _ in answer:
        some.set()


WAYS = [cancelled_while_it_waits, cancelled_in_its_body, failed_in_its_body, closed, out_of_time]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_who_leaves_frees_the_slot_before_the_next_step(llm, released, way):
    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            answer, some = many.stream(random_ids(20), LONG), asyncio.Event()
            task = await way(answer, some)
            await asyncio.sleep(0)  # where a task ends
            at = held(many)
            other = await many.generate(random_ids(30, seed=2), short(3))
            if task is not None:
                await asyncio.wait([task])
            del answer, task  # held until here, its frames and its exception too
            return at, other

    at, other = asyncio.run(main())
    assert other.token_ids == llm.generate(random_ids(30, seed=2), short(3)).token_ids
    assert len(released) == 2 and at <= released[0] <= at + 2 < 900


def test_an_iterator_that_is_dropped_frees_the_slot(llm, released):
    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            await dropped(many.stream(random_ids(20), LONG), asyncio.Event())
            at = held(many)
            await many.generate([1, 2, 3], short(1))
            return at

    at = asyncio.run(main())
    assert len(released) == 2 and at <= released[0] <= at + 2 < 900


def test_one_that_leaves_while_it_waits_never_begins(llm, released):
    async def main():
        async with AsyncLLM(llm, slots=1, waiting=1) as many:
            first = asyncio.ensure_future(many.generate(random_ids(20), short(40)))
            await until(lambda: many.running == 1)
            second = asyncio.ensure_future(many.generate(random_ids(21), short(40)))
            await until(lambda: many.waiting == 1)
            with pytest.raises(Busy, match="1 requests are waiting"):
                await many.generate([1, 2], short(1))
            second.cancel()
            await until(lambda: many.waiting == 0, 1.0)
            third = await many.generate([4, 5, 6], short(2))  # the place is free again
            return (await first).token_ids, third.token_ids

    first, third = asyncio.run(main())
    assert len(first) == 40 and len(third) == 2 and len(released) == 2


def test_with_no_place_to_wait_the_slots_are_still_there(llm):
    async def main():
        async with AsyncLLM(llm, slots=2, waiting=0) as many:
            tasks = [asyncio.ensure_future(many.generate([n, 5], short(60))) for n in (1, 2)]
            await until(lambda: many.running == 2)
            with pytest.raises(Busy):
                await many.generate([1, 2], short(1))
            return await asyncio.gather(*tasks)

    assert all(len(found.token_ids) == 60 for found in asyncio.run(main()))


def test_one_that_leaves_while_his_prompt_is_read_costs_one_chunk_more(llm, released):
    seen = []

    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            pieces = many.stream(random_ids(1000), short(1), progress=seen.append)
            task = asyncio.ensure_future(whole(pieces, asyncio.Event()))
            await until(lambda: len(seen) > 1)
            task.cancel()
            await many.generate([1, 2, 3], short(1))

    asyncio.run(main())
    assert released[0] <= seen[-1].done + 2 * 64 < 1000


# ---------------------------------------------------------------- progress


def test_progress_is_told_in_the_callers_thread(llm):
    told = []

    def progress(found: PrefillProgress) -> None:
        told.append((threading.get_ident(), found))

    async def main():
        async with AsyncLLM(llm) as many:
            return await many.generate(random_ids(300), short(2), progress)

    found = asyncio.run(main())
    assert {thread for thread, _ in told} == {threading.get_ident()}
    done = [one.done for _, one in told]
    assert done == [0, 64, 128, 192, 256, 300] and {one.total for _, one in told} == {300}
    assert told[0][1].eta is None and told[-1][1].eta == 0.0
    assert 0 < told[1][1].work < told[2][1].work < told[-1][1].work == 1.0
    assert found.stats.prompt_tokens == 300 and found.stats.prefill_seconds > 0


def test_progress_that_fails_ends_its_own_answer_only(llm):
    def fail(_):
        raise ValueError("the caller's own")

    async def main():
        async with AsyncLLM(llm, slots=2) as many:
            good = asyncio.ensure_future(many.generate(random_ids(200), short(8)))
            with pytest.raises(ValueError, match="the caller's own"):
                await many.generate(random_ids(300), LONG, fail)
            return await good

    assert len(asyncio.run(main()).token_ids) == 8


# ---------------------------------------------------------------- errors


def test_each_error_is_its_own_callers(llm):
    async def main():
        async with AsyncLLM(llm, slots=2) as many:
            good = asyncio.ensure_future(many.generate(random_ids(50), short(20)))
            for prompt, kind in (
                ([1] * 1025, ContextTooLong),
                ([97], SettingError),
                ([], SettingError),
                ("text", SettingError),  # this model has no tokenizer
            ):
                with pytest.raises(kind):
                    await many.generate([prompt] if prompt == [] else prompt, short(2))
            with pytest.raises(SettingError, match="SamplingParams"):
                many.stream([1], {"max_tokens": 2})
            with pytest.raises(SettingError, match="progress"):
                many.stream([1], progress=3)
            biased = SamplingParams(max_tokens=2, logit_bias={5000: 1.0})
            with pytest.raises(EngineError):  # found in the model's thread
                await many.generate([1, 2, 3], biased)
            return await good

    assert len(asyncio.run(main()).token_ids) == 20


def test_wrong_arguments_are_named(llm):
    for wrong in ({"slots": 0}, {"waiting": -1}, {"pause": 0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            AsyncLLM(llm, **wrong)
    with pytest.raises(SettingError, match="expected an LLM"):
        AsyncLLM("pocket")


def test_a_fault_of_the_thread_reaches_everybody(llm, monkeypatch):
    async def main():
        many = AsyncLLM(llm, slots=1)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(many._worker.batch.scheduler, "schedule", fault)
        tasks = [asyncio.ensure_future(many.generate([1, 2, n], short(4))) for n in range(3)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(WorkerClosed):
            await many.generate([1, 2], short(1))
        await many.aclose()
        return found

    def fault():
        raise RuntimeError("a fault")

    assert [str(error) for error in asyncio.run(main())] == ["a fault"] * 3


# ---------------------------------------------------------------- beside other calls, and the end


@pytest.mark.parametrize("wait", [False, True])
def test_other_calls_of_the_llm_take_turns_and_stop_no_caller(wait):
    llm = tiny_llm(SPARSE, max_context=1024, threads=1, wait=wait)
    beside, refused = [], []

    def call():
        for _ in range(5):
            try:
                beside.append(len(llm.generate([1, 2, 3], short(3)).token_ids))
            except Busy:
                refused.append(1)

    async def main():
        async with AsyncLLM(llm, slots=2) as many:
            tasks = [asyncio.ensure_future(many.generate([n, 5], short(150))) for n in (1, 2, 3)]
            await until(lambda: many.running == 2)
            await asyncio.to_thread(call)
            assert many.running
            return [len(found.token_ids) for found in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == [150] * 3
    assert len(beside) + len(refused) == 5 and set(beside) <= {3}
    assert not refused if wait else True


def test_closing_refuses_who_waits_and_ends_who_is_answered(llm):
    async def main(grace):
        many = AsyncLLM(llm, slots=1)
        first = asyncio.ensure_future(many.generate(random_ids(20), short(60)))
        await until(lambda: many.running == 1)
        second = asyncio.ensure_future(many.generate(random_ids(21), short(60)))
        await until(lambda: many.waiting == 1)
        await many.aclose(grace)
        with pytest.raises(WorkerClosed):
            await second
        with pytest.raises(WorkerClosed):
            await many.generate([1], short(1))
        await many.aclose()  # again is nothing
        assert not many._worker._thread.is_alive() and not many._worker.slots.slots
        return await first

    cut, ended = asyncio.run(main(0.0)), asyncio.run(main(60.0))
    assert cut.finish_reason == "interrupted" and len(cut.token_ids) < 60
    assert ended.finish_reason == "length" and len(ended.token_ids) == 60
    with pytest.raises(SettingError, match="grace"):
        AsyncLLM(llm).close(-1)


def test_a_prompt_that_closing_cuts_raises(llm):
    async def main():
        many, seen = AsyncLLM(llm), []
        answer = many.generate(random_ids(1000), short(1), seen.append)
        task = asyncio.ensure_future(answer)
        await until(lambda: len(seen) > 1)
        await many.aclose()
        with pytest.raises(WorkerClosed, match="not read in time"):
            await task

    asyncio.run(main())


def test_a_thread_ends_with_its_async_llm(llm):
    many = AsyncLLM(llm)
    thread = many._worker._thread
    assert thread.is_alive()
    del many
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_loops_of_several_threads(llm):
    many, found = AsyncLLM(llm, slots=2), {}

    def run(n):
        found[n] = asyncio.run(many.generate([n, 5, 6], short(30))).token_ids

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    many.close()
    assert found == {n: llm.generate([n, 5, 6], short(30)).token_ids for n in range(4)}


def test_pieces_may_be_taken_by_tasks_of_their_own(llm):
    async def main():
        async with AsyncLLM(llm) as many:
            answer, found = many.stream([1, 2, 3], short(6)), []
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    found.append((await asyncio.wait_for(anext(answer), 20)).token_id)
                    await asyncio.sleep(0)
            return found

    assert asyncio.run(main()) == llm.generate([1, 2, 3], short(6)).token_ids


def test_a_chat_with_the_shipped_model():
    llm = LLM(str(POCKET), max_context=512, threads=1)
    messages = [
        {"role": "system", "content": "The pass key of Bob is 41213."},
        {"role": "user", "content": "What is the pass key of Bob?"},
    ]

    async def main():
        async with AsyncLLM(llm, slots=2) as many:
            ids = await many.chat_ids(messages)
            text = "".join([piece.text async for piece in many.stream(ids, short(12))])
            return text, (await many.chat(messages, short(12))).text

    text, again = asyncio.run(main())
    assert text == again == llm.chat(messages, short(12)).text and "41213" in text


@pytest.mark.parametrize("version", ["2.0", "2.4"])
def test_a_client_who_leaves_a_streaming_response_frees_its_slot(llm, released, version):
    """Starlette cancels a stream whose client leaves, or is told so by a `send` that fails; the
    server then catches what was raised, so that no task fails.
    """
    responses = pytest.importorskip("starlette.responses")
    left = asyncio.Event()

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body"):
            left.set()
            if version == "2.4":
                raise OSError("the client left")

    async def main():
        async with AsyncLLM(llm, slots=1) as many:
            pieces = many.stream(random_ids(20), LONG)
            response = responses.StreamingResponse(str(p.token_id) async for p in pieces)
            del pieces
            scope = {"type": "http", "asgi": {"spec_version": version}}
            with contextlib.suppress(Exception):
                await response(scope, receive, send)
            del response
            at = held(many)
            await many.generate([1, 2, 3], short(1))
            return at

    at = asyncio.run(main())
    assert len(released) == 2 and at <= released[0] <= at + 3 < 900
