"""The shipped model's folder (transformers gives the same tokens, template, fingerprint, skills)
and its trainer's parts.
"""

import json
from pathlib import Path
from random import Random

import pytest
import torch

from tools.pocket import data as pocket_data
from tools.pocket import model as pocket_model
from tools.pocket.checkpoint import export
from tools.pocket.optim import orthogonalise
from tools.pocket.start import MATCH_LAYERS, structured_start
from tools.pocket.tokenizer import ASSISTANT, BOS, END, USER, train_tokenizer

POCKET = Path(__file__).resolve().parents[2] / "weights" / "pocket"
SHIPPED = pytest.mark.skipif(
    not (POCKET / "model.safetensors").exists(), reason="the shipped model is not in this checkout"
)


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

    def spy(query, key, value):
        flat = key.unsqueeze(2)
        scores = (query @ flat.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        seen[len(seen)] = scores.softmax(-1)
        return original(query, key, value)

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


@SHIPPED
def test_the_folder_is_complete_and_small():
    assert (POCKET / "model.safetensors").stat().st_size <= 20_000_000
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "omnikv.json",
        "MODEL_CARD.md",
        "welcome.txt",
    ):
        assert (POCKET / name).is_file(), name
    config = json.loads((POCKET / "config.json").read_text())
    assert (
        config["num_hidden_layers"] >= 8
        and config["num_key_value_heads"] < config["num_attention_heads"]
    )


@SHIPPED
def test_calibration_belongs_to_these_weights():
    from weights.fingerprint import fingerprint

    data = json.loads((POCKET / "omnikv.json").read_text())
    assert data["format"] == 1 and data["fingerprint"] == fingerprint(POCKET)


@SHIPPED
def test_blocks_belong_to_these_weights_and_save_what_the_card_says():
    from tools.pod_groups import read_blocks, saving

    assert saving(read_blocks(POCKET), 8) >= 0.35


@SHIPPED
def test_tokenizer_is_the_trained_one(tokenizer):
    assert json.loads((POCKET / "tokenizer.json").read_text()) == json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def llm():
    from engine import LLM, Full

    return LLM(str(POCKET), device="cpu", dtype="float32", method=Full(), max_context=4096)


@SHIPPED
def test_template_puts_the_document_first(llm):
    render = llm.tokenizer.render
    want = "<|bos|>Alice lives in Rome.\n\nBen too.\n<|user|>Where does Alice live?<|assistant|>"
    assert (
        render(
            [
                {
                    "role": "user",
                    "content": "Alice lives in Rome.\n\nBen too.\n\nWhere does Alice live?",
                }
            ]
        )
        == want
    )
    system = [
        {"role": "system", "content": "Alice lives in Rome.\n\nBen too."},
        {"role": "user", "content": "Where does Alice live?"},
    ]
    assert render(system) == want
    turns = [
        *system,
        {"role": "assistant", "content": "Alice lives in Rome."},
        {"role": "user", "content": "Thanks"},
    ]
    assert render(turns) == want + "Alice lives in Rome.<|end|><|user|>Thanks<|assistant|>"


@SHIPPED
def test_same_greedy_tokens_as_transformers(llm):
    transformers = pytest.importorskip("transformers")
    from engine import SamplingParams
    from tools.tasks import make_sample

    theirs = transformers.AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    for task in ("kv", "facts", "two_stage"):
        sample = make_sample(task, 600, lambda t: len(llm.tokenizer.encode(t, special=False)), 3)
        text = llm.tokenizer.render(
            [{"role": "user", "content": sample.document + "\n\n" + sample.questions[0]}]
        )
        ids = llm.tokenizer.encode(text, special=False)
        ours = llm.generate(ids, SamplingParams(max_tokens=40)).token_ids
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[
            0, len(ids) :
        ].tolist()
        assert [t for t in ours if t != END] == [t for t in out if t not in (END, 0)]


@SHIPPED
def test_answers_and_refuses(llm):
    from engine import SamplingParams
    from tools.tasks import make_sample
    from tools.tasks.talk import REFUSAL

    def ask(text):
        prompt = llm.tokenizer.render([{"role": "user", "content": text}])
        ids = llm.tokenizer.encode(prompt, special=False)
        return llm.generate(ids, SamplingParams(max_tokens=40)).text.strip()

    right = 0
    for seed in range(4):
        sample = make_sample(
            "passkey", 800, lambda t: len(llm.tokenizer.encode(t, special=False)), seed
        )
        right += ask(sample.document + "\n\n" + sample.questions[0]) == sample.answers[0]
    assert right >= 3
    assert ask("Alice lives in Rome.\n\nWrite a poem about rivers.") == REFUSAL
