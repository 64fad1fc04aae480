"""What synthesizers, query and chat engines of LlamaIndex make of documents, up to the engine's chunk layout."""

from types import SimpleNamespace

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from daric_rag import known_documents
from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import InputProcessor
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import Completion, GenerationResult, StreamChunk
from daric_rag.integrations.llama_index import DaricLLM, DaricPromptHelper, watch_retrieval
from daric_rag.integrations.llama_index import calls as llama_index_calls
from daric_rag.recognition import Recognizer, split_by_matches
from tests.character_tokenizer import CharacterTokenizer
from tests.llama_index_support import WordEmbedding

DOCUMENTS = [
    "The ferry leaves the harbour at six in the morning and needs fifty minutes for the crossing.",
    "The bakery lights its oven at three, and the dark bread with rye and seaweed is sold out at noon.",
    "The clinic has four beds and one doctor, who visits her patients on a bicycle in the afternoon.",
]
QUESTIONS = ["When does the ferry leave the harbour?", "Which dark bread has the bakery?"]
METRICS = RequestMetrics(1, 0, 0, 0, 0, 1, 1, ttft_s=0.1)


class LayoutEngine:
    """Lays prompts out as `DaricEngine` does, and answers all of them alike."""

    def __init__(self):
        self.config = DaricConfig()
        self.recognizer = Recognizer()
        self.max_model_len = 100_000
        self.model_name = "layout"
        self.processor = InputProcessor(CharacterTokenizer(), 32, self.max_model_len, 0x110000, "\n")
        self.layouts = []

    def register(self, texts):
        self.recognizer.register(texts)

    def generate(self, prompt, params, **options):
        self._lay_out(prompt)
        return GenerationResult("r", (Completion(0, "An answer.", (1,), "stop"),), METRICS)

    async def agenerate(self, prompt, params, **options):
        return self.generate(prompt, params, **options)

    def stream(self, prompt, params, **options):
        self._lay_out(prompt)
        yield StreamChunk("r", 0, "An answer.", (1,), "stop", metrics=METRICS)

    def _lay_out(self, prompt):
        def split(text):
            return split_by_matches(text, self.recognizer.find(text))

        self.layouts.append(self.processor.process(prompt, self.config, split))

    def documents(self):
        """The document chunks of all prompts so far."""
        texts = [
            "".join(map(chr, layout.token_ids[start:end])).rstrip("\n")
            for layout in self.layouts
            for start, end in layout.documents
        ]
        self.layouts.clear()
        return texts


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(llama_index_calls, "_sampling_params", lambda *_: SimpleNamespace())
    monkeypatch.setattr(known_documents, "_KNOWN", known_documents.KnownDocuments())
    yield LayoutEngine()
    watch_retrieval(False)


@pytest.fixture
def llm(engine):
    return DaricLLM(engine=engine)


@pytest.fixture
def index(llm):
    before = Settings._llm, Settings._embed_model, Settings._prompt_helper
    Settings.llm, Settings.embed_model = llm, WordEmbedding()
    yield VectorStoreIndex([TextNode(text=text, metadata={"file": "osten.txt"}) for text in DOCUMENTS])
    Settings._llm, Settings._embed_model, Settings._prompt_helper = before


def nodes(texts):
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]


MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
]


@pytest.mark.parametrize("mode", [*MODES, ResponseMode.SIMPLE_SUMMARIZE], ids=lambda mode: mode.value)
def test_known_documents_are_chunks_in_every_synthesizer(llm, engine, mode):
    engine.register(DOCUMENTS)
    get_response_synthesizer(llm=llm, response_mode=mode).synthesize("Why?", nodes(DOCUMENTS))
    assert engine.documents() == DOCUMENTS


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_our_prompt_helper_makes_chunks_in_every_synthesizer(llm, engine, mode):
    helper = DaricPromptHelper.from_llm_metadata(llm.metadata)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper)
    synthesizer.synthesize("Why?", nodes(DOCUMENTS[::-1]))
    assert engine.documents() == DOCUMENTS[::-1]


def test_an_unmodified_query_engine_has_its_nodes_as_chunks(index, engine):
    for question in QUESTIONS:
        response = index.as_query_engine(similarity_top_k=3).query(question)
        shown = [f"file: osten.txt\n\n{item.node.text}" for item in response.source_nodes]
        assert engine.documents() == shown and len(shown) == 3


async def test_an_unmodified_query_engine_asynchronously_and_streaming(index, engine):
    await index.as_query_engine(similarity_top_k=3).aquery(QUESTIONS[0])
    assert len(engine.documents()) == 3
    streaming = index.as_query_engine(similarity_top_k=3, streaming=True).query(QUESTIONS[0])
    assert "".join(streaming.response_gen) == "An answer."
    assert len(engine.documents()) == 3


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_chat_engines_have_their_nodes_as_chunks(index, engine, mode):
    chat_engine = index.as_chat_engine(chat_mode=mode, similarity_top_k=3)
    for question in QUESTIONS:
        assert chat_engine.chat(question).response == "An answer."
        assert len(engine.documents()) == 3


def test_recognition_of_retrieved_nodes_can_be_switched_off(index, engine):
    watch_retrieval(False)
    llm = DaricLLM(engine=engine, recognise_retrieved=False)
    index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTIONS[0])
    assert engine.documents() == []


def test_documents_beyond_the_window_are_spread_over_prompts(llm, engine):
    metadata = llm.metadata.model_copy(update={"context_window": 800, "num_output": 10})
    helper = DaricPromptHelper.from_llm_metadata(metadata)
    mode = ResponseMode.COMPACT_ACCUMULATE
    get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper).synthesize(
        "Why?", nodes(DOCUMENTS * 2)
    )
    assert len(engine.layouts) > 1
    assert engine.documents() == DOCUMENTS * 2
