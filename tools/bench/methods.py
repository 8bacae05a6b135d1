"""Which methods a benchmark runs: names to frozen method values, found in engine/methods, with what
cannot run saying why.
"""

import dataclasses
from dataclasses import dataclass

from engine.errors import SettingError
from engine.methods.full import Full
from engine.methods.omnikv.settings import OmniKV
from engine.methods.registry import methods
from tools.planted_selection import Replay


@dataclass(frozen=True)
class Spec:
    """One column of a comparison: label, method value, and where the sparse layers' rows lie
    ("device" or "host").
    """

    label: str
    method: object
    offload: str = "device"


def describe(method):
    """A method as its call with the fields that differ from their defaults:
    "OmniKV(filter_layers=(2, 5, 8), tokens=2048)".
    """
    given = [
        f"{f.name}={getattr(method, f.name)!r}"
        for f in dataclasses.fields(method)
        if getattr(method, f.name) != f.default
    ]
    return f"{type(method).__name__}({', '.join(given)})"


def specs(names, filter_layers, tokens, waits, reuses, dense_below=0, tail=256):
    """Spec list for names such as "full", "omnikv", "omnikv-host", "brutal" or any registered
    method.

    OmniKV is multiplied by `waits` (numbers of wait layers) and, on "omnikv-host", by `reuses`
    (planted shares; None: as chosen). Raises SettingError for a name that nobody knows.
    """
    known, found = methods(), []
    for name in names:
        base, _, place = name.partition("-")
        base, place = ("brutal_offload", "host") if name == "brutal" else (base, place)
        if place not in ("", "host") or base not in known:
            raise SettingError(
                f"methods: found {name!r}, expected full, omnikv, omnikv-host, brutal or one of "
                f"{', '.join(known)}"
            )
        if base == "omnikv":
            settings = dict(
                filter_layers=filter_layers, tokens=tokens, dense_below=dense_below, tail=tail
            )
            found += _omnikv(settings, waits, reuses if place else (None,), place)
        else:
            found.append(
                Spec(
                    name,
                    _fill(known[base], filter_layers, tokens, dense_below),
                    "host" if place else "device",
                )
            )
    return found


def _omnikv(settings, waits, reuses, place):
    for wait in waits:
        for reuse in reuses:
            label = f"omnikv{'-host' if place else ''} w{wait}" + (
                "" if reuse is None else f" reuse {reuse:g}"
            )
            method = (
                OmniKV(wait_layers=wait, **settings)
                if reuse is None
                else Replay(wait_layers=wait, reuse=reuse, **settings)
            )
            yield Spec(label, method, "host" if place else "device")


def _fill(cls, filter_layers, tokens, dense_below):
    """A method with those of our settings that it has."""
    if cls is Full:
        return Full()
    names = {field.name for field in dataclasses.fields(cls)}
    offered = dict(filter_layers=filter_layers, tokens=tokens, dense_below=dense_below)
    return cls(**{name: value for name, value in offered.items() if name in names})
