"""The last line of a plan: whether it fits, and if not what would, each found by planning it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.base.errors import SettingError
from engine.base.figures import count, human
from engine.cli.fits import FORMS, USEFUL, flags
from engine.load.batch_plan import SlotPlan
from engine.load.planner import Planner
from engine.load.report import ROUND, Plan
from engine.plan.free_memory import HEADROOM

SHOWN = 2  # forms that are proposed, those that change answers least
BITS = ("float", "int8", "int4")


class Need(NamedTuple):
    """Whether something fits, the bytes that it needs on the device, its context in tokens, the
    largest that would fit, and whether host memory alone is too small.
    """

    fits: bool
    bytes: int
    context: int
    largest: int = 0
    lacks_host: bool = False


def plan_verdict(planner: Planner) -> tuple[bool, str]:
    """Return (whether the plan of one session fits, the line that says so)."""
    plan = planner.plan()
    need = _of_plan(plan)
    allowed = f"the {human(plan.free * HEADROOM)} that may be used (of {plan.free_name})"
    if plan.fits:
        line = f"fits: {human(need.bytes)} of {allowed}"
        if plan.device != "cpu" and (plan.placement is not None or plan.staging is not None):
            line += f", {human(plan.host_total)} of the {human(plan.host_free * HEADROOM)} of host "
            line += f"memory that may be used (of {plan.host_name})"
        return True, line + _without_streaming(planner)
    short, over = [], 0.0
    for number, part in enumerate(plan.by_device):
        where = f"device {number} ({part.device}): " if len(plan.by_device) > 1 else ""
        allowed = f"the {human(part.free * HEADROOM)} that may be used (of {part.free_name})"
        more = part.total - part.free * HEADROOM
        host = part.host_total - part.host_free * HEADROOM
        over = max(over, more)
        if more > 0:
            short.append(f"{where}{human(more)} too much for {allowed}")
        if part.device != "cpu" and host > 0:
            short.append(f"{where}{human(host)} of host memory too much (of {part.host_name})")
    found = []
    if ROUND <= plan.largest_context < plan.max_context:
        found.append(f"--ctx {plan.largest_context}")
    if over <= 0 and (gpu := planner.options.imagined_gpu) is not None:
        found.append(f"--fits {gpu / 1e9:g}+{math.ceil(plan.host_total / HEADROOM / 1e9)}")

    def needed(settings: dict[str, Any]) -> Need:
        return _of_plan(planner.plan(**settings))

    return False, f"does not fit: {' and '.join(short)}; {_remedies(planner, needed, found)}"


def _without_streaming(planner: Planner) -> str:
    """Name the first form in which no weights have to stream, where some do of themselves."""
    if planner.staging is None or planner.options.weights_offload != "auto":
        return ""
    for form in (form for form in FORMS if _smaller(planner, form)):
        settings: dict[str, Any] = {**form, "weights_offload": "off"}
        try:
            plan = planner.asked(**settings).plan()
        except SettingError:
            continue
        if plan.fits and plan.max_context >= planner.max_context:
            return f"; nothing streams with {flags(form)} ({human(plan.total)})"
    return ""


def slots_verdict(planner: Planner, slots: Callable[..., SlotPlan]) -> tuple[bool, str]:
    """Return (whether a server's sessions fit, the line that says so). slots(**settings): their
    plan, with other settings of the planner.
    """
    now = slots()
    sessions = f"{now.slots} sessions of {now.context} tokens"
    host = now.slots * now.each_host
    held = f" and {human(host)} of the {human(now.host_free)} of host memory" if host else ""
    line = f"{sessions}, {human(now.total)} of the {human(now.free)} that may be used{held}"
    if now.slots <= now.most:
        return True, f"fits: {line}"
    found = [f"--slots {now.most}"] if now.most else []
    found += [f"--ctx {c}" for c, most in now.fitting if most >= now.slots and c < now.context][:1]

    def needed(settings: dict[str, Any]) -> Need:
        plan = slots(**settings)
        return Need(plan.slots <= plan.most, plan.total, plan.context)

    return False, f"does not fit: {line}, is too much; {_remedies(planner, needed, found)}"


def _of_plan(plan: Plan) -> Need:
    lacks_host = plan.fits_device and not plan.fits
    return Need(plan.fits, plan.total, plan.max_context, plan.largest_context, lacks_host)


def _remedies(planner: Planner, needed: Callable[[dict[str, Any]], Need], found: list[str]) -> str:
    """Name what fits: `found`, and the first forms of weights and bank that do."""
    options, least = planner.options, None
    shorter: tuple[str, int] | None = None  # a form that holds the longest of shorter contexts
    useful = options.max_context or min(USEFUL, planner.config.context_limit)
    gpu = planner.device.type == "cuda"
    places = [place for place in ("auto", "host") if gpu and place != options.offload]
    candidates: list[dict[str, Any]] = [{"offload": place} for place in places]
    if gpu and options.weights_offload != "auto":
        candidates.append({"weights_offload": "auto"})
    if str(planner.dtype) == "torch.float32":
        candidates.append({"dtype": "bfloat16"})
    shown = 0
    for settings in (*candidates, *(form for form in FORMS if _smaller(planner, form))):
        try:
            with warnings.catch_warnings():  # said of the plan itself already
                warnings.simplefilter("ignore")
                need = needed(settings)
        except SettingError:  # rows or groups that the form does not take
            continue
        if need.fits and need.context >= useful and shown < SHOWN:
            tokens = "" if options.max_context else f", {count(need.context)}"
            found.append(f"{flags(settings)} ({human(need.bytes)}{tokens})")
            shown += 1
        if not need.lacks_host and (least is None or need.bytes < least[1]):
            least = flags(settings), need.bytes
        if ROUND <= need.largest < need.context and (shorter is None or need.largest > shorter[1]):
            shorter = flags(settings), need.largest
    if found:
        return f"fits with {', or '.join(found)}"
    if least is None:
        return "a smaller model fits, or more memory"
    if shorter is not None:
        return f"fits with {shorter[0]} --ctx {shorter[1]} ({count(shorter[1])})"
    return f"{least[0]} still needs {human(least[1])}: a smaller model, or more memory"


def _smaller(planner: Planner, form: dict[str, str]) -> bool:
    """Whether a form takes fewer bits than now, and more nowhere."""
    steps = [(_rank(value), _rank(getattr(planner.options, name))) for name, value in form.items()]
    return all(new >= now for new, now in steps) and any(new > now for new, now in steps)


def _rank(word: str) -> int:
    return BITS.index(word.partition(":")[0]) if word.partition(":")[0] in BITS else 0
