"""Every model family gives transformers' logits and greedy tokens: all prompt lengths, chunk sizes,
tiers, Full and OmniKV that reads everything.

Each cell of the grid is drawn with a fixed seed; `--whole-grid` runs all of them. Stops: a bias, a
norm or a factor forgotten or in the wrong place, a NoPE layer that rotates, fused tensors split in
the wrong order, a window off by one.
"""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine import LLM, Full, OmniKV, SamplingParams
from engine.model.config.config import ModelConfig
from engine.model.tensors import targets
from tools.families.models import POSITIONS, VARIANTS, ids_of, make
from weights.checkpoint import Checkpoint

pytest.importorskip("transformers")
LENGTHS = (1, 2, 200, 1500)
CHUNKS = (1, 7, 64, 512, 4096)
TIERS = ("device", "host")
OMNI = OmniKV(filter_layers=(0,), tokens=2048, tail=64, dense_below=0)
METHODS = {"full": Full(), "omnikv": OMNI}
NO_GLOBAL = ("mistral-window", "phi3-window")  # every layer slides: no filter is possible
STEPS = 3  # decode steps after a prompt: their logits are compared as well


def cells(name, whole):
    """(length, chunk, tier, method) of a family's runs."""
    methods = ["full"] if name in NO_GLOBAL else list(METHODS)
    grid = list(itertools.product(LENGTHS, CHUNKS, TIERS, methods))
    if whole:
        return grid
    draw = random.Random(name)
    cheap = [cell for cell in grid if cell[0] <= 40 * cell[1]]
    return [
        draw.choice([cell for cell in cheap if cell[0] == n and cell[3] == method])
        for n in LENGTHS
        for method in methods
    ]


def seeing_first(folder):
    """The first layer that sees everything."""
    return ModelConfig.from_folder(folder).seeing_layers[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens(tmp_path, name, request):
    theirs, ids = make(tmp_path, name), ids_of(max(LENGTHS) + STEPS)
    wanted = {}
    with torch.inference_mode():
        for n in LENGTHS:
            wanted[n] = theirs(torch.tensor([ids[: n + STEPS]])).logits[0, n - 1 :]
    llm = None
    for n, chunk, tier, method in cells(name, request.config.getoption("--whole-grid")):
        # longrope: the frequencies are those of the longest context, here this prompt's
        room = {"max_context": n + STEPS} if "longrope" in name else {}
        chosen = METHODS[method]
        if method == "omnikv":
            chosen = replace(chosen, filter_layers=(seeing_first(tmp_path),))
        llm = LLM(tmp_path, device="cpu", chunk=chunk, method=chosen, offload=tier, **room)
        with llm.session() as session:
            found = [session.prefill(ids[:n])]
            found += [session.decode(token) for token in ids[n : n + STEPS]]
            worst = (torch.stack(found) - wanted[n]).abs().max()
            assert worst <= 2e-3, (name, n, chunk, tier, method, float(worst))
            assert torch.equal(torch.stack(found).argmax(-1), wanted[n].argmax(-1))
            if method == "omnikv" and n > 64:
                assert session.stats.sparse_steps == STEPS
    prompt = torch.tensor([ids[:100]])
    seen = torch.ones_like(prompt)  # or transformers takes a token for padding
    reference = theirs.generate(prompt, attention_mask=seen, max_new_tokens=12, do_sample=False)
    room = {"max_context": 112} if "longrope" in name else {}
    answer = LLM(tmp_path, device="cpu", **room).generate(
        ids[:100], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    assert answer.token_ids == reference[0, 100:].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_counted(tmp_path, name):
    """The plan's count is transformers', and the fused tensors hold every stored one once."""
    theirs = make(tmp_path, name)
    config = ModelConfig.from_folder(tmp_path)
    counted = dict(theirs.named_parameters())
    counted |= {k: b for k, b in theirs.named_buffers() if k in theirs.state_dict()}
    assert config.parameters == sum(tensor.numel() for tensor in counted.values())
    stored = {name: math.prod(t.shape) for name, t in Checkpoint.open(tmp_path).tensors.items()}
    if config.tied_embeddings:
        stored.pop("lm_head.weight", None)
    # a stacked tensor is named once for each of its entries, and some tensors by groups of rows
    named: Counter[str] = Counter()
    for target in targets(config):
        for part, shape in target.parts:
            named[part] += math.prod(shape)
    assert named == stored
    assert config.max_positions == POSITIONS


def test_longrope_has_one_set_of_frequencies_for_all_sessions(tmp_path):
    """Rows rotated by one set mean nothing beside rows of the other: the longest context decides,
    and a short session of the same LLM keeps to it.
    """
    make(tmp_path, "phi3-longrope")
    long, short = (LLM(tmp_path, device="cpu", max_context=n) for n in (513, 512))
    assert long.config.rope.long and not short.config.rope.long
    ids = ids_of(500)
    with long.session(max_context=501) as one, long.session() as two, short.session() as three:
        first = [session.prefill(ids) for session in (one, two, three)]
    assert torch.equal(first[0], first[1]) and not torch.allclose(first[0], first[2], atol=1e-2)
