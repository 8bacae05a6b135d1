"""Counters of the server, in Prometheus' text form: under its own names, and those that others
have under vLLM's, which routers and dashboards ask for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from engine.batch.slots import Slots

# vLLM's, seconds; a first token behind a long prompt takes minutes
BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PIECE = 16  # tokens
Row = tuple[str, str, str, float]  # name, kind, meaning, value


class Metrics:
    """What was asked, read and written since the start. The worker's thread counts; others read."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.prompt_tokens = self.cached_tokens = self.read_tokens = self.written_tokens = 0
        self.read_seconds = self.decode_seconds = 0.0
        self._first = [0] * (len(BUCKETS) + 1)  # answers by the seconds to their first token
        self._first_seconds = 0.0

    def began(self, prompt: int, cached: int) -> None:
        """A request of `prompt` tokens got a slot that held `cached` of them."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def read(self, tokens: int, seconds: float) -> None:
        """A chunk was read."""
        self.read_tokens += tokens
        self.read_seconds += seconds

    def wrote(self, token: bool) -> None:
        """A piece was written, with a token or without. Its seconds are shared with others'."""
        self.written_tokens += token

    def first(self, seconds: float) -> None:
        """A request's first token came so long after it was queued."""
        self._first[bisect_left(BUCKETS, seconds)] += 1
        self._first_seconds += seconds

    def text(self, running: int, paused: int, waiting: int, slots: Slots, model: str) -> str:
        """All figures; the sessions' are those of now. model: the name that clients know."""
        sessions = [slot.session for slot in list(slots.slots)]
        device = sum(s.bank.nbytes for s in sessions if not s.closed)
        host = sum(s.bank.host_nbytes for s in sessions if not s.closed)
        rows: list[Row] = [
            ("prompt_tokens_total", "counter", "tokens of prompts", self.prompt_tokens),
            ("cached_tokens_total", "counter", "of those, held already", self.cached_tokens),
            ("read_tokens_total", "counter", "tokens read by prefill", self.read_tokens),
            ("read_seconds_total", "counter", "seconds of prefill", self.read_seconds),
            ("written_tokens_total", "counter", "tokens sampled", self.written_tokens),
            (
                "decode_seconds_total",
                "counter",
                "seconds of decode steps",
                self.decode_seconds,
            ),
            ("requests_running", "gauge", "answers under way", running),
            ("requests_paused", "gauge", "of those, whose clients do not read", paused),
            ("requests_waiting", "gauge", "requests in the queue", waiting),
            ("slots", "gauge", "sessions that may be held", slots.count),
            ("slots_held", "gauge", "sessions that are held", len(sessions)),
            ("tokens_held", "gauge", "tokens in all sessions", sum(map(len, sessions))),
            ("bank_device_bytes", "gauge", "K and V on the device", device),
            ("bank_host_bytes", "gauge", "K and V in host memory", host),
        ]
        lines = [line for row in rows for line in _lines("omnikv_", "", row)]
        lines += ["# HELP omnikv_requests_total requests", "# TYPE omnikv_requests_total counter"]
        lines += [
            f'omnikv_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        return "\n".join([*lines, *self._others(running, waiting, slots, model)]) + "\n"

    def _others(self, running: int, waiting: int, slots: Slots, model: str) -> list[str]:
        """The lines under vLLM's names."""
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        label, busy = f'model_name="{escaped}"', [s.session for s in list(slots.slots) if s.busy]
        room = slots.count * slots.batch.planner.max_context
        used = sum(min(len(session), session.capacity) for session in busy) / room
        rows: list[Row] = [
            ("num_requests_running", "gauge", "answers under way", running),
            ("num_requests_waiting", "gauge", "requests in the queue", waiting),
            ("kv_cache_usage_perc", "gauge", "tokens of answers under way, of 1", used),
            ("prefix_cache_queries_total", "counter", "tokens of prompts", self.prompt_tokens),
            ("prefix_cache_hits_total", "counter", "of those, held already", self.cached_tokens),
            ("prompt_tokens_total", "counter", "tokens of prompts", self.prompt_tokens),
            ("generation_tokens_total", "counter", "tokens sampled", self.written_tokens),
        ]
        lines = [line for row in rows for line in _lines("vllm:", f"{{{label}}}", row)]
        # what Kubernetes' inference gateway cuts prompts into, to guess who holds them; here a
        # beginning is found to the token
        sizes = f'block_size="{PIECE}",num_gpu_blocks="{room // PIECE}"'
        row = ("cache_config_info", "gauge", "tokens of a piece, and pieces that the slots hold", 1)
        lines += _lines("vllm:", f"{{{label},{sizes}}}", row)
        name, below = "vllm:time_to_first_token_seconds", 0
        lines += [f"# HELP {name} from the queue to the first token", f"# TYPE {name} histogram"]
        for edge, count in zip((*BUCKETS, "+Inf"), list(self._first), strict=True):
            below += count
            lines.append(f'{name}_bucket{{{label},le="{edge}"}} {below}')
        total = f"{name}_sum{{{label}}} {self._first_seconds:.17g}"
        return [*lines, total, f"{name}_count{{{label}}} {below}"]


def _lines(prefix: str, label: str, row: Row) -> list[str]:
    """A figure with what Prometheus wants to know of it."""
    name, kind, about, value = row
    name = prefix + name
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", f"{name}{label} {value:.17g}"]
