"""The one exception tree of the package.

Every message names the value, the limit and the way out. Internal invariants
use ``assert``; everything a user can cause is one of these.
"""


class TinyVllmError(Exception):
    """Root of all errors raised on purpose by tiny_vllm."""


class ConfigError(TinyVllmError, ValueError):
    """A configuration key or value that cannot be used."""


class ModelLoadError(TinyVllmError):
    """A model that cannot be found, read or matched to an architecture."""


class TraceError(TinyVllmError, ValueError):
    """A trace file or workload that cannot be read; names file, line and field."""


class InvalidRequestError(TinyVllmError, ValueError):
    """A request that is refused. ``field`` names the parameter at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RequestTooLongError(InvalidRequestError):
    """A prompt (or prompt plus output) that can never fit."""


class EngineDeadError(TinyVllmError):
    """The engine failed earlier or was shut down and takes no more work."""
