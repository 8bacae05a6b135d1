"""The figures that the chat prints: the line under each answer, /stats, /memory and /plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from engine.base.figures import brief, clock, count, human
from engine.load.planner import Planner
from engine.plan.filter_layers import filter_layers
from engine.plan.free_memory import resident_bytes
from engine.runner.state import SessionStats
from engine.session.results import GenerationStats
from engine.session.session import Session

# sizes that a session knows (fields of SessionStats), as the plan calls them
HELD = {
    "bank_bytes": "context bank",
    "ring_bytes": "query ring",
    "scratch_bytes": "decode scratch",
    "selection_bytes": "selection",
    "host_bytes": "host tier",
    "store_bytes": "retained rows",
    "snapshot_bytes": "savepoints",
}
ENDS = {
    "length": "cut at -n/--max-tokens",
    "context": "the context is full",
    "interrupted": "stopped",
}

Rows = list[tuple[str, str]]


# ---------------------------------------------------------------- facts


def model_name(planner: Planner) -> str:
    """Name a local model by its folder, any other by what was asked for."""
    found = planner.resolved
    if found is None or found.source != "folder":
        return planner.name
    return Path(found.folder).resolve().name


def forms_of(planner: Planner) -> str:
    """Name what weights and K/V are held in: weights int8, bank bfloat16."""
    dtype, held = str(planner.dtype).removeprefix("torch."), planner.few_bits
    weights, bank = planner.options.weights, planner.config.bank
    rows = planner.options.activations
    if weights in ("auto", "float"):
        weights = f"{held.kind} as stored" if held else dtype
    weights = weights if rows == "auto" else f"{weights}, activations {rows}"
    return f"weights {weights}, bank {dtype if bank == 'model' else bank}"


def start_note(planner: Planner) -> str:
    """Say in one line why OmniKV is off, or that nobody has checked the filter layers here; ""
    where the flags or a calibration of this model name them.
    """
    note = planner.plan().note
    if not note:
        return ""
    known = filter_layers(planner.folder, planner.resolved, planner.config)
    return "" if known.source == "file" else note


def bank_bytes(planner: Planner, tokens: int) -> int:
    """Return the bytes of K and V of `tokens` tokens in all layers, by their windows."""
    return sum(planner.config.rows_seen(tokens)) * planner.config.kv_bytes(planner.dtype.itemsize)


def bytes_read(session: Session) -> int:
    """Return the K and V bytes that a session's decode steps have read."""
    stats = session.stats
    return stats.bytes_read_dense + stats.bytes_read_sparse


def process_memory(planner: Planner) -> str:
    """Format the memory of this process: on the GPU if it uses one, and RAM."""
    parts = []
    if getattr(planner.device, "type", "cpu") == "cuda":
        parts.append(f"{human(torch.cuda.memory_allocated(planner.device))} on the GPU")
    if (held := resident_bytes()) is not None:
        parts.append(f"{human(held)} RAM")
    return ", ".join(parts)


def context_used(planner: Planner, session: Session) -> str:
    """Format how full the context is: 1,598 of 32,768 (5%); of a stream, what is forgotten."""
    used, limit = len(session), planner.max_context
    if session.endless:
        return f"{used:,}, {session.forgotten:,} of them forgotten"
    return f"{used:,} of {limit:,} ({100 * used / limit:.0f}%)"


# ---------------------------------------------------------------- one line


def answer_line(
    planner: Planner, session: Session, s: GenerationStats, finish_reason: str | None
) -> str:
    """Format the line under an answer: tokens, speed, context, memory and why it was cut."""
    parts = [f"{s.cached_tokens:,} cached + {s.prompt_tokens:,} new tokens"]
    if s.prompt_tokens and s.prefill_seconds:
        parts.append(f"read in {clock(s.prefill_seconds)}, {s.prefill_rate:,.0f} tok/s")
    steps = s.sparse_steps + s.dense_steps
    if s.decode_seconds and steps:
        parts.append(
            f"{s.new_tokens:,} written at {s.decode_rate:.1f} tok/s, "
            f"{1000 * s.decode_seconds / steps:.1f} ms each"
        )
    if s.drafted:
        parts.append(exact_text(s))
    parts += [f"context {context_used(planner, session)}", process_memory(planner)]
    parts.append(ENDS.get(finish_reason or "", ""))
    return f"[{' · '.join(part for part in parts if part)}]"


def exact_text(s: GenerationStats | SessionStats) -> str:
    """Format what exact mode gained: drafts accepted, tokens a verification, counted speed."""
    written = s.cycles + s.accepted
    full = s.speedup
    return (
        f"exact: {s.accepted:,} of {s.drafted:,} drafts right ({s.accepted / s.drafted:.0%}), "
        f"{written / s.cycles:.1f} tokens a full step, {full:.2f}x full attention (counted)"
    )


