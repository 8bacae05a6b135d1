"""Real processes that hold the shipped model split by context: one driver for all of them, files of
each rank's rows, joint steps, and a server.
"""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from engine import LLM, AsyncLLM, Exact, Full, OmniKV, RankedLLM, SamplingParams
from engine.base.errors import SavedFileError
from engine.cli.ranked import planned_llm
from engine.ranks.placement import placements
from engine.saved.cache import BlockCache
from engine.serve.flags import parser, require_sense
from tests.builders import POCKET

METHOD = OmniKV(tokens=64, dense_below=0)
SETTINGS = dict(max_context=1024, chunk=64, dtype="float32", device="cpu", threads=1, method=METHOD)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def one():
    """One process."""
    return LLM(POCKET, **SETTINGS)


@pytest.fixture(scope="module")
def pair():
    """Two processes."""
    llm = RankedLLM(POCKET, 2, split_by="context", timeout=300, **SETTINGS)
    yield llm
    llm.close()


def ids_of(count):
    """Token ids of the shipped model."""
    return torch.randint(5, 5000, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("method", [METHOD, Exact(METHOD, draft=4)], ids=lambda m: m.name)
def test_processes_write_one_process_s_text(one, pair, method, offload):
    found = []
    for llm in (one, pair):
        with llm.session(method=method, offload=offload) as session:
            found.append([piece.token_id for piece in session.generate(ids_of(331), GREEDY)])
            assert method is not METHOD or session.stats.sparse_steps >= 11
            if method is METHOD:
                found.append([step.sparse_token for step in session.check(3).steps])
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert [rank.tokens for rank in placements(pair)] == [512, 512]


def names(folder):
    return sorted(re.sub(r"\d+-[0-9a-f]{16}", "N", path.name) for path in folder.iterdir())


def test_a_saved_session_goes_on_to_the_bit(one, pair, tmp_path):
    path = tmp_path / "a"
    for method, lengths in ((METHOD, (1, 255, 450)), (Full(), (64,))):
        for length in lengths:
            with pair.session(method=method) as session:
                session.prefill(ids_of(length))
                session.decode(5)
                session.save(path, {"made": length})
                want = session.decode(9)
                other, extra = pair.restore(path)
                with other:
                    assert (other.ids, extra) == (session.ids[:-1], {"made": length})
                    assert torch.equal(other.decode(9), want)
                session.truncate(length // 2 + 1)
                want = session.decode(8)
                with pair.restore(path, tokens=length // 2 + 1, offload="host")[0] as other:
                    assert torch.allclose(other.decode(8), want, atol=1e-5)
            assert names(tmp_path) == ["a", "a.N.rank0", "a.N.rank1"]
    with pytest.raises(SavedFileError, match="by 2 ranks by context, .* 2 --split-by context, or"):
        one.restore(path)


def test_blocks_of_ranks_are_their_own_rows(pair, tmp_path):
    prompt, cache = ids_of(1000)[:700], BlockCache(tmp_path)
    with pair.session() as session:
        session.prefill(prompt)
        want = session.decode(9)
        assert cache.store(session) == 2 and cache.store(session) == 0
    with pair.session() as session:
        session.prefill(prompt[:50])
        assert cache.fill(session, prompt) == 512
        session.prefill(prompt[512:])
        assert torch.allclose(session.decode(9), want, atol=1e-5)
    assert len(list(tmp_path.glob("*/*"))) == 4


def test_sessions_take_their_steps_together(one, pair):
    """Fed by hand: another set of sessions at every step."""
    found = []
    for llm in (one, pair):
        logits = []
        with llm.batch(slots=2) as batch:
            first = batch.session()
            first.prefill(ids_of(150))
            second = batch.session(method=Full(), offload="host")
            second.prefill(ids_of(70))
            for token in (5, 6, 7):
                for session in (first, second)[: 1 + (token != 6)]:
                    batch.feed(session, token)
                logits += batch.step().values()
        found.append(torch.stack(logits))
    assert len(found[0]) == 5 and float((found[0] - found[1]).abs().max()) < 1e-4


def test_many_callers_share_the_steps_of_ranks(one, pair):
    prompts = [ids_of(200) + [20 + n] * 9 for n in range(3)]
    params = [SamplingParams(max_tokens=6 + n, ignore_eos=True, seed=n) for n in range(3)]

    async def asked(llm):
        async with AsyncLLM(llm, slots=2) as many:
            answers = [many.generate(ids, each) for ids, each in zip(prompts, params)]
            return [await answer for answer in answers]

    want, found = (asyncio.run(asked(llm)) for llm in (one, pair))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in want]


def test_a_server_answers_over_the_split(one, pair):
    """Two clients at once, and a second question on what one of them has had read, over HTTP: the
    texts of a server of one process, and the ranks have exchanged what a split by context does.
    """
    conftest = pytest.importorskip("tests.engine.serve.conftest")
    read = ["a b c d " * 40, "The red door is open. " * 20]
    asked = [dict(prompt=text, max_tokens=n, temperature=0) for text, n in zip(read, (9, 14))]
    asked.append(dict(asked[1], prompt=read[1] + "Which door?"))
    found, before = [], pair._ranks.sent.calls
    for llm in (one, pair):
        with conftest.serving(llm, slots=2) as server, ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(partial(server.post, "/v1/completions"), asked[:2]))
            answers.append(server.post("/v1/completions", asked[2]))
            assert [answer.status_code for answer in answers] == [200] * 3
            told = [answer.json() for answer in answers]
            assert told[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
            found.append([answer["choices"][0]["text"] for answer in told])
    assert found[0] == found[1] and len(set(found[0])) > 1
    assert pair._ranks.sent.calls - before > 30 * len(pair.config.seeing_layers)


def test_a_server_takes_the_split():
    """That one starts its ranks is tests/engine/ranks/test_processes.py's."""
    args = parser().parse_args(["--ranks", "2", "--split-by", "context"])
    require_sense(args)
    assert planned_llm(str(POCKET), args, dict(max_context=256)).split_by == "context"
