"""Vectors' form, batching by length, optional dependencies."""

import subprocess
import sys

import numpy as np
import pytest

from daric_rag.errors import MissingExtraError
from daric_rag.retrieval import SentenceTransformerEmbedder
from daric_rag.retrieval import optional as optional_module
from daric_rag.retrieval.embedder import _encodable, batches_by_length, normalised


def test_normalised_scales_and_keeps_zero() -> None:
    vectors = normalised([[3, 4], [0, 0]], 2, 2, "test")
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert vectors.dtype == np.float32


def test_normalised_does_not_change_its_argument() -> None:
    given = np.array([[3, 4]], dtype=np.float32)
    normalised(given, 1, 2, "test")
    assert given.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 2.0, 3.0]], r"shape \[1, 3\], expected \[1, 2\]"),
        ([[1.0, 2.0]] * 2, "shape"),
        ([1.0, 2.0], "shape"),
        ([[1.0, float("nan")]], "NaN"),
    ],
)
def test_normalised_refuses(vectors: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=f"named.*{message}"):
        normalised(vectors, 1, 2, "named")


def test_batches_by_length_covers_all_longest_first() -> None:
    texts = ["a" * length for length in (5, 1, 9, 3, 7)]
    batches = batches_by_length(texts, 2)
    assert batches == [[2, 4], [0, 3], [1]]
    assert batches_by_length([], 2) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("plain", "plain"), ("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\U0001f600\0é", "\U0001f600\0é")],
)
def test_lone_surrogates_are_replaced(text: str, expected: str) -> None:
    assert _encodable(text) == expected


def test_bad_batch_size() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        SentenceTransformerEmbedder(batch_size=0)


def test_missing_extra_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(optional_module.importlib, "import_module", missing)
    with pytest.raises(
        MissingExtraError, match=r'sentence_transformers.*pip install "daric-rag\[retrieval\]"'
    ):
        SentenceTransformerEmbedder().encode_query("a")


def test_import_is_light() -> None:
    program = (
        "import sys, daric_rag.retrieval\n"
        "heavy = {'faiss', 'sentence_transformers', 'torch', 'vllm', 'langchain_core', 'llama_index'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "blocked", "extra"),
    [
        ("langchain_store", "langchain_core", "langchain"),
        ("llama_index_retriever", "llama_index", "llamaindex"),
    ],
)
def test_adapter_without_its_framework(module: str, blocked: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from daric_rag.errors import MissingExtraError\n"
        f"try:\n    import daric_rag.integrations.{module}\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f'pip install "daric-rag[{extra}]"' in run.stdout
