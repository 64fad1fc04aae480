"""Tool choice, the schema of a forced call, and reading calls out of answers and streams."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from daric_rag.integrations.langchain.tools import (
    ToolCallGate,
    call_schema,
    chosen_tools,
    openai_tools,
    parse_answer,
    tool_call_text,
    tools_text,
)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def search(query: str) -> str:
    """Search."""
    return query


TOOLS = openai_tools([add, search])


@pytest.mark.parametrize("choice", [None, "auto", "none", False])
def test_free_choices(choice: Any) -> None:
    assert chosen_tools(TOOLS, choice) is None


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_one_of_all(choice: Any) -> None:
    assert chosen_tools(TOOLS, choice) == TOOLS


@pytest.mark.parametrize(
    "choice", ["search", {"type": "function", "function": {"name": "search"}}, {"name": "search"}]
)
def test_one_by_name(choice: Any) -> None:
    assert chosen_tools(TOOLS, choice) == [TOOLS[1]]


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tool_choice='serch': did you mean 'search'\?.*add, search"):
        chosen_tools(TOOLS, "serch")
    with pytest.raises(ValueError, match="no tools to choose from"):
        chosen_tools([], "any")


def test_schema_of_a_forced_call() -> None:
    schema = call_schema(TOOLS)
    assert [one["properties"]["name"] for one in schema["anyOf"]] == [{"const": "add"}, {"const": "search"}]
    single = call_schema(TOOLS[:1])
    assert single["required"] == ["name", "arguments"]
    assert set(single["properties"]["arguments"]["properties"]) == {"a", "b"}


def test_schema_has_no_dangling_references() -> None:
    class Place(BaseModel):
        name: str

    class Visit(BaseModel):
        """Visit a place."""

        place: Place

    schema = Visit.model_json_schema()
    assert "$ref" in str(schema)
    tool = {"type": "function", "function": {"name": "visit", "parameters": schema}}
    arguments = call_schema([tool])["properties"]["arguments"]
    assert arguments["properties"]["place"]["properties"] == Place.model_json_schema()["properties"]


def test_tagged_calls_and_text_beside_them() -> None:
    answer = f"I add.\n{tool_call_text('add', {'a': 1, 'b': 2})}\n{tool_call_text('search', {'query': 'ä'})}"
    parsed = parse_answer(answer, TOOLS)
    assert parsed.text == "I add."
    assert [(call["name"], call["args"]) for call in parsed.calls] == [
        ("add", {"a": 1, "b": 2}),
        ("search", {"query": "ä"}),
    ]
    assert len({call["id"] for call in parsed.calls}) == 2
    assert "ä" in answer


def test_bare_calls() -> None:
    for answer in (
        '{"name": "add", "arguments": {"a": 1}}',
        '[{"name": "add", "parameters": {"a": 1}}]',
        ' {"name": "add", "arguments": {"a": 1}}\n',
    ):
        (call,) = parse_answer(answer, TOOLS).calls
        assert call["args"] == {"a": 1}
    (call,) = parse_answer('{"name": "add"}', TOOLS).calls
    assert call["args"] == {}


@pytest.mark.parametrize(
    "answer",
    ["", "text", "{", '{"name": "other", "arguments": {}}', '{"name": "add", "arguments": 3}', "[1]", "3"],
)
def test_what_is_no_call_is_text(answer: str) -> None:
    parsed = parse_answer(answer, TOOLS)
    assert (parsed.text, parsed.calls, parsed.invalid) == (answer, (), ())


def test_tagged_nonsense_is_invalid_and_without_tools_all_is_text() -> None:
    parsed = parse_answer('<tool_call>{"name": "add", "arg', TOOLS)
    assert parsed.calls == ()
    assert parsed.invalid[0]["args"] == '{"name": "add", "arg'
    assert parse_answer("<tool_call>{}</tool_call>", []).text == "<tool_call>{}</tool_call>"


def test_tools_text_has_every_tool() -> None:
    told = tools_text(TOOLS)
    assert "Add two numbers." in told
    assert '"search"' in told


PARTS = st.lists(
    st.sampled_from(
        [
            "a",
            " ",
            "<",
            "<tool",
            "_call>",
            "<tool_call>",
            "{",
            "[",
            '{"name": "add", "arguments": {}}',
            "</tool_call>",
        ]
    ),
    max_size=8,
)


@given(PARTS, st.integers(1, 5))
def test_a_gate_loses_nothing_and_shows_no_call(parts: list[str], step: int) -> None:
    answer = "".join(parts)
    gate = ToolCallGate(TOOLS, forced=False)
    shown = "".join(gate.feed(answer[start : start + step]) for start in range(0, len(answer), step))
    rest = gate.finish()
    assert "<tool_call>" not in shown
    whole = parse_answer(answer, TOOLS)
    assert [call["name"] for call in rest.calls] == [call["name"] for call in whole.calls]
    assert len(rest.invalid) == len(whole.invalid)
    if not whole.calls and not whole.invalid:
        assert shown + rest.text == answer


def test_a_gate_lets_plain_text_pass_at_once() -> None:
    gate = ToolCallGate(TOOLS, forced=False)
    assert gate.feed("Hello ") == "Hello "
    assert gate.feed("a < b <") == "a < b "
    assert gate.feed("tool_box>") == "<tool_box>"
    forced = ToolCallGate(TOOLS, forced=True)
    assert forced.feed('{"name"') == ""
    assert ToolCallGate([], forced=False).feed("{") == "{"
