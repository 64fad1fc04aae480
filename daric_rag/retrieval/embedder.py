"""Text to vectors: the interface, and sentence-transformers behind it."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daric_rag.one_process import OneProcess
from daric_rag.retrieval.optional import require

Embeddings = NDArray[np.float32]

DEFAULT_EMBEDDER = "all-minilm-l6-v2"

# A tokenizer reads the whole text before it truncates: seconds for a megabyte of which 256 tokens are kept.
# More than this many characters for each kept token is white space or one endless word.
MAX_CHARACTERS_PER_TOKEN = 128


class Embedder(Protocol):
    """What a document store needs of an embedding model; vectors are L2-normalised float32."""

    @property
    def name(self) -> str:
        """Identity of the model: a stored index opens only with an embedder of the same name."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    def encode_documents(self, texts: list[str]) -> Embeddings:
        """Vectors of documents, float32 [len(texts), dim]."""

    def encode_query(self, text: str) -> Embeddings:
        """Vector of a query, float32 [dim]."""


class SentenceTransformerEmbedder(OneProcess):
    """A sentence-transformers model: the embedded default, a directory, or a hub id.

    The model is loaded at first use. Safe to call from several threads (calls are serialised, because the
    tokenizer's truncation state is shared), not in a process forked after the first use. Raises
    `MissingExtraError` if sentence-transformers is missing.

        embedder = SentenceTransformerEmbedder()
        embedder.encode_query("Who was Teutberga?")    # float32 [384]
    """

    kind = "embedder"

    def __init__(
        self, name: str = DEFAULT_EMBEDDER, *, device: str | None = None, batch_size: int = 32
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: must be at least 1")
        self._name = name
        self._device = device
        self._batch_size = batch_size
        self._model: Any = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> int:
        self.check_process()
        with self._lock:
            return int(self._loaded().get_embedding_dimension())

    def encode_documents(self, texts: list[str]) -> Embeddings:
        self.check_process()
        with self._lock:
            model = self._loaded()
            if not texts:  # the library answers with shape [0], not [0, dim]
                return np.empty((0, int(model.get_embedding_dimension())), dtype=np.float32)
            return self._encode(model.encode_document, model, texts)

    def encode_query(self, text: str) -> Embeddings:
        self.check_process()
        with self._lock:
            model = self._loaded()
            query: Embeddings = self._encode(model.encode_query, model, [text])[0]
            return query

    def _encode(self, encode: Any, model: Any, texts: list[str]) -> Embeddings:
        limit = int(model.max_seq_length or 8192) * MAX_CHARACTERS_PER_TOKEN
        vectors = encode(
            [_encodable(text[:limit]) for text in texts],
            batch_size=self._batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        result: Embeddings = np.ascontiguousarray(vectors, dtype=np.float32)
        return result

    def _loaded(self) -> Any:
        if self._model is None:
            library = require("sentence_transformers", "retrieval")
            from daric_rag.models import resolve_embedder

            self._model = library.SentenceTransformer(str(resolve_embedder(self._name)), device=self._device)
        return self._model


def normalised(vectors: Any, count: int, dim: int | None, source: str) -> Embeddings:
    """`vectors` as L2-normalised float32 [count, dim]; a zero vector stays zero.

    `source` names the embedder in the `ValueError` that a wrong shape or a non-finite value raises.
    """
    array = np.array(vectors, dtype=np.float32, order="C")
    if array.ndim != 2 or array.shape[0] != count or (dim is not None and array.shape[1] != dim):
        expected = f"[{count}, {'any' if dim is None else dim}]"
        raise ValueError(f"embeddings of {source} have shape {list(array.shape)}, expected {expected}")
    if not np.isfinite(array).all():
        raise ValueError(f"embeddings of {source} contain NaN or infinity")
    lengths = np.linalg.norm(array, axis=1, keepdims=True)
    np.divide(array, lengths, out=array, where=lengths > 0)
    return array


def batches_by_length(texts: Sequence[str], batch_size: int) -> list[list[int]]:
    """Positions of `texts` in batches of similar length, longest first (so that padding is small)."""
    order = sorted(range(len(texts)), key=lambda position: -len(texts[position]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _encodable(text: str) -> str:
    """Lone surrogates have no UTF-8 form, and the tokenizer refuses them: they become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
