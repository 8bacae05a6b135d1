"""One benchmark run: builds the model, goes through the contexts, and collects cells, splits and
memory figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from engine import LLM, Full
from engine.base.figures import brief, human
from engine.load.memory import Plan
from engine.model.config.config import ModelConfig
from engine.model.tensors import random_stream
from engine.plan.free_memory import HEADROOM, available_bytes
from tools.bench import gather as bench_gather
from tools.bench.allowed import FIXED, RUNG, SHALLOW, ladder
from tools.bench.floor import floor_seconds, measure_rates
from tools.bench.memory import Peak, held
from tools.bench.methods import Spec
from tools.bench.options import Options, Result
from tools.bench.run import (
    Cell,
    Engine,
    Entrant,
    Match,
    crashed,
    engine_bytes,
    fetched_bytes,
    reason,
)
from tools.bench.shapes import shape_config
from tools.bench.split import split_step
from tools.bench.verify import verify

SMALL = 4096  # capacity of the LLM that holds the weights
# tokens a session can hold beyond its depth: timed steps, and tokens appended at depth
ROOM = 1152
CHUNK = 512  # tokens of the prefill that is timed at depth
# tokens of a second turn over a bank in host memory: its past comes back over the link
FOLLOW_UP = 1024
# of random queries and keys: scores spread by 2.25, so that attention is uneven as on text
SHARPNESS = 1.5


def sharp_stream(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """Random weights with uneven attention, see SHARPNESS."""
    return random_stream(config, dtype, device, sharpness=SHARPNESS)


class Suite:
    """Runs Options into a Result. `say` gets one line of progress at a time. model: an LLM whose
    weights are taken; None: one is made.
    """

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None] = lambda line: None,
        model: LLM | None = None,
    ):
        self.options, self.say, self.result, self._model = options, say, Result(), model
        # makers of contestants beside the peers of Options: LLM -> peer, as in tools/bench/peers.py
        self.others: Sequence[Callable[[LLM], Any]] = ()
        # called after every depth, for programs that write as they go
        self.on_context: Callable[[Result], None] = lambda result: None
        self._began = time.perf_counter()

    def run(self) -> Result:
        """All of it. Raises EngineError where the model itself cannot be made."""
        o = self.options
        if o.threads is not None:
            torch.set_num_threads(o.threads)
        self.llm = self._build() if self._model is None else self._model
        self._describe()
        self.device = self.llm.device
        if self.result.rates is None:
            self.say("measuring memory bandwidth")
            self.result.rates = measure_rates(self.device, o.rates_bytes)
            self._release()
        if o.gather:
            self.say("bringing rows from host memory")
            self.result.link, self.result.gather = bench_gather.compare(self.device)
        self._peers = self._make_peers()
        try:
            for n in o.contexts:
                self._context(n)
                self.on_context(self.result)
            for n in o.prefill:
                self._prefill(n)
        finally:
            for peer in self._peers:
                peer.close()
        if o.rates_again:
            self.result.rates_after = measure_rates(self.device, o.rates_bytes, seconds=1.0)
        return self.result

    def left(self) -> float:
        """Seconds left of the run's budget."""
        return (
            float("inf")
            if self.options.seconds is None
            else self.options.seconds - (time.perf_counter() - self._began)
        )

    # ---------------------------------------------------------------- model

    def _build(self) -> LLM:
        """The LLM with the weights that all others share; its own capacity is small."""
        o = self.options
        before, began = (
            held("cpu" if o.device == "auto" and not torch.cuda.is_available() else o.device),
            time.perf_counter(),
        )
        settings = dict(
            device=o.device,
            dtype=o.dtype,
            threads=o.threads,
            chunk=o.chunk,
            method=Full(),
            backend=o.backend,
            offload="device",
            max_context=SMALL,
        )
        self.say(f"loading {o.model}" if o.model else f"making {o.shape} of random weights")
        llm = (
            LLM(o.model, **settings)
            if o.model
            else LLM.from_stream(shape_config(o.shape), sharp_stream, name=o.shape, **settings)
        )
        planned = llm.plan().bytes_of("weights")
        self.result.memory.append(
            {"name": "weights", "n": 0, "planned": planned, "measured": held(llm.device) - before}
        )
        self.result.model["seconds_to_make"] = time.perf_counter() - began
        # first use of every library: not a session's memory
        with llm.session(max_context=min(64, llm.max_context)) as session:
            session.prefill([0, 1])
            session.decode(2)
        return llm

    def _describe(self) -> None:
        """Note the model's shape."""
        llm = self.llm
        self.result.model |= {
            "name": llm.name,
            "parameters": llm.config.parameters,
            "weight_bytes": llm.plan().bytes_of("weights"),
            "dtype": str(llm.dtype)[6:],
            "layers": llm.config.num_layers,
            "heads": llm.config.num_heads,
            "kv_heads": llm.config.num_kv_heads,
            "head_dim": llm.config.head_dim,
            "kv_bytes_per_token": llm.config.num_layers * llm.config.kv_bytes(llm.dtype.itemsize),
            "device": str(llm.device),
        }

    def _make_peers(self) -> list[Any]:
        from tools.bench.peers import make_peer

        peers = []
        for name in self.options.peers:
            self.say(f"making {name}")
            try:
                peers.append(make_peer(name, self.llm, self.options))
            except Exception as error:
                self.result.peers[name] = {"why": reason(error)}
        return peers + [make(self.llm) for make in self.others]

    # ---------------------------------------------------------------- decode

    def _context(self, n: int) -> None:
        entrants, cells = [], {}
        self._release()
        own = [(spec, n) for spec in self.options.specs]
        if self.options.allowed:
            own.append((Spec(FIXED, Full()), SHALLOW))
            whole = any(spec.label == "full" for spec in self.options.specs)
            rungs = ladder(n) if whole else [*ladder(n), n]
            own += [(Spec(f"{RUNG}{depth}", Full()), depth) for depth in rungs]
        for spec, depth in own:
            cell = cells[spec.label] = Cell(spec.label, "tg", depth)
            try:
                entrants += self._own(spec, cell)
            except Exception as error:
                self._failed(cell, error)
        for peer in self._peers:
            cells[peer.name] = Cell(peer.name, "tg", n, settings=peer.settings)
            try:
                host = peer.host_bytes_at(n) if hasattr(peer, "host_bytes_at") else 0
                entrants.append(Entrant(peer.name, peer.at(n, ROOM), peer.bytes_at(n + ROOM), host))
            except Exception as error:
                cells[peer.name].fail(reason(error))
        for name, facts in self.result.peers.items():
            if "why" in facts:
                cells[name] = Cell(name, "tg", n, why=facts["why"])
        if self.left() <= 0:
            for cell in cells.values():
                cell.fail(f"left out: the run's {self.options.seconds:g} s were over (--seconds)")
        elif entrants:
            self._compete(n, entrants, cells)
        self.result.cells += cells.values()

    def _own(self, spec: Spec, cell: Cell) -> list[Entrant]:
        """The entrant of one of our methods, its bytes predicted before anything is timed; none
        where it does not fit.
        """
        n, offload = cell.n, spec.offload
        llm = LLM.sharing(self.llm, method=spec.method, max_context=n + ROOM, offload=offload)
        cell.fail(self._cannot(llm.plan()))
        if cell.why:
            return []
        needed = engine_bytes(llm, n + 2, n)
        fetched = cell.extra["fetched_predicted"] = fetched_bytes(llm, n + 2)
        cell.expect(brief(llm.method), needed, floor_seconds(needed, self.result.rates, fetched))
        return [self._entrant(spec.label, llm, n)]

    def _failed(self, cell: Cell, error: Exception) -> None:
        """One entrant's failure is its cell's reason, and the run goes on."""
        cell.fail(reason(error))
        self.result.crashed += crashed(error)

    def _release(self) -> None:
        """Give cached blocks back to the GPU: the driver says how much memory is free."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _cannot(self, plan: Plan) -> str:
        """Why a plan does not fit beside the loaded weights, or ""."""
        beside, room = (
            plan.total - plan.bytes_of("weights"),
            HEADROOM * available_bytes(self.device)[0],
        )
        if beside > room:
            return f"needs {human(beside)} beside the weights, {human(room)} may be used"
        if plan.host_bytes > HEADROOM * plan.host_free:
            return (
                f"needs {human(plan.host_bytes)} of host memory, "
                f"{human(HEADROOM * plan.host_free)} may be used"
            )
        return ""

    def _entrant(self, label: str, llm: LLM, n: int) -> Entrant:
        plan = llm.plan()
        size = plan.total - plan.bytes_of("weights") - plan.bytes_of("prefill workspace")
        check = verify if self.options.verify else None
        return Entrant(label, lambda: Engine(label, llm, n), size, plan.host_bytes, check)

    def _compete(self, n: int, entrants: list[Entrant], cells: dict[str, Cell]) -> None:
        o = self.options
        free = available_bytes(self.device)[0]
        host_free = available_bytes(torch.device("cpu"))[0] + self.llm.planner.host_tier.idle
        clock = time.process_time if o.cpu_time else time.perf_counter
        match = Match(
            entrants, self.device, 0.8 * free, lambda: held(self.device), 0.8 * host_free, clock
        )
        plain = {}

        def finish(name, contestant):
            self._after(name, contestant, n, cells, plain, match)

        turns = "" if match.together else " (in turns: memory)"
        self.say(f"{n} tokens: {', '.join(e.name for e in entrants)}{turns}")
        match.run(o.rounds, o.steps, budget=min(120.0, self.left() / 3), finish=finish)
        for entrant in entrants:
            cell, facts = cells[entrant.name], match.facts[entrant.name]
            cell.seconds, cell.why = match.times[entrant.name], match.failed.get(entrant.name, "")
            cell.extra |= {"checked": facts.get("checked"), "interleaved": match.together}
            cell.settings = facts.get("settings", cell.settings)
            self.result.failed_checks += entrant.name in match.wrong
            ours = cell.needed is not None
            self.result.crashed += ours and entrant.name in match.crashed
            if cell.needed is not None and cell.seconds:
                self.result.memory.append(
                    {
                        "name": cell.name,
                        "n": cell.n,
                        "planned": entrant.bytes,
                        "measured": facts["held_bytes"],
                    }
                )
        for row in self.result.splits:
            if row["n"] == n and cells[row["name"]].seconds:
                row["timed"] = cells[row["name"]].median

    def _after(
        self,
        name: str,
        contestant: Any,
        n: int,
        cells: dict[str, Cell],
        plain: dict,
        match: Match,
    ) -> None:
        """After an entrant's last turn: note its counters, its split, and one prefill chunk at
        depth.
        """
        if not isinstance(contestant, Engine) or name == FIXED or name.startswith(RUNG):
            return
        needed, fetched = cells[name].needed, _fetched(contestant)
        cells[name].extra |= {
            "counted_kv_bytes": _counted(contestant),
            "predicted_kv_bytes": needed.dense + needed.sparse,
            **fetched,
        }
        if self.options.split:
            row = split_step(contestant, plain_dense=plain.get(n))
            plain[n] = plain.get(n) or row.get("dense_layer")
            self.result.splits.append(
                {
                    "name": name,
                    "n": n,
                    "stages": {k: v for k, v in row.items() if k not in ("step", "dense_layer")},
                    "step": row["step"],
                }
            )
        if self.options.append and self.left() > 30:
            if isinstance(contestant.session.method, Full):
                self._append(name, contestant, n, CHUNK)
            # the same for every planted reuse: once per depth
            elif fetched and ("follow-up", n) not in plain:
                plain["follow-up", n] = True
                self._append(name, contestant, n, FOLLOW_UP)

    def _append(self, name: str, contestant: Engine, n: int, count: int) -> None:
        """Read `count` tokens onto a bank of n; where its past streams back, note the seconds
        that the bytes take over the link.
        """
        cell, session = Cell(name, f"pp{count} @ d{n}", n, tokens=count), contestant.session
        contestant.back()
        before, ids = (
            session.stats.bytes_streamed,
            [i % self.llm.config.vocab_size for i in range(count)],
        )
        start = time.perf_counter()
        session.prefill(ids)
        cell.seconds = [time.perf_counter() - start]
        streamed = session.stats.bytes_streamed - before
        if streamed:
            cell.extra["streamed_bytes"] = streamed
            if self.result.rates.h2d:
                cell.extra["link_seconds"] = streamed / self.result.rates.h2d
        self.result.cells.append(cell)
        contestant.back()

    # ---------------------------------------------------------------- prefill

    def _prefill(self, n: int) -> None:
        """Time a whole prompt of n tokens, ours and the other engines' in turns, and compare the
        peak of memory with the plan.
        """
        ids = torch.randint(
            self.llm.config.vocab_size, (n,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        ours = Cell("full", f"pp{n}", n, tokens=n)
        self.result.cells.append(ours)
        llm = LLM.sharing(self.llm, method=Full(), max_context=n, offload="device")
        plan = llm.plan()
        ours.why = "left out: no time" if self.left() <= 0 else self._cannot(plan)
        if ours.why:
            return
        self.say(f"prompt of {n} tokens")
        cells = [Cell(p.name, f"pp{n}", n, tokens=n, settings=p.settings) for p in self._peers]
        for number in range(2):
            try:
                with Peak(self.device) as peak:
                    ours.seconds.append(_read(llm, ids))
            except Exception as error:
                self._failed(ours, error)
                break
            # another engine in this process grows the heap
            if number == 0 and not self._peers:
                self.result.memory.append(
                    {
                        "name": "prefill",
                        "n": n,
                        "planned": plan.total - plan.bytes_of("weights"),
                        "measured": peak.bytes,
                    }
                )
            for peer, cell in zip(self._peers, cells):
                if cell.why:
                    continue
                try:
                    cell.seconds.append(peer.prefill(ids))
                except Exception as error:
                    cell.why = reason(error)
            if self.left() < 2 * (time.perf_counter() - self._began) / 4 or ours.seconds[0] > 30:
                break
        self.result.cells += cells


def _read(llm: LLM, ids: list[int]) -> float:
    """Seconds from a prompt to the logits of its last token, in a new session."""
    with llm.session() as session:
        start = time.perf_counter()
        session.prefill(ids)
        return time.perf_counter() - start


def _counted(contestant: Engine) -> int:
    """Bank bytes that session.stats counts for the step at the depth that was predicted."""
    contestant.back()
    contestant.step()
    before = contestant.session.stats
    contestant.step()
    after = contestant.session.stats
    return (
        after.bytes_read_sparse
        + after.bytes_read_dense
        - before.bytes_read_sparse
        - before.bytes_read_dense
    )


def _fetched(contestant: Engine) -> dict[str, Any]:
    """Bytes over the link per token and hit rate, over some steps at depth; empty where nothing is
    offloaded.
    """
    session, steps = contestant.session, 8
    before = session.stats
    if not before.host_bytes:
        return {}
    for _ in range(steps):
        contestant.step()
    after = session.stats
    asked = after.hits + after.misses - before.hits - before.misses
    return {
        "fetched_bytes_per_token": (
            after.bytes_fetched
            + after.bytes_streamed
            - before.bytes_fetched
            - before.bytes_streamed
        )
        / steps,
        "hit_rate": (after.hits - before.hits) / asked if asked else None,
        "host_bytes": after.host_bytes,
        "resident": after.resident,
    }
