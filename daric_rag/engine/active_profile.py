"""Which profile corrects an engine's stored KV: found at the start, made at a model's first start, or made anew."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine.calibrating import CalibrationTooSlowError, Calibrator, bundled_documents
from daric_rag.engine.profile import Profile, profile_path
from daric_rag.errors import CacheUnavailableError
from daric_rag.prompt import Content

logger = logging.getLogger(__name__)

_FIRST_START_S = 120.0
"""A model's first start may take this much longer, in seconds, to be calibrated on the bundled documents."""


class ActiveProfile:
    """The profile that requests get from now on; used in the engine's event loop.

    `model`: its name. `find_key`: what its profile is found by; called only if one is wanted, because the weights
    are hashed for it.
    """

    def __init__(
        self, calibrator: Calibrator, config: DaricConfig, model: str, find_key: Callable[[], str]
    ) -> None:
        self._calibrator = calibrator
        self._config = config
        self._model = model
        self._find_key = find_key
        self.profile: Profile | None = None

    @functools.cached_property
    def _key(self) -> str:
        return self._find_key()

    def digest(self, config: DaricConfig, adapter: Any) -> str:
        """The profile of a request, "" for none: an adapter's KV deviates in other ways than its base model's."""
        if self.profile is None or adapter is not None or config.profile == "none":
            return ""
        return self.profile.digest

    async def open(self) -> None:
        """Take up what the configuration asks for.

        A profile that cannot be used is named in a warning, and the engine serves without one. Raises ValueError if
        the configuration names a file and it cannot be used.
        """
        wanted = self._config.profile
        if wanted == "none":
            return
        if wanted != "auto":
            await self._take_up(self._read(Path(wanted)))
            return
        path = profile_path(self._key)
        if not path.exists():
            await self._make_first(path)
            return
        try:
            await self._take_up(self._read(path))
        except ValueError as error:
            logger.warning("%s; documents are reused without correction until `engine.calibrate`", error)

    async def calibrate(self, documents: Sequence[Content], progress: bool | None) -> Profile:
        """Make the model's profile of `documents`, keep it for coming starts, and take it up."""
        profile = await self._make(documents, profile_path(self._key), progress, None)
        await self._take_up(profile)
        return profile

    async def _make_first(self, path: Path) -> None:
        try:
            await self._take_up(await self._make(bundled_documents(), path, None, _FIRST_START_S))
        except (CalibrationTooSlowError, CacheUnavailableError, ValueError) as error:
            logger.warning(
                "Documents of %s are reused without correction, which costs quality: %s. "
                "Call `engine.calibrate(documents)` once.",
                self._model,
                error,
            )

    async def _make(
        self, documents: Sequence[Content], path: Path, progress: bool | None, limit_s: float | None
    ) -> Profile:
        return await self._calibrator.run(
            documents, path, model=self._model, model_key=self._key, progress=progress, limit_s=limit_s
        )

    def _read(self, path: Path) -> Profile:
        profile = Profile.read(path)
        if profile.model_key != self._key:
            raise ValueError(
                f"profile {str(path)!r} was made for another model or other settings ({profile.model}); "
                f"call `engine.calibrate(documents)` for {self._model}"
            )
        return profile

    async def _take_up(self, profile: Profile) -> None:
        """Let all ranks load the maps, then send requests with it. Raises ValueError if a rank cannot."""
        if not profile.corrects_nothing:
            problems = await self._calibrator.call_ranks("daric_load_profile", args=(profile.path,))
            for problem in filter(None, problems):
                raise ValueError(problem)
        self.profile = None if profile.corrects_nothing else profile
