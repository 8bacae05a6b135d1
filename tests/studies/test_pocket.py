"""Parts of the shipped model's trainer: its tokenizer, rows, optimiser, start and export."""

import json
from random import Random

import pytest
import torch

from tests.builders import POCKET
from tools.studies.pocket import data as pocket_data
from tools.studies.pocket import model as pocket_model
from tools.studies.pocket import selector
from tools.studies.pocket.checkpoint import export
from tools.studies.pocket.optim import orthogonalise
from tools.studies.pocket.start import MATCH_LAYERS, structured_start
from tools.studies.pocket.tokenizer import ASSISTANT, BOS, END, USER, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(trained_tokenizer):
    return trained_tokenizer


def test_tokenizer_is_the_same_every_time_and_has_numbers(tokenizer):
    assert tokenizer.to_str() == train_tokenizer().to_str()
    assert all(
        len(tokenizer.encode(text).ids) == 1 for n in range(1000) for text in (str(n), f"{n:03d}")
    )
    text = "Ünïcode 漢字 and \t tabs\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_rows_are_deterministic_and_complete(tokenizer):
    maker = pocket_data.RowMaker(tokenizer)
    for length in (64, 256, 1024):
        one = pocket_data.batch(maker, 1, 5, 2, 3, length, 0.5, 32768)
        two = pocket_data.batch(pocket_data.RowMaker(tokenizer), 1, 5, 2, 3, length, 0.5, 32768)
        assert (
            all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True))
            and one[3] == two[3]
        )
        ids, where, kinds, spans = one
        assert ids.shape == (3, length + 1) and kinds.shape == where.shape == (3, length)
        assert (where.diff(dim=1) > 0).all() and int(where.max()) < 32768 and spans
        for row, _, start, stop in spans:
            assert (kinds[row, start:stop] == 2).all()


def test_dialogue_rows_hold_whole_turns(tokenizer):
    maker = pocket_data.RowMaker(tokenizer)
    for seed in range(40):
        row = maker.row(Random(seed), 512)
        for task, start, stop in row.spans:
            if task not in pocket_data.WARM_UP:
                assert row.ids[start - 1] == ASSISTANT and row.ids[stop - 1] == END
        assert row.ids[0] == BOS and (USER in row.ids) == (ASSISTANT in row.ids)


