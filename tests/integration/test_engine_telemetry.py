"""vLLM's statistics and traces through our engine; by default both are off."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from daric_rag import DaricConfig, DaricEngine
from daric_rag.engine.launch import _log_arguments
from tests.engine_support import make_prompt, sampling
from tests.process_support import engine_processes, still_running

pytestmark = pytest.mark.integration


@pytest.fixture
def collector() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """An OpenTelemetry collector: its address, and the spans that it is sent."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: queue.Queue[Any] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put(span)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing to tell."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def test_traces_and_statistics_as_in_vllm(
    tiny_model: str, collector: tuple[str, queue.Queue[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import REGISTRY

    address, spans = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    # vLLM sets it for its processes and leaves it behind.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
    config = DaricConfig(kv_pool_bytes=64 << 20, host_bytes=64 << 20)
    options = {"max_model_len": 1024, "otlp_traces_endpoint": address, "disable_log_stats": False}
    others = {process.pid for process in engine_processes()}
    engine = DaricEngine(tiny_model, config, **options)
    results = [engine.generate(make_prompt([1]), sampling(3)) for _ in range(2)]
    told: set[bytes] = set()
    while len(told) < len(results):
        span = spans.get(timeout=30)
        if span.name == "llm_request":
            values = {item.key: item.value.int_value for item in span.attributes}
            assert values["gen_ai.usage.prompt_tokens"] == results[0].metrics.prompt_tokens
            told.add(span.span_id)
    finished = [
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    ]
    assert sum(finished) == len(results)
    # Nobody closes this one, and neither the statistics nor the traces keep it alive.
    processes = [process for process in engine_processes() if process.pid not in others]
    assert len(processes) == 1
    del engine
    gc.collect()
    assert still_running(processes, 20) == []


def test_statistics_are_off_unless_asked_for() -> None:
    assert _log_arguments({}) == {"disable_log_stats": True}
    assert _log_arguments({"disable_log_stats": False}) == {"disable_log_stats": False}
    assert _log_arguments({"otlp_traces_endpoint": "x"})["disable_log_stats"] is False
    with pytest.raises(ValueError, match="disable_log_stats=True: with otlp_traces_endpoint"):
        _log_arguments({"otlp_traces_endpoint": "x", "disable_log_stats": True})
