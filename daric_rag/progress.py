"""Progress bars: on standard error, and only where somebody can see them."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int, what: str, unit: str, show: bool | None = None) -> Any:
    """A tqdm bar over `total` steps; `show` None means: if standard error is a terminal."""
    visible = sys.stderr.isatty() if show is None else show
    return tqdm(total=total, desc=what, unit=unit, disable=not visible, file=sys.stderr, leave=False)
