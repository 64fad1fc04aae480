"""The LangChain classes over an engine that answers from a script: options, keys, callbacks, cancellation."""

import asyncio
import subprocess
import sys
import warnings
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document as LangChainDocument
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatResult, LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from daric_rag.config import DaricConfig
from daric_rag.integrations.langchain import (
    ChatDaric,
    DaricCallbackHandler,
    DaricLLM,
    create_daric_rag_chain,
)
from daric_rag.known_documents import attach_engine
from daric_rag.prompt import ChatPrompt, ChunkedPrompt, Document
from tests.langchain_support import ScriptedEngine

pytestmark = pytest.mark.integration

BOTH = pytest.mark.parametrize("kind", [ChatDaric, DaricLLM])
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Recorder(BaseCallbackHandler):
    """Notes what the callbacks are told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[LLMResult] = []
        self.metadata: list[dict[str, Any]] = []

    def on_llm_start(self, serialized: Any, prompts: Any, *, metadata: Any = None, **kwargs: Any) -> None:
        self.metadata.append(metadata)

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, metadata: Any = None, **kwargs: Any
    ) -> None:
        self.metadata.append(metadata)

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends.append(response)


# ---- options ----


@BOTH
def test_misspelt_options_are_refused_with_the_nearest_name(kind: type) -> None:
    with pytest.raises(
        ValueError, match=rf"unknown option 'temprature' for {kind.__name__}: did you mean 'temperature'"
    ):
        kind(temprature=1)
    engine = ScriptedEngine()
    with pytest.raises(ValueError, match=r"unknown option 'max_token' .* did you mean 'max_tokens'"):
        kind(engine=engine).invoke("q", max_token=1)
    with pytest.raises(ValueError, match="selection='daricc': allowed are daric, epic, none, all"):
        DaricConfig(selection="daricc")
    assert engine.calls == 0


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("n", 0), ("logprobs", -1)],
)
def test_values_out_of_range_are_refused(kind: type, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        kind(**{field: value})


@BOTH
def test_an_engine_is_the_only_source_of_its_settings(kind: type) -> None:
    engine = ScriptedEngine()
    assert kind(engine=engine).model == "scripted"
    assert kind(engine=engine, model="scripted").model == "scripted"
    with pytest.raises(ValueError, match="model='other': the engine given serves 'scripted'"):
        kind(engine=engine, model="other")
    with pytest.raises(ValueError, match="config: an engine is given"):
        kind(engine=engine, config=DaricConfig())
    with pytest.raises(ValueError, match="engine_args: an engine is given"):
        kind(engine=engine, engine_args={"seed": 1})
    with pytest.raises(ValueError, match="engine: a DaricEngine is expected, not str"):
        kind(engine="smollm2-135m")
    with pytest.raises(ValueError, match="serves 'scripted' only"):
        kind(engine=engine).invoke("q", model="other")


@BOTH
def test_a_call_overrides_the_fields(kind: type) -> None:
    engine = ScriptedEngine()
    model = kind(engine=engine, max_tokens=10, temperature=0.5, top_p=0.9, seed=1, stop=["a"], logprobs=2)
    model.invoke("q")
    model.invoke("q", stop=["b"], max_tokens=5, temperature=0.7, seed=2, top_k=3, n_avg=8, reuse=False)
    model.invoke("q", stop=[], max_tokens=None)
    first, second, third = engine.params
    assert (first.max_tokens, first.temperature, first.top_p, first.seed) == (10, 0.5, 0.9, 1)
    assert (first.stop, first.logprobs, first.n) == (["a"], 2, 1)
    assert (second.stop, second.max_tokens, second.temperature, second.seed) == (["b"], 5, 0.7, 2)
    assert second.top_k == 3
    assert (third.stop, third.max_tokens) == ([], 10)
    assert engine.options == [{}, {"n_avg": 8, "reuse": False}, {}]
    assert kind(engine=engine, stop="x").stop == ["x"]


@BOTH
def test_reconfiguration_keeps_the_engine(kind: type) -> None:
    engine = ScriptedEngine()
    model = kind(engine=engine).configurable_fields(max_tokens=ConfigurableField(id="limit"))
    model.with_config(configurable={"limit": 7}).invoke("q")
    assert engine.params[0].max_tokens == 7


# ---- identity ----


@BOTH
def test_cache_keys_differ_whenever_answers_may(kind: type) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model": "other"},
        {"max_tokens": 1},
        {"temperature": 1.0},
        {"top_p": 0.5},
        {"seed": 3},
        {"n": 2},
        {"stop": ["x"]},
        {"logprobs": 1},
        {"engine_args": {"revision": "abc"}},
        {"engine_args": {"dtype": "bfloat16"}},
        {"config": DaricConfig(n_avg=64)},
        {"config": DaricConfig(reuse=False)},
        {"config": DaricConfig(namespace="tenant")},
    ]
    keys = {str(kind(**change).asdict()) for change in changes}
    assert len(keys) == len(changes)
    assert kind().asdict() == kind(config=DaricConfig()).asdict()


@BOTH
def test_a_cache_is_not_fooled_by_options_of_a_call(kind: type) -> None:
    engine = ScriptedEngine()
    cache = InMemoryCache()
    model = kind(engine=engine, cache=cache)
    calls = [
        {},
        {"documents": ["one"]},
        {"documents": ["two"]},
        {"max_tokens": 3},
        {"stop": ["x"]},
        {"reuse": False},
    ]
    for options in calls:
        model.invoke("q", **options)
    assert engine.calls == len(calls)
    for options in calls:
        model.invoke("q", **options)
    assert engine.calls == len(calls)
    kind(engine=engine, cache=cache, max_tokens=9).invoke("q")
    assert engine.calls == len(calls) + 1


async def test_a_cache_is_not_fooled_when_awaited() -> None:
    engine = ScriptedEngine()
    model = DaricLLM(engine=engine, cache=InMemoryCache())
    for options in ({}, {"documents": ["one"]}, {}, {"documents": ["one"]}):
        await model.ainvoke("q", **options)
    assert engine.calls == 2


@BOTH
def test_traces_name_model_and_options(kind: type) -> None:
    recorder = Recorder()
    model = kind(engine=ScriptedEngine(), max_tokens=9, temperature=0.3, stop=["x"])
    model.invoke("q", config={"callbacks": [recorder]})
    metadata = recorder.metadata[0]
    assert metadata["ls_provider"] == "daric"
    assert metadata["ls_model_name"] == "scripted"
    assert (metadata["ls_temperature"], metadata["ls_max_tokens"], metadata["ls_stop"]) == (0.3, 9, ["x"])
    assert model._get_ls_params(stop=["y"], model="m")["ls_model_name"] == "m"


# ---- results ----


def test_chat_results_carry_usage_and_metrics() -> None:
    message = ChatDaric(engine=ScriptedEngine("yes")).invoke("q")
    assert message.content == "yes"
    assert message.usage_metadata == {
        "input_tokens": 100,
        "output_tokens": 3,
        "total_tokens": 103,
        "input_token_details": {"cache_read": 72},
    }
    metadata = message.response_metadata
    assert metadata["daric"]["loaded_tokens"] == 40
    assert metadata["daric"]["recomputed_ranges"] == []
    assert (metadata["model_name"], metadata["finish_reason"]) == ("scripted", "stop")
    assert metadata["token_usage"]["total_tokens"] == 103


def test_several_answers_count_the_prompt_once() -> None:
    chat = ChatDaric(engine=ScriptedEngine(), n=3, temperature=1.0)
    result: ChatResult = chat._generate([HumanMessage("q")])
    usages = [generation.message.usage_metadata for generation in result.generations]  # type: ignore[attr-defined]
    assert [one["input_tokens"] for one in usages] == [100, 0, 0]
    llm = DaricLLM(engine=ScriptedEngine(), n=3, temperature=1.0)
    assert [len(generations) for generations in llm.generate(["a", "b"]).generations] == [3, 3]
    for model in (chat, llm):
        with pytest.raises(ValueError, match="n=3: a stream has one answer"):
            list(model.stream("q"))


def test_a_batch_of_the_llm_is_one_call_of_the_engine() -> None:
    engine = ScriptedEngine()
    recorder = Recorder()
    llm = DaricLLM(engine=engine)
    assert llm.batch(["a", "b", "c"], config={"callbacks": [recorder]}) == ["yes"] * 3
    assert (engine.calls, engine.prompts) == (1, ["a", "b", "c"])
    generation = recorder.ends[0].generations[0][0]
    assert generation.generation_info is not None
    assert generation.generation_info["daric"]["engine_hit_tokens"] == 32
    assert recorder.ends[0].llm_output == {
        "token_usage": {"prompt_tokens": 300, "completion_tokens": 9, "total_tokens": 309},
        "model_name": "scripted",
    }
    assert asyncio.run(llm.abatch(["a", "b"])) == ["yes"] * 2
    assert engine.calls == 2


@BOTH
def test_streams_call_back_and_end_with_the_metrics(kind: type) -> None:
    async def collect(model: Any, recorder: Recorder) -> list[Any]:
        return [chunk async for chunk in model.astream("q", config={"callbacks": [recorder]})]

    model = kind(engine=ScriptedEngine("hello"))
    for chunks, recorder in (
        ((lambda r: list(model.stream("q", config={"callbacks": [r]})))(first := Recorder()), first),
        (asyncio.run(collect(model, second := Recorder())), second),
    ):
        texts = [getattr(chunk, "content", chunk) for chunk in chunks]
        assert "".join(texts) == "".join(recorder.tokens) == "hello"
        assert len([text for text in texts if text]) == 5
        (generation,) = recorder.ends[0].generations[0]
        info = {**(generation.generation_info or {})}
        if kind is ChatDaric:
            message = generation.message  # type: ignore[attr-defined]
            info = message.response_metadata
            assert message.usage_metadata["input_token_details"]["cache_read"] == 72
        assert info["daric"]["prompt_tokens"] == 100
        assert info["model_name"] == "scripted"


# ---- cancellation ----


@BOTH
async def test_cancelling_aborts_in_the_engine(kind: type) -> None:
    engine = ScriptedEngine()
    engine.hang = True
    task = asyncio.create_task(kind(engine=engine).ainvoke("q"))
    await asyncio.sleep(0.3)
    assert not engine.aborted.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted.is_set()


@BOTH
async def test_leaving_a_stream_aborts_in_the_engine(kind: type) -> None:
    engine = ScriptedEngine("hello")
    model = kind(engine=engine)
    stream = model.stream("q")
    next(stream)
    stream.close()
    assert engine.aborted.is_set()
    engine.aborted.clear()
    astream = model.astream("q")
    await anext(astream)
    await astream.aclose()
    assert engine.aborted.is_set()


# ---- prompts ----


def test_routes_to_the_chat_model() -> None:
    engine = ScriptedEngine()
    chat = ChatDaric(engine=engine)
    chat.invoke("q", documents=["d"])
    chat.bind(documents=[LangChainDocument("d")]).invoke("q")
    chat.invoke([HumanMessage([{"type": "text", "text": "d"}, {"type": "text", "text": "q"}])])
    delimiter = engine.config.delimiter
    chat.invoke(f"{delimiter}d{delimiter}q")
    for prompt in engine.prompts:
        assert isinstance(prompt, ChatPrompt)
        assert list(prompt.messages[0].content) == [Document("d"), "q"]


def test_routes_to_the_llm() -> None:
    engine = ScriptedEngine()
    llm = DaricLLM(engine=engine)
    llm.invoke("q", documents=["d"])
    list(llm.stream("q", documents=["d"]))
    delimiter = engine.config.delimiter
    llm.invoke(f"{delimiter}d{delimiter}q")
    assert engine.prompts == [ChunkedPrompt("", ["d"], "q")] * 3
    assert (PromptTemplate.from_template("Say {x}") | llm).invoke({"x": "hi"}) == "yes"
    assert engine.prompts[-1] == "Say hi"


def test_messages_to_the_llm_keep_roles_and_blocks() -> None:
    engine = ScriptedEngine()
    llm = DaricLLM(engine=engine)
    chain = ChatPromptTemplate.from_messages([("system", "s"), ("human", "{x}")]) | llm
    chain.invoke({"x": "q"})
    list(chain.stream({"x": "q"}))
    chain.batch([{"x": "q"}])
    asyncio.run(chain.ainvoke({"x": "q"}))
    llm.invoke(
        [SystemMessage("s"), HumanMessage([{"type": "text", "text": "d"}, {"type": "text", "text": "q"}])]
    )
    for prompt in engine.prompts:
        assert [message.role for message in prompt.messages] == ["system", "user"]
    assert list(engine.prompts[-1].messages[1].content) == [Document("d"), "q"]
    engine.has_chat_template = False
    chain.invoke({"x": "q"})
    assert engine.prompts[-1] == "System: s\nHuman: q"


def test_images_are_refused_before_the_engine_is_asked() -> None:
    engine = ScriptedEngine()
    image = HumanMessage(
        [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    )
    with pytest.raises(ValueError, match=r"message 1 \(human\), content block 2: type 'image_url'"):
        ChatDaric(engine=engine).invoke([image])
    assert engine.calls == 0


# ---- tools and structured output ----


def test_a_forced_call_is_constrained_and_parsed() -> None:
    engine = ScriptedEngine(CALL)
    bound = ChatDaric(engine=engine).bind_tools([add], tool_choice="any")
    message = bound.invoke("q")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert message.content == ""
    constraint = engine.params[0].structured_outputs.json
    assert constraint["properties"]["name"] == {"const": "add"}
    full = None
    for chunk in bound.stream("q"):
        full = chunk if full is None else full + chunk
    assert isinstance(full, AIMessage)
    assert (full.content, full.tool_calls[0]["args"]) == ("", {"a": 1, "b": 2})


def test_a_free_call_is_parsed_and_not_constrained() -> None:
    engine = ScriptedEngine(f"I add. <tool_call>{CALL}</tool_call>")
    bound = ChatDaric(engine=engine).bind_tools([add])
    message = bound.invoke("q")
    assert (message.content, len(message.tool_calls)) == ("I add.", 1)
    assert engine.params[0].structured_outputs is None
    chunks = list(bound.stream("q"))
    assert "".join(str(chunk.content) for chunk in chunks).strip() == "I add."
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks) == 1  # type: ignore[attr-defined]
    broken = ChatDaric(engine=ScriptedEngine("<tool_call>{oops</tool_call>")).bind_tools([add])
    assert broken.invoke("q").invalid_tool_calls[0]["args"] == "{oops"


def test_tools_reach_the_prompt() -> None:
    plain, native = ScriptedEngine(), ScriptedEngine(chat_template="{% if tools %}…")
    ChatDaric(engine=plain).bind_tools([add]).invoke("q")
    ChatDaric(engine=native).bind_tools([add]).invoke("q")
    ChatDaric(engine=native).bind_tools([add], tool_choice="none").invoke("q")
    assert plain.prompts[0].tools is None
    assert "Add two numbers." in str(plain.prompts[0].messages[0].content)
    assert native.prompts[0].tools[0]["function"]["name"] == "add"
    assert native.prompts[1].tools is None
    with pytest.raises(ValueError, match="tool_choice='sub'"):
        ChatDaric(engine=plain).bind_tools([add], tool_choice="sub")


def test_structured_output() -> None:
    schema = {"title": "Sum", "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine = ScriptedEngine('{"a": 1}')
    chat = ChatDaric(engine=engine)
    assert chat.with_structured_output(schema).invoke("q") == {"a": 1}
    assert engine.params[0].structured_outputs.json["properties"] == schema["properties"]
    assert chat.with_structured_output(schema, method="json_mode").invoke("q") == {"a": 1}
    assert engine.params[1].structured_outputs.json_object is True
    raw: Any = chat.with_structured_output(schema, include_raw=True).invoke("q")
    assert (raw["raw"].content, raw["parsed"], raw["parsing_error"]) == ('{"a": 1}', {"a": 1}, None)
    bad: Any = (
        ChatDaric(engine=ScriptedEngine("no")).with_structured_output(schema, include_raw=True).invoke("q")
    )
    assert bad["parsed"] is None
    assert bad["parsing_error"] is not None
    with pytest.raises(ValueError, match="method='json': allowed are"):
        chat.with_structured_output(schema, method="json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="response_format="):
        chat.invoke("q", response_format={"type": "xml"})
    with pytest.raises(ValueError, match="together with a tool_choice"):
        chat.bind_tools([add], tool_choice="any").invoke("q", response_format={"type": "json_object"})


# ---- the chain and the callback ----


@BOTH
def test_chain(kind: type) -> None:
    engine = ScriptedEngine()
    documents = [LangChainDocument("d1 {braces}"), LangChainDocument("d2")]
    chain = create_daric_rag_chain(
        kind(engine=engine), RunnableLambda(lambda inputs: documents), system_prompt="s"
    )
    output = chain.invoke({"input": "q", "chat_history": [("human", "before"), ("ai", "well")]})
    assert (output["input"], output["context"], output["answer"]) == ("q", documents, "yes")
    system, before, well, question = engine.prompts[0].messages
    assert (list(system.content), list(before.content), list(well.content)) == (["s"], ["before"], ["well"])
    assert list(question.content) == [Document("d1 {braces}"), Document("d2"), "q"]
    assert [list(one) for one in chain.stream({"input": "q"})][-1] == ["answer"]


def test_chain_without_documents_or_with_a_foreign_model() -> None:
    engine = ScriptedEngine()
    chain = create_daric_rag_chain(ChatDaric(engine=engine), RunnableLambda(lambda inputs: []))
    assert chain.invoke({"input": "q"})["answer"] == "yes"
    assert list(engine.prompts[0].messages[1].content) == ["q"]
    with pytest.raises(ValueError, match="not FakeListChatModel"):
        create_daric_rag_chain(FakeListChatModel(responses=["a"]), RunnableLambda(lambda inputs: []))


def test_callback_makes_retrieved_texts_known() -> None:
    class Listener:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def register(self, texts: Any) -> None:
            self.texts += texts

    listener = Listener()
    attach_engine(listener)
    DaricCallbackHandler().on_retriever_end([LangChainDocument("seen by a callback")])
    assert listener.texts[-1] == "seen by a callback"


# ---- the package ----


def test_no_warnings_and_no_engine_at_construction() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            ChatDaric(model="no-such-model")
            DaricLLM(model="no-such-model")


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        (
            ("faiss", "llama_index", "sentence_transformers", "langchain_classic", "langchain", "vllm"),
            "imported",
        ),
        (("langchain_core",), 'pip install "daric-rag[langchain]"'),
    ],
)
def test_import_needs_only_its_own_extra(hidden: tuple[str, ...], expected: str) -> None:
    program = f"""
import sys
for name in {hidden!r}:
    sys.modules[name] = None
try:
    import daric_rag.integrations.langchain
    print("imported")
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert expected in done.stdout
