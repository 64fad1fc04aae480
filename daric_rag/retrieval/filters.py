"""Metadata filters: a dictionary of conditions becomes a predicate over a document's metadata."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Metadata: TypeAlias = dict[str, Any]
Predicate: TypeAlias = Callable[[Metadata], bool]
Filter: TypeAlias = Mapping[str, Any] | Predicate

_MISSING = object()


def compile_filter(filter: Filter | None) -> Predicate | None:
    """Turn a filter into a predicate; `None` and `{}` accept everything and become `None`.

    A filter is a callable that gets the metadata, or a dictionary whose conditions must all hold:
    `{"year": 1990}`, `{"year": {"$gte": 1990, "$lt": 2000}}`, `{"lang": {"$in": ["en", "fr"]}}`,
    `{"$or": [filter, …]}`, `{"$and": […]}`, `{"$not": filter}`. Operators of a field: $eq, $ne, $gt, $gte,
    $lt, $lte, $in, $nin, $exists. Numbers compare with numbers and text with text; any other pair is unequal
    and unordered. A missing field fulfils only $ne, $nin and `{"$exists": False}`.

    Raises `ValueError` naming an unknown operator or a malformed operand.
    """
    if filter is None:
        return None
    if callable(filter):
        return filter
    if not isinstance(filter, Mapping):
        raise ValueError(f"filter={filter!r}: must be a dictionary, a callable or None")
    conditions = [_condition(field, operand) for field, operand in filter.items()]
    if not conditions:
        return None
    return lambda metadata: all(condition(metadata) for condition in conditions)


def _condition(field: str, operand: Any) -> Predicate:
    if field in ("$and", "$or"):
        return _combination(field, operand)
    if field == "$not":
        inner = compile_filter(operand)
        return lambda metadata: inner is not None and not inner(metadata)
    if not isinstance(field, str) or field.startswith("$"):
        raise ValueError(f"filter operator {field!r}: allowed around filters are $and, $or, $not")
    if isinstance(operand, Mapping) and any(str(key).startswith("$") for key in operand):
        tests = [_test(field, operator, value) for operator, value in operand.items()]
        return lambda metadata: all(test(metadata.get(field, _MISSING)) for test in tests)
    return lambda metadata: _equal(metadata.get(field, _MISSING), operand)


def _combination(operator: str, operand: Any) -> Predicate:
    if not isinstance(operand, list | tuple) or not operand:
        raise ValueError(f"filter operator {operator} needs a non-empty list of filters, got {operand!r}")
    predicates = [compile_filter(part) or (lambda metadata: True) for part in operand]
    combine = all if operator == "$and" else any
    return lambda metadata: combine(predicate(metadata) for predicate in predicates)


def _test(field: str, operator: str, operand: Any) -> Callable[[Any], bool]:
    """The test that `{field: {operator: operand}}` makes on the field's value."""
    if operator not in _TESTS:
        raise ValueError(f"filter operator {operator!r} of field {field!r}: allowed are {', '.join(_TESTS)}")
    if operator in ("$in", "$nin") and not isinstance(operand, list | tuple | set | frozenset):
        raise ValueError(f"filter operator {operator} of field {field!r} needs a list, got {operand!r}")
    if operator == "$exists" and not isinstance(operand, bool):
        raise ValueError(f"filter operator $exists of field {field!r} needs True or False, got {operand!r}")
    test = _TESTS[operator]
    return lambda value: test(value, operand)


def _equal(value: Any, operand: Any) -> bool:
    # JSON tells true from 1; Python does not.
    if isinstance(value, bool) != isinstance(operand, bool):
        return False
    # Metadata was stored as JSON, which knows no tuples.
    return bool(value == (list(operand) if isinstance(operand, tuple) else operand))


def _ordered(value: Any, operand: Any) -> bool:
    if isinstance(value, bool) or isinstance(operand, bool):
        return False
    number = isinstance(value, int | float) and isinstance(operand, int | float)
    return number or (isinstance(value, str) and isinstance(operand, str))


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": lambda value, operand: not _equal(value, operand),
    "$gt": lambda value, operand: _ordered(value, operand) and value > operand,
    "$gte": lambda value, operand: _ordered(value, operand) and value >= operand,
    "$lt": lambda value, operand: _ordered(value, operand) and value < operand,
    "$lte": lambda value, operand: _ordered(value, operand) and value <= operand,
    "$in": lambda value, operand: any(_equal(value, one) for one in operand),
    "$nin": lambda value, operand: not any(_equal(value, one) for one in operand),
    "$exists": lambda value, operand: (value is not _MISSING) == operand,
}
