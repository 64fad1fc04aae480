"""LangChain on the embedded model: an unmodified retrieval chain, then an agent with a retrieval tool.

    pip install "daric-rag[cpu,langchain,retrieval]"
    python examples/langchain_chain.py

The chain is the usual one; only its model and its vector store are ours. Its questions retrieve the same notes in
another order, and so does the agent's search: what the first question computed for them is loaded from then on.
"""

from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.tools import tool
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate

from daric_rag.integrations.langchain import ChatDaric
from daric_rag.integrations.langchain_store import DaricVectorStore

NOTES = {
    "observatory.txt": "The observatory of Hallum stands on the Kestrel hill, 640 metres above the sea. Its telescope, "
    "called Big Ida, has a mirror of two metres and was paid for by a maker of sewing machines in 1931. Visitors may "
    "look through it on the first Friday of every month, if the sky is clear.",
    "ferry.txt": "The ferry from Hallum to the island of Brae sails four times a day, the first time at half past six. "
    "The crossing takes thirty-five minutes. A ticket costs nine crowns, bicycles travel free, and in storms the "
    "captain, Ruth Olsen, decides whether the boat leaves.",
    "museum.txt": "The museum of Hallum shows two hundred clocks, the oldest of which was made in 1540. Every day at "
    "noon its keeper, Martin Vey, winds the tower clock with a crank that weighs eleven kilograms. The museum is "
    "closed on Tuesdays.",
    "bakery.txt": "The bakery in Harbour Street sells a loaf with caraway and dried plums, known as the sailor's loaf. "
    "It keeps for three weeks. The bakery opens at five in the morning and has belonged to the Lindqvist family "
    "since 1874.",
}
QUESTIONS = [
    "Which telescope does the observatory of Hallum have?",
    "What does a ticket for the ferry to Brae cost?",
]


class LastMetrics(BaseCallbackHandler):
    """Keeps the reuse metrics of the last model call, which a chain does not hand on."""

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        message: Any = response.generations[0][0]
        self.metrics = message.message.response_metadata["daric"]


@wrap_model_call
def search_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Force the first step to be a search: a model of 135M parameters would not decide for it."""
    is_first_step = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="search_notes" if is_first_step else None))


def report(question: str, answer: str, sources: list[str], metrics: dict[str, Any]) -> None:
    """Print an answer, where it comes from, and how much of its prompt was there already."""
    reused = metrics["loaded_tokens"] + metrics["engine_hit_tokens"]
    print(f"Question: {question}")
    print(f"Answer:   {answer.strip()}")
    print(f"Sources:  {', '.join(sources)}")
    print(f"Reused:   {reused} of {metrics['prompt_tokens']} prompt tokens")
    print(f"TTFT:     {metrics['ttft_s'] * 1000:.0f} ms\n")


def ask_chain(chat: ChatDaric, store: DaricVectorStore) -> None:
    """Put the questions to a retrieval chain."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from these notes:\n\n{context}"), ("human", "{input}")]
    )
    retriever = store.as_retriever(search_kwargs={"k": len(NOTES)})
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, prompt))
    for question in QUESTIONS:
        last = LastMetrics()
        output = chain.invoke({"input": question}, config={"callbacks": [last]})
        sources = [document.metadata["file"] for document in output["context"]]
        report(question, output["answer"], sources, last.metrics)


def ask_agent(chat: ChatDaric, store: DaricVectorStore) -> None:
    """Put a question to an agent, which searches and then answers."""

    @tool(response_format="content_and_artifact")
    def search_notes(query: str) -> tuple[str, list[Document]]:
        """Search the notes about the town of Hallum."""
        found = store.similarity_search(query, k=len(NOTES))
        return "\n\n".join(document.page_content for document in found), found

    agent = create_agent(chat, [search_notes], middleware=[search_first])
    question = "On which day is the museum of Hallum closed?"
    messages = agent.invoke({"messages": [HumanMessage(question)]})["messages"]
    answer = messages[-1]
    assert isinstance(answer, AIMessage)
    sources = [
        document.metadata["file"]
        for message in messages
        for document in getattr(message, "artifact", None) or []
    ]
    report(question, answer.text, sources, answer.response_metadata["daric"])


def main() -> None:
    chat = ChatDaric(model="smollm2-135m", max_tokens=48)
    store = DaricVectorStore()
    store.add_documents([Document(text, metadata={"file": name}) for name, text in NOTES.items()])
    print("A retrieval chain\n")
    ask_chain(chat, store)
    print("An agent\n")
    ask_agent(chat, store)


if __name__ == "__main__":  # vLLM starts processes, which import this file again
    main()
