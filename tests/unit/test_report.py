"""Counts of a request over its steps, preemptions included."""

from __future__ import annotations

from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.report_book import ReportBook


def test_a_report_from_before_a_preemption_does_not_count() -> None:
    book = ReportBook()
    book.of("r").lookup_s += 0.5
    book.add("r", RequestReport(0, loaded_tokens=5))
    book.restart("r")
    book.add("r", RequestReport(0, loaded_tokens=7))  # the step that async scheduling had under way
    book.add("r", RequestReport(1, loaded_tokens=11))
    assert book.attempt("r") == 1
    values = book.close("r")
    assert (values["loaded_tokens"], values["lookup_s"]) == (11, 0.5)
    assert "attempt" not in values


def test_the_last_step_is_told_after_the_request_was_closed() -> None:
    book = ReportBook()
    book.of("r").engine_hit_tokens = 32
    book.add("r", RequestReport(loaded_tokens=3))
    values = book.close("r")
    book.add("r", RequestReport(loaded_tokens=4, recomputed_ranges=[(0, 2)]))
    assert (values["loaded_tokens"], values["recomputed_ranges"]) == (7, [(0, 2)])
    assert values["engine_hit_tokens"] == 32
    book.next_step()
    book.add("r", RequestReport(loaded_tokens=4))  # of a request that is gone
    assert values["loaded_tokens"] == 7
    assert book.close("r")["loaded_tokens"] == 0
