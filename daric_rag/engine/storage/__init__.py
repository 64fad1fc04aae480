"""Where KV bytes live: a host-memory arena, a disk tier below it, and the two stacked as `KVStore`."""

from daric_rag.engine.metrics import StoreStats
from daric_rag.engine.storage.base import ReadHandle, RecordSpec, StoreEvent, WriteHandle
from daric_rag.engine.storage.directory import probe_record, record_path, stored_keys
from daric_rag.engine.storage.store import KVStore

__all__ = [
    "KVStore",
    "ReadHandle",
    "RecordSpec",
    "StoreEvent",
    "StoreStats",
    "WriteHandle",
    "probe_record",
    "record_path",
    "stored_keys",
]
