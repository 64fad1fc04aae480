"""What the LlamaIndex tests with and without an engine share."""

import re
import zlib

from llama_index.core.base.embeddings.base import BaseEmbedding


class WordEmbedding(BaseEmbedding):
    """Counts of hashed words: enough to rank a few texts, and the same on every machine."""

    def _get_text_embedding(self, text):
        vector = [0.0] * 256
        for word in re.findall(r"[a-z]{4,}", text.lower()):
            vector[zlib.crc32(word.encode()) % 256] += 1.0
        return vector

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)
