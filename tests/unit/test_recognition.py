"""Recognition of registered documents in a prompt, against a search that tries everything."""

import random
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag import recognition
from daric_rag.recognition import Match, Recognizer, document_key, split_by_matches


def search_everything(text: str, documents: Iterable[str], min_chars: int) -> list[Match]:
    """Leftmost, then longest, without overlaps: by trying every document at every place."""
    stripped = {document.strip() for document in documents}
    by_length = sorted((d for d in stripped if len(d) >= min_chars), key=len, reverse=True)
    matches: list[Match] = []
    position = 0
    while position < len(text):
        found = next((d for d in by_length if text.startswith(d, position)), None)
        if found is not None:
            matches.append(Match(position, position + len(found), document_key(found)))
        position += len(found or " ")
    return matches


def words(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) + " "
    return text[: length - 1] + "."


def recognizer_of(documents: Iterable[str], min_chars: int = 48) -> Recognizer:
    recognizer = Recognizer(min_chars=min_chars)
    recognizer.register(documents)
    return recognizer


small_texts = st.text(alphabet="ab \ud800é\0😀", max_size=12)


@st.composite
def prompts_with_documents(draw: st.DrawFn) -> tuple[str, list[str]]:
    documents = draw(st.lists(small_texts, max_size=8))
    pieces = draw(st.lists(st.one_of(small_texts, st.sampled_from(documents or [""])), max_size=8))
    return "".join(pieces), documents


@given(prompts_with_documents(), st.integers(1, 5))
def test_finds_what_trying_everything_finds(case: tuple[str, list[str]], min_chars: int) -> None:
    text, documents = case
    assert recognizer_of(documents, min_chars).find(text) == search_everything(text, documents, min_chars)


@given(prompts_with_documents(), st.integers(1, 5))
def test_collisions_of_all_hashes_change_nothing(case: tuple[str, list[str]], min_chars: int) -> None:
    text, documents = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognition, "_mixed", np.zeros_like)
        found = recognizer_of(documents, min_chars).find(text)
    assert found == search_everything(text, documents, min_chars)


def test_documents_of_a_real_size_in_any_order() -> None:
    rng = random.Random(1)
    documents = [words(rng, rng.randint(60, 2000)) for _ in range(300)]
    recognizer = recognizer_of(documents)
    for _ in range(5):
        chosen = rng.sample(documents, 12)
        prompt = "System.\n\n" + "\n\nSource: ".join(chosen) + "\n\nQuestion?"
        matches = recognizer.find(prompt)
        assert [prompt[m.start : m.end] for m in matches] == chosen
        assert [m.document_key for m in matches] == [document_key(d) for d in chosen]


@pytest.mark.parametrize("place", ["first", "last", "both"])
def test_documents_with_a_common_header_or_footer(place: str) -> None:
    rng = random.Random(2)
    header = words(rng, 200) if place in ("first", "both") else ""
    footer = words(rng, 200) if place in ("last", "both") else ""
    documents = [header + words(rng, rng.randint(100, 900)) + footer for _ in range(2000)]
    recognizer = recognizer_of(documents)
    chosen = rng.sample(documents, 10)
    prompt = "\n".join(chosen)
    assert [prompt[m.start : m.end] for m in recognizer.find(prompt)] == chosen
    # No fingerprint is crowded: the work of a search does not grow with the number of such documents.
    assert max(map(len, recognizer._buckets.values())) <= 2


def test_documents_that_differ_in_one_place() -> None:
    body = words(random.Random(3), 1000)
    documents = [f"{body[:500]}{number:04d}{body[500:]}" for number in range(2000)]
    recognizer = recognizer_of(documents)
    prompt = "\n".join([documents[7], documents[1234], body])
    assert [m.document_key for m in recognizer.find(prompt)] == [
        document_key(documents[7]),
        document_key(documents[1234]),
    ]


