"""What clients read before they ask: the context under every server's name, the tokenizer, figures
under the names that routers know, and what this server does not do.

Stops: a client that takes another context than the server's, a path of this machine told, a
histogram that does not add up, a client that retries what will never work.
"""

import re

import openai
import pytest

from engine.serve.worker.metrics import BUCKETS
from tests.engine.serve.test_openai_client import chat


def test_the_context_under_every_name(server):
    context = server.service.llm.max_context
    model = server.http.get("/v1/models").json()["data"][0]
    names = ("max_model_len", "context_length", "max_context_length")
    assert [model[name] for name in names] == [context] * 3 == [model["meta"]["n_ctx"]] * 3
    assert server.http.get("/v1/models/pocket").json() == model
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == context
    assert props["total_slots"] == 3 and props["model_alias"] == "pocket"
    assert props["model_path"] == "pocket" and "/" not in props["model_path"]  # no path of ours
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["chat_template"] == server.service.llm.tokenizer.template.source
    assert server.http.get("/tokenizer_info").json()["model_max_length"] == context


def test_texts_and_tokens_in_three_forms(server):
    end = server.service.llm.tokenizer.eos_token

    def ids(**body):
        reply = server.post("/tokenize", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["count"] == len(reply.json()["tokens"])
        return reply.json()["tokens"]

    text = f"The code {end}"
    plain, known = ids(text=text), ids(text=text, special=True)
    assert ids(prompt=text) == known and len(known) < len(plain)
    bare = ids(prompt=text, add_special_tokens=False)
    assert ids(content=text) == bare == known[len(known) - len(bare) :]
    assert ids(content=text, add_special=True) == known
    assert server.post("/v1/tokenize", {"text": text}).json()["tokens"] == plain
    for path in ("/detokenize", "/v1/detokenize"):
        found = server.post(path, {"tokens": plain}).json()
        assert found == dict.fromkeys(("text", "prompt", "content"), text)
    for body, field in (
        ({"prompt": text, "add_special_tokens": 1}, "add_special_tokens"),
        ({"content": text, "add_special": "x"}, "add_special"),
        ({"prompt": 3}, "prompt"),
        ({}, "text"),
    ):
        refused = server.post("/tokenize", body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score"])
def test_what_is_not_done_is_refused_once(server, path):
    reply = server.post(path, {"model": "pocket", "input": "x", "query": "y"})
    assert reply.status_code == 501 and reply.headers["x-should-retry"] == "false"
    assert "no embeddings" in reply.json()["error"]["message"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as client:
        before = asked(server, "/v1/embeddings")
        with pytest.raises(openai.APIStatusError) as caught:
            client.embeddings.create(model="pocket", input="x")
        assert caught.value.status_code == 501 and asked(server, "/v1/embeddings") == before + 1


def asked(server, path):
    return figures(server).get(f'omnikv_requests_total{{path="{path}",status="501"}}', 0)


def figures(server):
    lines = server.http.get("/metrics").text.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line[0] != "#"]
    assert len(dict(found)) == len(found)
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(kinds)) == len(kinds)
    return {name: float(value) for name, value in found}


def test_figures_under_vllms_names(server):
    label = '{model_name="pocket"}'
    before = figures(server)
    for _ in range(2):
        usage = chat(server, max_tokens=3, extra_body={"ignore_eos": True}).usage
    now = figures(server)

    def grown(name, of=label):
        return now[name + of] - before[name + of]

    assert grown("vllm:generation_tokens_total") == 6
    assert grown("vllm:prompt_tokens_total") == 2 * usage.prompt_tokens
    assert grown("vllm:prefix_cache_queries_total") == 2 * usage.prompt_tokens
    assert usage.prompt_tokens <= grown("vllm:prefix_cache_hits_total") <= 2 * usage.prompt_tokens
    first = "vllm:time_to_first_token_seconds"
    assert grown(f"{first}_count") == 2 and 0 < grown(f"{first}_sum") < 40
    edges = [f'{{model_name="pocket",le="{edge}"}}' for edge in (*BUCKETS, "+Inf")]
    counts = [now[f"{first}_bucket{edge}"] for edge in edges]
    assert counts == sorted(counts) and counts[-1] == now[f"{first}_count{label}"]
    assert now[f"vllm:num_requests_waiting{label}"] == now["omnikv_requests_waiting"] == 0
    stream = chat(server, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    during = figures(server)
    assert during[f"vllm:num_requests_running{label}"] == 1
    assert 0 < during[f"vllm:kv_cache_usage_perc{label}"] < 1
    stream.close()
    server.until(lambda: figures(server)[f"vllm:kv_cache_usage_perc{label}"] == 0)


def test_a_models_name_cannot_write_a_line(server):
    worker = server.worker
    text = worker.metrics.text(0, 0, 0, worker.slots, 'a"b\\c\nvllm:x 1')
    assert 'model_name="a\\"b\\\\c\\nvllm:x 1"' in text
    value = r"(# (HELP|TYPE) .*|[a-z:_]+(\{([a-z_]+=\"([^\"\\\n]|\\.)*\",?)*\})? [0-9.e+-]+)"
    assert all(re.fullmatch(value, line) for line in text.splitlines())
