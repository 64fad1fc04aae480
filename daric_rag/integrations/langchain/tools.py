"""Tool calls: the constraint on the answer when one is forced, the text form, and reading them back.

Text form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which the chat templates of many models write
(Hermes, Qwen) and which stands in for the template's own where it knows no tools. A bare JSON object or list of
such calls is understood too.
"""

from __future__ import annotations

import difflib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json_schema import dereference_refs

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

Tool = dict[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class ParsedAnswer:
    """A model's answer taken apart: the text beside its tool calls, and these."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidToolCall, ...] = ()


def openai_tools(tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any]) -> list[Tool]:
    """Any of LangChain's forms of tools in OpenAI's form."""
    return [convert_to_openai_tool(tool) for tool in tools]


def chosen_tools(tools: Sequence[Tool], tool_choice: Any) -> list[Tool] | None:
    """The tools of which the answer has to be a call; None if the model is free to call one or none.

    `tool_choice`: None or "auto" (free), "none" (free; give the model no tools), "any", "required" or True (one of
    all), a tool's name, or `{"type": "function", "function": {"name": …}}`. Raises `ValueError` for a name that is
    not among the tools.
    """
    if tool_choice in (None, False, "auto", "none"):
        return None
    if not tools:
        raise ValueError(f"tool_choice={tool_choice!r}: there are no tools to choose from")
    if tool_choice in (True, "any", "required"):
        return list(tools)
    name = (
        tool_choice.get("function", tool_choice).get("name") if isinstance(tool_choice, dict) else tool_choice
    )
    names = [_name(tool) for tool in tools]
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"tool_choice={tool_choice!r}: {hint}allowed are auto, none, any, required, {', '.join(names)}"
        )
    return [tools[names.index(name)]]


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON Schema of a call of one of these tools: an object of name and arguments."""
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": _name(tool)}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def tools_text(tools: Sequence[Tool]) -> str:
    """What a model whose chat template knows no tools is told about them, in its system prompt."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, given as JSON Schema:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON between tags:\n"
        f'{_OPEN}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{_CLOSE}'
    )


def tool_call_text(name: str, arguments: dict[str, Any]) -> str:
    """One call in its text form."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_OPEN}\n{call}\n{_CLOSE}"


def parse_answer(text: str, tools: Sequence[Tool]) -> ParsedAnswer:
    """Find the tool calls in an answer; without tools everything is text.

    Calls of unknown tools or with broken JSON are `invalid`, if they are tagged; else they are text.
    """
    if not tools:
        return ParsedAnswer(text)
    names = {_name(tool) for tool in tools}
    tagged = _TAGGED.findall(text)
    if not tagged:
        calls = _bare_calls(text, names)
        return ParsedAnswer("", tuple(calls)) if calls else ParsedAnswer(text)
    calls, invalid = [], []
    for body in tagged:
        found = _bare_calls(body, names)
        calls += found
        if not found:
            invalid.append(_invalid(body, names))
    return ParsedAnswer(_TAGGED.sub("", text).strip(), tuple(calls), tuple(invalid))


class ToolCallGate:
    """Lets the text of a stream pass until a tool call may have begun; the rest is kept for its end."""

    def __init__(self, tools: Sequence[Tool], *, forced: bool) -> None:
        self._tools = tools
        self._forced = forced
        self._held = ""
        self._passed = False

    def feed(self, text: str) -> str:
        """Take new text of the stream; return what can be shown now."""
        if not self._tools:
            return text
        self._held += text
        shown = self._held[: self._safe_length()]
        self._held = self._held[len(shown) :]
        self._passed = self._passed or bool(shown.strip())
        return shown

    def finish(self) -> ParsedAnswer:
        """What was kept: the calls, and text that turned out to be none."""
        held, self._held = self._held, ""
        return parse_answer(held, self._tools)

    def _safe_length(self) -> int:
        # An answer that begins like JSON may be a call without tags.
        if self._forced or (not self._passed and self._held.lstrip()[:1] in ("", "{", "[")):
            return 0
        if (begin := self._held.find(_OPEN)) >= 0:
            return begin
        for length in range(min(len(_OPEN), len(self._held)), 0, -1):
            if self._held.endswith(_OPEN[:length]):
                return len(self._held) - length
        return len(self._held)


def _bare_calls(text: str, names: set[str]) -> list[ToolCall]:
    """The calls in a JSON object or list, or none if it is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    items = value if isinstance(value, list) else [value]
    calls = []
    for item in items:
        if not isinstance(item, dict) or item.get("name") not in names:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, dict):
            return []
        calls.append(ToolCall(name=item["name"], args=arguments, id=new_call_id(), type="tool_call"))
    return calls


def _invalid(body: str, names: set[str]) -> InvalidToolCall:
    return InvalidToolCall(
        name=None,
        args=body.strip(),
        id=new_call_id(),
        error=f"not a JSON object with a name of {', '.join(sorted(names))} and arguments",
        type="invalid_tool_call",
    )


def new_call_id() -> str:
    """An id for a tool call, which models do not make themselves."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    # References point to the root of a schema; inside a larger one they would lead nowhere.
    resolved: dict[str, Any] = (
        dereference_refs(parameters) if "$ref" in json.dumps(parameters) else parameters
    )
    return {"additionalProperties": False, **resolved}