def test_the_outer_of_two_nested_documents_wins_and_the_inner_one_is_found_alone() -> None:
    rng = random.Random(4)
    inner = words(rng, 100)
    starts_with, contains = inner + words(rng, 100), words(rng, 100) + inner + words(rng, 100)
    recognizer = recognizer_of([inner, starts_with, contains])
    prompt = f"{contains}\n{starts_with}\n{inner}\n"
    assert [prompt[m.start : m.end] for m in recognizer.find(prompt)] == [contains, starts_with, inner]


def test_of_two_that_overlap_the_left_one_is_found() -> None:
    rng = random.Random(5)
    a, b, c = (words(rng, 60) for _ in range(3))
    assert recognizer_of([a + b, b + c]).find(a + b + c) == [Match(0, 120, document_key(a + b))]


def test_surrounding_white_space_does_not_matter() -> None:
    document = words(random.Random(6), 100)
    recognizer = Recognizer()
    key, same_key = recognizer.register([f"\n  {document}\t\n", document])
    assert key == same_key == document_key(f" {document}")
    assert len(recognizer) == 1
    assert recognizer.find(f"{document}\n") == [Match(0, 100, key)]
    assert recognizer.find(f"x {document} \n") == [Match(2, 102, key)]


@pytest.mark.parametrize(
    "document",
    ["\ud800" * 50, "a\udfff\0" * 30, "\0" * 48, "日本語の文書" * 20, "😀 <|im_end|> {x} {{y}}" * 5],
)
def test_any_characters(document: str) -> None:
    recognizer = recognizer_of([document])
    assert recognizer.find(f"é{document}é") == [Match(1, 1 + len(document), document_key(document))]


def test_a_megabyte_document_in_a_longer_prompt() -> None:
    document = words(random.Random(7), 1_000_000)
    recognizer = recognizer_of([document])
    assert recognizer.find(f"before {document} after")[0].end == 7 + 1_000_000
    assert recognizer.find(f"before {document[:-1]}! after") == []


def test_documents_shorter_than_the_minimum_are_ignored() -> None:
    recognizer = recognizer_of(["x" * 9, "", "  ", "y" * 10], min_chars=10)
    assert len(recognizer) == 1
    assert recognizer.find("x" * 9 + "y" * 10) == [Match(9, 19, document_key("y" * 10))]
    assert recognizer.find("y" * 9) == []
    assert recognizer.find("") == []


def test_forget_and_clear() -> None:
    rng = random.Random(8)
    documents = [words(rng, 80) for _ in range(20)]
    recognizer = recognizer_of(documents)
    assert recognizer.forget([documents[3], documents[3] + "\n", "unknown"]) == 1
    assert len(recognizer.find("\n".join(documents))) == 19
    recognizer.clear()
    assert (len(recognizer), recognizer.num_bytes) == (0, 0)
    assert recognizer.find("\n".join(documents)) == []
    recognizer.register(documents[:2])
    assert len(recognizer.find("\n".join(documents))) == 2


operations = st.lists(
    st.tuples(st.sampled_from(["register", "forget", "find"]), st.integers(0, 11)), max_size=60
)


@given(operations)
def test_memory_is_bounded_and_the_least_recently_used_is_forgotten(steps: list[tuple[str, int]]) -> None:
    rng = random.Random(9)
    documents = [words(rng, 60 + 300 * (number % 4)) for number in range(12)]
    max_bytes = 5_000
    recognizer = Recognizer(max_bytes=max_bytes)
    model: OrderedDict[int, int] = OrderedDict()  # document number -> bytes
    cost = {n: Recognizer() for n in range(12)}
    for number, single in cost.items():
        single.register([documents[number]])
    for operation, number in steps:
        if operation == "register":
            recognizer.register([documents[number]])
            model[number] = cost[number].num_bytes
            model.move_to_end(number)
            while sum(model.values()) > max_bytes:
                model.popitem(last=False)
        elif operation == "forget":
            recognizer.forget([documents[number]])
            model.pop(number, None)
        else:
            assert bool(recognizer.find(documents[number])) == (number in model)
            if number in model:
                model.move_to_end(number)
        assert recognizer.num_bytes == sum(model.values()) <= max_bytes
    for number in range(12):
        assert bool(recognizer.find(documents[number])) == (number in model)