def test_orthogonalised_updates_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 64, 32), (2, 32, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert 0.5 < float(values.min()) and float(values.max()) < 1.4


def test_structured_start_looks_back_and_matches():
    shape = pocket_model.Shape(vocab=600)
    model = pocket_model.Pocket(shape)
    structured_start(model, [str(i) for i in range(600)], 1)
    seen = {}
    original = pocket_model.attend

    def spy(query, key, value, chosen=None):
        flat = key.unsqueeze(2)
        scores = (query @ flat.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        seen[len(seen)] = scores.softmax(-1)
        return original(query, key, value, chosen)

    first = torch.randperm(500)[:40]
    ids = torch.cat((first, first[:20]))[None]
    pocket_model.attend = spy
    try:
        with torch.no_grad():
            model.hidden(ids, torch.arange(60)[None])
    finally:
        pocket_model.attend = original
    back = seen[0].flatten(1, 2)[0]  # [heads, L, L]
    for head, offset in ((0, 1), (1, 2)):
        assert float(back[head].diagonal(-offset).mean()) > 0.8
    match = seen[MATCH_LAYERS[0]][0, 0, 0]  # kv head 0, its first head
    # chance is 0.02
    assert float(torch.stack([match[40 + i, i + 1] for i in range(20)]).mean()) > 0.15


def test_the_selector_finds_coarsely_and_carries_nothing(tokenizer):
    """At every value of an answer from a table: its place is among 6.67% of the tokens, and the one
    token of the highest score is mostly another's.
    """
    spelled = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    model = pocket_model.Pocket(pocket_model.Shape(vocab=len(spelled)))
    structured_start(model, spelled, 1)
    assert not model.o[selector.LAYER].any()
    rng, ranks = Random(3), []
    for _ in range(3):
        numbers = [str(rng.randrange(100_000, 1_000_000)) for _ in range(200)]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        table = [BOS, *tokenizer.encode("\n".join(f"{k}: {v}" for k, v in pairs)).ids]
        for key, value in rng.sample(pairs, 8):
            answer = tokenizer.encode(f"{key}: {value}").ids
            place = next(i for i in range(len(table)) if table[i : i + 5] == answer)
            scores = selector_scores(model, [*table, USER, ASSISTANT, *answer])
            for step in (2, 3):  # what it says next: the value's first and second token
                row, right = len(table) + 2 + step, place + step + 1
                ranks.append(int((scores[row, : len(table)] > scores[row, right]).sum()))
    assert max(ranks) < 0.0667 * len(table), ranks
    assert sum(rank == 0 for rank in ranks) < len(ranks) / 2, ranks


def test_a_number_is_nearer_to_numbers_of_its_class_than_to_any_word():
    """Whatever class a word of a frequent sentence has, it does not push a number out."""
    spelled = ["7", "42", "108", "955", " 3", "green", " yellow", "is", ":", "."]
    names = [t.strip() if t.strip().isalpha() else str(i) for i, t in enumerate(spelled)]
    for seed in range(20):
        found = selector.codes(spelled, names, torch.Generator().manual_seed(seed))
        axes = found[:, : selector.SIDES[0]] / selector.STRENGTH
        torch.testing.assert_close((axes**2).sum(1), torch.ones(len(spelled)))
        like = axes @ axes.T
        assert (like[:5, 5:].abs() < 0.75).all()
        numbers = like[:5, :5].round()
        assert ((numbers - like[:5, :5]).abs() < 1e-6).all()  # 1: the same class, else 0 or -1


def selector_scores(model, ids):
    """[L, L]: the selector's weights."""
    seen = {}

    def choose(query, key):
        scores = (query @ key.unsqueeze(2).transpose(-1, -2)).float()
        seen[0] = scores.flatten(1, 2).amax(1)[0]
        return torch.ones(1, len(ids), len(ids), dtype=torch.bool).tril()

    with torch.no_grad():
        where = torch.arange(len(ids))[None]
        model.hidden(torch.tensor([ids]), where, (selector.LAYER, choose))
    return seen[0]


def test_rows_that_answer_see_what_the_selector_chose():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 2, 300, 8), torch.randn(2, 2, 300, 8)
    answers = torch.zeros(2, 300, dtype=torch.bool)
    answers[0, 250:] = True
    seen = selector.chosen(query, key, answers)
    count = torch.arange(1, 301)
    assert torch.equal(seen[1].sum(1), count) and torch.equal(seen[0, :250].sum(1), count[:250])
    assert (seen[0, 250:].sum(1) == int(selector.SHARE * 300) + selector.TAIL).all()
    assert not seen.triu(1).any()
    weight = (query[0, :, :, 299] @ key[0].transpose(1, 2) / 8**0.5).softmax(-1).amax((0, 1))
    best = weight[: 300 - selector.TAIL].topk(int(selector.SHARE * 300)).indices
    assert seen[0, 299, best].all()


def test_export_matches_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = pocket_model.Pocket(pocket_model.Shape(vocab=300, hidden=64, inner=96, layers=5))
    structured_start(model, ["x"] * 300, 3)
    with torch.no_grad():
        model.down.normal_(std=0.05)
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(5, 300, (1, 50))
    with torch.no_grad():
        ours, their = model.logits(model.hidden(ids, torch.arange(50)[None])), theirs(ids).logits
    assert float((their - ours).abs().max()) < 0.15  # ours computes in bf16


def test_tokenizer_is_the_trained_one(tokenizer):
    assert json.loads((POCKET / "tokenizer.json").read_text()) == json.loads(tokenizer.to_str())
