"""Counters of the server, in Prometheus' text form."""

from __future__ import annotations

from collections import Counter

from engine.batch.slots import Slots


class Metrics:
    """What was asked, read and written since the start. The worker's thread counts; others read."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.prompt_tokens = self.cached_tokens = self.read_tokens = self.written_tokens = 0
        self.read_seconds = self.decode_seconds = 0.0

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

    def text(self, running: int, paused: int, waiting: int, slots: Slots) -> str:
        """All figures; the sessions' are those of now."""
        sessions = [slot.session for slot in list(slots.slots)]
        device = sum(s.bank.nbytes for s in sessions if not s.closed)
        host = sum(s.bank.host_nbytes for s in sessions if not s.closed)
        rows: list[tuple[str, str, str, float]] = [
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
        lines = []
        for name, kind, about, value in rows:
            lines += [f"# HELP omnikv_{name} {about}", f"# TYPE omnikv_{name} {kind}"]
            lines.append(f"omnikv_{name} {value:.17g}")
        lines += ["# HELP omnikv_requests_total requests", "# TYPE omnikv_requests_total counter"]
        lines += [
            f'omnikv_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        return "\n".join(lines) + "\n"
