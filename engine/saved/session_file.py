"""A session in one file: save and restore, in bounded memory, to the bit.

The file holds the tokens, the rows of all layers in pieces, sliding windows, the query ring, the
savepoints with their logits, which tokens were read and which a step wrote, the method with its
state, and what the program adds. It names the model that made it (engine/saved/model_key.py). Of a
session that forgets the state is the store, with positions and rows, and there are no others. A
store that stands beside a bank is not saved.

Of a model that ranks hold, each has such a file of its share (engine/saved/ranks/shares.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.bank.base import Bank
from engine.bank.row_origins import READ, Span
from engine.base.checks import callables
from engine.base.errors import EngineError, SavedFileError, SettingError
from engine.base.newest_tokens import BLOCK, NewestTokens
from engine.load.loaded import Loaded
from engine.methods.base import Method
from engine.methods.exact import Exact
from engine.methods.registry import make
from engine.runner.history import Savepoint
from engine.runner.ranks.agreed import agreed
from engine.runner.ranks.led import led
from engine.runner.rewind import cut, replay
from engine.runner.rollback import exclusive
from engine.runner.state import SessionState
from engine.saved.container import Reader, Writer
from engine.saved.model_key import model_key
from engine.saved.ranks.shares import number_of, open_share, remove_shares, save_shares
from engine.saved.rows import (
    PIECE,
    piece_shape,
    pieces,
    read_ahead,
    spans,
    windows,
    write_piece,
    write_windows,
)
from engine.saved.states import states, write_states
from engine.saved.values import decode, encode

VERSION = 1
VALUE_BYTES = 1 << 30  # most bytes of one tensor that is no row
# {field that methods had: the value that is now the only one}: earlier files hold them
GONE = {"dense_estimator": "pooled"}
S = TypeVar("S", bound=SessionState)
Progress = Callable[[int, int], None]  # (tokens done, tokens in all)


def require_savable(session: SessionState) -> None:
    """Raise SettingError if a session has state that a file cannot restore."""
    name, needs = session.method.name, session.runtime.needs
    if needs.kept is not None:
        raise SettingError(
            f"save: found a session of {name} that keeps a number of blocks, whose rows no file "
            "holds; expected blocks=None, or streaming_llm in a stream without end"
        )
    if needs.forgets:
        if session.history.prompt_is_open(len(session)):
            raise SettingError(
                f"save: found a prompt of {name} that goes on, expected its end; read the rest, or "
                "let it answer first"
            )
        if session.runtime.state() is None:
            waits = len(session) - session.runtime.waiting_from(len(session))
            raise SettingError(
                f"save: found {waits or len(session)} tokens of {name} that are not cut yet, "
                "expected a store; let it answer first"
            )
    elif needs.near is not None:
        raise SettingError(
            f"save: found {name} with forget=True, whose keys of distant tokens are gone; use "
            "forget=False, whose bank has them all"
        )
    elif needs.history != "bank" and not needs.rebuilt:
        raise SettingError(
            f"save: found a session of {name}, which keeps a store of its own beside the "
            "bank; expected a method that keeps every token (/method full in the chat, "
            "set_method(Full()) in a program), or one with forget=True"
        )


# ---------------------------------------------------------------- saving


@led
def save_session(
    session: SessionState, path: str | Path, extra: Any = None, progress: Progress | None = None
) -> None:
    """Write a session to `path` (see Session.save)."""
    callables(progress=progress)
    path, loaded = Path(path), session.loaded
    with exclusive(loaded):
        if session.bank.forgets:
            replay(session)
        require_savable(session)
        if loaded.peers is not None:
            write = partial(_write, session, extra=extra, progress=progress)
            save_shares(loaded, path, len(session), write)
            return
        before = number_of(path)
        _write(session, path, extra, progress)
        remove_shares(path, before)


def _write(session: SessionState, path: Path, extra: Any, progress: Progress | None) -> str:
    """Write what this process holds of a session; the file's digest."""
    tensors: list[torch.Tensor] = []
    facts = _facts(session, extra, tensors)
    # the rows of which there are pieces
    bank, total = session.bank.here(0 if session.bank.forgets else len(session))
    plan = [(f"value.{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    plan += [
        (f"rows.{number}", bank.dtype, piece_shape(bank, stop - first))
        for number, (first, stop) in enumerate(spans(total))
    ]
    with Writer(path, plan, facts) as writer:
        for i, tensor in enumerate(tensors):
            writer.write(f"value.{i}", tensor)
        for number, piece in pieces(bank, total):
            writer.write(f"rows.{number}", piece)
            if progress is not None:
                progress(min(total, (number + 1) * PIECE), total)
    return writer.digest


def _facts(session: SessionState, extra: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    ring, runtime = session.query_ring, session.runtime
    queries = ring.newest(ring.high - ring.low) if ring.high > ring.low else None
    state = {
        "ids": torch.tensor(list(session.ids), dtype=torch.int64),
        **_gone_before(session),
        "queries": queries if queries is None else ring.as_one(queries),
        "ring": (ring.low, ring.high),
        "kept": {length: ring.as_one(kept) for length, kept in ring.kept.items()},
        "windows": windows(session.bank, len(session)),
        "recurrent": states(session),
        "last_logits": session.last_logits,
        "state": runtime.state(),
        "savepoints": [
            (p.start, p.length, p.state, p.logits, p.open) for p in session.history.savepoints
        ],
        "origins": session.origins.of(0, len(session)),
        "method": _described(session.method),
    }
    try:
        encoded = encode(state, tensors)
    except TypeError as error:
        raise SettingError(f"save: method {session.method.name}: {error}") from error
    try:
        more = encode(extra, tensors)
    except TypeError as error:
        raise SettingError(f"extra: {error}") from error
    peers = session.loaded.peers
    return {
        **({} if peers is None else {"share": [peers.rank, peers.size]}),
        "version": VERSION,
        "model": model_key(session.loaded),
        "tokens": len(session),
        "state": encoded,
        "extra": more,
    }


def _gone_before(session: SessionState) -> dict[str, Any]:
    """Of a stream, how many tokens before those in the file are gone, and their digest."""
    ids = session.ids
    if not isinstance(ids, NewestTokens) or not ids.first:
        return {}
    return {"first": ids.first, "past": ids.past.hex()}


def _described(method: Method) -> tuple[str, dict[str, Any]]:
    """(name, fields) of a method; a field that is a method too becomes such a pair."""
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    fields = {k: _described(v) if isinstance(v, Method) else v for k, v in values.items()}
    return method.name, fields


# ---------------------------------------------------------------- restoring


def restore_session(
    loaded: Loaded,
    open_session: Callable[[Method, int | None, str | None], S],
    path: str | Path,
    max_context: int | None = None,
    offload: str | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> tuple[S, Any]:
    """(session, extra) of a file that `save_session` wrote (see LLM.restore)."""
    callables(progress=progress)
    with ExitStack() as closing:
        with agreed(loaded):
            reader = closing.enter_context(open_share(Path(path), loaded))
            state, extra, ids, method = _described_in(reader, loaded)
        _require_alike(reader, loaded, state, ids)
        wanted = len(ids) if tokens is None else tokens
        if not 0 <= wanted <= len(ids):
            raise SettingError(f"tokens: found {tokens}, expected 0 to {len(ids)} (those saved)")
        session = open_session(method, max_context, offload)
        try:
            if isinstance(ids, NewestTokens) and not session.endless:
                raise SavedFileError(
                    f"{reader.path}: holds a stream without end that has forgotten {ids.first:,} "
                    f"of {len(ids):,} tokens; load it with forever=True (--forever)"
                )
            session.require_room(wanted)
            with agreed(loaded):
                _fill(session, reader, ids, state, wanted, progress)
            if wanted < len(ids):
                cut(session, wanted)
        except BaseException:
            session.close()
            raise
    return session, extra


def _described_in(
    reader: Reader, loaded: Loaded
) -> tuple[dict[str, Any], Any, list[int] | NewestTokens, Method]:
    """(state, extra, token ids, method) of a file."""
    facts = _checked_facts(reader, loaded)
    values: dict[int, torch.Tensor] = {}

    def value(i: int) -> torch.Tensor:
        if i not in values:
            values[i] = reader.load(f"value.{i}", VALUE_BYTES)
        return values[i]

    try:
        state, extra = decode(facts["state"], value), decode(facts["extra"], value)
        ids = _ids(state, loaded.config.vocab_size)
        method = _rebuilt(*state["method"])
        if len(ids) != facts["tokens"]:
            raise ValueError("tokens")
    except SavedFileError:
        raise
    except (EngineError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise reader.damaged("its description makes no session") from None
    return state, extra, ids, method


def _require_alike(
    reader: Reader, loaded: Loaded, state: dict[str, Any], ids: list[int] | NewestTokens
) -> None:
    """Raise SavedFileError where the files of the ranks are of sessions that would go on
    differently: every rank would wait for what the others do not do.
    """
    if loaded.peers is None:
        return
    try:
        points = [
            (start, length, held is None, logits is None, bool(open_))
            for start, length, held, logits, open_ in state["savepoints"]
        ]
        none = [name for name, value in state.items() if value is None]
        held = state.get("recurrent") or {}
        stands = [
            point[:2] for point in (*held.get("savepoints", ()), *filter(None, [held.get("now")]))
        ]
        rest = state["ring"], sorted(state["kept"]), state["origins"], state["method"]
        outline = repr((list(ids), points, none, stands, *rest))
    except (TypeError, ValueError, KeyError, AttributeError):
        outline = ""  # it makes no session, as its rank will say
    if len(set(loaded.peers.texts(hashlib.sha256(outline.encode()).hexdigest()))) > 1:
        raise SavedFileError(
            f"{reader.path}: the files of its ranks are of different sessions; delete them and "
            "read the text again"
        )


def _ids(state: dict[str, Any], vocab_size: int) -> list[int] | NewestTokens:
    """Return a file's token ids. Raises ValueError if one is outside the vocabulary."""
    held, first = state["ids"], state.get("first", 0)
    if type(first) is not int or not 0 <= first < 1 << 31 or first % BLOCK:
        raise ValueError("first")
    if held.dtype != torch.int64 or held.dim() != 1:
        raise ValueError("ids")
    if len(held) and not 0 <= int(held.min()) <= int(held.max()) < vocab_size:
        raise ValueError("ids")
    if first:
        return NewestTokens.of(first, bytes.fromhex(state["past"]), held.tolist())
    return held.tolist()


def _rebuilt(name: str, fields: dict[str, Any]) -> Method:
    """The method that `_described` named. Raises SettingError or TypeError for no such one."""
    if name == "exact":
        return Exact(**{**fields, "method": _rebuilt(*fields["method"])})
    return make(name, {k: v for k, v in fields.items() if k not in GONE or v != GONE[k]})


def _checked_facts(reader: Reader, loaded: Loaded) -> dict[str, Any]:
    facts = reader.facts
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        found = facts.get("version") if isinstance(facts, dict) else None
        raise reader.damaged(f"found version {str(found)[:20]}, expected {VERSION}")
    made_by, here = facts.get("model"), model_key(loaded)
    if not isinstance(made_by, dict):
        raise reader.damaged("it names no model")
    for what, value in here.items():
        # files of before name the weights' word alone
        alike = (value, value.partition(",")[0]) if what == "held" else (value,)
        if made_by.get(what) not in alike:
            raise SavedFileError(
                f"{reader.path}: made by another model: {what}: found "
                f"{str(made_by.get(what))[:80]}, expected {value[:80]} ({loaded.name}); load it "
                "with the model that saved it, or read the text again"
            )
    return facts


def _fill(
    session: SessionState,
    reader: Reader,
    ids: list[int] | NewestTokens,
    state: dict[str, Any],
    wanted: int,
    progress: Progress | None,
) -> None:
    """Load the file into an empty session: of rows, those of the first `wanted` tokens."""
    bank, ring = session.bank, session.query_ring
    with exclusive(session.loaded):
        rows, total = bank.here(0 if bank.forgets else len(ids))
        most = bank.here(wanted)[1]
        held = [span for span in spans(total) if span[0] < most]
        _read_rows(rows, reader, held, most, progress)
        try:
            low, high = state["ring"]
            if not 0 <= low <= high <= len(ids):
                raise ValueError("ring")
            if state["queries"] is not None:
                ring.write_chunk(ring.taken(state["queries"]), high)
            ring.set_valid(low, high)
            ring.kept = _kept(session, state.get("kept", {}), len(ids))
            write_windows(bank, state.get("windows", {}), len(ids))
            write_states(session, state.get("recurrent"), len(ids))
            now = session.runtime.restored(state["state"], len(ids))
            points = [_point(session, len(ids), *saved) for saved in state["savepoints"]]
            session.restored(ids, points, _origins(state.get("origins"), points, len(ids)))
            session.runtime.load(now, len(ids))
            session.learn(_logits(session, state["last_logits"]))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError):
            raise reader.damaged("its description makes no session") from None


def _read_rows(
    bank: Bank,
    reader: Reader,
    wanted_spans: list[tuple[int, int]],
    wanted: int,
    progress: Progress | None,
) -> None:
    """Put the file's pieces of these spans, up to position `wanted`, into a bank."""

    def read(number: int, piece: torch.Tensor) -> None:
        reader.read(f"rows.{number}", piece)

    with read_ahead(bank, wanted_spans, read) as found:
        for (first, stop), piece in zip(wanted_spans, found, strict=True):
            write_piece(bank, piece[:, : wanted - first], first)
            if progress is not None:
                progress(min(stop, wanted), wanted)


def _point(
    session: SessionState,
    total: int,
    start: int,
    length: int,
    state: Any,
    logits: torch.Tensor | None,
    open_: bool,
) -> Savepoint:
    """A savepoint of a file. One of a session that forgets may have lost its state."""
    if not 0 <= start <= length <= total:
        raise ValueError("savepoint")
    if state is not None or not session.bank.forgets:
        state = session.runtime.restored(state, length)
    return Savepoint(start, length, state, _logits(session, logits), bool(open_))


def _origins(saved: list[Span] | None, points: list[Savepoint], total: int) -> list[Span]:
    """Which tokens of a file were read in prompts (READ) and which steps wrote (None). Files of
    before tell of the prompts that have savepoints.
    """
    if saved is None:
        spans = [span for p in points for span in ((p.start, None), (p.length, READ))]
        return [*spans, (total, None)]
    stops = [stop for stop, _ in saved]
    if not all(type(stop) is int and 0 < stop <= total for stop in stops) or stops != sorted(stops):
        raise ValueError("origins")
    return [(stop, None if origin is None else READ) for stop, origin in saved]


def _kept(
    session: SessionState, kept: dict[int, torch.Tensor], total: int
) -> dict[int, torch.Tensor]:
    """The queries that come back at certain lengths of a session of `total` tokens."""
    slots = session.query_ring.slots
    for length, queries in kept.items():
        layers, batch, width, *rest = queries.shape
        most = min(length, slots.shape[2]) if type(length) is int and length <= total else 0
        if (layers, batch, *rest) != (*slots.shape[:2], *slots.shape[3:]) or not 0 < width <= most:
            raise ValueError("kept")
    return {length: session.query_ring.taken(queries) for length, queries in kept.items()}


def _logits(session: SessionState, logits: torch.Tensor | None) -> torch.Tensor | None:
    if logits is None:
        return None
    if logits.shape != (session.loaded.config.vocab_size,):
        raise ValueError("logits")
    return logits.to(session.loaded.device, torch.float32)
