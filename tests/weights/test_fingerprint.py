"""The digests that tell model folders apart.

Stops: resuming from another training's answers, a digest that depends on the files' layout.
"""

from tests.tiny_model import sharded, sound, tensors
from weights.fingerprint import fingerprint, weights_digest


def test_two_trainings_of_one_shape(tmp_path):
    one, other, words = tmp_path / "one", tmp_path / "other", tmp_path / "words"
    for folder in (one, other, words):
        sound(folder)
    assert len({weights_digest(folder) for folder in (one, other, words)}) == 1
    changed = tensors()
    name = max(changed, key=lambda key: changed[key].numel())
    flat = changed[name].flatten()
    flat[flat.numel() // 2] += 1
    changed[name] = flat.view_as(changed[name])
    sharded(other, changed, 1)
    (words / "tokenizer.json").write_text((words / "tokenizer.json").read_text() + " ")
    assert len({fingerprint(folder) for folder in (one, other, words)}) == 1
    assert len({weights_digest(folder) for folder in (one, other, words)}) == 3


def test_shards_change_nothing(tmp_path):
    sound(tmp_path / "one")
    sound(tmp_path / "two", shards=2)
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")
