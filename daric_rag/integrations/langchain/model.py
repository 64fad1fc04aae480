"""What `DaricLLM` and `ChatDaric` have in common: fields, options of a call, engine, identity."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from daric_rag.config import PER_CALL_OPTIONS, DaricConfig, reject_unknown
from daric_rag.integrations.common.shared_engine import get_engine
from daric_rag.integrations.langchain.messages import PromptFormat, document_contents
from daric_rag.known_documents import attach_engine
from daric_rag.prompt import Content

if TYPE_CHECKING:
    from vllm import SamplingParams

    from daric_rag.engine.engine import DaricEngine

# Fields of the model object that a call may override, and more of vLLM's sampling parameters.
_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "seed", "n", "logprobs")
_MORE_SAMPLING = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "ignore_eos",
)
CALL_OPTIONS = frozenset({*_SAMPLING_FIELDS, *_MORE_SAMPLING, *PER_CALL_OPTIONS, "documents", "model"})


@dataclass(frozen=True)
class Call:
    """One call, its options validated: what the engine is given beside the prompts."""

    engine: DaricEngine
    model: str
    params: SamplingParams
    documents: list[Content]
    overrides: dict[str, Any]
    form: PromptFormat


class DaricModel(BaseModel):
    """Fields and engine of a LangChain model; the engine is shared by all objects with the same arguments."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str = Field("smollm2-135m", description="An embedded model, a path or a hub id.")
    config: DaricConfig | None = Field(None, description="Options of reuse; None: the defaults.")
    engine: Any = Field(
        None,
        exclude=True,
        repr=False,
        description="A DaricEngine to use; None: a shared one, at the first call.",
    )
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0: the most probable token each time.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most probable tokens with this mass.")
    stop: list[str] | None = Field(None, description="Texts that end an answer; a call's own replace these.")
    seed: int | None = Field(None, description="Makes sampling repeatable.")
    n: int = Field(1, ge=1, description="Answers per prompt.")
    logprobs: int | None = Field(
        None, ge=0, description="Log-probabilities of this many tokens at each place, and of the one chosen."
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")

    _token_counter: Any = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            reject_unknown(values, cls.model_fields, cls.__name__)
        return values

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source_of_the_engine(self) -> DaricModel:
        if self.engine is None:
            return self
        if not hasattr(self.engine, "agenerate"):
            raise ValueError(f"engine: a DaricEngine is expected, not {type(self.engine).__name__}")
        for name in ("config", "engine_args"):
            if getattr(self, name):
                raise ValueError(f"{name}: an engine is given, which has its own; leave out one of the two")
        if "model" in self.model_fields_set and self.model != self.engine.model_name:
            raise ValueError(f"model={self.model!r}: the engine given serves {self.engine.model_name!r}")
        self.model = self.engine.model_name
        return self

    # ---- a call ----

    def start_call(
        self,
        stop: list[str] | None,
        options: Mapping[str, Any],
        *,
        streaming: bool = False,
        constraint: dict[str, Any] | None = None,
    ) -> Call:
        """Check the options of a call and find its engine, which starts now if it did not yet.

        Raises `ValueError` for unknown options, naming the nearest one, and for values out of range.
        `constraint`: arguments of vLLM's `StructuredOutputsParams`.
        """
        reject_unknown(options, CALL_OPTIONS, f"a call of {type(self).__name__}")
        documents = document_contents(options.get("documents"))
        overrides = {name: options[name] for name in PER_CALL_OPTIONS if options.get(name) is not None}
        model = options.get("model") or self.model
        engine = self.get_engine(model)
        params = self._sampling(stop, options, constraint)
        if streaming and params.n > 1:
            raise ValueError(f"n={params.n}: a stream has one answer; use invoke or generate for several")
        return Call(engine, model, params, documents, overrides, prompt_format(engine))

    async def astart_call(
        self, stop: list[str] | None, options: Mapping[str, Any], *, streaming: bool = False
    ) -> Call:
        """`start_call` in a thread, because the engine may have to start."""
        return await asyncio.to_thread(self.start_call, stop, options, streaming=streaming)

    def get_engine(self, model: str | None = None) -> DaricEngine:
        """The engine of this object, or the shared one that serves another `model` with the same options."""
        if self.engine is None:
            return get_engine(model or self.model, self.config, self.engine_args)
        if model not in (None, self.model):
            raise ValueError(f"model={model!r}: the engine given serves {self.model!r} only")
        attach_engine(self.engine)
        engine: DaricEngine = self.engine
        return engine

    def _sampling(
        self, stop: list[str] | None, options: Mapping[str, Any], constraint: dict[str, Any] | None
    ) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: options[name] for name in (*_SAMPLING_FIELDS, *_MORE_SAMPLING) if name in options}
        values |= {name: value for name, value in given.items() if value is not None}
        structured = StructuredOutputsParams(**constraint) if constraint else None
        effective_stop = self.stop if stop is None else stop
        return SamplingParams(stop=effective_stop, structured_outputs=structured, **values)

    # ---- identity ----

    def identity(self) -> dict[str, Any]:
        """Everything that the text of an answer depends on, for caches and traces."""
        config = self.engine.config if self.engine is not None else self.config or DaricConfig()
        return {
            "model": self.model,
            "revision": self.engine_args.get("revision"),
            **{name: getattr(self, name) for name in (*_SAMPLING_FIELDS, "stop")},
            "config": config.model_dump(),
            "engine_args": {name: repr(value) for name, value in sorted(self.engine_args.items())},
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer, no special tokens added."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        if self._token_counter is None:
            # A tokenizer is not safe for several threads, and the engine uses its own in its thread.
            self._token_counter = copy.deepcopy(self.get_engine().tokenizer)
        return list(self._token_counter(text, add_special_tokens=False)["input_ids"])


def prompt_format(engine: DaricEngine) -> PromptFormat:
    """How prompts for an engine are written."""
    template = getattr(engine.tokenizer, "chat_template", None)
    recognizer = engine.recognizer
    return PromptFormat(
        delimiter=engine.config.delimiter,
        template_has_tools="tools" in str(template),
        find=recognizer.find if recognizer is not None else None,
    )