def test_being_recognised_counts_as_use() -> None:
    rng = random.Random(13)
    documents = [words(rng, 1000) for _ in range(4)]
    recognizer = Recognizer(max_bytes=3 * recognizer_of(documents[:1]).num_bytes)
    recognizer.register(documents[:3])
    recognizer.find(documents[0])
    recognizer.register(documents[3:])
    assert [bool(recognizer.find(document)) for document in documents] == [True, False, True, True]


def test_the_tail_of_a_document_in_a_short_prompt() -> None:
    rng = random.Random(14)
    body = words(rng, 400).replace(" ", "_")  # or the prefixes that end in a space would be the same
    prefixes = [body[:length] for length in range(48, 401)]  # the n-th one's only free window is its last
    recognizer = recognizer_of(prefixes)
    assert recognizer._columns[0, recognizer._entries[document_key(body)].slot] == 400 - 48
    assert recognizer.find(body[-48:] + words(rng, 100)) == []


def test_a_document_larger_than_the_budget_drives_nobody_out() -> None:
    rng = random.Random(10)
    small, large = words(rng, 100), words(rng, 50_000)
    recognizer = Recognizer(max_bytes=10_000)
    recognizer.register([small, large])
    assert recognizer.find(f"{large}\n{small}") == [Match(50_001, 50_101, document_key(small))]


def test_documents_made_to_crowd_one_fingerprint_cost_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_MAX_CANDIDATES", 1000)
    ordinary = words(random.Random(11), 500)
    recognizer = recognizer_of(["a" * n for n in range(100, 400)] + [ordinary])
    prompt = "a" * 5000 + ordinary
    windows = recognition._PrefixHashes(prompt).windows(recognizer.min_chars)
    assert len(recognizer._candidates(windows)[0]) <= 1000
    assert Match(5000, 5500, document_key(ordinary)) in recognizer.find(prompt)


def test_many_threads() -> None:
    rng = random.Random(12)
    documents = [words(rng, rng.randint(60, 400)) for _ in range(200)]
    keep, churn = documents[:100], documents[100:]
    recognizer = recognizer_of(keep)

    def work(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(40):
            recognizer.register(own.sample(churn, 10))
            chosen = own.sample(keep, 5)
            prompt = "\n".join(chosen)
            assert [prompt[m.start : m.end] for m in recognizer.find(prompt)] == chosen
            recognizer.forget(own.sample(churn, 10))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    recognizer.forget(churn)
    assert len(recognizer) == 100
    recognizer.forget(keep)
    assert recognizer.num_bytes == 0
    assert not recognizer._filter.any()
    assert not recognizer._buckets


@pytest.mark.parametrize(("field", "value"), [("max_bytes", -1), ("min_chars", 0)])
def test_bad_limits(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; allowed"):
        Recognizer(**{field: value})


# ---- splitting


@given(prompts_with_documents())
def test_split_loses_no_character(case: tuple[str, list[str]]) -> None:
    text, documents = case
    matches = recognizer_of(documents, 2).find(text)
    pieces = split_by_matches(text, matches)
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece for piece, _ in pieces)
    assert [document_key(piece) for piece, is_document in pieces if is_document] == [
        m.document_key for m in matches
    ]


def test_split_by_hand() -> None:
    assert split_by_matches("abcdef", [Match(1, 3, "k"), Match(3, 4, "l")]) == [
        ("a", False),
        ("bc", True),
        ("d", True),
        ("ef", False),
    ]
    assert split_by_matches("ab", []) == [("ab", False)]
    assert split_by_matches("", []) == []


@pytest.mark.parametrize("ranges", [[(2, 4), (3, 5)], [(3, 5), (0, 2)], [(2, 2)], [(-1, 2)], [(5, 7)]])
def test_split_rejects_matches_that_do_not_fit(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="matches has"):
        split_by_matches("abcdef", [Match(start, end, "k") for start, end in ranges])
