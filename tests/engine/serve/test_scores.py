"""`echo` with `logprobs`: a prompt's own tokens, scored through the server.

Stops: a list that is one short, scores of rows that were held and not computed, offsets that point
elsewhere, a harness's requests refused, a chance result that nobody notices.
"""

from functools import partial

import openai
import pytest

from tests.engine.serve.conftest import serving

TEXT = "The pass key of Alice is 48213. Where is the red door? ½ 漢字."


def complete(server, **settings):
    settings = {"model": "pocket", "temperature": 0, "echo": True} | settings
    return server.openai.completions.create(**settings)


def ids_of(server, text=TEXT):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


@pytest.fixture(scope="module")
def expected(server):
    """The library's scores, before any request: the worker's thread owns the model later."""
    return server.service.llm.score(server.service.llm.encode(TEXT), 3)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_prompts_tokens_are_scored_and_then_the_answers(server, expected, most):
    ids, by_text = expected.token_ids, complete(server, prompt=TEXT, logprobs=2, max_tokens=most)
    assert ids == ids_of(server)
    assert by_text.usage.completion_tokens <= most and by_text.usage.prompt_tokens == len(ids)
    (choice,) = by_text.choices
    found = choice.logprobs
    for values in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset):
        assert len(values) == by_text.usage.total_tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected.logprobs[1:], abs=1e-3)
    assert all(1 <= len(top) <= 2 for top in found.top_logprobs[1:])
    assert choice.text.startswith(TEXT) and choice.finish_reason in ("length", "stop")
    (again,) = complete(server, prompt=ids, logprobs=2, max_tokens=most).choices
    assert again.text == choice.text and again.logprobs.tokens == found.tokens
    assert again.logprobs.token_logprobs == found.token_logprobs
    # each token begins where the text says, where its characters are its own
    for offsets in (found.text_offset, again.logprobs.text_offset):
        for token, at in zip(found.tokens, offsets):
            assert "\ufffd" in token or choice.text.startswith(token, at)


def test_nothing_that_is_held_is_taken_for_scores(server, expected):
    """A prompt that is held whole is read again; a chat that is held stays held."""
    ask = partial(complete, server, prompt=TEXT, max_tokens=1)
    ask(echo=False)
    held = ask(echo=False)
    assert held.usage.prompt_tokens_details.cached_tokens == len(expected.token_ids)
    for _ in range(2):
        again = ask(logprobs=1)
        assert again.usage.prompt_tokens_details.cached_tokens == 0
        found = again.choices[0].logprobs.token_logprobs[1 : len(expected.token_ids)]
        assert found == pytest.approx(expected.logprobs[1:], abs=1e-3)
    # and it leaves rows that others may use
    assert ask(echo=False).usage.prompt_tokens_details.cached_tokens == len(expected.token_ids)


def test_choices_have_the_same_prompt(server):
    reply = complete(server, prompt=TEXT, logprobs=1, max_tokens=2, n=2, temperature=1.5, seed=3)
    one, two = (choice.logprobs for choice in reply.choices)
    size = reply.usage.prompt_tokens
    assert one.token_logprobs[:size] == two.token_logprobs[:size]
    assert len(one.tokens) + len(two.tokens) == 2 * size + reply.usage.completion_tokens
    only = complete(server, prompt=TEXT, max_tokens=0, n=2)
    assert [c.text for c in only.choices] == [TEXT] * 2 and only.usage.completion_tokens == 0


def test_what_cannot_be_scored_is_refused(server):
    for settings, field in (
        ({"logprobs": 1, "stream": True}, "stream"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"prompt": [[1, 2], [3]], "logprobs": 1}, "prompt"),
        ({"prompt": [], "logprobs": 1}, "prompt"),
        ({"prompt": [1] * 5000, "logprobs": 1}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, **{"prompt": TEXT} | settings)
        assert caught.value.param == field and "\n" not in caught.value.message


# What lm-evaluation-harness 0.4.13 sends (`--model local-completions`, tokenizer_backend=remote):
# /tokenizer_info once, /tokenize for a context and for the context with its continuation, and one
# completion for each continuation; its sum is over the scores behind the context's, but the last.
def harness(server, context, continuation):
    def tokens(text):
        body = {"prompt": text, "add_special_tokens": False}
        return server.post("/tokenize", body).json()["tokens"]

    whole, before = tokens(context + continuation), len(tokens(context))
    reply = server.post(
        "/v1/completions",
        {
            "model": "pocket",
            "prompt": [whole],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    )
    assert reply.status_code == 200, reply.text
    found = reply.json()["choices"][0]["logprobs"]
    scores, tops = (found[name][before:-1] for name in ("token_logprobs", "top_logprobs"))
    assert len(scores) == len(whole) - before > 0
    return sum(scores), all(s == max(top.values()) for s, top in zip(scores, tops)), whole


def test_a_harnesss_choices_are_scored(server):
    info = server.http.get("/tokenizer_info").json()
    tokenizer = server.service.llm.tokenizer
    assert info["eos_token"] == tokenizer.eos_token and info["bos_token"] == tokenizer.bos_token
    assert info["chat_template"] == tokenizer.template.source
    ends = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})
    assert tokenizer.token(ends.json()["tokens"][0]) == info["eos_token"]
    context = "The pass key of Alice is 48213. The grass is green. The pass key of Alice is"
    found = {key: harness(server, context, f" {key}") for key in ("48213", "71950", "green")}
    best = max(found, key=lambda key: found[key][0])
    assert best == "48213" and len({value for value, _, _ in found.values()}) == 3
    for value, greedy, whole in found.values():
        assert server.post("/detokenize", {"tokens": whole}).json()["prompt"].startswith(context)
        assert value < 0 and isinstance(greedy, bool)


def test_a_sparse_servers_scores_are_its_prompts_own(pocket):
    """OmniKV reads prompts by full attention: its scores are full attention's."""
    from engine import LLM, Full, OmniKV

    settings = dict(max_context=4096, threads=1, chunk=128)
    sparse = OmniKV(tokens=64, dense_below=0)
    text = TEXT * 12
    full = LLM(str(pocket.folder), method=Full(), **settings).score(text)
    with serving(LLM(str(pocket.folder), method=sparse, load=False, **settings)) as running:
        reply = complete(running, prompt=text, logprobs=1, max_tokens=1)
        found = reply.choices[0].logprobs.token_logprobs[:-1]
        assert running.service.sparse
    assert found[1:] == pytest.approx(full.logprobs[1:], abs=1e-3)


def test_choices_through_the_server_score_as_transformers():
    """Not by chance, as through servers that pass over echo: each item to 1e-3 in float32."""
    import torch
    import transformers

    from engine import LLM, Full
    from tests.builders import POCKET

    theirs = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32).eval()
    llm = LLM(POCKET, dtype="float32", method=Full(), max_context=512, threads=1, load=False)
    context = "The pass key of Alice is 48213. The grass is green. The pass key of Alice is"
    with serving(llm) as running:
        for choice in (" 48213", " 71950, or another", " green"):
            found, greedy, whole = harness(running, context, choice)
            before = len(running.post("/tokenize", {"prompt": context}).json()["tokens"])
            ids = torch.tensor([whole])
            with torch.inference_mode():
                logits = theirs(ids).logits[0, before - 1 : -1].double()
            values = torch.log_softmax(logits, -1).gather(1, ids[0, before:, None])
            assert found == pytest.approx(float(values.sum()), abs=1e-3)
            assert greedy == bool((logits.argmax(-1) == ids[0, before:]).all())
