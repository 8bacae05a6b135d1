"""OmniKV on a model of transformers chooses what a session of the engine chooses, index by index.

Stops: a selection of another query, a tail or a budget that differs from the engine's, a layer that
attends to everything where it should be sparse, keys of another cache, padding that is attended to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine import LLM, OmniKV, SamplingParams
from engine.base.errors import ContextTooLong, SettingError

transformers = pytest.importorskip("transformers")

from engine.integrations.transformers import OmniKVCache  # noqa: E402  needs transformers

HOME = Path(os.environ.get("OMNIKV_HOME", Path.home() / ".cache" / "omnikv"))
SMOLLM2 = HOME / "models" / "smollm2-135m-instruct"
TINY = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.25,  # peaked attention
)
SPARSE = dict(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0)
METHODS = {
    "last": {},
    "raw": dict(scores="raw"),
    "uniform": dict(selector="uniform", window=8),
    "exponential": dict(selector="exponential", window=16, scores="raw"),
    "share": dict(tokens=None, share=0.1),
    "sink": dict(sink=4),
    "wait": dict(wait_layers=1),
    "prefill": dict(prefill_ratio=1, prefill_block=64, prefill_dense_end=64),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="omnikv", dtype=torch.float32
    ).eval()


def ids_of(count, vocab=199, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def called(model, ids, cache):
    """float32 logits [vocab] of the last of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].float()


def compare(model, folder, method, prompt, steps, tolerance):
    """Both read a prompt, then the same tokens one by one; the largest difference to full attention
    in any step.
    """
    cache = OmniKVCache(model, method, max_context=2048)
    llm = LLM(folder, dtype="float32", backend="reference", max_context=2048, threads=1)
    apart = 0.0
    with llm.session(method) as session, llm.session() as full:
        ours, theirs = session.prefill(prompt), called(model, prompt, cache)
        torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)
        full.prefill(prompt)
        for token in steps:
            ours, theirs = session.decode(token), called(model, [token], cache)
            apart = max(apart, float((ours - full.decode(token)).abs().max()))
            torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)
            assert cache.selections.keys() == session.selections.keys() == {*method.filter_layers}
            for layer, mine in session.selections.items():
                assert torch.equal(cache.selections[layer], mine)
        assert cache.sparse_steps == session.stats.sparse_steps == len(steps)
        assert cache.dense_steps == 0 and cache.get_seq_length() == len(session)
    return apart


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_random_llama_chooses_what_a_session_chooses(model, folder, settings):
    method = OmniKV(**{**SPARSE, **settings})
    prompt = ids_of(300)
    apart = compare(model, folder, method, prompt, ids_of(70, seed=2), 2e-4)
    assert apart > 0.05  # of what full attention says: it was sparse


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127])
def test_short_prompts_and_the_tails_border(model, folder, length):
    """Where the tail covers everything nothing is chosen, and nothing differs."""
    compare(model, folder, OmniKV(**SPARSE), ids_of(length), ids_of(70, seed=2), 2e-4)


def test_a_real_model_chooses_what_a_session_chooses():
    if not (SMOLLM2 / "config.json").is_file():
        pytest.skip("make real-model fetches it")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2, attn_implementation="omnikv", dtype=torch.float32
    ).eval()
    text = "The lighthouse keeper wrote the number 48213 into the book. " + "Rain fell. " * 120
    ids = transformers.AutoTokenizer.from_pretrained(SMOLLM2)(text)["input_ids"]
    method = OmniKV(filter_layers=(6, 14, 22), tokens=32, tail=64, dense_below=0)
    apart = compare(model, SMOLLM2, method, ids, ids[20:36], 2e-3)
    assert apart > 0.05


def test_a_budget_that_holds_everything_is_eager_attention(model, folder):
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    method = OmniKV(**{**SPARSE, "tokens": 600})
    cache, theirs = OmniKVCache(model, method, 512), transformers.DynamicCache()
    few = OmniKVCache(model, OmniKV(**SPARSE), 512)
    for part in (ids_of(300), *([token] for token in ids_of(20, seed=3))):
        wanted = called(eager, part, theirs)
        torch.testing.assert_close(called(model, part, cache), wanted, rtol=2e-4, atol=2e-4)
        sparse = called(model, part, few)
    assert cache.sparse_steps == few.sparse_steps == 20
    assert (sparse - wanted).abs().max() > 0.05  # fewer rows would have been noticed


def test_generate_writes_what_the_engine_writes_over_two_turns(model, folder):
    method, prompt = OmniKV(**SPARSE), ids_of(200)
    cache = OmniKVCache(model, method, 1024)
    llm = LLM(folder, dtype="float32", backend="reference", max_context=1024, threads=1)
    settings = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    ids = torch.tensor([prompt])
    with llm.session(method) as session:
        for turn in (prompt, ids_of(90, seed=5)):
            ids = ids if turn is prompt else torch.cat([ids, torch.tensor([turn])], dim=1)
            wanted = [piece.token_id for piece in session.generate(turn, params)]
            before = ids.shape[1]
            mask = torch.ones_like(ids)  # else a 0 in the prompt would be padding
            ids = model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **settings
            )
            assert ids[0, before:].tolist() == wanted
            # transformers leaves the last token out of its cache until the next turn
            called(model, ids[0, -1:].tolist(), cache)
    assert cache.sparse_steps == 24


