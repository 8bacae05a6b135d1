"""`"omnikv": {"sources": N, "check": N}`: what a request learns of its answer is what the library
says of it, and its places are those of the client's own text.

Stops: passages of another answer or another message, offsets that do not point at them, a check
that is not session.check's, evidence that n choices share, work for a client that has left.
"""

import asyncio
import json

import openai
import pytest

from engine import LLM, OmniKV, SamplingParams
from engine.evidence.sources import Choices, rank_passages
from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.serve.worker.evidence import places
from tests.builders import POCKET
from tests.engine.serve.conftest import serving

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
FACT = "The pass key of Alice is 48213."
DOCUMENT = FILLER * 5 + "\n" + FILLER * 5 + FACT + "\n" + FILLER * 25
MESSAGES = [
    {"role": "system", "content": FILLER},
    {"role": "user", "content": DOCUMENT + "\n\nWhat is the pass key of Alice?"},
]
EXTRA = {"omnikv": {"sources": 3, "check": 4}}


@pytest.fixture(scope="module")
def sparse():
    method = OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=64, dense_below=0)
    llm = LLM(POCKET, method=method, max_context=2048, threads=1, chunk=256, load=False)
    with serving(llm, slots=2) as running:
        yield running


def ask(server, **settings):
    settings = {"model": "pocket", "messages": MESSAGES, "max_tokens": 12, "temperature": 0} | (
        settings
    )
    return server.openai.chat.completions.create(**settings)


def test_sources_and_check_are_the_librarys(sparse):
    choice = ask(sparse, extra_body=EXTRA).choices[0]
    assert "48213" in choice.message.content
    found = choice.model_extra["omnikv"]
    assert 1 < len(found["sources"]) <= 3 and found["selections"] > 3
    first, *others = found["sources"]
    assert first["text"] == FACT and first["message"] == 1
    assert first["share"] > 2 * others[0]["share"]
    assert sum(source["share"] for source in found["sources"]) == pytest.approx(1)
    for source in found["sources"]:
        content = MESSAGES[source["message"]]["content"]
        assert content[source["start"] : source["stop"]] == source["text"]
        assert source["line"] == 1 + content[: source["start"]].count("\n")
    ids = sparse.service.prompts.chat(MESSAGES).ids
    low, high = first["tokens"]
    assert "48213" in sparse.service.llm.tokenizer.decode(ids[low : high + 1])
    # the worker idles: its thread and this one take turns
    with sparse.service.llm.session() as session:
        pieces = list(session.generate(ids, SamplingParams(max_tokens=12)))
        report = session.check(4)
    assert not session.counters.dense_steps and len(pieces) > 4
    check = found["check"]
    assert check["steps"] == 4 and check["agreement"] == report.agreement
    assert check["mean_kl"] == pytest.approx(report.mean_kl, rel=1e-3, abs=1e-7)
    assert check["context"] == report.context and check["budget"] == report.budget == 64
    assert 0 < check["attention_mass"] < 1


def test_each_choice_has_its_own_and_a_stream_brings_it_with_the_end(sparse):
    both = ask(sparse, n=2, seed=1, temperature=1.5, extra_body={"omnikv": {"sources": 1}})
    made = [choice.model_extra["omnikv"]["selections"] for choice in both.choices]
    tokens = both.usage.completion_tokens
    assert len(made) == 2 and sum(made) in (tokens, 2 * tokens)  # one or two filter layers
    assert all("check" not in choice.model_extra["omnikv"] for choice in both.choices)

    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{sparse.url}/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(
                model="pocket",
                messages=MESSAGES,
                max_tokens=12,
                temperature=0,
                stream=True,
                extra_body=EXTRA,
            )
            return [chunk.choices[0] async for chunk in chunks]

    parts = asyncio.run(stream())
    said = [part for part in parts if "omnikv" in (part.model_extra or {})]
    assert said == parts[-1:] and said[0].finish_reason
    assert said[0].model_extra["omnikv"]["sources"][0]["text"] == FACT
    assert said[0].model_extra["omnikv"]["check"]["steps"] == 4


def test_a_request_may_choose_full_attention_or_exact_mode(sparse):
    """Exact mode says what full attention says; what is held is not read again."""

    def said(method):
        reply = ask(sparse, extra_body={"omnikv": {"method": method}, "ignore_eos": True})
        return reply.choices[0].message.content, reply.usage

    texts = {method: said(method) for method in ("full", "exact", "sparse", "full")}
    assert texts["full"][0] == texts["exact"][0]
    sparse.until(lambda: sparse.worker.running == 0)
    held = {type(slot.session.method).__name__ for slot in sparse.worker.slots.slots}
    assert "Full" in held and len(held) <= 2
    for _, usage in texts.values():
        assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 1
    ids = sparse.service.prompts.chat(MESSAGES).ids
    with sparse.service.llm.session(Full()) as session:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        whole = "".join(p.text for p in session.generate(ids, params))
    assert texts["full"][0] == whole.lstrip()


