"""Metadata filters."""

import pytest

from daric_rag.retrieval.filters import Filter, compile_filter

METADATA = {
    "year": 1990,
    "lang": "en",
    "score": 0.5,
    "ok": True,
    "none": None,
    "tags": ["a", "b"],
    "sub": {"x": 1},
}


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"year": 1990}, True),
        ({"year": 1990, "lang": "fr"}, False),
        ({"year": 1990.0}, True),
        ({"year": "1990"}, False),
        ({"missing": None}, False),
        ({"none": None}, True),
        ({"ok": 1}, False),
        ({"ok": True}, True),
        ({"tags": ["a", "b"]}, True),
        ({"tags": ("a", "b")}, True),
        ({"sub": {"x": 1}}, True),
        ({"year": {"$gte": 1990, "$lt": 1991}}, True),
        ({"year": {"$gt": 1990}}, False),
        ({"year": {"$lte": 1989}}, False),
        ({"lang": {"$gt": "de"}}, True),
        ({"lang": {"$gt": 3}}, False),
        ({"ok": {"$gt": 0}}, False),
        ({"missing": {"$lt": 3}}, False),
        ({"year": {"$ne": 1990}}, False),
        ({"missing": {"$ne": 1990}}, True),
        ({"year": {"$eq": 1990}}, True),
        ({"lang": {"$in": ["en", "fr"]}}, True),
        ({"lang": {"$in": []}}, False),
        ({"lang": {"$nin": ["en", "fr"]}}, False),
        ({"missing": {"$nin": ["en"]}}, True),
        ({"missing": {"$exists": False}}, True),
        ({"none": {"$exists": True}}, True),
        ({"$or": [{"year": 1}, {"lang": "en"}]}, True),
        ({"$and": [{"year": 1990}, {"lang": "fr"}]}, False),
        ({"$not": {"lang": "en"}}, False),
        ({"$not": {}}, False),
        (lambda metadata: metadata["year"] == 1990, True),
    ],
)
def test_filter(filter: Filter, expected: bool) -> None:
    predicate = compile_filter(filter)
    assert predicate is not None
    assert predicate(METADATA) is expected


@pytest.mark.parametrize("filter", [None, {}])
def test_no_filter(filter: Filter | None) -> None:
    assert compile_filter(filter) is None


@pytest.mark.parametrize(
    ("filter", "named"),
    [
        ({"year": {"$near": 3}}, r"\$near.*year.*\$gte"),
        ({"$xor": []}, r"\$xor.*\$or"),
        ({"$or": []}, r"\$or"),
        ({"$and": {"year": 1}}, r"\$and"),
        ({"lang": {"$in": "en"}}, r"\$in.*lang.*'en'"),
        ({"lang": {"$exists": 1}}, r"\$exists.*lang"),
        ("year", "filter='year'"),
    ],
)
def test_malformed_filter(filter: Filter, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compile_filter(filter)
