"""Types of the errors that a user can cause in a model folder; engine/base/errors.py has the
others.

A message is one line that names the thing, the numbers and the remedy. The command line prints it
and exits with `exit_code`.
"""


class EngineError(Exception):
    """Base class of every error that this project raises on purpose."""

    exit_code = 1


class UsageError(EngineError):
    """A flag, a value or a name that makes no sense."""

    exit_code = 2


class ModelNotFound(UsageError):
    """The model's name is neither a folder nor an alias nor an existing hub id."""


class UnsupportedCheckpoint(EngineError):
    """A sound checkpoint that this engine does not run (architecture, rope type, quantised format,
    pickle).
    """


class BadCheckpoint(EngineError):
    """A damaged, incomplete or contradictory model folder."""


class HubError(EngineError):
    """The hub refused, or could not be reached (gated, offline, partial download)."""
