"""Bad options are refused with the field, the value and what is allowed."""

import pytest

from daric_rag.config import DaricConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_avg": 0}, ["n_avg", "0", "greater than or equal to 1"]),
        ({"ratio": 0.0}, ["ratio", "0.0", "greater than 0"]),
        ({"ratio": 1.0}, ["ratio", "1.0", "less than 1"]),
        ({"mtaf": "cubic"}, ["mtaf", "cubic", "linear, log, exp"]),
        ({"selection": "magic"}, ["selection", "magic", "daric, epic, none, all"]),
        ({"n_avgg": 3}, ["n_avgg", "n_avg"]),
        ({"index": "mysql://u:secret@host"}, ["index", "mysql", "redis://"]),
        ({"delimiter": "a b"}, ["delimiter", "a b", "white space"]),
        ({"delimiter": "abca"}, ["delimiter", "abca", "first character"]),
        ({"storage_dtype": "int8"}, ["storage_dtype", "int8", "bfloat16"]),
    ],
)
def test_bad_option_is_named(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        DaricConfig(**options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


def test_override_is_validated() -> None:
    config = DaricConfig(n_avg=16)
    assert config.override(n_avg=8, mtaf="log").n_avg == 8
    assert config.override() is config
    with pytest.raises(ValueError, match="n_avg"):
        config.override(n_avg=-1)
    with pytest.raises(ValueError, match="host_bytes"):
        config.override(host_bytes=5)


def test_config_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DaricConfig().n_avg = 3  # type: ignore[misc]
