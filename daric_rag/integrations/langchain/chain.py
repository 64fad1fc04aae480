"""A retrieval chain that hands documents over as documents, and a callback for chains of other making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from daric_rag.integrations.langchain.model import DaricModel
from daric_rag.known_documents import register_documents

DEFAULT_SYSTEM_PROMPT = (
    "Answer the user's question with the help of the documents. If they do not hold the answer, say so."
)


def create_daric_rag_chain(
    llm: Runnable[Any, Any],
    retriever: Runnable[Any, Any],
    *,
    system_prompt: str = DEFAULT_SYSTEM_PROMPT,
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """A chain that retrieves documents, puts each into the prompt as a chunk of its own, and answers.

    In: {"input": question} and optionally "chat_history"; out: these, "context" (the documents) and "answer" (text),
    as `create_retrieval_chain` has them; it streams, batches and awaits like any runnable. `retriever`: takes the
    question if it is a `BaseRetriever`, else the whole input. `llm`: a `ChatDaric` or `DaricLLM`, or one with options
    bound. Raises `ValueError` for another language model, which could not tell documents from text.

        chain = create_daric_rag_chain(ChatDaric(), retriever)
        chain.invoke({"input": "Where is Paris?"})["answer"]
    """
    if isinstance(llm, BaseLanguageModel) and not isinstance(llm, DaricModel):
        raise ValueError(f"llm: ChatDaric or DaricLLM is expected, not {type(llm).__name__}")
    retrieve: Runnable[Any, Any] = retriever
    if isinstance(retriever, BaseRetriever):
        retrieve = RunnableLambda(_question) | retriever

    def prompt(inputs: dict[str, Any]) -> ChatPromptValue:
        return ChatPromptValue(messages=_messages(system_prompt, inputs))

    answer = RunnableLambda(prompt) | llm | StrOutputParser()
    chain = RunnablePassthrough.assign(context=retrieve.with_config(run_name="retrieve_documents"))
    return chain.assign(answer=answer).with_config(run_name="daric_rag_chain")


class DaricCallbackHandler(BaseCallbackHandler):
    """Lets the engines of this process recognise what any retriever returns, for chains that stay as they are.

    chain.invoke({"input": question}, config={"callbacks": [DaricCallbackHandler()]})
    """

    # The documents have to be known before the prompt is answered, so not in a thread beside it.
    run_inline = True

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Register the texts of retrieved documents."""
        register_documents([document.page_content for document in documents])


def _question(inputs: dict[str, Any]) -> str:
    return str(inputs["input"])


def _messages(system_prompt: str, inputs: dict[str, Any]) -> list[BaseMessage]:
    documents: list[str | dict[Any, Any]] = [
        {"type": "text", "text": document.page_content, "daric": "document"} for document in inputs["context"]
    ]
    system = [SystemMessage(system_prompt)] if system_prompt else []
    history = convert_to_messages(inputs.get("chat_history") or [])
    question = HumanMessage(content=[*documents, {"type": "text", "text": _question(inputs)}])
    return [*system, *history, question]
