"""The KV cache index: the interface, and its two implementations."""

from daric_rag.engine.scheduling.index.base import KVIndex, Probe
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.index.opening import check_index, new_index, open_index, shared_disk_id

__all__ = ["KVIndex", "MemoryIndex", "Probe", "check_index", "new_index", "open_index", "shared_disk_id"]
