"""A model split by context gives one process's logits and selections, whatever block a session ends
in, and each rank holds and sends what the plan and docs/PARALLEL.md say. Ranks are threads here.
"""

import random
from dataclasses import replace

import pytest
import torch

from engine import LLM, Exact, Full, OmniKV, OracleTopK, Quest, SamplingParams, SnapKV
from engine.base.errors import SettingError, UsageError
from engine.chat.flags import parser
from engine.cli.ranked import planned_llm
from engine.methods.split import context_attention, context_runtime
from engine.methods.split.context_attention import candidates, winners
from engine.model.config.share import BLOCK, EXCHANGED, LANDING, ContextShare
from kernels.select.topk import select_topk, select_topk_ref
from tests.builders import POCKET
from tests.engine.ranks.model import SETTINGS, ids_of, model_folder
from tests.engine.ranks.test_merge import planted, whole
from tests.engine.ranks.threads import Together
from tests.weights.quantised_files import write

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 131, 307)
SPARSE = OmniKV(filter_layers=(1, 4), tokens=20, tail=64, dense_below=0)
CLOSE = 1e-4  # of float32 logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder. Layer 4 asks nothing, so that it scores every token alike."""
    from safetensors.torch import load_file, save_file

    path = model_folder(tmp_path_factory.mktemp("context") / "model")
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "layers.4." in name and "q_proj" in name:
            weight.zero_()
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def one(folder):
    """One process."""
    return LLM(folder, method=SPARSE, **SETTINGS)


@pytest.fixture(scope="module", params=[2, 3])
def many(folder, request):
    """Two ranks, and three."""
    return Together(folder, request.param, split_by="context", method=SPARSE, **SETTINGS)


def answered(llm, method, prompt, steps=4):
    """(logits, selections of every step, figures) of a prompt and forced steps."""
    with llm.session(method=method) as session:
        found, chosen = [session.prefill(ids_of(prompt))], []
        for token in ids_of(steps, seed=9):
            found.append(session.decode(token))
            chosen.append({k: v.clone() for k, v in session.selections.items()})
        stats = session.stats
        return torch.stack(found), chosen, stats


def require_same(ranks, alone):
    """Require one process's logits and selections, and the same bits on every rank."""
    logits, chosen, stats = alone
    for theirs, lists, counted in ranks:
        assert float((theirs - logits).abs().max()) < CLOSE
        assert torch.equal(theirs, ranks[0][0])
        assert (counted.sparse_steps, counted.tokens) == (stats.sparse_steps, stats.tokens)
        for mine, own in zip(lists, chosen, strict=True):
            assert mine.keys() == own.keys()
            assert all(torch.equal(mine[layer], own[layer]) for layer in own)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_blocks_go_round(ranks):
    draw = random.Random(ranks)
    shares = [ContextShare(rank, ranks) for rank in range(ranks)]
    for n in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, *(draw.randrange(5000) for _ in range(20))):
        counts = [share.count(n) for share in shares]
        assert sum(counts) == n and max(counts) - min(counts) <= BLOCK
        every = []
        for share, count in zip(shares, counts):
            positions = share.positions(torch.arange(count))
            assert [share.count(p) for p in positions.tolist()] == list(range(count))
            assert all(map(share.holds, positions.tolist()))
            assert torch.equal(share.rows_of(torch.arange(n)), torch.arange(count))
            every += positions.tolist()
            first = draw.randint(0, n)
            spans = list(share.spans(first, n))
            assert [p for a, b, _ in spans for p in range(a, b)] == list(range(first, n))
            assert all(share.holds(p) == held for a, b, held in spans for p in range(a, b))
            assert all(x[2] != y[2] for x, y in zip(spans, spans[1:]))
        assert sorted(every) == list(range(n))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", [Full(), SPARSE, replace(SPARSE, scores="raw", sink=3)])
