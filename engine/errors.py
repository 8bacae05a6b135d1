"""The engine's typed errors, beside those of weights/ (re-exported, so that callers need one
import).
"""

from weights.errors import (
    BadCheckpoint,
    EngineError,
    HubError,
    ModelNotFound,
    UnsupportedCheckpoint,
    UsageError,
)

__all__ = [
    "BadCheckpoint",
    "Busy",
    "ContextTooLong",
    "EngineError",
    "HubError",
    "ModelNotFound",
    "OutOfHostMemory",
    "OutOfMemoryPlan",
    "SessionClosed",
    "SettingError",
    "TemplateError",
    "UnsupportedCheckpoint",
    "UsageError",
]


class SettingError(UsageError):
    """A field of a method, of SamplingParams or of LLM(...) outside its range; names field, value
    and range.
    """


class ContextTooLong(EngineError):
    """More tokens than the context holds; names both numbers and the remedy. Nothing was read or
    cut.
    """


class OutOfMemoryPlan(EngineError):
    """The memory plan does not fit; names what, how much, and the remedies in order. Nothing was
    allocated.
    """


class OutOfHostMemory(EngineError):
    """The host tier got no memory for more tokens; names the limit and the remedies. The session
    keeps the length it had.
    """


class Busy(EngineError):
    """Another request is running on this LLM."""


class SessionClosed(EngineError):
    """The session was closed; its bank is gone."""


class TemplateError(EngineError):
    """The model's chat template is missing, unsafe, too slow or raises."""
