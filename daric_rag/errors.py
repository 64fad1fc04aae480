"""One tree of exceptions: everything that daric_rag raises on purpose is a `DaricError` or a `ValueError`."""


class DaricError(Exception):
    """Root of the errors that are not simply a bad argument."""


class EngineClosedError(DaricError):
    """The engine was closed, or its process died; no further request can be served."""


class UnsupportedModelError(DaricError):
    """The model's KV cannot be re-encoded to another position (DESIGN: backends that are refused)."""


class MissingExtraError(DaricError, ImportError):
    """An optional dependency is not installed; the message names the `pip install` line."""


class CacheUnavailableError(DaricError):
    """A cache location (directory, Redis) cannot be used at start."""


class IndexMismatchError(DaricError):
    """A stored index belongs to another embedder, or is damaged."""


class UnsupportedVersionError(DaricError, ImportError):
    """A library is installed in a version that daric_rag does not work with; the message names both."""
