"""The command line without an engine: options, folders, splitting, the cache command, token bars."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag import cli
from daric_rag.commands import engine_options
from daric_rag.commands.documents import Document, read_folder, split_folder, split_text
from daric_rag.commands.quiet import held_back_stderr
from daric_rag.commands.token_bars import (
    ENGINE_HIT,
    GENERATED,
    LIVE,
    LOADED,
    RECOMPUTED,
    TokenBars,
    token_kinds,
)
from daric_rag.demo import QUESTIONS, sample_documents
from daric_rag.engine.metrics import RequestMetrics
from tests.storage_support import ROOT, key_of, open_store, save


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the input must be found before an engine starts."""

    def start(*arguments: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("daric_rag.commands.ask.start_engine", start)
    monkeypatch.setattr("daric_rag.commands.warm.start_engine", start)
    monkeypatch.setattr(cli, "_end_on_sigterm", lambda: None)


def run(*arguments: str) -> int:
    """The exit status, whichever way the command ends."""
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


# ---- options ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aks"], "unknown command 'aks'; did you mean ask?"),
        (["cache", "stat"], "unknown action 'stat'; did you mean stats?"),
        (["ask", "--docs", "d", "--modle", "m", "q"], "unknown option --modle; did you mean --model?"),
        (["ask", "--docs", "d", "--modle=m", "q"], "unknown option --modle=m; did you mean --model?"),
        (["ask", "--docs", "d", "--max-token", "3", "q"], "did you mean --max-tokens?"),
        (["warm", "d", "e"], "unexpected argument 'e'"),
        (["ask", "q"], "required: --docs"),
        ([], "required: command"),
    ],
)
def test_wrong_options_are_named_and_the_right_one_is_suggested(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-avg", "0"], "n_avg=0: Input should be greater than or equal to 1"),
        (["--selection", "darc"], "selection='darc': allowed are daric, epic, none, all"),
        (["--index", "reddis://x"], "index='reddis': allowed are"),
        (["--disk-gib", "-1"], "disk_bytes=-1073741824: Input should be greater than or equal to 0"),
        (["-k", "0"], "k=0: must be an int of at least 1"),
        (["--max-tokens", "0"], "max_tokens=0: must be at least 1"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(options, message, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert run("ask", "--docs", str(tmp_path), *options, "q") == 2
    assert message in capsys.readouterr().err


# ---- folders ----


@pytest.mark.parametrize("command", [["ask", "q", "--docs"], ["warm"]])
def test_a_folder_without_text_ends_with_status_2(command, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "file.txt").write_text("text")
    for name, message in {
        "missing": "there is no such folder",
        "file.txt": "is not a folder",
        "empty": "there are no files in this folder",
        "binary": "none of the 1 files in this folder is readable text",
    }.items():
        assert run(*command, str(tmp_path / name)) == 2
        assert f"{tmp_path / name}: {message}" in capsys.readouterr().err


def test_what_is_not_text_is_skipped_with_its_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b.md").write_bytes("\ufeffZoë\r\nline".encode())
    (tmp_path / "sub" / "a.py").write_text("print()")
    (tmp_path / "latin.txt").write_bytes("Zoë".encode("latin-1"))
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    folder = read_folder(str(tmp_path))
    assert [(file.name, file.text) for file in folder.files] == [
        ("b.md", "Zoë\nline"),
        ("sub/a.py", "print()"),
    ]
    assert {file.name: file.reason for file in folder.skipped} == {
        "latin.txt": "binary, or not UTF-8 text",
        "nul.txt": "binary",
        "blank.txt": "empty",
        "gone.txt": "No such file or directory",
        "pipe.txt": "not a regular file",
    }


def test_documents_of_a_folder_have_unique_ids(tmp_path):
    (tmp_path / "long.txt").write_text("one two three four five\n\n" * 4)
    (tmp_path / "short.txt").write_text("  as it is \n")
    documents = split_folder(read_folder(str(tmp_path)), 10, words)
    assert [document.id for document in documents] == ["long.txt", "long.txt#2", "short.txt"]
    assert documents[2] == Document("short.txt", 1, "  as it is \n")


def test_a_long_text_is_cut_at_the_coarsest_place_that_helps():
    text = "a b c\n\nd e f\n\ng h i j k l m n o p q. r s"
    assert split_text(text, 8, words) == ["a b c\n\nd e f", "g h i j k l m n", "o p q.", "r s"]


@given(st.text(alphabet="ab .\n🙂", max_size=300), st.integers(8, 20))
def test_splitting_loses_only_white_space_and_keeps_the_limit(text, max_tokens):
    def count(part: str) -> int:
        # Together more than the sum of the parts: what a tokenizer may do.
        return len(part.encode()) + part.count(" ") * part.count("b")

    parts = split_text(text, max_tokens, count)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(count(part) <= max_tokens or len(part) == 1 for part in parts)


# ---- cache ----


@pytest.fixture
def stored(tmp_path):
    """A cache directory with two records of one document."""
    path = tmp_path / "kv"
    store = open_store(path, model_id="/models/tiny-1")
    assert save(store, key_of(1)) and save(store, key_of(2), key_of(1))
    assert store.flush(10)
    store.close()
    return str(path)


def cache_json(capsys, *arguments: str):
    assert run("cache", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_cache_stats_counts_documents_and_segments(stored, capsys):
    stats = cache_json(capsys, "stats", "--disk", stored)
    (model,) = stats["models"]
    assert (model["model"], model["key"]) == ("/models/tiny-1", ROOT.hex())
    assert (model["documents"], model["segments"], model["tokens"]) == (1, 2, 32)
    assert model["disk_bytes"] == sum(file.stat().st_size for file in Path(stored).rglob("*.kv"))
    assert run("cache", "stats", "--disk", stored) == 0
    out = capsys.readouterr().out
    assert "tiny-1" in out and ROOT.hex()[:12] in out


def test_cache_stats_of_nothing(tmp_path, capsys):
    assert cache_json(capsys, "stats", "--disk", str(tmp_path / "none"))["models"] == []


def test_cache_verify_deletes_a_damaged_record(stored, capsys):
    assert cache_json(capsys, "verify", "--disk", stored)["removed"] == 0
    file = sorted(Path(stored).rglob("*.kv"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = cache_json(capsys, "verify", "--disk", stored)
    assert (report["examined"], report["removed"]) == (2, 1)
    assert not file.exists()
    assert cache_json(capsys, "stats", "--disk", stored)["models"][0]["segments"] == 1


@pytest.mark.parametrize("name", ["/models/tiny-1", "tiny-1", "tiny", ROOT.hex()[:12]])
def test_cache_clear_takes_a_model_by_any_of_its_names(stored, name, capsys):
    assert cache_json(capsys, "clear", "--disk", stored, "--model", name)["removed"] == 2
    assert cache_json(capsys, "stats", "--disk", stored)["models"] == []


def test_cache_clear_leaves_other_models_and_namespaces(stored, capsys):
    assert run("cache", "clear", "--disk", stored, "--model", "other") == 2
    assert "no such model" in (error := capsys.readouterr().err) and "tiny-1" in error
    assert cache_json(capsys, "clear", "--disk", stored, "--namespace", "acme")["removed"] == 0
    assert cache_json(capsys, "stats", "--disk", stored)["models"][0]["segments"] == 2


def test_cache_export_and_import(stored, tmp_path, capsys):
    archive, other = str(tmp_path / "warm.tar"), str(tmp_path / "other")
    assert cache_json(capsys, "export", archive, "--disk", stored)["records"] == 2
    assert cache_json(capsys, "import", archive, "--disk", other)["records"] == 2
    again = cache_json(capsys, "import", archive, "--disk", other)
    assert (again["records"], again["present"], again["refused"]) == (0, 2, [])
    left, right = (cache_json(capsys, "stats", "--disk", path)["models"] for path in (stored, other))
    assert left == right


def test_cache_export_of_nothing_and_import_of_no_archive(stored, tmp_path, capsys):
    empty = str(tmp_path / "empty")
    assert run("cache", "export", str(tmp_path / "a.tar"), "--disk", empty) == 2
    assert "nothing is stored there" in capsys.readouterr().err
    (tmp_path / "text.tar").write_text("no archive" * 200)
    assert run("cache", "import", str(tmp_path / "text.tar"), "--disk", empty) == 2
    assert "text.tar" in capsys.readouterr().err
    assert run("cache", "import", str(tmp_path / "missing.tar"), "--disk", empty) == 1
    assert "missing.tar" in capsys.readouterr().err


# ---- what is printed ----


def metrics(**values) -> RequestMetrics:
    zero = dict.fromkeys(
        (
            "prompt_tokens",
            "padding_tokens",
            "engine_hit_tokens",
            "loaded_tokens",
            "generated_tokens",
            "recomputed_tokens",
            "live_tokens",
        ),
        0,
    )
    return RequestMetrics(**{**zero, "ttft_s": 1.0, "reused": True, **values})


def test_every_token_has_the_kind_that_the_metrics_say():
    bounds, live = ((0, 4), (4, 8), (8, 12), (12, 14)), (False, False, False, True)
    warm = metrics(
        prompt_tokens=14,
        engine_hit_tokens=4,
        loaded_tokens=8,
        live_tokens=2,
        recomputed_tokens=5,
        recomputed_ranges=((4, 5), (8, 10), (12, 14)),
    )
    kinds = token_kinds(warm, bounds, live)
    assert kinds == [
        *[ENGINE_HIT] * 4,
        RECOMPUTED,
        *[LOADED] * 3,
        *[RECOMPUTED] * 2,
        *[LOADED] * 2,
        *[LIVE] * 2,
    ]
    bars = TokenBars(columns=36)
    assert [row.split()[-1] for row in bars.rows("sabq", bounds, kinds)] == ["....", "#===", "##==", "**"]
    assert bars.legend()[0].startswith("== loaded ")
    assert "\x1b" not in "".join(bars.legend())


def test_a_cold_prompt_is_generated_and_a_plain_one_is_computed():
    bounds, live = ((0, 4), (4, 6)), (False, True)
    cold = metrics(prompt_tokens=6, generated_tokens=4, live_tokens=2, recomputed_ranges=((4, 6),))
    assert token_kinds(cold, bounds, live) == [GENERATED] * 4 + [LIVE] * 2
    plain = metrics(prompt_tokens=6, engine_hit_tokens=2, live_tokens=4, reused=False)
    assert token_kinds(plain, (), ()) == [ENGINE_HIT] * 2 + [LIVE] * 4


@pytest.mark.parametrize("longest", [1, 67, 68, 69, 5000])
def test_bars_fit_the_screen(longest):
    bounds = ((0, longest), (longest, longest + 1))
    for row in TokenBars(columns=100).rows(("x" * 99, "y"), bounds, [LOADED] * (longest + 1)):
        assert len(row) <= 100


def test_colours_are_ansi_codes_around_blocks():
    (row,) = TokenBars(columns=100, colour=True).rows("s", ((0, 2),), [LOADED, LOADED])
    assert row.endswith("\x1b[32m██\x1b[0m")


def test_what_is_held_back_is_shown_when_the_start_fails(capfd):
    with held_back_stderr():
        os.write(2, b"noise\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError), held_back_stderr():
        os.write(2, b"the reason\n")
        raise RuntimeError
    assert "the reason" in capfd.readouterr().err


def test_ctrl_c_ends_quietly_with_130(monkeypatch, tmp_path, capsys):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr("daric_rag.commands.warm.start_engine", interrupted)
    assert run("warm", str(tmp_path)) == 130
    assert capsys.readouterr().err == ""


def test_the_demo_has_a_dozen_documents_that_answer_its_questions():
    documents = sample_documents()
    assert len(documents) == 12
    assert all(len(text.split()) > 80 for text in documents.values())
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 2


def test_the_cache_is_where_the_xdg_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engine_options.default_disk_path() == str(tmp_path / "daric_rag" / "kv")
