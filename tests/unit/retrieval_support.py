"""An embedder without a model: a text's vector is made of its words."""

import hashlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class WordEmbedder:
    """Texts that share words are similar; the words' directions come from a hash."""

    def __init__(self, name: str = "words", dim: int = 64) -> None:
        self.name = name
        self.dim = dim
        self.encoded: list[str] = []

    def encode_documents(self, texts: list[str]) -> Vectors:
        self.encoded += texts
        return np.array([self._vector(text) for text in texts], dtype=np.float32).reshape(-1, self.dim)

    def encode_query(self, text: str) -> Vectors:
        return self._vector(text)

    def _vector(self, text: str) -> Vectors:
        vector = np.zeros(self.dim, dtype=np.float32)
        for word, count in Counter(text.encode("utf-8", "surrogatepass").split()).items():
            seed = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
            vector += count * np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)
        return vector / max(float(np.linalg.norm(vector)), 1e-12)