def test_sessions_are_one_process_s(one, many, method, length):
    alone = answered(one, method, length)
    require_same(many.each(answered, method, length), alone)
    if method != Full():
        assert alone[2].sparse_steps == 4
        # of layer 4 all tokens tie: the lowest win, wherever they lie
        most = max(0, length + 4 - 64) // 8 * 8
        tied = alone[1][-1][4]
        assert torch.equal(tied, torch.arange(len(tied))) and len(tied) <= 20
        assert len(tied) == 20 or most < 40


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_lists_of_ranks_hold_what_one_process_chooses(backend):
    generator = torch.Generator().manual_seed(41)
    for trial in range(40):
        ranks, tokens = 2 + trial % 3, [1, 63, 65, 128, 331][trial % 5]
        k = [1, 5, 16, tokens][trial // 4 % 4]
        scores = planted(generator, 1, tokens, trial % 5)[:, 0]
        hi = tokens - trial % 4  # may be empty
        want = torch.empty(100, k, dtype=torch.int32)
        counts = torch.empty(100, dtype=torch.int32)
        select_topk_ref(scores, whole(0), whole(hi), whole(k), want, counts)
        shares = [ContextShare(rank, ranks) for rank in range(ranks)]
        held = [share.held(torch.arange(tokens)) for share in shares]
        numbers = torch.tensor([k], dtype=torch.int32)
        for row in range(0, 100, 20):
            lists = []
            for share, own in zip(shares, held):
                mine = scores[row : row + 1, own].contiguous()
                mine = torch.nn.functional.pad(mine, (0, 1))  # never nothing at all
                index = torch.empty(1, k, dtype=torch.int32)
                found, zero = torch.empty_like(numbers), torch.zeros_like(numbers)
                limit = torch.full_like(numbers, share.count(max(0, hi)))
                select_topk(mine, zero, limit, numbers, index, found, backend=backend)
                lists.append(candidates(mine[0], index[0], share))
            index = torch.empty(1, k, dtype=torch.int32)
            best = winners(torch.stack(lists), numbers, index, found)
            assert torch.equal(index[0], want[row]) and int(found) == int(counts[row])
            given = scores[row, index[0, : int(found)].long()]
            assert torch.equal(best.nan_to_num(7), given.nan_to_num(7))


def test_parts_that_weigh_alike_are_not_attention(one, many, monkeypatch):
    """The control: without the log-sum-exps as weights the answers are others."""

    def mean(part, gathered, dtype, softmax):
        parts = gathered(torch.cat([part[0].float(), part[1].unsqueeze(-1)], -1))
        return parts[..., :-1].mean(0).to(dtype), parts[..., -1].logsumexp(0)

    alone = answered(one, Full(), 131)
    for module in (context_attention, context_runtime):
        monkeypatch.setattr(module, "merged", mean)
    (found, _, _), *_ = many.each(answered, Full(), 131)
    assert float((found - alone[0]).abs().max()) > 100 * CLOSE


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_launchers_agree(one, many, backend):
    def run(llm):
        with llm.session() as session:
            session.set_backend(backend)
            session.prefill(ids_of(200))
            return torch.stack([session.decode(token) for token in ids_of(4, seed=9)])

    want = run(one)
    for found in many.each(run):
        assert float((found - want).abs().max()) < CLOSE


def test_sessions_go_back_fork_and_change_their_method(one, many):
    def walk(llm):
        with llm.session() as session:
            session.prefill(ids_of(100), more=True)
            found = [session.prefill(ids_of(EXCHANGED + 21, seed=3))]
            found += [session.decode(token) for token in (5, 6, 7)]
            scores = session.selection_scores
            session.refresh_logits()
            session.truncate(129)
            found.append(session.decode(8))
            session.refresh_logits()
            found.append(session.last_logits)
            with session.fork() as other:
                found.append(other.decode(9))
                other.set_method(Full())
                found.append(other.decode(10))
            session.truncate(64)
            session.refresh_logits()
            found += [session.last_logits, session.decode(12)]
            return torch.stack(found), scores

    want, scores = walk(one)
    for found, theirs in many.each(walk):
        assert float((found - want).abs().max()) < CLOSE
        assert theirs.keys() == scores.keys()
        assert all(torch.allclose(theirs[k], scores[k], atol=1e-5) for k in scores)


def test_prompts_are_scored_as_by_one_process(one, many):
    want = one.score(ids_of(150), 2)
    for found in many.each(lambda llm: llm.score(ids_of(150), 2)):
        assert found.logprobs[1:] == pytest.approx(want.logprobs[1:], abs=CLOSE)


@pytest.mark.parametrize("settings", [dict(weights="int4"), dict(dtype="bfloat16")], ids=str)
def test_other_weights(tmp_path, settings):
    """In bfloat16 a last bit of rounding is a step of its own: 2**-8 of a logit's size."""
    sizes = dict(hidden_size=64, head_dim=32, intermediate_size=128, num_attention_heads=4)
    folder = model_folder(tmp_path, num_hidden_layers=5, **sizes)
    given = {**SETTINGS, **settings, "method": replace(SPARSE, filter_layers=(1,))}
    want = answered(LLM(folder, **given), None, 131)[0]
    close = CLOSE if "weights" in settings else 0.02 * float(want.abs().max())
    together = Together(folder, 2, split_by="context", **given)
    for found, _, stats in together.each(answered, None, 131):
        assert float((found - want).abs().max()) < close and stats.sparse_steps == 4


def test_weights_that_come_in_few_bits(tmp_path):
    """They are whole on every rank."""
    config, _ = write(tmp_path / "m", "w4a16, channels")
    given = dict(dtype="float32", device="cpu", threads=1, method=Full())
    ids = [1 + place % (config.vocab_size - 1) for place in range(min(131, config.max_positions))]
    want = LLM(tmp_path / "m", **given).session().prefill(ids)
    together = Together(tmp_path / "m", 2, split_by="context", **given)
    for found in together.each(lambda llm: llm.session().prefill(ids)):
        assert float((found - want).abs().max()) < CLOSE


def test_each_rank_holds_and_sends_what_is_planned(one, many):
    config = one.config
    size = len(many.llms)

    def run(llm):
        with llm.session() as session:
            sent = [replace(llm._ranks.sent)]
            session.prefill(ids_of(200))
            sent.append(replace(llm._ranks.sent))
            session.decode(5)
            return [*sent, replace(llm._ranks.sent)], session.stats.bank_bytes

    held = 0
    for llm, ((first, before, after), held_here) in zip(many.llms, many.each(run), strict=True):
        part = config.num_heads * (config.head_dim + 1) * 4
        assert after.bytes - before.bytes == config.num_layers * part + 2 * 20 * 8
        assert after.calls - before.calls == config.num_layers + 2
        # the last layer attends for the prompt's last token alone
        assert before.bytes - first.bytes == part * (200 * (config.num_layers - 1) + 1)
        assert llm.plan().bytes_of("context bank") == held_here
        held += held_here
    plan = many.llms[0].planner.plan(ram_budget=10**9)
    whole_machine = one.planner.plan(ram_budget=10**9)
    assert plan.free == whole_machine.free // size
    assert plan.free_name == f"1/{size} of {whole_machine.free_name}"
    landing = 2 * LANDING * config.kv_bytes(4) * size
    assert held - landing == one.plan().bytes_of("context bank")


REFUSED = [
    (dict(method=SnapKV(tokens=64)), "snapkv with 2 ranks split by context, but it evicts"),
    (dict(method=Quest(tokens=64)), "quest with 2 ranks split by context, but it has not been"),
    (dict(method=OracleTopK(tokens=9, granularity="kv_head")), "use granularity='layer'"),
    (dict(method=Exact(OracleTopK(tokens=9, granularity="query_head"))), "granularity='layer'"),
    (dict(method=replace(SPARSE, prefill_ratio=8)), "chooses for prompts by rows of all"),
    (dict(method=replace(SPARSE, residual="sample")), "leave residual out"),
    (dict(method=OmniKV(filter_layers=(1, 4), official=True)), "leave official out"),
    (dict(selection="per_rank"), "selection: found 'per_rank' with split_by='context'"),
    (dict(split_by="tokens"), "split_by: found 'tokens', expected one of heads, context"),
    (dict(forever=True, max_context=None, method=None), "forever"),
]


@pytest.mark.parametrize("settings, said", REFUSED, ids=lambda x: "")
def test_what_does_not_run_is_refused_in_a_line(folder, settings, said):
    with pytest.raises(SettingError, match=said) as error:
        Together(folder, 2, **{**SETTINGS, "method": SPARSE, "split_by": "context", **settings})
    assert "\n" not in str(error.value)


def test_rows_by_position_are_refused(many):
    with many.llms[0].session() as session:
        for read in (lambda: session.bank.kv(0), lambda: session.bank.newest_rows(0, 0, 1)):
            with pytest.raises(SettingError, match="of which none has the rows"):
                read()


def test_a_split_needs_processes():
    args = parser().parse_args(["--split-by", "context"])
    with pytest.raises(UsageError, match="--split-by: found context and one process"):
        planned_llm("pocket", args, {})


SHIPPED = dict(max_context=1024, chunk=64, dtype="float32", device="cpu", threads=1)
SHIPPED["method"] = OmniKV(tokens=64, dense_below=0)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def written(llm):
    """The greedy answer to a prompt of the shipped model's ids."""
    ids = torch.randint(5, 5000, (331,), generator=torch.Generator().manual_seed(1)).tolist()
    with llm.session() as session:
        text = [piece.token_id for piece in session.generate(ids, GREEDY)]
        assert session.stats.sparse_steps >= 11
        return text


def test_three_ranks_write_the_shipped_model_s_text():
    """A chunk here is exchanged in two parts, and ends inside a block."""
    given = {**SHIPPED, "chunk": EXCHANGED + 44}
    want = written(LLM(POCKET, **given))
    three = Together(POCKET, 3, split_by="context", **given)
    assert three.each(written) == [want] * 3
