"""The probe for RazorAttention's heads: its pass is the model's, its scores are those of a float64
attention map, its file is taken by a session.

Stops: rounds off by one, a head that repeats and is not seen, a file that chance has changed.
"""

import pytest
import torch

from engine import LLM, Full, Razor
from engine.base.errors import UsageError
from engine.model.rope import Rotary
from tests.builders import POCKET
from tools.studies import razor_heads
from tools.studies.razor_heads import arguments, head_scores, main, probe, text_of


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize("length, repeats, first", [(2, 2, 0), (7, 4, 1), (31, 3, 2)])
def test_scores_are_sums_over_the_attention_map(
    heads, kv_heads, length, repeats, first, monkeypatch
):
    generator = torch.Generator().manual_seed(length)
    count = first + length * repeats
    q = torch.randn(count, heads, 16, generator=generator)
    k = torch.randn(count, kv_heads, 16, generator=generator)
    wide = k.double().repeat_interleave(heads // kv_heads, 1)
    logits = torch.einsum("shd,thd->hst", q.double(), wide) * 0.25
    seen = torch.ones(count, count).tril().bool()
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.zeros(2, heads, dtype=torch.float64)
    for i in range(first + length, count):
        for j in range(first, i):
            if (i - j) % length == 0:
                expected[0] += weights[:, i, j]
                expected[1] += weights[:, i, j + 1]
    expected /= count - first - length
    for block in (1, 1 << 24):
        monkeypatch.setattr(razor_heads, "BLOCK", block)
        found = torch.stack(head_scores(q, k, 0.25, first, length))
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(POCKET), device="cpu", dtype="float32", threads=1, method=Full())


def test_a_text_is_random_tokens_in_rounds(llm):
    ids, first = text_of(llm, 300, 3, seed=1)
    rounds = [ids[first + i * 300 : first + i * 300 + 300] for i in range(3)]
    assert rounds[0] == rounds[1] == rounds[2] and len(set(rounds[0])) == 300
    assert not set(rounds[0]) & set(llm.tokenizer.special_ids) and first == len(
        llm.tokenizer.prefix_ids
    )
    assert text_of(llm, 300, 3, seed=1)[0] == ids != text_of(llm, 300, 3, seed=2)[0]
    assert len(text_of(llm, llm.config.vocab_size + 50, 2, seed=1)[0]) > 2 * llm.config.vocab_size


def test_the_pass_is_the_models_and_its_heads_are_the_shipped_ones(llm):
    """Heads of layers 2 and 4 alone repeat, at any length."""
    ids, first = text_of(llm, 200, 3, seed=5)
    with torch.no_grad():
        rotary = Rotary(llm.config, torch.device("cpu"))
        echo, induction = probe(llm.model.on_torch(), rotary, ids, first, 200)
    best = torch.maximum(echo, induction)
    least = min(best[i].min() for i in (2, 4))
    others = max(best[i].max() for i in (0, 1, 3, 5, 6, 7))
    assert least > 5 * others
    shipped = Razor(heads=POCKET / "razor.json", induction=0.25, echo=0.0)
    assert [i for i, row in enumerate(shipped.whole) if row == (True, True)] == [2, 4]


def test_its_file_is_the_same_each_time_and_a_sessions(llm, tmp_path, capsys):
    texts = []
    for name in ("one.json", "two.json"):
        path = tmp_path / name
        assert main(["--length", "60", "--repeats", "2", "--out", str(path)]) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1] and "| 7 |" in capsys.readouterr().out
    with llm.session(Razor(heads=path, recent=16)) as session:
        session.prefill(list(range(5, 205)))
        assert min(session.runtime.rows_read(200)) == 4 + 40


@pytest.mark.parametrize("flags", [["--length", "1"], ["--repeats", "1"]])
def test_a_text_that_does_not_repeat_is_refused(flags):
    with pytest.raises(UsageError, match="expected 2 of each at least"):
        arguments(flags)
