"""Counts of a request over its steps, preemptions included."""

from __future__ import annotations

from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.report_book import ReportBook


def test_a_report_from_before_a_preemption_does_not_count() -> None:
    book = ReportBook()
    book.add("r", RequestReport(0, loaded_tokens=5))
    book.reset("r")
    book.add("r", RequestReport(0, loaded_tokens=7))  # the step that async scheduling had under way
    book.add("r", RequestReport(1, loaded_tokens=11))
    values = book.close("r")
    assert values["loaded_tokens"] == 11
    assert "attempt" not in values


def test_the_last_step_is_told_after_the_request_was_closed() -> None:
    book = ReportBook()
    book.add("r", RequestReport(loaded_tokens=3))
    values = book.close("r")
    assert book.is_closing("r")
    book.add("r", RequestReport(loaded_tokens=4, recomputed_ranges=[(0, 2)]))
    assert (values["loaded_tokens"], values["recomputed_ranges"]) == (7, [(0, 2)])
    book.next_step()
    assert not book.is_closing("r")
