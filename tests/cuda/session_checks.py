"""What tests/cuda asks of whole sessions, for any device: tests/engine/session/test_cuda_bodies.py
runs the same on a CPU, so that a body that is wrong fails without a GPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.methods.base import Method
from engine.model.tensors import random_stream
from tests.builders import random_ids, session_config
from tools.bench.run import Engine
from tools.bench.verify import verify

SPARSE = OmniKV(filter_layers=(1,), tokens=64, tail=64, dense_below=0)
PROMPT = 700
STEPS = 12
# largest difference of two right paths, of the spread of the logits: float32, and 16 bits or rows
# and weights of few bits, which round what they multiply
NEAR = {"float32": 0.02, "bfloat16": 0.4}


def made(device: str, method: Method = SPARSE, **settings: Any) -> LLM:
    """A model whose shapes every form takes."""
    config = session_config(layers=4, heads=8, kv_heads=2, head_dim=64, hidden=128)
    named = dict(max_context=2048, chunk=256, dtype="float32")
    stream = functools.partial(random_stream, sharpness=2.5)
    return LLM.from_stream(config, stream, device=device, method=method, **{**named, **settings})


def assert_near(found: torch.Tensor, wanted: torch.Tensor, dtype: str, what: str) -> None:
    """The same token, or one as likely within the difference; and that within rounding."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    difference = float((found - wanted).abs().max())
    assert difference <= NEAR[dtype] * float(wanted.std()), f"{what}: off by {difference:.3g}"
    gap = float(wanted.max() - wanted[found.argmax()])
    assert gap <= 2 * difference, f"{what}: another token, {gap:.3g} less likely"


def check_form(llm: LLM, ids: list[int]) -> None:
    """A prompt says what the reference says, and sparse steps do where both read the same rows (a
    rounding moves a choice's edge: tools/bench/verify.py).
    """
    dtype = str(llm.dtype)[6:]
    with llm.session() as session, llm.session() as reference:
        reference.set_backend("reference")
        found, wanted = session.prefill(ids), reference.prefill(ids)
        if llm.config.bank != "int4":  # a last bit of 16 moves a value by an eighth there
            assert_near(found, wanted, dtype, "the prompt")
    contestant = Engine("form", llm, len(ids))
    verify(contestant, STEPS)
    assert contestant.session.stats.sparse_steps >= STEPS, "a step was not sparse"
    contestant.close()


def check_batch(device: str, count: int, **settings: Any) -> None:
    """Sessions of different lengths write together what each writes alone."""
    llm = made(device, **settings)
    with llm.batch(slots=count) as batch:
        sessions = [batch.session() for _ in range(count)]
        for seed, session in enumerate(sessions):
            session.prefill(random_ids(200 + 37 * seed, seed=seed))
        twins = [session.fork() for session in sessions]
        for token in range(STEPS):
            for session in sessions:
                batch.feed(session, token)
            found = batch.step()
            for number, (session, twin) in enumerate(zip(sessions, twins, strict=True)):
                one = found[session]
                assert not isinstance(one, Exception), one
                assert_near(one, twin.decode(token), "float32", f"session {number}")


def check_exact(device: str, offload: str) -> None:
    """An answer in exact mode is full attention's, token by token, and some of it was drafted."""
    answers = []
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for method, tier in ((Full(), "device"), (Exact(SPARSE, draft=4), offload)):
        with made(device, method, offload=tier).session() as session:
            pieces = session.generate(random_ids(PROMPT), params)
            answers.append([piece.token_id for piece in pieces])
            assert isinstance(method, Full) or session.stats.drafted > 0
    assert answers[0] == answers[1]


def check_saved(device: str, offload: str, folder: Path, **settings: Any) -> None:
    """A session that comes back from disk goes on as the one that was written."""
    llm = made(device, offload=offload, **settings)
    with llm.session() as session:
        session.prefill(random_ids(PROMPT))
        session.decode(3)
        session.save(folder / "session")
        wanted = [session.decode(token) for token in (5, 6, 7)]
        assert session.stats.sparse_steps == 4
    restored, _ = llm.restore(folder / "session")
    with restored:
        for token, one in zip((5, 6, 7), wanted, strict=True):
            assert_near(restored.decode(token), one, "float32", f"token {token}")


# bank and weights in few bits, with their dtype
FORMS = [
    *({"bank": bank, "dtype": dtype} for bank in ("int8", "int4") for dtype in NEAR),
    {"bank": "int8", "offload": "host"},
    {"bank": "int4", "offload": "host"},
    *({"weights": kind, "dtype": dtype} for kind in ("int8", "int4") for dtype in NEAR),
    {"weights": "int4", "bank": "int8"},
    {"step": "plain", "dtype": "bfloat16"},
]
# caps on logits, sliding windows, sinks, and mixtures of experts
FAMILIES = ("gemma2-cap", "gemma3", "gpt-oss", "mistral-window", "qwen3-moe")


def form_name(form: dict) -> str:
    """The name of a form."""
    return "-".join(form.values())


def check_family(device: str, name: str, folder: Path) -> None:
    """A family's prompt and steps say what the reference says, under full attention."""
    from tools.families.models import ids_of, make

    make(folder, name)
    llm = LLM(folder, device=device, dtype="float32", method=Full(), max_context=512, chunk=128)
    ids, answers = ids_of(300), []
    for backend in ("auto", "reference"):
        with llm.session() as session:
            session.set_backend(backend)
            first = session.prefill(ids)
            answers.append([first, *(session.decode(token) for token in ids[:STEPS])])
    for number, (one, other) in enumerate(zip(*answers, strict=True)):
        assert_near(one, other, "float32", f"{name}, step {number}")


def check_streamed(device: str, **settings: Any) -> None:
    """Weights that stream say what weights that stay do, bit for bit, over chunks and steps (on a
    GPU captured ones), and cross once a pass.
    """
    ids, found = random_ids(PROMPT), []
    for count in (0, 3):
        llm = made(device, Full(), weights_offload=count, **settings)
        with llm.session() as session:
            logits = [session.prefill(ids)]
            logits += [session.decode(token) for token in random_ids(STEPS, seed=1)]
            found.append([row.cpu() for row in logits])
            passes = -(-PROMPT // llm.chunk) + STEPS
            came, each = session.stats.weight_bytes_streamed, llm.plan().staged_bytes
            assert came >= passes * each and (came > 0) == (count > 0)
            if device == "cpu":  # elsewhere steps run before they are captured
                assert came == passes * each
    assert all(map(torch.equal, *found))
