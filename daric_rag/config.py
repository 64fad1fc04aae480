"""Every option of daric_rag, validated in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from daric_rag.engine.selection import MTAFS, STRATEGIES

DEFAULT_DELIMITER = "<|daric|>"

# The options that a single call may override; the others belong to the engine as a whole.
PER_CALL_OPTIONS = frozenset(
    {"reuse", "selection", "n_avg", "ratio", "mtaf", "max_fraction", "cache_query", "namespace", "profile"}
)

GIB = 1 << 30


class DaricConfig(BaseModel):
    """Options of an engine; immutable, keyword-only.

    Raises `ValueError` (pydantic's `ValidationError`) naming the field, the value and what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    reuse: bool = Field(default=True, description="Reuse KV by default; False serves plain vLLM.")
    selection: str = Field(
        default="daric",
        description="Strategy that chooses the recomputed tokens (paper §3.4): daric, epic, none, all, or a "
        "registered one.",
    )
    n_avg: int = Field(
        default=32, ge=1, description="Average recomputation budget per chunk, in tokens (Eq. 4)."
    )
    ratio: float = Field(
        default=0.1, gt=0, lt=1, description="Initial ratio r: the second chunk gets r * n_avg (Eq. 4)."
    )
    mtaf: str = Field(
        default="linear", description="Monotonic token allocation function: linear, log or exp."
    )
    max_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Cap of the recomputation budget, as a fraction of the prompt (§5.2.5).",
    )
    cache_query: bool = Field(
        default=False,
        description="Cache the last chunk too, as the paper does, instead of computing it in full context.",
    )

    profile: str = Field(
        default="none",
        min_length=1,
        description="Correction of stored KV: auto (the model's own profile, made at its first start), none, or the "
        "path of a profile's JSON file.",
    )

    delimiter: str = Field(
        default=DEFAULT_DELIMITER, description="Separates chunks in the text form of a prompt."
    )
    padding: str = Field(
        default="\n", min_length=1, description="Text of the padding token; must be a single token."
    )
    recognition: bool = Field(
        default=True, description="Find registered documents verbatim in plain text prompts."
    )
    recognition_bytes: int = Field(
        default=256 << 20, ge=0, description="Memory for registered document texts, in bytes."
    )

    kv_pool_bytes: int = Field(
        default=GIB, ge=1 << 20, description="vLLM's own KV pool on the CPU, in bytes."
    )
    block_size: int = Field(default=32, ge=1, description="Tokens per KV block; on the CPU a multiple of 32.")
    host_bytes: int = Field(
        default=2 * GIB, ge=0, description="Host-memory tier of the document cache, in bytes."
    )
    disk_path: str | None = Field(default=None, description="Directory of the disk tier; None: no disk tier.")
    disk_bytes: int = Field(default=16 * GIB, ge=0, description="Budget of the disk tier, in bytes.")
    index: str = Field(
        default="memory", description="KV cache index: memory, or a redis:// or rediss:// URL."
    )
    namespace: str = Field(
        default="", description="Tenant: part of every key, so nothing is shared across namespaces."
    )
    storage_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto", description="Type in which document KV is kept; auto: the engine's own."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            reject_unknown(values, cls.model_fields, "DaricConfig")
        return values

    @field_validator("selection")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        return one_of("selection", value, STRATEGIES)

    @field_validator("mtaf")
    @classmethod
    def _known_mtaf(cls, value: str) -> str:
        return one_of("mtaf", value, MTAFS)

    @field_validator("index")
    @classmethod
    def _known_index(cls, value: str) -> str:
        if value != "memory" and not value.startswith(("redis://", "rediss://")):
            # The value may hold a password: name only its scheme.
            raise ValueError(
                f"index={value.split('://')[0]!r}: allowed are 'memory', 'redis://…' and 'rediss://…'"
            )
        return value

    @field_validator("delimiter")
    @classmethod
    def _usable_delimiter(cls, value: str) -> str:
        check_delimiter(value)
        return value

    def override(self, **options: Any) -> DaricConfig:
        """Return a validated copy with some options of one call replaced (`PER_CALL_OPTIONS`)."""
        reject_unknown(options, PER_CALL_OPTIONS, "a call")
        if not options:
            return self
        if options.get("profile", self.profile) not in (self.profile, "none"):
            raise ValueError(
                f"profile={options['profile']!r}: an engine has one profile; a call may choose 'none' or the "
                f"engine's own {self.profile!r}"
            )
        return DaricConfig(**{**self.model_dump(), **options})


def reject_unknown(options: Any, allowed: Any, where: str) -> None:
    """Raise `ValueError` naming the first option that is not allowed, and the nearest one that is."""
    for name in options:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), list(allowed), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown option {name!r} for {where}: {hint}allowed are {', '.join(sorted(allowed))}"
            )


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """Return `value`, or raise `ValueError` naming field, value and the allowed values."""
    if value not in allowed:
        raise ValueError(f"{field}={value!r}: allowed are {', '.join(allowed)}")
    return value


def check_delimiter(delimiter: str) -> None:
    """Raise `ValueError` if the delimiter could not be escaped or would be stripped by templates."""
    if len(delimiter) < 2:
        raise ValueError(f"delimiter={delimiter!r}: must have at least two characters")
    if not delimiter.isprintable() or any(character.isspace() for character in delimiter):
        raise ValueError(f"delimiter={delimiter!r}: must be printable and hold no white space")
    if "\\" in delimiter or "!" in delimiter:
        raise ValueError(
            f"delimiter={delimiter!r}: must not hold '\\' or '!', which mark escapes and live pieces"
        )
    if delimiter[0] in delimiter[1:]:
        # With a first character that occurs once, delimiters never overlap each other or a document's end.
        raise ValueError(f"delimiter={delimiter!r}: its first character must not occur in it again")
