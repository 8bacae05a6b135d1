"""InfLLM: a stream of pieces against a float64 simulation of the paper's system, its block memory,
and sessions that go back.

Stops: a row seen twice or by a query whose window holds it, a block that forms too early or from
the wrong scores, a position that is not the local distance, a truncate that leaves scores of tokens
that are gone.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.select.infllm import InfLLM
from engine.methods.select.infllm_memory import Layout
from engine.model.rope import apply_rope, inv_freq
from tests.builders import GROUPS, World, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.infllm_simulation import Stream
from tools.compare.build import Facts, infllm

SMALL = InfLLM(block=5, init=3, local=16, topk=2, representatives=2, cached=4, chunk=8)
METHODS = (
    SMALL,
    InfLLM(block=1, init=0, local=4, topk=3, representatives=1, cached=3, chunk=4),
    InfLLM(block=7, init=20, local=11, topk=1, representatives=7, cached=9, chunk=11),
    infllm(Facts(None, 96), 0.35),  # as a comparison builds it: 34 rows
)


CHUNKS = ((45, 9), (64, 1), (23, 17), (1, 40, 3))


@pytest.mark.parametrize("yarn", [False, True])
@given(
    st.sampled_from(GROUPS), st.sampled_from(METHODS), st.sampled_from(CHUNKS), st.integers(0, 9)
)
@settings(max_examples=6, derandomize=True)
def test_a_stream_of_chunks_and_steps_against_the_papers_system(yarn, shape, method, chunks, seed):
    """Prompts in chunks, seven steps after each: outputs, rows read, layout and representatives.
    Every chunk and step runs twice, as if it had broken off.
    """
    rope = (
        dict(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        )
        if yarn
        else {}
    )
    world = World(method, shape, 160, seed=seed, **rope)
    (heads, kv_heads), runtime, at, scaling = (
        shape,
        world.runtime,
        0,
        world.config.rope.attention_factor,
    )
    stream = Stream(method, heads, kv_heads, inv_freq(world.config.rope, 16), scaling)
    for count in (c for chunk in chunks for c in (chunk, *[1] * 7)):
        q, k, v = (
            world.random(1, count, heads, 16),
            world.random(1, count, kv_heads, 16),
            world.random(1, count, kv_heads, 16),
        )
        turned = apply_rope(q, *world.rotary.at(torch.arange(at, at + count)))
        world.bank.write_chunk(
            2, apply_rope(k, *world.rotary.at(torch.arange(at, at + count))), v, at
        )
        for _ in range(2):
            step = world.step(at + count)
            out = (
                runtime.attend(2, turned, step)
                if count == 1
                else runtime.attend_prompt(2, turned, world.bank, at)
            )
        # what a step does not read may be anything
        if count == 1:
            unread = torch.ones(160, dtype=torch.bool)
            unread[
                [*runtime.chosen_rows(2).tolist(), *range(max(0, at + 1 - method.local), at + 1)]
            ] = False
            parts = world.bank.kv(2)
            kept = [part[:, :, unread].clone() for part in parts]
            for part in parts:
                part[:, :, unread] = float("nan")
            assert torch.equal(runtime.attend(2, turned, step), out)
            for part, rows in zip(parts, kept):
                part[:, :, unread] = rows
        edges = [
            at,
            *range((at // method.chunk + 1) * method.chunk, at + count, method.chunk),
            at + count,
        ]
        for first, last in zip(edges, edges[1:]):
            part = slice(first - at, last - at)
            exact, old = stream.piece(q[0, part].double(), k[0, part].double(), v[0, part].double())
            torch.testing.assert_close(out[0, part].double(), exact, atol=2e-5, rtol=2e-5)
        runtime.commit(count)
        at += count
        assert runtime.chosen_rows(2).tolist() == sorted(old)
        layout = Layout.at(method, at)
        assert (layout.initial, layout.blocks) == (len(stream.initial), len(stream.blocks))
        assert layout.rest == stream.rest[0]
        if count == 1:
            assert runtime.rows_read(at)[2] == len(old) + min(at, method.local)
        # keys in the bank carry yarn's factor
        for block, (_, mean, _) in enumerate(stream.blocks):
            torch.testing.assert_close(
                runtime.memory.means[2, 0, block].double(), mean * scaling, atol=1e-5, rtol=1e-5
            )


CONFIG = tiny_config(layers=5, heads=8, kv_heads=2)
WEIGHTS = tiny_weights(CONFIG, seed=4)


def opened(method=SMALL, **more):
    return tiny_llm(Full(), CONFIG, WEIGHTS, max_context=256, **{"chunk": 64, **more}).session(
        method
    )


def test_chunks_of_whole_pieces_are_one_shot():
    """Pieces end at absolute multiples: chunks that are multiples of them change nothing; others
    do.
    """
    ids = random_ids(200, seed=1)
    with opened(chunk=256) as whole:
        expected = whole.prefill(ids)
    for chunk in (8, 64, 72):
        with opened(chunk=chunk) as session:
            torch.testing.assert_close(session.prefill(ids), expected, atol=2e-5, rtol=2e-5)
    with opened(chunk=50) as session:
        assert (session.prefill(ids) - expected).abs().max() > 1e-3


# a prompt up to A, its answer up to B, a second prompt up to C, its answer up to D
A, B, C, D = 70, 90, 115, 130


def test_going_back_is_as_if_nothing_had_been():
    """Into an answer, into a prompt, to the very beginning; forks too; a second turn follows.
    Always a session's bits that never did.
    """
    ids = random_ids(D, seed=2)
    with opened() as session, opened() as plain, opened() as other:
        expected = {0: plain.prefill(ids[:A])}
        expected |= {at: plain.decode(ids[at]) for at in range(A, B)}
        expected[B] = plain.prefill(ids[B:C])
        expected |= {at: plain.decode(ids[at]) for at in range(C, D)}

        def play(at):
            """Tokens from `at` on, in whole calls; the logits must be the plain session's."""
            while at < D:
                stop = {0: A, B: C}.get(at, at + 1)
                logits = (
                    session.decode(ids[at]) if stop == at + 1 else session.prefill(ids[at:stop])
                )
                assert torch.equal(logits, expected[at]), at
                at = stop

        play(0)
        for back in (D - 1, C, B, A + 7, A, 0):
            session.truncate(back)
            assert len(session) == back
            if back:
                with session.fork() as twin:
                    assert torch.equal(twin.decode(5), session.decode(5))
                session.truncate(back)
            play(back)
        # inside the second prompt: it ends here now, as it would have
        session.truncate(B + 10)
        other.prefill(ids[:A])
        for token in ids[A:B]:
            other.decode(token)
        other.prefill(ids[B : B + 10])
        assert torch.equal(session.decode(7), other.decode(7)) and session.stats.dense_steps == 0


