"""Objects that live in one process: their threads, locks and connections do not come along into another."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NoReturn, Self

from daric_rag.errors import DaricError


class OneProcess:
    """Base of an object that belongs to the process that first uses it.

    After a fork its threads are gone and its locks may be held for ever, so `check_process` comes before
    anything that could wait for one. A copy is the object itself, and pickling says why it cannot be.
    """

    kind: ClassVar[str]
    """What errors call it."""
    _process: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the object belongs to another process than this one."""
        return self._process not in (None, os.getpid())

    def check_process(self) -> None:
        """Raise `DaricError`, naming both processes and the way out, where the object cannot work."""
        if self.is_elsewhere:
            raise DaricError(
                f"this {self.kind} belongs to process {self._process}; it does not work in process "
                f"{os.getpid()}, which was forked from it. Make one in each process after the fork, or start "
                "processes with multiprocessing's 'spawn' method"
            )
        self._process = os.getpid()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: this {self.kind} cannot be pickled, because its threads, memory and "
            "connections belong to this process. Make one in each process, or leave it out of what is sent"
        )
