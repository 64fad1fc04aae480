"""Keeping vLLM's start-up messages off the screen, and showing them when the start fails."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

_SHOWN_ON_FAILURE = 20  # last lines of what was held back

# What the user has set stays. Messages go to standard error: standard output is for answers.
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "VLLM_NO_USAGE_STATS": "1",
}


def quiet_environment() -> None:
    """Set what vLLM, torch and transformers read when they are imported, here and in the engine's processes."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def held_back_stderr(verbose: bool = False) -> Iterator[None]:
    """Send standard error of this process and of those it starts to a file; an error shows its last lines.

    Processes started inside keep writing to the file, which is gone when the last of them ends.
    """
    if verbose:
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        failed = False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            if failed:
                held_back.seek(0)
                lines = held_back.read().decode(errors="replace").splitlines()
                print("\n".join(lines[-_SHOWN_ON_FAILURE:]), file=sys.stderr)
