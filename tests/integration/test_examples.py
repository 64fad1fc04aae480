"""Examples, demo and the README's code as they are, on the engine that the tests share."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings

import daric_rag
from daric_rag import DaricEngine, demo
from daric_rag.integrations.llama_index import watch_retrieval
from daric_rag.known_documents import attach_engine

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


class Lent:
    """An engine whose borrower may leave its `with` block, with a cache of the borrower's own."""

    def __init__(self, engine: DaricEngine, namespace: str) -> None:
        self._engine = engine
        self._options = {"namespace": namespace}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.generate(*arguments, **options, **self._options)

    def warm(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.warm(*arguments, **options, **self._options)


@pytest.fixture
def shared(engine: DaricEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the models of the examples get instead of starting an engine of their own."""
    for module in ("langchain.model", "llama_index.llm"):
        monkeypatch.setattr(f"daric_rag.integrations.{module}.get_engine", lambda *arguments: engine)
    attach_engine(engine)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """The printed fields of every question of an example."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    # An answer may have several lines.
    questions = re.split(r"^(?=Question: )", printed, flags=re.M)[1:]
    return [dict(re.findall(r"^(\w+): +(.+)$", question, re.M)) for question in questions]


def reused_and_prompt(answer: dict[str, str]) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+) of (\d+) prompt tokens", answer["Reused"])
    assert match is not None
    return int(match[1]), int(match[2])


def test_langchain_chain(shared: None, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, agent = run("langchain_chain.py", capsys)
    for answer in (first, second, agent):
        assert answer["Answer"] and len(answer["Sources"].split(", ")) == 4
    assert first["Sources"] != second["Sources"]
    for answer in (second, agent):
        reused, prompt = reused_and_prompt(answer)
        # The notes are some 280 tokens; the rest is the template, the question and the agent's tool.
        assert 250 < reused < prompt


def test_llama_index_query_engine(
    shared: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_llm", "_embed_model", "_prompt_helper"):  # the example sets them; they are put back
        monkeypatch.setattr(Settings, name, getattr(Settings, name))
    try:
        first, second = run("llama_index_query_engine.py", capsys)
    finally:
        watch_retrieval(False)
    assert first["Sources"] != second["Sources"]
    for answer in (first, second):
        assert answer["Answer"] and len(answer["Sources"].split(", ")) == 4
    reused, prompt = reused_and_prompt(second)
    assert 250 < reused < prompt


def test_the_demo_reuses_every_document_in_another_order(
    engine: DaricEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_start", lambda *arguments: Lent(engine, "demo"))
    monkeypatch.setattr(demo, "MAX_TOKENS", 4)
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:2])
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    counts = re.findall(r"(\d+) tokens: (\d+) loaded, (\d+) generated, (\d+) engine hits", printed)
    cold, warm = (tuple(map(int, count)) for count in counts)
    assert cold[1] == 0 and cold[2] > 1500
    prompt, loaded, generated, hits = warm
    assert generated == 0
    # The system prompt is the only thing that vLLM's own prefix cache can have.
    assert hits == 32 and prompt - loaded - hits < 32
    orders = re.findall(r"system prompt.*?question ", printed, re.DOTALL)
    names = [re.findall(r"(\w+\.txt)", order) for order in orders]
    assert names[0] != names[1] and set(names[0]) == set(names[1])


def test_the_code_in_the_readme_runs(
    engine: DaricEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(daric_rag, "DaricEngine", lambda *a, **k: Lent(engine, "readme"), raising=False)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from vllm.*?)```", readme, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    answers = [line for line in capsys.readouterr().out.splitlines() if re.search(r" 96 \d+\.\d+$", line)]
    assert len(answers) == 2
