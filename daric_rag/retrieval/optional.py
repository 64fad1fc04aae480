"""Optional dependencies, imported at first use."""

import importlib
from typing import Any

from daric_rag.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import `module`, which the extra `extra` of this package installs.

    Raises `MissingExtraError` with the `pip install` line if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f'{module} cannot be imported ({error}); install it with: pip install "daric-rag[{extra}]"'
        ) from error
