"""Document texts reach every engine, whichever comes first."""

import gc
from collections.abc import Sequence

from daric_rag.known_documents import KnownDocuments, attach_engine
from daric_rag.retrieval.hooks import notify


class Listener:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def register(self, texts: Sequence[str]) -> None:
        self.texts += texts


def test_texts_reach_engines_attached_before_and_after() -> None:
    known = KnownDocuments()
    early, late = Listener(), Listener()
    known.attach(early)
    known.register(["a", "b"])
    known.attach(late)
    known.register(["c"])
    assert early.texts == late.texts == ["a", "b", "c"]


def test_attaching_twice_tells_once() -> None:
    known = KnownDocuments()
    known.register(["a"])
    listener = Listener()
    known.attach(listener)
    known.attach(listener)
    assert listener.texts == ["a"]


def test_old_texts_are_dropped_above_the_budget() -> None:
    known = KnownDocuments(max_bytes=3000)
    texts = [f"{number}" * 1000 for number in range(4)]
    known.register(texts[:2])
    known.register([texts[0]])  # seen again: text 1 is the oldest now
    known.register([texts[2]])
    listener = Listener()
    known.attach(listener)
    assert listener.texts == [texts[0], texts[2]]


def test_engines_are_held_weakly() -> None:
    known = KnownDocuments()
    listener = Listener()
    known.attach(listener)
    del listener
    gc.collect()
    assert len(known._engines) == 0
    known.register(["a"])


def test_retrieval_makes_texts_known_with_and_without_hook() -> None:
    listener = Listener()
    attach_engine(listener)
    seen: list[str] = []
    notify(None, ["found without a hook"])
    notify(seen.extend, ["found with a hook"])
    assert listener.texts[-2:] == ["found without a hook", "found with a hook"]
    assert seen == ["found with a hook"]