def full_attention_cost(
    planner: Planner, tokens: int, last: GenerationStats | None, last_bytes: int
) -> str:
    """Format the bytes that a step of full attention reads, and its time at the last answer's rate.

    last, last_bytes: figures of the last answer and the K and V bytes that its steps read.
    """
    weights = planner.plan().step_weights
    bank = bank_bytes(planner, tokens)
    text = (
        f"a step of full attention reads {human(weights + bank)} here "
        f"({human(bank)} of them the bank)"
    )
    steps = last.sparse_steps + last.dense_steps if last else 0
    if last is None or not steps or not last.decode_seconds:
        return text
    seconds = last.decode_seconds * (weights + bank) / (last_bytes + steps * weights)
    each = clock(seconds) if seconds > 10 else f"{1000 * seconds:.1f} ms"
    return (
        f"{text}: about {each} per token, "
        f"after {1000 * last.decode_seconds / steps:.1f} ms in the last answer"
    )


# ---------------------------------------------------------------- /stats


def stats_text(planner: Planner, session: Session, last: GenerationStats | None) -> str:
    """Format what a person wants to know of a session; parts that it does not use are left out."""
    return _grouped(
        [
            ("tokens and speed", _speed(planner, session, last)),
            ("memory", _held(planner, session)),
            ("what a decode step reads", _read_per_step(planner, session)),
            ("host tier", _host_tier(session)),
        ]
    )


def _speed(planner: Planner, session: Session, last: GenerationStats | None) -> Rows:
    s = session.stats
    used, limit = len(session), planner.max_context
    full = f"{used:,} of {limit:,} tokens ({100 * used / limit:.0f}%)"
    if session.endless:
        full = f"without end: {used:,} tokens, {session.forgotten:,} of them forgotten"
    rows = [("method", brief(session.method)), ("context", full)]
    if s.prefill_seconds:
        rate = s.prefill_tokens / s.prefill_seconds
        rows.append(
            (
                "read",
                f"{count(s.prefill_tokens)} in all, of documents and questions, in "
                f"{clock(s.prefill_seconds)} of the model's own time, {rate:,.0f} tok/s",
            )
        )
    if s.decode_seconds and s.decode_steps:
        rate = s.decode_steps / s.decode_seconds
        rows.append(
            (
                "written",
                f"{count(s.decode_steps, 'step')} in all, those of end tokens among them, in "
                f"{clock(s.decode_seconds)}, {rate:,.1f} steps/s, {1000 / rate:.1f} ms each",
            )
        )
    if s.drafted:
        rows.append(("exact", exact_text(s).removeprefix("exact: ")))
    if last is not None:
        rows.append(
            (
                "last answer",
                f"{last.cached_tokens:,} tokens cached, {last.prompt_tokens:,} read, "
                f"{last.new_tokens:,} written at {last.decode_rate:,.1f} tok/s",
            )
        )
    return rows


def _held(planner: Planner, session: Session) -> Rows:
    s = session.stats
    rows = [("context bank", f"{human(s.bank_bytes)} on the device")]
    if s.store_bytes:
        beside = "" if s.forgets else " beside the bank"
        kept = f"{human(s.store_bytes)}{beside}; their K and V are {s.resident:.1%} of all tokens'"
        rows.append(("retained rows", kept))
        note = "whole: answers do not read it"
        if s.forgets:
            note = "rows that wait for the store; what it does not take is freed"
        rows[0] = ("context bank", f"{rows[0][1]}, {note}")
    elif s.resident < 1:
        rows[0] = ("context bank", f"{rows[0][1]}, {s.resident:.1%} of what all layers would take")
    if s.snapshot_bytes:
        rows.append(("savepoints", human(s.snapshot_bytes)))
    buffers = s.scratch_bytes + s.ring_bytes + s.selection_bytes
    if buffers:
        rows.append(("buffers", f"{human(buffers)} for scratch, newest queries and selections"))
    if process := process_memory(planner):
        rows.append(("this process", process))
    return rows


