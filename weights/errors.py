"""Every error that a user can cause has a type here or in engine/errors.py, all under EngineError.

The message is one line that names the thing, the numbers and the remedy; the command line prints it
and exits with `exit_code`.
"""


class EngineError(Exception):
    """Base class of all errors this project raises on purpose."""

    exit_code = 1


class UsageError(EngineError):
    """A flag, a value or a name that cannot be meant."""

    exit_code = 2


class ModelNotFound(UsageError):
    """The model's name is no folder, no alias and no hub id that exists."""


class UnsupportedCheckpoint(EngineError):
    """A sound checkpoint of a kind this engine does not run (architecture, rope type, quantised
    format, pickle).
    """


class BadCheckpoint(EngineError):
    """A damaged, incomplete or contradictory model folder."""


class HubError(EngineError):
    """The hub refused or could not be reached (gated, offline, partial download)."""
