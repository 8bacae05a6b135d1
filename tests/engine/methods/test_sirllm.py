"""SirLLM: what stays is what surprised the model, in slots of a cache of fixed size.

The oracle is a dense float64 simulation that has all tokens; with surprises that are all alike the
method is StreamingLLM, to the bit. Stops: a surprise of the wrong token or of other logits, a token
that goes too early, late or twice, a distance that is not the slots', a query that sees more than
the budget, a turn that shrinks scores twice or not, logits that are held for a whole prompt.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.evict.sirllm import SirLLM, SirLLMRuntime
from engine.methods.evict.streaming_llm import StreamingLLM
from engine.methods.full import Full
from engine.methods.select.events import surprise
from tests.builders import GROUPS, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
KINDS = {
    "eighths": SirLLM(tokens=32),
    "no sinks, none by age, decay": SirLLM(tokens=24, sink=0, recent=0, segment=7, decay=0.5),
    "one by one": SirLLM(tokens=24, sink=3, recent=5, segment=1),
    "segments beyond a chunk": SirLLM(tokens=80, recent=6, segment=45, decay=0.9),
}
# lengths 1, a segment and one beside it, primes, several chunks, more than is held
TURNS = ((1, 1), (90, 17), (7, 2), (3, 4), (29, 3))


class Surprised(Conversation):
    """A conversation whose tokens live by surprise; all heads and layers hold the same."""

    def __init__(self, model, method):
        super().__init__(model, Rule("sirllm", method.tokens))
        self.method, self.parts = method, method.parts(method.tokens)
        self.scores_of, self.held, self.behind = np.zeros(0), np.zeros(0, dtype=int), None

    def prompt(self, ids):
        """A turn's first tokens, in segments: there is room for one before each and at its end."""
        self.scores_of, size = self.scores_of * self.method.decay, self.parts.segment
        self.cut(size, self.parts.recent)
        for first in range(0, len(ids), size):
            logits = self.read(ids[first : first + size])
            if first + size <= len(ids):
                self.cut(size, self.parts.recent)
        return logits

    def step(self, token):
        """A token of an answer, which is one of the newest."""
        self.cut(1, max(self.parts.recent, 1) - 1)
        return self.read([token])

    def cut(self, room, recent):
        """Drop what is least surprising, of equal tokens the oldest, until so many have room."""
        while len(self.held) > self.method.tokens - room:
            newest = len(self.scores_of) - recent
            free = [i for i in self.held if self.parts.sinks <= i < newest]
            worst = min(free, key=lambda i: (self.scores_of[i], i))
            self.held = self.held[self.held != worst]

    def read(self, ids):
        model, first, count = self.model, len(self.keys[0]), len(ids)
        x = model.weights["model.embed_tokens.weight"][list(ids)]
        self.held = np.concatenate([self.held, np.arange(first, first + count)])
        slots = np.arange(len(self.held))
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (model.project(layer, part, normed) for part in "qkv")
            self.keys[layer] = np.concatenate([self.keys[layer], k])
            self.values[layer] = np.concatenate([self.values[layer], v])
            q = model.rotate(q, slots[-count:])
            mask = slots <= slots[-count:, None]
            k = model.rotate(self.keys[layer][self.held], slots)
            x = model.rest(layer, x, model.attend(q, k, self.values[layer][self.held], mask))
        logits = np.stack([model.head(one) for one in x])
        before = np.concatenate([[logits[0]] if self.behind is None else [self.behind], logits])
        new = [
            np.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
            for row, token in zip(before, ids)
        ]
        if self.behind is None:
            new[0] = 0.0
        self.scores_of, self.behind = np.concatenate([self.scores_of, new]), logits[-1]
        return logits[-1]