def test_a_cache_that_was_reset_begins_anew(model):
    cache = OmniKVCache(model, OmniKV(**{**SPARSE, "tokens": None, "share": 0.1}), 512)
    found = []
    for _ in range(2):
        called(model, ids_of(300), cache)
        assert cache.selections == {}
        found.append((called(model, [7], cache), cache.selections))
        cache.reset()
        assert cache.get_seq_length() == 0 == cache.sparse_steps and cache.selections == {}
        called(model, ids_of(64, seed=9), cache)
        cache.reset()
    (one, chose), (other, chose_again) = found
    assert torch.equal(one, other) and chose.keys() == chose_again.keys()
    assert all(torch.equal(chose[layer], chose_again[layer]) for layer in chose)


def test_the_fast_launchers_say_the_same(model):
    logits = []
    for backend in ("reference", "cpu", "auto"):
        cache = OmniKVCache(model, OmniKV(**SPARSE), 512, backend=backend)
        called(model, ids_of(300), cache)
        logits.append(called(model, [5], cache))
    torch.testing.assert_close(logits[0], logits[1], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(logits[0], logits[2], rtol=2e-4, atol=2e-4)


def test_dense_below_is_full_attention_until_then(model):
    cache = OmniKVCache(model, OmniKV(**{**SPARSE, "dense_below": 304}), 512)
    called(model, ids_of(300), cache)
    for token in range(6):
        called(model, [token], cache)
        assert bool(cache.selections) == (cache.get_seq_length() >= 304)
    assert (cache.dense_steps, cache.sparse_steps) == (3, 3)


# ---------------------------------------------------------------- refusals


def test_what_cannot_be_is_refused_in_a_line(model, folder):
    method = OmniKV(**SPARSE)
    cache = OmniKVCache(model, method, 64)
    two = torch.tensor([ids_of(8), ids_of(8)])
    padded = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]))
    with torch.no_grad():
        with pytest.raises(SettingError, match="found 2 sequences, expected 1"):
            model(two, past_key_values=cache)
        with pytest.raises(SettingError, match="padding"):
            model(two[:1], past_key_values=cache, **padded)
        with pytest.raises(SettingError, match="keys of no OmniKVCache"):
            model(two[:1])
        with pytest.raises(ContextTooLong, match="65 tokens do not fit"):
            model(torch.tensor([ids_of(65)]), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(SettingError, match="gradients"):
        model(two[:1], past_key_values=cache)
    cache.reset()
    assert called(model, ids_of(8), cache).isfinite().all()


def test_a_call_that_broke_off_asks_for_a_reset(model, monkeypatch):
    cache = OmniKVCache(model, OmniKV(**SPARSE), 64)
    attend = type(cache).attend

    def broken(self, layer, *rest):
        if layer == 3:
            raise KeyboardInterrupt
        return attend(self, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(type(cache), "attend", broken)
        with pytest.raises(KeyboardInterrupt):
            called(model, ids_of(8), cache)
    with pytest.raises(SettingError, match="broke off"):
        called(model, [1], cache)
    cache.reset()
    assert called(model, ids_of(8), cache).isfinite().all()


@pytest.mark.parametrize(
    "method, named",
    [
        (OmniKV(tokens=8), "filter_layers"),
        (OmniKV(filter_layers=(1,), official=True), "official"),
        ("omnikv", "expected OmniKV"),
        (OmniKV(filter_layers=(99,)), "99"),
    ],
)
def test_methods_that_do_not_fit_are_refused(model, method, named):
    with pytest.raises(SettingError, match=named):
        OmniKVCache(model, method, 64)


def test_models_that_do_not_fit_are_refused(folder):
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with pytest.raises(SettingError, match="attn_implementation 'eager', expected 'omnikv'"):
        OmniKVCache(eager, OmniKV(**SPARSE), 64)
    with pytest.raises(SettingError, match="expected a model of transformers"):
        OmniKVCache(None, OmniKV(**SPARSE), 64)
    config = transformers.MistralConfig(**TINY, sliding_window=16)
    sliding = transformers.MistralForCausalLM(config).eval()
    sliding.set_attn_implementation("omnikv")
    with torch.no_grad(), pytest.raises(SettingError, match="sliding_window"):
        sliding(torch.tensor([[1, 2]]), past_key_values=OmniKVCache(sliding, OmniKV(**SPARSE), 64))


def test_a_family_that_the_engine_does_not_run():
    """A model with a rotation, a norm and an MLP of its own: only its attention is ours."""
    shape = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    config = transformers.GPTNeoXConfig(**{**shape, "num_hidden_layers": 4, "rotary_pct": 0.5})
    torch.manual_seed(3)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    prompt, theirs = ids_of(200), transformers.DynamicCache()
    wanted = [called(model, part, theirs) for part in (prompt, [5], [6])]
    model.set_attn_implementation("omnikv")
    for tokens in (300, 8):
        method = OmniKV(filter_layers=(1,), tokens=tokens, tail=64, dense_below=0)
        cache = OmniKVCache(model, method, 256)
        found = [called(model, part, cache) for part in (prompt, [5], [6])]
        near = torch.allclose(found[-1], wanted[-1], rtol=2e-4, atol=2e-4)
        assert near == (tokens == 300) and cache.sparse_steps == 2
        assert cache.selections[1].numel() == min(tokens, 128)
