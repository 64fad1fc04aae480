"""Retrieved nodes become known documents; options and results of a call without an engine."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_instrumentation import get_dispatcher

from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import StreamChunk
from daric_rag.integrations.llama_index import DaricLLM
from daric_rag.integrations.llama_index import events as llama_index_events
from daric_rag.integrations.llama_index.calls import Accumulator, call_options, chat_response
from daric_rag.integrations.llama_index.events import node_texts, watch_retrieval

NODES = [
    NodeWithScore(node=TextNode(text="The ferry leaves at six.", metadata={"file": "ferry.txt"}), score=1.0),
    NodeWithScore(node=TextNode(text="The bakery opens at three."), score=0.5),
]
METRICS = RequestMetrics(64, 3, 32, 16, 0, 16, 16, ttft_s=0.1, completion_tokens=2, reused=True)


class FixedRetriever(BaseRetriever):
    def _retrieve(self, query_bundle):
        return NODES


@pytest.fixture
def registered(monkeypatch):
    texts = []
    monkeypatch.setattr(llama_index_events, "register_documents", texts.extend)
    yield texts
    watch_retrieval(False)


def test_node_texts_are_the_form_of_synthesizers_and_the_bare_text():
    assert node_texts(NODES) == [
        "file: ferry.txt\n\nThe ferry leaves at six.",
        "The ferry leaves at six.",
        "The bakery opens at three.",
    ]


def test_every_retriever_is_heard(registered):
    watch_retrieval()
    FixedRetriever().retrieve("when?")
    assert registered == node_texts(NODES)


async def test_asynchronous_retrieval_is_heard(registered):
    watch_retrieval()
    await FixedRetriever().aretrieve("when?")
    assert registered == node_texts(NODES)


def test_watching_twice_registers_once_and_can_be_ended(registered):
    watch_retrieval()
    watch_retrieval()
    FixedRetriever().retrieve("when?")
    assert len(registered) == 3
    watch_retrieval(False)
    FixedRetriever().retrieve("when?")
    assert len(registered) == 3


def test_a_model_watches_unless_told_not_to(registered):
    before = len(get_dispatcher().event_handlers)
    DaricLLM(recognise_retrieved=False)
    assert len(get_dispatcher().event_handlers) == before
    DaricLLM()
    DaricLLM()
    assert len(get_dispatcher().event_handlers) == before + 1


@pytest.mark.parametrize(
    "options", [{"max_token": 3}, {"temprature": 0}, {"n_average": 8}, {"documnets": []}]
)
def test_a_misspelt_option_of_a_call_is_refused_with_a_hint(options):
    with pytest.raises(ValueError, match=r"unknown option '.*' for a call of DaricLLM: did you mean"):
        call_options({}, options)


def test_one_text_as_documents_is_refused():
    with pytest.raises(ValueError, match="documents: a sequence of documents is expected"):
        call_options({}, {"documents": "a text"})


def test_a_misspelt_field_is_refused_with_a_hint():
    with pytest.raises(
        ValueError, match="unknown option 'temprature' for DaricLLM: did you mean 'temperature'"
    ):
        DaricLLM(temprature=0.5)


@pytest.mark.parametrize("field", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_values_outside_their_range_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        DaricLLM(**field)


def test_fields_survive_serialisation_and_the_engine_is_left_out():
    llm = DaricLLM(
        engine=SimpleNamespace(), stop="x", seed=3, max_tokens=7, engine_args={"max_model_len": 512}
    )
    data = llm.to_dict()
    assert "engine" not in data and data["class_name"] == "DaricLLM"
    again = DaricLLM.from_dict(data)
    assert (again.stop, again.seed, again.max_tokens) == (["x"], 3, 7)
    assert again.engine_args == {"max_model_len": 512}


def test_the_payload_of_events_needs_no_engine():
    assert DaricLLM(model="no-such-model").to_payload()["model_name"] == "no-such-model"


def test_a_stream_accumulates_text_and_ends_with_usage():
    chunks = [
        StreamChunk("r", 0, "", (1,)),
        StreamChunk("r", 0, "Hello", (2,)),
        StreamChunk("r", 0, "", (3,), finish_reason="stop", metrics=METRICS),
    ]
    accumulated = Accumulator()
    answers = [answer for chunk in chunks if (answer := accumulated.add(chunk)) is not None]
    assert [(answer.text, answer.delta) for answer in answers] == [("Hello", "Hello"), ("Hello", "")]
    raw = chat_response(answers[-1]).raw
    assert raw["usage"] == {
        "prompt_tokens": 64,
        "completion_tokens": 2,
        "total_tokens": 66,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    assert raw["daric"] == METRICS.to_dict()
    assert raw["finish_reason"] == "stop"


def test_a_missing_extra_names_the_line_to_install_it():
    code = (
        "import sys; sys.modules['llama_index'] = None\n"
        "from daric_rag.errors import MissingExtraError\n"
        "try:\n    import daric_rag.integrations.llama_index\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "daric-rag[llamaindex]"' in done.stdout


def test_the_module_needs_no_other_extra():
    code = (
        "import sys\n"
        "for name in ('langchain', 'langchain_core', 'faiss', 'sentence_transformers', 'redis', 'vllm'):\n"
        "    sys.modules[name] = None\n"
        "import daric_rag.integrations.llama_index as module; print(module.DaricLLM.class_name())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DaricLLM"
