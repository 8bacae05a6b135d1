"""Synthetic banks and planted selections: what benchmarks time must be what a real text would make
the engine do.
"""

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.base.errors import ContextTooLong, SettingError
from engine.model.config.config import ModelConfig
from engine.model.tensors import random_stream
from tools.common.planted_selection import Replay, ring_shape
from tools.common.synthetic_bank import synthesize

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
)


def make(capacity=10000):
    return LLM.from_stream(CONFIG, random_stream, device="cpu", max_context=capacity)


def planted(reuse, tokens=256, **more):
    return Replay(filter_layers=(0, 3), tokens=tokens, tail=64, dense_below=0, reuse=reuse, **more)


def test_synthetic_rows_have_the_scale_of_read_rows_and_none_repeats():
    session = make().session()
    synthesize(session, 9000, seed=3)
    assert len(session) == 9000 and session.ids[:4] != session.ids[4:8]
    for layer in (0, 5):
        for rows in session.bank.kv(layer, 9000):
            real, drawn = (
                rows[0, :, :64].square().mean(dim=(1, 2)),
                rows[0, :, 64:].square().mean(dim=(1, 2)),
            )
            assert torch.all((drawn / real).log().abs() < 0.2)
            assert torch.unique(rows[0, 0, 64:], dim=0).shape[0] == 9000 - 64


def test_synthetic_bank_is_deterministic_and_decodes():
    banks, logits = [], []
    for method in (Full(), OmniKV(filter_layers=(1,), tokens=16, tail=64, dense_below=0)):
        session = make(800).session(method)
        synthesize(session, 700)
        logits.append(session.decode(3))
        banks.append(session.bank.kv(5, 700)[0].contiguous())
    assert torch.equal(*banks)  # whatever the layout
    assert torch.isfinite(logits[1]).all() and not torch.equal(*logits)


def test_synthesize_refuses_what_it_cannot_fill():
    session = make(128).session()
    with pytest.raises(ContextTooLong):
        synthesize(session, 129)
    with pytest.raises(SettingError, match="synthesize: found 0"):
        synthesize(session, 0)
    synthesize(session, 10)
    with pytest.raises(SettingError, match="10 tokens, expected an empty one"):
        synthesize(session, 5)


def test_windowed_selector_works_on_a_synthetic_bank():
    session = make(1000).session(
        OmniKV(filter_layers=(1,), tokens=16, tail=64, dense_below=0, selector="uniform")
    )
    synthesize(session, 900)
    session.decode(1)
    assert session.selections[1].numel() == 16


@pytest.mark.parametrize("reuse", [0.0, 0.5, 0.7, 0.9, 1.0])
def test_replay_plants_the_asked_reuse(reuse):
    session = make(4200).session(planted(reuse))
    synthesize(session, 4096)
    last, shares = None, []
    for token in range(9):
        session.decode(token)
        chosen = session.selections[0]
        assert (
            chosen.numel() == 256 and torch.all(chosen[1:] > chosen[:-1]) and chosen[-1] < 4096 - 64
        )
        if last is not None:
            shares.append(torch.isin(chosen, last).float().mean().item())
        last = chosen
    assert abs(sum(shares) / len(shares) - reuse) < 0.01
    assert not torch.equal(session.selections[0], session.selections[3])


def test_replay_is_a_function_of_the_position_and_survives_a_fork():
    session = make(2100).session(planted(0.7))
    synthesize(session, 2000)
    twin = session.fork()
    first = session.decode(1)
    chosen = session.selections[3]
    session.truncate(2000)
    assert torch.equal(session.decode(1), first) and torch.equal(session.selections[3], chosen)
    assert torch.equal(twin.decode(1), first) and torch.equal(twin.selections[3], chosen)


def test_replay_with_few_candidates_and_bad_settings():
    session = make(512).session(planted(0.0, tokens=400))
    synthesize(session, 300)
    session.decode(1)
    assert session.selections[0].tolist() == list(range(300 // 64 * 64 - 64))
    for bad in (-0.1, 1.5, "much", True):
        with pytest.raises(SettingError, match="reuse"):
            planted(bad)
    with pytest.raises(SettingError, match="official"):
        Replay(filter_layers=(1,), official=True)


@pytest.mark.parametrize(
    "k,candidates", [(2048, 130000), (2048, 4096), (2048, 3000), (1, 2), (5, 5), (0, 0)]
)
@pytest.mark.parametrize("reuse", [0, 0.3, 0.9, 0.999, 1])
def test_ring_holds_its_windows(k, candidates, reuse):
    rows, fresh = ring_shape(k, candidates, reuse)
    assert rows >= 1 and rows * fresh <= candidates and (fresh == 0 or rows * fresh >= k + fresh)
    assert k == 0 or 1 - fresh / k >= reuse - 0.5 / k - 0.01


def test_set_backend_goes_on_over_the_same_bank():
    session = make(600).session(OmniKV(filter_layers=(1,), tokens=32, tail=64, dense_below=0))
    synthesize(session, 500)
    fast = session.decode(7)
    session.truncate(500)
    session.set_backend("reference")
    assert (session.decode(7) - fast).abs().max() < 2e-3
    with pytest.raises(SettingError, match="backend: found 'fast'"):
        session.set_backend("fast")


def test_a_session_may_be_smaller_than_planned_and_its_plan_says_so():
    llm = make(1000)
    session = llm.session(max_context=128)
    assert session.capacity == 128
    assert session.stats.bank_bytes == llm.plan(max_context=128).bytes_of("context bank")
    assert llm.plan().max_context == 1000
    for bad in (0, 1001, 2.5, True):
        with pytest.raises(SettingError, match="max_context"):
            llm.session(max_context=bad)