def made(heads=(4, 2), **settings):
    """(LLM, its float64 model)."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    given = dict(max_context=512, backend="reference", chunk=37) | settings
    shape = Shape(LAYERS, *heads, 64 // heads[0], 1e-5)
    return tiny_llm(Full(), config, weights, **given), Model(shape, weights)


@pytest.mark.parametrize(
    ("heads", "backend", "forget", "chunk"),
    [
        (GROUPS[0], "reference", False, 37),
        (GROUPS[1], "auto", True, 16),
        (GROUPS[2], "auto", False, 512),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_rows_surprises_and_logits_are_the_simulations(name, heads, backend, forget, chunk):
    method = replace(KINDS[name], forget=forget)
    llm, model = made(heads, backend=backend, chunk=chunk)
    oracle, evicted = Surprised(model, method), 0
    with llm.session(method) as session:
        for turn, (prompt, answer) in enumerate(TURNS):
            ids = random_ids(prompt + answer, seed=turn)
            found = session.prefill(ids[:prompt]).numpy()
            np.testing.assert_allclose(found, oracle.prompt(ids[:prompt]), atol=1e-4)
            for token in ids[prompt:]:
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.step(token), atol=1e-4)
                evicted += assert_held(session, oracle)
        assert session.bank.forgets == forget and evicted > 10
        assert session.stats.sparse_steps == sum(answer for _, answer in TURNS)


def assert_held(session, oracle):
    """The same tokens and surprises in every layer and head; how many tokens are gone."""
    for layer in range(LAYERS):
        (rows,) = session.runtime.sequences[0].layers[layer]
        for head, row in enumerate(rows.positions[:, : rows.held]):
            order = row.argsort()
            assert row[order].tolist() == sorted(oracle.held)
            mine = rows.scores[head, 0, : rows.held][order].numpy()
            expected = oracle.scores_of[np.sort(oracle.held)]
            np.testing.assert_allclose(mine, expected, atol=1e-4)
    return len(session) - len(oracle.held)


# ---------------------------------------------------------------- what it is made of


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("recent", [0, 9])
def test_with_equal_surprises_it_is_streaming_llm_to_the_bit(monkeypatch, heads, recent):
    """Answers, over the turning point; a prompt token by token, within the rounding of chunks."""
    monkeypatch.setattr(surprise, "surprise", lambda logits, ids: torch.ones(len(ids)))
    llm, _ = made(heads)
    method = SirLLM(tokens=24, recent=recent, segment=1)
    with llm.session(method) as one, llm.session(StreamingLLM(tokens=24)) as other:
        for token in random_ids(60):
            assert torch.equal(one.decode(token), other.decode(token))
        assert one.runtime.rows_read(60) == other.runtime.rows_read(60) == [24] * LAYERS

        assert one.runtime.positions(1) == other.runtime.positions(1)
    with llm.session(method) as one, llm.session(StreamingLLM(tokens=24)) as other:
        prompt = random_ids(45, seed=1)
        torch.testing.assert_close(one.prefill(prompt), other.prefill(prompt), atol=2e-5, rtol=0)
        for token in random_ids(5, seed=2):
            torch.testing.assert_close(one.decode(token), other.decode(token), atol=2e-5, rtol=0)


def test_with_equal_surprises_some_other_distance_is_noticed(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(surprise, "surprise", lambda logits, ids: torch.ones(len(ids)))
    llm, _ = made()
    with (
        llm.session(SirLLM(tokens=24, segment=1)) as one,
        llm.session(StreamingLLM(tokens=25)) as other,
    ):
        found = [(one.decode(token), other.decode(token)) for token in random_ids(60)]
    assert all(torch.equal(*pair) for pair in found[:24])
    assert not any(torch.equal(*pair) for pair in found[30:])


def test_a_score_is_minus_the_log_probability_and_nothing_else():
    """Of the session's own logits: of every token of a prompt, across chunks and calls, and of what
    an answer is given.
    """
    llm, _ = made(chunk=16)
    ids, behind = random_ids(60), []
    with llm.session(SirLLM(tokens=128, segment=16)) as session:

        def every(x, start):
            behind.append(llm.model.logits(x[0]))

        session.prefill(ids[:33], every=every)
        for token in ids[33:40]:
            behind.append(session.decode(token).unsqueeze(0))
        session.prefill(ids[40:], every=every)
        logits = torch.cat(behind).double()[:-1]
        expected = -logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]
        for (rows,) in session.runtime.sequences[0].layers:
            assert rows.held == 60 and rows.scores.shape[1] == 1
            for scores in rows.scores[:, 0, :60]:
                torch.testing.assert_close(scores[1:].double(), expected, atol=1e-5, rtol=0)
                assert scores[0] == 0


def test_logits_of_a_chunk_are_never_held_together(monkeypatch):
    llm, _ = made(chunk=64)
    seen = []
    ids, method = random_ids(60), SirLLM(tokens=512)

    def scores():
        with llm.session(method) as session:
            session.prefill(ids)
            return session.runtime.sequences[0].layers[0][0].scores

    hear, whole = SirLLMRuntime.hear, scores()

    def counted(self, tokens, logits):
        hear(self, tokens, lambda *at: seen.append(at) or logits(*at))

    monkeypatch.setattr(SirLLMRuntime, "hear", counted)
    monkeypatch.setattr(surprise, "SLICE", 7 * llm.config.vocab_size + 5)
    torch.testing.assert_close(scores(), whole, atol=1e-5, rtol=0)
    assert max(stop - first for first, stop in seen) == 7 and seen[-1][1] == 60


@pytest.mark.parametrize("forget", [False, True])
def test_no_query_sees_more_than_the_budget(monkeypatch, forget):
    """In prompts, in later turns and in answers; and it does see all of it."""
    most = []
    for name in ("attend_rows", "attend_window"):
        plain = getattr(SirLLMRuntime, name)

        def noted(self, *given, plain=plain, name=name):
            k = given[1 if name == "attend_window" else 2]
            window = given[7] if name == "attend_window" else k.shape[1]
            most.append(window + (given[6] if name == "attend_window" else 0))
            return plain(self, *given)

        monkeypatch.setattr(SirLLMRuntime, name, noted)
    llm, _ = made(chunk=8)
    with llm.session(SirLLM(tokens=40, segment=6, forget=forget)) as session:
        for turn in range(3):
            session.prefill(random_ids(101 + turn, seed=turn))
            assert all(len(head) <= 40 for head in session.runtime.positions(0))
            for token in random_ids(20, seed=turn):
                session.decode(token)
        assert max(most) == 40
        assert all(len(head) == 40 for head in session.runtime.positions(2))
        assert session.stats.store_bytes == session.method.held_bytes(
            session.plan, llm.config, 4, 103, 20
        )


# ---------------------------------------------------------------- turns, interrupts, files


@pytest.mark.parametrize("settings", [{"tokens": 64}, {"tokens": 64, "segment": 7}, {"share": 0.5}])
def test_no_chunk_is_longer_than_what_is_planned_for_one(settings):
    llm = tiny_llm(method=SirLLM(sink=2, **settings), max_context=512)
    plan = llm.plan()
    with llm.session() as session:
        piece, ends = session.runtime.needs.piece, []
        for count in (300, 101):
            session.prefill(random_ids(count), progress=lambda state: ends.append(state.done))
    # positions from 0, in both prompts
    lengths = [stop - start if stop > start else stop for start, stop in zip([0, *ends], ends)]
    assert sum(lengths) == 401 and max(lengths) <= piece
    notes = {item[0]: item[2] for item in plan.items}
    assert (
        notes["prefill workspace"] == f"activations of one chunk of {min(piece, plan.chunk)} tokens"
    )


def surprises(session):
    """{position: surprise} of layer 1."""
    (rows,) = session.runtime.sequences[0].layers[1]
    found = rows.positions[0, : rows.held].tolist(), rows.scores[0, 0, : rows.held].tolist()
    return dict(zip(*found))


def test_scores_shrink_when_a_turn_begins_and_only_then():
    llm, _ = made(chunk=16)
    with llm.session(SirLLM(tokens=160, segment=16, decay=0.5)) as session:
        session.prefill(random_ids(40))
        for token in random_ids(5, seed=1):
            session.decode(token)
        first = surprises(session)

        def stop(_):
            raise KeyboardInterrupt

        session.prefill(random_ids(32, seed=2), more=True)  # two whole segments
        session.prefill(random_ids(20, seed=3))
        second = surprises(session)
        assert len(first) == 45 and len(second) == 97
        assert all(second[at] == score / 2 for at, score in first.items())
        with pytest.raises(KeyboardInterrupt):
            session.prefill(random_ids(20, seed=4), stop)
        third = surprises(session)  # the chunk that was read was a turn
        assert len(third) == 113 and all(third[at] == old / 2 for at, old in second.items())


def test_a_prompt_that_fails_before_its_first_chunk_changes_no_score(monkeypatch):
    llm, _ = made(chunk=16)
    with llm.session(SirLLM(tokens=40, segment=8, decay=0.5)) as session:
        session.prefill(random_ids(60))
        for token in random_ids(20, seed=1):
            session.decode(token)
        before = surprises(session)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def interrupted(*_):
                raise KeyboardInterrupt

            patch.setattr(SirLLMRuntime, "hear", interrupted)
            session.prefill(random_ids(5, seed=2))
        assert surprises(session) == before
        with session.fork() as twin:
            session.prefill(random_ids(5, seed=2))
            twin.prefill(random_ids(5, seed=2))
            assert surprises(session) == surprises(twin)
            assert all(surprises(session)[at] == before[at] / 2 for at in range(4))


@pytest.mark.parametrize("forget", [False, True])
def test_going_back_forks_and_files_have_the_newest_tokens_logits(tmp_path, forget):
    """The first token behind a savepoint is scored by them."""
    llm, _ = made(chunk=16)
    with llm.session(SirLLM(tokens=40, segment=8, decay=0.9, forget=forget)) as session:
        session.prefill(random_ids(100))
        copies = [session.fork()]
        if forget:
            session.save(tmp_path / "one")
            copies.append(llm.restore(tmp_path / "one")[0])
        answer = random_ids(12, seed=1)
        expected = torch.stack([session.decode(token) for token in answer])
        kept = surprises(session)
        session.truncate(100)
        for one in (session, *copies):
            found = torch.stack([one.decode(token) for token in answer])
            assert torch.equal(found, expected) and surprises(one) == kept
        session.truncate(105)  # in the middle of an answer: its steps run again
        found = torch.stack([session.decode(token) for token in answer[5:]])
        assert torch.equal(found, expected[5:]) and surprises(session) == kept


def test_a_stream_is_the_simulation_in_constant_memory():
    """Over six times what it holds and four times the positions that the model is made for."""
    method = SirLLM(tokens=40, segment=8, decay=0.8)
    config = tiny_config(layers=LAYERS, heads=4, kv_heads=2, max_positions=64)
    weights = tiny_weights(config, seed=6)
    given = dict(max_context=None, chunk=16, backend="reference", forever=True)
    llm = tiny_llm(method, config, weights, **given)
    oracle, sizes = Surprised(Model(Shape(LAYERS, 4, 2, 16, 1e-5), weights), method), set()
    with llm.session() as session:
        for turn in range(5):
            prompt = random_ids(45, seed=turn)
            found = session.prefill(prompt).numpy()
            np.testing.assert_allclose(found, oracle.prompt(prompt), atol=1e-4)
            for token in random_ids(9, seed=turn + 9):
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.step(token), atol=1e-4)
                assert_held(session, oracle)
            sizes.add((session.bank.nbytes, session.runtime.nbytes))
        assert len(session) == 270 > 4 * 64 and len(sizes) == 1
        assert "surprised the model least" in session.method.forgotten(270)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (dict(tokens=5), "sink, recent, segment: found 4 \\+ 1 \\+ 1, expected fewer than .* 5 t"),
        (dict(tokens=64, recent=60), "found 4 \\+ 60 \\+ 8"),
        (dict(sink=-1), "sink: found -1"),
        (dict(recent=-1), "recent: found -1"),
        (dict(segment=0), "segment: found 0"),
        (dict(decay=0), "decay: found 0"),
        (dict(decay=1.5), "decay: found 1.5"),
        (dict(tokens=40, share=0.5), "tokens"),
    ],
)
def test_bad_settings_are_one_line(settings, line):
    with pytest.raises(SettingError, match=line) as error:
        SirLLM(**settings)
    assert "\n" not in str(error.value)


def test_a_session_of_full_attention_cannot_go_on_with_it():
    llm, _ = made()
    with llm.session() as session:
        session.prefill(random_ids(30))
        with pytest.raises(SettingError, match="sirllm: reads prompts in its own way"):
            session.set_method(SirLLM(tokens=40))
