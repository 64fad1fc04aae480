"""A plain LlamaIndex query engine on `DaricLLM`: the second question reuses the documents of the first.

    pip install "daric-rag[cpu,llamaindex,retrieval]"
    python examples/llama_index_query_engine.py

Nothing but `Settings.llm` is special here. Both questions retrieve the same notes in another order; what the
first one computed for them is loaded for the second.
"""

from typing import Any

from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index_instrumentation import get_dispatcher

from daric_rag.integrations.llama_index import DaricLLM
from daric_rag.retrieval import SentenceTransformerEmbedder

NOTES = {
    "mill.txt": "The water mill of Varn was built in 1788 by the brothers Tomas and Jakob Held. Its wheel is six "
    "metres high. The mill grinds rye on weekdays and oats on Saturdays, and the miller today is Anna Held.",
    "bridge.txt": "The stone bridge of Varn has five arches and crosses the river Ilm below the mill. It was "
    "closed for two years after the flood of 1954. Lorries of more than nine tonnes must use the ford.",
    "market.txt": "The market of Varn is held on Thursdays from seven to noon on the square behind the church. "
    "Forty stalls sell vegetables, cheese and baskets. In winter the market moves into the old tram hall.",
    "school.txt": "The school of Varn has ninety pupils and five teachers. Lessons begin at eight, and on Fridays "
    "the older children sail on the lake. The headmaster, Emil Sand, teaches geography and the violin.",
}
QUESTIONS = ["Who built the water mill of Varn?", "On which day is the market of Varn held?"]


class MiniLM(BaseEmbedding):
    """The embedded sentence-transformers model as a LlamaIndex embedding."""

    embedder: Any

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [vector.tolist() for vector in self.embedder.encode_documents(texts)]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self.embedder.encode_query(query).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class LastCall(BaseEventHandler):
    """Keeps the metrics of the last model call, which a query engine does not hand on."""

    metrics: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it for every object

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.metrics = event.response.raw["daric"]


def main() -> None:
    Settings.llm = DaricLLM(max_tokens=48)
    Settings.embed_model = MiniLM(embedder=SentenceTransformerEmbedder())
    last_call = LastCall()
    get_dispatcher().add_event_handler(last_call)

    documents = [Document(text=text, metadata={"file": name}) for name, text in NOTES.items()]
    query_engine = VectorStoreIndex.from_documents(documents).as_query_engine(similarity_top_k=len(NOTES))
    for question in QUESTIONS:
        response = query_engine.query(question)
        metrics = last_call.metrics
        reused = metrics["loaded_tokens"] + metrics["engine_hit_tokens"]
        print(f"Question: {question}")
        print(f"Answer:   {str(response).strip()}")
        print(f"Sources:  {', '.join(node.metadata['file'] for node in response.source_nodes)}")
        print(f"Reused:   {reused} of {metrics['prompt_tokens']} prompt tokens")
        print(f"TTFT:     {metrics['ttft_s'] * 1000:.0f} ms\n")


if __name__ == "__main__":  # vLLM starts processes, which import this file again
    main()
