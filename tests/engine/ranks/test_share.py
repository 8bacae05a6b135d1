"""What each rank reads of a model: together all of it, and alone no more than its share."""

import math

import pytest
import torch

from engine.base.errors import RankLost, SettingError
from engine.load.files import model_files
from engine.model.config.share import Part
from engine.model.share.divide import MOST_RANKS, heads_of, share_of, whole_of
from engine.model.tensors import targets
from engine.ranks.drive import meeting
from engine.ranks.place import Place
from tests.builders import POCKET, session_config, tiny_config

COLUMNS = (".o", ".down")


def shares(ranks):
    """[{target: tensor}] of every rank, {target: tensor} of the whole, bytes that each has read."""
    files, read = model_files(POCKET), []
    config = files.config(None)
    whole = dict(files.tensors(config).stream(targets(config)))
    found = []
    for rank in range(ranks):
        own = share_of(config, rank, ranks)
        seen = []
        stream = files.tensors(own).stream(targets(own), progress=seen.append)
        found.append(dict(stream))
        assert seen[-1].bytes_done == seen[-1].bytes_total
        read.append(seen[-1].bytes_done)
    return found, whole, read


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_the_model(ranks):
    found, whole, read = shares(ranks)
    stored = 2 * sum(tensor.numel() for tensor in whole.values())  # bfloat16
    for name, tensor in whole.items():
        parts = [share[name] for share in found]
        if name.endswith(COLUMNS):
            assert torch.equal(torch.cat(parts, 1), tensor)
        elif name == "embed":
            assert torch.equal(torch.cat(parts), tensor)
        elif name.endswith("gate_up"):
            halves = [part.chunk(2) for part in parts]
            assert torch.equal(torch.cat([a for a, _ in halves] + [b for _, b in halves]), tensor)
        elif not name.endswith("qkv"):
            assert all(torch.equal(part, tensor) for part in parts)
    assert sum(read) >= stored
    kept = max(read)
    if ranks == 2:
        assert kept <= 1.05 * stored / ranks
    config = model_files(POCKET).config(None)
    for rank, size in enumerate(read):  # what a rank reads is what its plan counts
        assert size == 2 * share_of(config, rank, ranks).parameters


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_heads_are_read_with_the_keys_that_they_meet(ranks):
    found, whole, _ = shares(ranks)
    config = model_files(POCKET).config(None)
    dim, group = config.head_dim, config.group
    q = whole["3.qkv"][: config.q_size].unflatten(0, (-1, dim))
    k, v = (part.unflatten(0, (-1, dim)) for part in whole["3.qkv"][config.q_size :].chunk(2))
    for rank, share in enumerate(found):
        own = share_of(config, rank, ranks)
        heads = share["3.qkv"].unflatten(0, (-1, dim))
        first = own.share.heads.first
        for number in range(own.num_heads):
            kv = number // own.group
            assert torch.equal(heads[number], q[first + number])
            assert torch.equal(heads[own.num_heads + kv], k[(first + number) // group])
            assert torch.equal(
                heads[own.num_heads + own.num_kv_heads + kv], v[(first + number) // group]
            )


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (12, 5 - 1)])
def test_every_head_has_one_rank_and_whole_groups(heads, kv_heads):
    for ranks in range(1, heads + 1):
        try:
            found = heads_of(heads, kv_heads, ranks)
        except SettingError as error:
            assert "each rank needs a query head" in str(error)
            continue
        assert [part.first for part, _ in found] == [0, *(part.stop for part, _ in found[:-1])]
        assert found[-1][0].stop == heads
        group = heads // kv_heads
        for part, kv in found:
            assert part.size and part.first // group == kv.first
            assert -(-part.stop // group) == kv.stop
            assert part.size % kv.size == 0


@pytest.mark.parametrize("ranks", range(1, 8))
def test_widths_and_tokens_cover_the_model_once(ranks):
    config = tiny_config(heads=8, kv_heads=4, hidden=64, intermediate_size=168)
    parts = [share_of(config, rank, ranks) for rank in range(ranks)]
    for name in ("mlp", "vocab"):
        found = [getattr(own.share, name) for own in parts]
        assert found[0].first == 0 and found[-1].stop == found[-1].of
        assert all(a.stop == b.first and a.size for a, b in zip(found, found[1:]))
    assert all(whole_of(own) == config for own in parts)


def test_what_is_split_is_even_where_heads_are_not():
    config = tiny_config(heads=9, kv_heads=3, hidden=576, head_dim=64, intermediate_size=1536)
    sizes = [share_of(config, rank, 2).parameters for rank in range(2)]
    assert max(sizes) / math.fsum(sizes) < 0.52


@pytest.mark.parametrize(
    "ranks, changes, said",
    [
        (5, dict(heads=4, kv_heads=2), "at most 4 for 4 query heads over 2 K/V heads"),
        (MOST_RANKS + 1, dict(heads=128, kv_heads=2, hidden=256), f"at most {MOST_RANKS}"),
        (4, dict(heads=4, kv_heads=4, intermediate_size=3), "at most 3, the width"),
    ],
)
def test_more_ranks_than_parts_are_refused(ranks, changes, said):
    with pytest.raises(SettingError, match=said):
        share_of(tiny_config(**changes), 0, ranks)


def test_a_part_scales():
    assert Part(1, 3, 4).times(16) == (16, 48, 64)
    assert session_config().share is None


def test_cores_that_are_refused_are_said_in_a_line(monkeypatch, capsys):
    def refuse(process, cores):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("engine.ranks.place.os.sched_setaffinity", refuse, raising=False)
    Place(1, 2, cores=(4, 5)).bind()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1: cannot run on cores 4, 5 alone (Invalid argument)")


def test_a_folder_that_others_can_reach_is_not_taken(tmp_path):
    """torchrun's store takes anybody's word, and a call is unpickled where it arrives."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    meeting._require_own(own)
    for mode in (0o755, 0o710, 0o702):
        own.chmod(mode)
        with pytest.raises(RankLost, match="not this user's alone"):
            meeting._require_own(own)
    with pytest.raises(RankLost, match="ranks run on one machine"):
        meeting._require_own(tmp_path / "elsewhere")
