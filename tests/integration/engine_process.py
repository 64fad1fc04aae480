"""A process that a test kills: `python -m tests.integration.engine_process MODEL DIRECTORY`.

Starts an engine with a disk tier, warms a few documents, prints one JSON line, and waits for the end of its input;
then it ends without closing the engine.
"""

from __future__ import annotations

import json
import sys

import psutil

from daric_rag import DaricConfig, DaricEngine
from tests.engine_support import make_document

DOCUMENTS = [make_document(seed) for seed in range(12)]
engines: list[DaricEngine] = []


def main() -> None:
    model, directory = sys.argv[1:]
    config = DaricConfig(kv_pool_bytes=64 << 20, host_bytes=64 << 20, disk_path=directory)
    engines.append(DaricEngine(model, config, max_model_len=1024))
    result = engines[0].warm(DOCUMENTS, progress=False)
    processes = [process.pid for process in psutil.Process().children(recursive=True)]
    told = {
        "documents": result.documents,
        "stored_before": result.cached_documents,
        "processes": processes,
    }
    # A line of its own, whatever vLLM writes to the same stream.
    print("\n" + json.dumps(told), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
