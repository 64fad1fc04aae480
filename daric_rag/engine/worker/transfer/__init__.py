"""Moving KV between canonical records in host memory and the paged blocks of all layers."""

from daric_rag.engine.worker.transfer.in_place import BlockRange, InPlace
from daric_rag.engine.worker.transfer.layer_stream import LayerStream
from daric_rag.engine.worker.transfer.plan import (
    NO_RECORD,
    NO_ROTATION,
    Kind,
    RopeTable,
    TransferPlan,
    TransferRange,
)
from daric_rag.engine.worker.transfer.transfer import Transfer

__all__ = [
    "NO_RECORD",
    "NO_ROTATION",
    "BlockRange",
    "InPlace",
    "Kind",
    "LayerStream",
    "RopeTable",
    "Transfer",
    "TransferPlan",
    "TransferRange",
]