def test_an_interrupted_prompt_is_what_its_whole_chunks_hold():
    """Ctrl-C after the second of three chunks: the session goes on as one that has read so much."""
    ids = random_ids(190, seed=5)

    def stop(progress):
        if progress.done == 128:
            raise KeyboardInterrupt

    with opened() as session, opened() as plain:
        with pytest.raises(KeyboardInterrupt):
            session.prefill(ids, progress=stop)
        expected = plain.prefill(ids[:128])
        assert len(session) == 128 and session.last_logits is None
        session.refresh_logits()
        assert torch.equal(session.last_logits, expected)
        assert torch.equal(session.decode(3), plain.decode(3))
        assert torch.equal(session.prefill(ids[128:]), plain.prefill(ids[128:]))


def test_other_kernels_go_on_with_the_same_memory():
    ids = random_ids(160, seed=3)
    with opened(backend="auto") as session, opened() as plain:
        for s in (session, plain):
            s.prefill(ids[:120])
            for token in ids[120:140]:
                s.decode(token)
        session.set_backend("reference")
        expected = [plain.decode(token) for token in ids[140:]]
        for _ in range(2):
            for token, logits in zip(ids[140:], expected):
                torch.testing.assert_close(session.decode(token), logits, atol=2e-5, rtol=2e-5)
            session.truncate(140)


def test_a_check_of_the_answer_changes_nothing():
    ids = random_ids(160, seed=2)
    with opened() as plain, opened() as session:
        for s in (plain, session):
            s.prefill(ids[:120])
            for token in ids[120:150]:
                s.decode(token)
        report = session.check(20)
        assert len(report.steps) == 20 and all(
            0 < mass < 1 for step in report.steps for mass in step.mass.values()
        )
        for token in ids[150:]:
            assert torch.equal(session.decode(token), plain.decode(token))


def test_it_reads_its_own_prompts():
    """A bank that another method has read holds neither its hidden states nor its scores."""
    with opened(Full()) as session:
        session.set_method(SMALL)  # nothing has been read
        session.prefill(random_ids(100))
    with opened(Full()) as session:
        session.prefill(random_ids(100))
        with pytest.raises(SettingError, match="infllm.*100 tokens"):
            session.set_method(SMALL)
        assert session.decode(3).isfinite().all()


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (dict(block=0), "block"),
        (dict(chunk=5000), "local"),
        (dict(local=256), "local"),
        (dict(cached=15), "cached"),
        (dict(representatives=129), "representatives"),
        (dict(local=True), "local"),
        (dict(topk=0), "topk"),
        (dict(init=-1), "init"),
    ],
)
def test_bad_settings_are_named(bad, word):
    with pytest.raises(SettingError, match=f"^{word}: found"):
        InfLLM(**bad)


def test_a_rope_that_cannot_be_turned_back_is_named():
    config = tiny_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(SettingError, match="dynamic NTK"):
        SMALL.plan(config)
