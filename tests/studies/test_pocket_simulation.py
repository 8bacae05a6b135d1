"""The mask simulation that chooses filter layers against the engine: the same logits under full
attention and under OmniKV.
"""

import pytest
import torch

from engine import LLM, Full, OmniKV
from tools.studies.pocket.checkpoint import export
from tools.studies.pocket.filters import candidates, score
from tools.studies.pocket.model import Pocket, Shape
from tools.studies.pocket.simulation import Setting, Simulated, choose, kept_tokens, layer_roles
from tools.studies.pocket.start import structured_start
from tools.studies.pocket.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained_tokenizer):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = trained_tokenizer
    size = tokenizer.get_vocab_size()
    model = Pocket(
        Shape(
            vocab=size,
            hidden=64,
            inner=64,
            layers=6,
            heads=4,
            kv_heads=2,
            head_dim=64,
            positions=4096,
        )
    )
    structured_start(model, [tokenizer.decode([i]) for i in range(size)], 0)
    with torch.no_grad():
        for stack in (model.q, model.k):
            stack += torch.randn(stack.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    export(model, folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.mark.parametrize(
    "method, setting",
    [
        (Full(), Setting()),
        (
            OmniKV(filter_layers=(2,), share=0.05, wait_layers=1, tail=64, dense_below=0),
            Setting((2,), 1, 0.05, 64),
        ),
        (
            OmniKV(filter_layers=(1, 3), share=0.02, wait_layers=0, tail=128, dense_below=0),
            Setting((1, 3), 0, 0.02, 128),
        ),
    ],
)
def test_the_engine_agrees(folder, method, setting):
    ids = torch.randint(5, 4000, (700,), generator=torch.Generator().manual_seed(2)).tolist()
    llm = LLM(
        str(folder), device="cpu", dtype="float32", method=method, max_context=1024, threads=1
    )
    model = Simulated(folder)
    prompt = model.read(ids[:500])
    prompt, last = model.extend(prompt, ids[500:680])
    with llm.session() as session:
        assert float((session.prefill(ids[:680]) - last).abs().max()) < 2e-3
        theirs = torch.stack([session.decode(i) for i in ids[680:]])
    ours = model.answer(prompt, ids[680:], setting)
    assert float((theirs - ours).abs().max()) < 2e-3
    if setting.filters:  # and the setting matters: full attention gives something else
        assert float((model.answer(prompt, ids[680:], Setting()) - ours).abs().max()) > 1e-2


def test_roles_budget_and_eviction(folder):
    assert layer_roles(6, (2,), 1) == ["full", "full", "filter", "wait", "sparse", "sparse"]
    assert layer_roles(6, (1, 3), 0) == ["full", "filter", "sparse", "filter", "sparse", "sparse"]
    seen = choose(torch.rand(3, 1003), 1000, Setting((1,), 1, 0.05, 256))
    assert (seen.sum(1) == torch.tensor([50 + 1001 - 704, 50 + 1002 - 704, 50 + 1003 - 704])).all()
    model = Simulated(folder)
    prompt, _ = model.extend(model.read(list(range(5, 405)), with_mass=True), list(range(50)))
    for keep in ("h2o", "streaming"):
        kept = kept_tokens(prompt, 2, Setting(share=0.3, keep=keep))
        assert (kept[:, :400].sum(1) == 120).all() and kept[:, 400:].all()


def test_search_counts_every_setting(folder):
    settings = {"full": Setting()} | candidates(6, 1, [0, 1], 0.05)
    assert settings["2 wait 1"].filters == (2,) and "4 wait 1" not in settings
    table = score(Simulated(folder), folder, settings, ("kv",), 300, 1, 2)
    assert all(row["kv"][1] == 2 for row in table.values()) and set(table) == set(settings)
