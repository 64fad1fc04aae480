"""A model's profile: the correction of its stored KV, as files that are found by the model.

A profile is a small JSON file and, in a folder beside it, one safetensors file of maps for every tensor-parallel
rank. The JSON is written last and names folder and files with their digests, so a profile is there as a whole or not
at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daric_rag.engine.keys import root_key
from daric_rag.errors import CacheUnavailableError
from daric_rag.models import cache_directory, locked, temporary_sibling

if TYPE_CHECKING:
    import torch

FORMAT = 1
"""Raised whenever the meaning of the files changes."""

NUM_PARTS = 4
"""Parts of the calibration requests, each held back once."""

# Below this share of the deviation explained on held-back documents a correction would be noise.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class LayerGain:
    """What the correction of a layer explains on documents that were held back: shares of the deviation's energy.

    At most 1; 0 and less: nothing. `ridge`: the regularisation that was chosen, as a share of each feature's own sum
    of squares.
    """

    key_gain: float
    value_gain: float
    ridge: float

    @property
    def corrects_keys(self) -> bool:
        """Whether the keys gain enough to be touched."""
        return self.key_gain > _LEAST_GAIN

    @property
    def corrects_values(self) -> bool:
        """Whether the values gain enough to be touched."""
        return self.value_gain > _LEAST_GAIN


@dataclass(frozen=True)
class Profile:
    """A profile that was read and found whole.

    `path`: its JSON file. `model_key`: hex digest of the model and what else its KV depends on (`model_key`).
    `folder`: of the maps, beside `path`. `maps_digests`: of each rank's file, by name. `documents_digest`,
    `num_tokens`: what it was fitted on.
    """

    path: str
    model_key: str
    model: str
    folder: str
    maps_digests: Mapping[str, str]
    documents_digest: str
    num_tokens: int
    layers: tuple[LayerGain, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What identifies the correction, and with it the KV that it was applied to; 32 hex digits."""
        return _digest(json.dumps([FORMAT, sorted(self.maps_digests.items())]).encode())

    @property
    def corrects_nothing(self) -> bool:
        """Whether no layer gained enough to be touched."""
        return not any(layer.corrects_keys or layer.corrects_values for layer in self.layers)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile's JSON file. Raises ValueError if it is missing, damaged or of another version."""
        location = Path(path)
        try:
            values = json.loads(location.read_text("utf-8"))
            found = values.pop("format")
            layers = tuple(LayerGain(**layer) for layer in values.pop("layers"))
            profile = cls(path=str(location), layers=layers, **values)
        except OSError as error:
            raise ValueError(f"profile {str(path)!r} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"profile {str(path)!r} is damaged: {error!r}") from None
        if found != FORMAT:
            raise ValueError(
                f"profile {str(path)!r} has format {found!r}, this version of daric_rag reads {FORMAT}; "
                "calibrate again"
            )
        return profile

    def maps(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's maps; `Correction` says their shapes. Raises ValueError if they are missing or damaged."""
        from safetensors.torch import load

        name = _maps_name(rank)
        file = Path(self.path).with_name(self.folder) / name
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"profile {self.path!r} lacks the maps of rank {rank}: {error}") from None
        if _digest(content) != self.maps_digests.get(name):
            raise ValueError(f"profile {self.path!r} is damaged: {file} is not what was written")
        return load(content)


def model_key(root_fields: Mapping[str, Any]) -> str:
    """The hex digest under which a model's profile is kept: all that its KV depends on, whatever type it is kept in."""
    fields = {name: value for name, value in root_fields.items() if name != "storage_dtype"}
    return root_key({**fields, "profile_format": FORMAT}).hex()[:32]


def profiles_directory() -> Path:
    """Where profiles are kept: beside the prepared models in the user's cache."""
    return cache_directory() / "profiles"


def profile_path(key: str) -> Path:
    """Where the profile of a model is, or would be."""
    return profiles_directory() / f"{key}.json"


@contextlib.contextmanager
def being_made(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` for the maps of a profile that is being made; gone at the end if still there.

    One process at a time makes a profile; what a process that was killed has left is removed. Raises
    `CacheUnavailableError` if nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path), temporary_sibling(path) as folder:
            maps = folder / "maps"
            maps.mkdir()
            yield maps
    except OSError as error:
        raise CacheUnavailableError(f"the profile {str(path)!r} cannot be written: {error}") from error


def publish(path: Path, made: Path, **fields: Any) -> Profile:
    """Make a profile of the maps in the folder `made`, in place of the one at `path`.

    `fields`: those of `Profile` that say what it was made of. Whoever has read the old one keeps it.
    """
    digests = {file.name: _digest(file.read_bytes()) for file in sorted(made.iterdir())}
    folder = f"{path.stem}-{_digest(json.dumps(digests).encode())[:12]}"
    profile = Profile(path=str(path), folder=folder, maps_digests=digests, **fields)
    target = path.with_name(folder)
    if not target.exists():
        made.rename(target)
    values = {name: value for name, value in asdict(profile).items() if name != "path"}
    content = made.parent / "profile.json"
    content.write_text(json.dumps({"format": FORMAT, **values}, indent=1), "utf-8")
    os.replace(content, path)
    for older in path.parent.glob(f"{path.stem}-*"):
        if older != target:
            shutil.rmtree(older, ignore_errors=True)
    return profile


def write_maps(directory: str, rank: int, maps: Mapping[str, torch.Tensor]) -> None:
    """Write a rank's maps into a profile that is being made."""
    from safetensors.torch import save

    (Path(directory) / _maps_name(rank)).write_bytes(save(dict(maps)))


def _maps_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
