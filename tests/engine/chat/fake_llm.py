"""An LLM without weights: real tokenizer and session book-keeping, answers from a script. For the
chat's tests.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from engine.base.errors import ContextTooLong
from engine.methods.full import Full
from engine.plan.prefill_time import PrefillProgress
from engine.runner.state import SessionStats
from engine.sampling.params import SamplingParams
from engine.session.results import GenerationStats, Piece
from engine.text.stop import StopScanner

CHUNK = 4


class FakeSession:
    """Ids and nothing else. `log` tells what was done: ("prefill", n), ("truncate", from, to),
    ("decode", id).
    """

    def __init__(self, llm):
        self.llm, self.ids, self.log = llm, [], []
        self.selections, self.selection_scores = {}, {}
        self.stats, self.method = SessionStats(bank_bytes=640), Full()
        self.capacity = self.limit = llm.max_context
        self.endless, self.forgotten = False, 0
        # a plan of one layer that chooses, at every length
        self.plan = SimpleNamespace(sparse_layers=(1,), partial_layers=(1,))
        self.runner = SimpleNamespace(dense_below=0, rows_read=lambda n, sparse: [n, 0])
        self.bank = SimpleNamespace(forgets=False, lacks=False)

    def __len__(self):
        return len(self.ids)

    def prefill(self, ids, progress=None):
        if len(self.ids) + len(ids) > self.llm.max_context:
            raise ContextTooLong(
                f"{len(self.ids) + len(ids)} tokens do not fit: the limit is {self.llm.max_context}"
            )
        for at in range(0, len(ids), CHUNK):
            part = ids[at : at + CHUNK]
            self.ids += part
            self.log.append(("prefill", len(part)))
            done = min(len(ids), at + CHUNK)
            if progress:
                progress(
                    PrefillProgress(
                        done, len(ids), done / len(ids), 0.1 * done, 0.1 * (len(ids) - done)
                    )
                )

    def tokens_again(self, n):
        return 0

    def watch_with(self, watch):
        self.watch = watch

    def frees(self, method):
        return 0

    def reads_again(self, method):
        return 0

    def truncate(self, n, later=False):
        assert 0 <= n <= len(self.ids)
        if n < len(self.ids):
            self.log.append(("truncate", len(self.ids), n))
            del self.ids[n:]

    def generate(self, ids, params=None, progress=None, should_stop=None):
        params = params or SamplingParams()
        stats = GenerationStats(
            cached_tokens=len(self.ids), prompt_tokens=len(ids), prefill_seconds=0.5
        )
        if ids:
            self.prefill(ids, progress)
        words, scanner = self.llm.tokenizer.stream(self.ids), StopScanner(params.stop)
        for token in self.llm.script(self.ids):
            if should_stop and should_stop():
                yield Piece(words.flush(), None, None, (), "interrupted", stats)
                return
            self.ids.append(token)
            if token in self.llm.end_token_ids:
                yield Piece(words.flush(), token, None, (), "stop", stats)
                return
            stats.new_tokens += 1
            stats.dense_steps += 1
            stats.decode_seconds += 0.01
            self.stats.bytes_read_dense += 1000
            shown = scanner.push(words.push(token))
            reason = (
                "stop"
                if scanner.found
                else "length"
                if stats.new_tokens >= params.max_tokens
                else None
            )
            yield Piece(shown + (words.flush() if reason else ""), token, None, (), reason, stats)
            if reason:
                return


@dataclass
class FakePlan:
    """A plan of 1000 bytes of weights, everything on the device."""

    model: str = "fake"
    placement: object = None
    fits: bool = True
    total: int = 1640
    free: int = 10**9
    free_name: str = "1.00 GB free RAM"
    device: str = "cpu"
    dtype: str = "float32"
    max_context: int = 512
    largest_context: int = 512
    host_bytes: int = 0
    lines: tuple = ()
    streaming: str = ""
    fits_device: bool = True
    staging: object = None
    items: tuple = (("weights", 1000, ""), ("context bank", 640, ""))
    note: str = ""
    unheeded: str = ""
    covered: str = ""
    forever: bool = False

    @property
    def step_weights(self):
        return self.bytes_of("weights")

    def bytes_of(self, name):
        return {"weights": 1000}[name]

    def to_dict(self):
        return {
            "total_bytes": 1640,
        }

    def __str__(self):
        return f"model {self.model}\nmemory\n  weights 1.00 kB"


class FakeLLM:
    """tokenizer: engine.text.tokenizer.Tokenizer; script(ids in the bank) -> ids to sample, with or
    without an end token.
    """

    def __init__(self, tokenizer, script=lambda ids: [], max_context=100_000, ends=("<|end|>",)):
        self.tokenizer, self.script, self.max_context, self.name = (
            tokenizer,
            script,
            max_context,
            "fake",
        )
        self.end_token_ids = tuple(tokenizer.backend.token_to_id(end) for end in ends)
        self.device, self.dtype = SimpleNamespace(type="cpu"), SimpleNamespace(itemsize=4)
        self.config = SimpleNamespace(
            num_layers=2, kv_bytes=lambda size: 8 * size, rows_seen=lambda n: [n, n], bank="model"
        )
        self.folder, self.few_bits, self.options = (
            None,
            None,
            SimpleNamespace(weights="auto", activations="auto", forever=False),
        )
        self.planner, self.staging = self, None
        self.method = Full()
        self.resolved = SimpleNamespace(
            folder="nowhere", revision=None, source="hub", why_not="", require_fetched=lambda: None
        )
        self.sessions = []

    def session(self):
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def plan(self):
        return FakePlan()

    def load(self):
        return None
