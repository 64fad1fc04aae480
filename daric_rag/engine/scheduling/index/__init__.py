"""The KV cache index: segment keys, the interface, and its two implementations."""

from daric_rag.engine.keys import (
    KEY_BYTES,
    SEGMENT_TOKENS,
    Segment,
    SegmentKey,
    model_fingerprint,
    root_key,
    segment_chain,
)
from daric_rag.engine.metrics import IndexStats
from daric_rag.engine.scheduling.index.base import UNKNOWN_ROOT, IndexEntry, KVIndex, Probe, Tier
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.index.opening import open_index, shared_disk_id

__all__ = [
    "KEY_BYTES",
    "SEGMENT_TOKENS",
    "UNKNOWN_ROOT",
    "IndexEntry",
    "IndexStats",
    "KVIndex",
    "MemoryIndex",
    "Probe",
    "Segment",
    "SegmentKey",
    "Tier",
    "model_fingerprint",
    "open_index",
    "root_key",
    "segment_chain",
    "shared_disk_id",
]