def test_a_stream_says_what_each_step_read(sparse):
    """Each step's passages are those of a lone session's selection, and point into the messages."""
    live = {"sources": 3, "live": True, "figures": True, "progress": True}
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "stream": True}
    lines = sparse.post("/v1/chat/completions", body | {"omnikv": live}).text.split("\n\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0] for chunk in data]
    steps = [part["omnikv"]["reads"] for part in parts if "reads" in part.get("omnikv", {})]
    prompt, alone = sparse.service.prompts.chat(MESSAGES), []
    contents = [message["content"] for message in MESSAGES]
    with sparse.service.llm.session() as session:
        for _ in session.generate(prompt.ids, SamplingParams(max_tokens=12)):
            one = Choices()
            one.add(session.selections, session.selection_scores)
            ranked = [
                (passage.score, place.message, place.offset + passage.start - place.start)
                for place in places(prompt.text, contents)
                for passage in rank_passages(
                    prompt.text, prompt.ends, one.counts, place.start, place.stop, 3
                )
            ]
            alone.append(sorted(ranked, reverse=True)[:3])
        written = len(session.ids) - len(prompt.ids)
    assert len(steps) == len(alone) == written > 4
    for reads, ranked in zip(steps, alone):
        total = sum(score for score, *_ in ranked)
        found = [(message, start, share) for message, start, _, share in reads]
        wanted = [
            (message, start, pytest.approx(score / total, abs=1e-3))
            for score, message, start in ranked
        ]
        assert found == wanted
        texts = [contents[message][start:stop] for message, start, stop, _ in reads]
        assert all(text in FILLER or text == FACT for text in texts)
    assert sum(contents[m][start:stop] == FACT for (m, start, stop, _), *_ in steps) > written / 2
    said = next(part["omnikv"] for part in parts if part["finish_reason"])
    assert said["sources"][0]["text"] == FACT and said["figures"]["dense_steps"] == 0
    assert said["figures"]["sparse_steps"] == written
    weights = sparse.service.llm.plan().bytes_of("weights")
    assert weights < said["figures"]["step_bytes"] < said["figures"]["full_step_bytes"]
    full = ask(sparse, extra_body={"omnikv": {"method": "full", "figures": True}}).choices[0]
    figures = full.model_extra["omnikv"]["figures"]
    assert figures["sparse_steps"] == 0 and figures["speedup"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "value, param",
    [
        (5, "omnikv"),
        ({"sources": -1}, "omnikv.sources"),
        ({"sources": True}, "omnikv.sources"),
        ({"sources": 65}, "omnikv.sources"),
        ({"check": 33}, "omnikv.check"),
        ({"check": "4"}, "omnikv.check"),
        ({"saurces": 4}, "omnikv.saurces"),
        ({"method": "other"}, "omnikv.method"),
        ({"method": "full", "check": 1}, "omnikv.check"),
        ({"sources": 1, "live": 1}, "omnikv.live"),
        ({"sources": 1, "live": True}, "omnikv.live"),  # not in a stream
        ({"live": True}, "omnikv.live"),
        ({"progress": "often"}, "omnikv.progress"),
    ],
)
def test_bad_values_are_refused_by_name(sparse, value, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(sparse, extra_body={"omnikv": value})
    assert caught.value.param == param
    reply = sparse.post("/v1/completions", {"prompt": "a", "omnikv": {"sources": 1}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "omnikv"


def test_a_server_in_exact_mode_answers_so_unless_a_request_says_otherwise():
    """Started with --exact: drafts without being asked, and still the method that drafts."""
    inner = OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=64, dense_below=0)
    llm = LLM(POCKET, method=Exact(inner, draft=3), max_context=2048, threads=1, load=False)
    with serving(llm, slots=2) as running:
        assert running.http.get("/v1/models").json()["data"][0]["meta"]["method"] == "exact"

        def figures(**more):
            extra = {"omnikv": {"figures": True, **more}}
            choice = ask(running, extra_body=extra).choices[0]
            return choice.message.content, choice.model_extra["omnikv"]["figures"]

        text, own = figures()
        assert own["drafted"] and not own.get("sparse_steps")
        assert figures(method="exact")[1]["drafted"] == own["drafted"]
        assert figures(method="sparse")[1]["sparse_steps"]
        whole, full = figures(method="full")
        assert not full.get("drafted") and not full["sparse_steps"] and whole == text
        plain = ask(running).choices[0].message.content
        assert plain == text  # a request without the field
        prompt = running.post("/v1/completions", {"prompt": "a b", "max_tokens": 4})
        assert prompt.status_code == 200
    held = {type(method).__name__ for method in running.service.methods.values()}
    assert held == {"OmniKV", "Full", "Exact"}


def test_a_method_that_reads_everything_has_nothing_to_say():
    llm = LLM(POCKET, method=Full(), max_context=1024, threads=1, load=False)
    with serving(llm, slots=1) as running:
        for value in ({"sources": 1}, {"check": 1}):
            with pytest.raises(openai.BadRequestError, match="--method omnikv") as caught:
                ask(running, messages=MESSAGES[:1], extra_body={"omnikv": value})
            assert caught.value.param == f"omnikv.{next(iter(value))}"
        assert ask(running, messages=[{"role": "user", "content": "a"}], extra_body={"omnikv": {}})


def test_contents_are_found_in_what_a_template_makes_of_them():
    text = "<s>one two\n<u>three\n\nthree<q>four<e>"
    found = places(text, ["one two ", " three\n\nthree\n\nfour", "absent"])
    assert [(p.message, text[p.start : p.stop]) for p in found] == [
        (0, "one two"),
        (1, "three"),
        (1, "three"),
        (1, "four"),
    ]
    assert [p.offset for p in found] == [0, 1, 8, 15]
    assert [p.start for p in found] == sorted(p.start for p in found)