def _read_per_step(planner: Planner, session: Session) -> Rows:
    s = session.stats
    if not s.decode_steps:
        return []
    sparse, dense = (size / s.decode_steps for size in (s.bytes_read_sparse, s.bytes_read_dense))
    full = human(bank_bytes(planner, len(session)))
    rows = [("K and V", f"{human(sparse + dense)} on average; full attention reads {full} now")]
    if sparse and dense:
        rows.append(
            ("by layers", f"{human(sparse)} in sparse layers, {human(dense)} in the others")
        )
    if s.sparse_steps:
        rows.append(("sparse steps", f"{s.sparse_steps:,} of {s.decode_steps:,}"))
    if s.mem < 1:
        rows.append(("Mem%", f"{s.mem:.1%} of the bank in a sparse step, by the paper's formula"))
    return rows


def _host_tier(session: Session) -> Rows:
    s = session.stats
    rows: Rows = []
    if s.weight_bytes_streamed:
        rows.append(("weights", f"{human(s.weight_bytes_streamed)} came over since loading"))
    if not s.host_bytes:
        return rows
    pinned = f", page-locked in {clock(s.pin_seconds)}" if s.pin_seconds else ""
    rows.append(("host memory", f"{human(s.host_bytes)}{pinned}"))
    if s.hits + s.misses:
        rows.append(("hit rate", f"{s.hit_rate:.1%} of the chosen tokens were on the device"))
    if s.bytes_fetched and s.sparse_steps:
        each = human(s.bytes_fetched / s.sparse_steps)
        rows.append(("fetched", f"{human(s.bytes_fetched)} by selection, {each} a sparse step"))
    if s.bytes_streamed:
        rows.append(("streamed", f"{human(s.bytes_streamed)} in whole layers or blocks"))
    if s.staging_stalls:
        rows.append(("staging stalls", f"{s.staging_stalls:,} chunks waited for their buffer"))
    return rows


def all_stats_text(session: Session, last: GenerationStats | None) -> str:
    """Format every counter of a session and every figure of its last answer."""
    data = dict(session.stats.to_dict())
    if last is not None:
        data |= {f"last answer: {name}": value for name, value in last.to_dict().items()}
    return _aligned([(name.replace("_", " "), _figure(name, v)) for name, v in data.items()])


def _figure(name: str, value: object) -> str:
    if "bytes" in name and isinstance(value, (int, float)):
        return human(value)
    if isinstance(value, float):
        return f"{value:,.3f}{' s' if name.endswith('seconds') else ''}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def reading_time(session: Session, tokens: int) -> str:
    """Format how long reading so many tokens again takes at the session's rate; empty if it has
    none.
    """
    s = session.stats
    if not s.prefill_tokens or not s.prefill_seconds:
        return ""
    return f", about {clock(tokens * s.prefill_seconds / s.prefill_tokens)} at the rate so far"


# ---------------------------------------------------------------- /memory and /plan


def memory_text(planner: Planner, session: Session) -> str:
    """Format a table of the memory that was planned and of what the session holds now.

    The context bank includes the working sets and streaming buffers of a host tier.
    """
    plan, stats = planner.plan(), session.stats
    planned = {name: size for name, size, _ in plan.items}
    planned["context bank"] += planned.pop("working sets", 0) + planned.pop("streaming", 0)
    held = {name: size for field, name in HELD.items() if (size := getattr(stats, field))}
    on_host = "host tier" not in planned  # on a GPU the total does not count it
    table = [("", "planned", "held now")]
    for name in dict.fromkeys([*planned, *held]):
        if name != "host tier" or not on_host:
            table.append((name, _size(planned, name), _size(held, name)))
    table.append(("total at the peak", human(plan.total), f"of {plan.free_name}"))
    if on_host and held.get("host tier"):
        table.append(("host tier", human(plan.host_bytes), _size(held, "host tier")))
    width = max(len(name) for name, *_ in table)
    lines = [f"{name:<{width}}  {left:>10}  {right:>10}".rstrip() for name, left, right in table]
    if held.get("retained rows"):
        beside = "the whole context bank stands beside them"
        if stats.forgets:
            beside = "rows that they do not take are freed"
        lines.append(f"answers read the retained rows; {beside}")
    if process := process_memory(planner):
        lines.append(f"this process holds {process}")
    return "\n".join(lines)


def _size(sizes: Mapping[str, int], name: str) -> str:
    return human(sizes[name]) if name in sizes else ""


def plan_text(planner: Planner) -> str:
    """Format the layer plan and the memory plan; a local model goes by its folder's name."""
    return str(dataclasses.replace(planner.plan(), model=model_name(planner)))


# ---------------------------------------------------------------- layout


def _aligned(rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _grouped(groups: list[tuple[str, Rows]]) -> str:
    width = max(len(name) for _, rows in groups for name, _ in rows)
    lines = []
    for title, rows in groups:
        if rows:
            lines += [title, *(f"  {name:<{width}}  {text}" for name, text in rows)]
    return "\n".join(lines)
