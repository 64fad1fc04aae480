"""Segment keys: chains, roots, fingerprints."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.keys import (
    KEY_BYTES,
    SEGMENT_TOKENS,
    model_fingerprint,
    root_key,
    segment_chain,
)

ROOT = root_key({"model": "m"})
# Lengths around whole segments, which lists of single tokens would hardly ever have.
LENGTHS = st.integers(0, 3 * SEGMENT_TOKENS + 5) | st.sampled_from([256, 257, 512, 513])


@st.composite
def token_lists(draw: st.DrawFn) -> list[int]:
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    token_ids: list[int] = generator.integers(0, 2**31, draw(LENGTHS)).tolist()
    return token_ids


TOKENS = token_lists()


@given(TOKENS)
def test_a_chain_covers_the_chunk_in_order(token_ids: list[int]) -> None:
    chain = segment_chain(ROOT, token_ids)
    assert [position for segment in chain for position in range(segment.start, segment.end)] == list(
        range(len(token_ids))
    )
    assert all(segment.num_tokens == SEGMENT_TOKENS for segment in chain[:-1])
    assert [segment.parent for segment in chain] == [ROOT, *(segment.key for segment in chain)][: len(chain)]


@given(TOKENS)
def test_keys_are_the_hash_of_parent_and_tokens(token_ids: list[int]) -> None:
    for segment in segment_chain(ROOT, token_ids):
        tokens = b"".join(token.to_bytes(4, "little") for token in token_ids[segment.start : segment.end])
        assert segment.key == hashlib.blake2b(segment.parent + tokens, digest_size=KEY_BYTES).digest()


@given(TOKENS, st.sampled_from([np.int32, np.int64, np.uint32]))
def test_lists_and_arrays_give_the_same_chain(token_ids: list[int], dtype: type) -> None:
    assert segment_chain(ROOT, token_ids) == segment_chain(ROOT, np.array(token_ids, dtype=dtype))


@given(TOKENS.filter(bool), st.data())
def test_a_changed_token_changes_every_key_from_there_on(token_ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(token_ids) - 1))
    changed = list(token_ids)
    changed[position] ^= 1
    pairs = list(zip(segment_chain(ROOT, token_ids), segment_chain(ROOT, changed), strict=True))
    for before, after in pairs:
        assert (before.key == after.key) == (before.end <= position)


def test_a_shorter_chunk_shares_only_whole_segments() -> None:
    long = segment_chain(ROOT, range(600))
    short = segment_chain(ROOT, range(300))
    assert long[0] == short[0]
    assert long[1].key != short[1].key


def test_other_roots_share_nothing() -> None:
    keys = [{s.key for s in segment_chain(root_key({"namespace": name}), range(600))} for name in "ab"]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    "token_ids",
    [
        [-1],
        [2**32],
        [1.5],
        ["1"],
        [None],
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.zeros((2, 2), int),
    ],
)
def test_what_is_no_token_is_refused(token_ids: object) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        segment_chain(ROOT, token_ids)  # type: ignore[arg-type]


def test_a_root_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="root"):
        segment_chain(b"short", [1])


def test_unequal_fields_give_unequal_roots() -> None:
    values: list[object] = [
        None,
        True,
        False,
        0,
        1,
        1.5,
        "",
        "1",
        "None",
        b"1",
        [],
        [1],
        [[1]],
        {},
        {"a": 1},
        {"a": None},
    ]
    keys = [root_key({"field": value}) for value in values] + [root_key({}), root_key({"other": 1})]
    for one, other in itertools.combinations(keys, 2):
        assert one != other


def test_the_order_of_fields_and_the_kind_of_sequence_do_not_matter() -> None:
    assert root_key({"a": 1, "b": [1, {"x": 2, "y": 3}]}) == root_key({"b": (1, {"y": 3, "x": 2}), "a": 1})


@pytest.mark.parametrize(
    "value", [object(), float("nan"), float("inf"), {1: 2}, {"a": [object()]}, np.int64(3)]
)
def test_fields_without_a_canonical_form_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="rope"):
        root_key({"rope": value})


def write_model(directory: Path, weights: bytes = b"w" * 5000) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "README.md").write_text(directory.name)
    return directory


def test_equal_models_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    assert model_fingerprint(write_model(tmp_path / "a")) == model_fingerprint(
        str(write_model(tmp_path / "b"))
    )


def test_another_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    size = 5 * 2**20
    large = bytearray(size)
    prints = [model_fingerprint(write_model(tmp_path / "0", bytes(large)))]
    for name, position in (("first", 0), ("last", size - 1)):
        changed = bytearray(large)
        changed[position] = 1
        prints.append(model_fingerprint(write_model(tmp_path / name, bytes(changed))))
    middle = bytearray(large)
    middle[size // 2 : size // 2 + size // 200] = b"x" * (size // 200)
    prints.append(model_fingerprint(write_model(tmp_path / "tensor", bytes(middle))))
    prints.append(model_fingerprint(write_model(tmp_path / "longer", bytes(size + 1))))
    assert len(set(prints)) == len(prints)


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        model_fingerprint("someone/some-model")
    with pytest.raises(ValueError, match="no weights"):
        model_fingerprint(tmp_path)
