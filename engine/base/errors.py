"""The engine's typed errors, and those of weights/ for callers to import from one place."""

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
    "DeviceFailed",
    "EngineError",
    "HubError",
    "ModelNotFound",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "OutOfMemoryPlan",
    "OutputFailed",
    "RankLost",
    "SavedFileError",
    "SessionClosed",
    "SettingError",
    "TemplateError",
    "TimedOut",
    "UnsupportedCheckpoint",
    "UsageError",
    "WorkerClosed",
]


class SettingError(UsageError):
    """A setting of a method, of SamplingParams or of LLM(...) is outside its range.

    The message names field, value and range.
    """


class ContextTooLong(EngineError):
    """The context cannot hold so many tokens; nothing was read and nothing cut.

    The message names both numbers and the remedy.
    """


class OutOfMemoryPlan(EngineError):
    """The memory plan does not fit; nothing was allocated.

    The message names the largest part, the numbers and the remedies in order.
    """


class OutOfHostMemory(EngineError):
    """The host tier got no memory for more tokens; the session keeps the length it had.

    The message names the limit and the remedies.
    """


class OutOfDeviceMemory(EngineError):
    """The GPU had no memory left for a chunk or a step; the session keeps the tokens that it had.

    The message names the driver's figures and the remedies.
    """


class DeviceFailed(EngineError):
    """The GPU or its driver refused a launch; the session keeps the tokens that it had."""


class OutputFailed(EngineError):
    """Standard output is closed or full: an answer cannot be written."""


class RankLost(EngineError):
    """Another process of a model has ended or does not answer: the model's sessions are gone.

    The message names the rank and what is known of its end.
    """


class Busy(EngineError):
    """Another request is running on this LLM (wait=True makes callers wait), or too many wait."""


class SavedFileError(EngineError):
    """A saved session cannot be written, is damaged, or belongs to another model.

    The message names the file, what was found and the remedy; nothing of it is used.
    """


class SessionClosed(EngineError):
    """The session was closed and its bank freed."""


class TemplateError(EngineError):
    """The model's chat template is missing, unsafe or too slow, or it raises an error."""


class TimedOut(EngineError):
    """The time of a request was over before its answer began; what was read stays."""


class WorkerClosed(EngineError):
    """The thread that answers requests ends or has ended: the server, or AsyncLLM.close()."""
