"""Recognition: documents whose text was seen before are found verbatim in a prompt.

Every registered document is represented by one *fingerprint*: the hash of a window of `min_chars` characters
somewhere in it. A search hashes all windows of the prompt at once (rolling polynomial hash, NumPy), keeps
those that are a fingerprint, checks the hash of the whole document at the place where it would have to be,
and compares the text itself only for what it is about to return. So the work is linear in the prompt,
whatever the number of documents.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import numpy as np
from numpy.typing import NDArray

__all__ = ["Match", "Recognizer", "document_key", "split_by_matches"]

UInt64Array = NDArray[np.uint64]
Int64Array = NDArray[np.int64]

_HASH_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2^64
_HASH_BASE_INVERSE = pow(_HASH_BASE, -1, 1 << 64)
_KEPT_POWERS = 1 << 17  # characters; powers for longer texts are computed when needed, not kept

_FILTER_BITS = 18
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)
# Python objects, dictionary slots and key of one registered document, beside its text.
_ENTRY_OVERHEAD_BYTES = 500
# Bound on the (place, document) pairs examined in one search. Reached only by texts made for it, such as
# thousands of documents that repeat one character; then some of those documents are not recognised.
_MAX_CANDIDATES = 100_000


@dataclass(frozen=True)
class Match:
    """A registered document in a prompt: `prompt[start:end]` is its stripped text."""

    start: int
    end: int
    document_key: str


@dataclass(frozen=True)
class _Entry:
    text: str
    key: str
    fingerprint: int
    slot: int  # column of `Recognizer._columns`


def document_key(text: str) -> str:
    """Return the key (32 hex digits) of a document: a hash of its text without surrounding white space."""
    return blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def split_by_matches(text: str, matches: Sequence[Match]) -> list[tuple[str, bool]]:
    """Cut a text at its matches: (piece, is_document) in order, no empty pieces, no character lost.

    Raises ValueError if the matches are not in order, overlap, or reach outside the text.
    """
    pieces: list[tuple[str, bool]] = []
    position = 0
    for match in matches:
        if not position <= match.start < match.end <= len(text):
            raise ValueError(
                f"matches has [{match.start}, {match.end}); allowed here: a non-empty range "
                f"within [{position}, {len(text)})"
            )
        pieces += [(text[position : match.start], False), (text[match.start : match.end], True)]
        position = match.end
    pieces.append((text[position:], False))
    return [(piece, is_document) for piece, is_document in pieces if piece]


class Recognizer:
    """Remembers document texts and finds them in prompts. All methods may be called from any thread.

    `max_bytes`: bytes of registered texts and their book-keeping; above it the least recently registered or
    recognised documents are forgotten (besides, a fixed 1 MiB filter). `min_chars`: shorter documents are
    ignored; also the width of the fingerprint windows, in characters.

    Raises ValueError for a `max_bytes` below 0 or a `min_chars` below 1.
    """

    def __init__(self, max_bytes: int = 64 << 20, min_chars: int = 48) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; allowed: an integer of at least 0")
        if min_chars < 1:
            raise ValueError(f"min_chars is {min_chars}; allowed: an integer of at least 1")
        self.max_bytes = max_bytes
        self.min_chars = min_chars
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by key, least recently used first
        self._slots: list[_Entry | None] = []
        self._free_slots: list[int] = []
        self._columns = np.zeros(
            (3, 1024), np.uint64
        )  # by slot: fingerprint's offset, length, hash of the whole
        self._buckets: dict[int, list[int]] = {}  # fingerprint -> slots
        self._filter = np.zeros(1 << _FILTER_BITS, np.int32)  # fingerprints by their top bits, counted
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of documents remembered."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes counted against `max_bytes`."""
        return self._num_bytes

    def register(self, texts: Iterable[str]) -> list[str]:
        """Remember documents, without surrounding white space, and return the key of each.

        Too short ones and ones larger than the whole budget get a key too, but are not remembered.
        """
        keys = []
        for text in texts:
            stripped = text.strip()
            key = document_key(stripped)
            keys.append(key)
            with self._lock:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    continue
            if len(stripped) >= self.min_chars:
                self._add(stripped, key)
        return keys

    def forget(self, texts: Iterable[str]) -> int:
        """Forget documents; unknown ones are passed over. Return how many were remembered."""
        keys = [document_key(text) for text in texts]
        with self._lock:
            known = {key for key in keys if key in self._entries}
            for key in known:
                self._remove(key)
        return len(known)

    def clear(self) -> None:
        """Forget all documents."""
        with self._lock:
            for key in list(self._entries):
                self._remove(key)

    def find(self, text: str) -> list[Match]:
        """Return the remembered documents in `text`, in order, without overlaps.

        Leftmost first; of several that start at the same place, the longest. So of a document that contains
        another the whole is found, and the inner one wherever it stands alone.
        """
        if len(text) < self.min_chars or not self._entries:
            return []
        hashes = _PrefixHashes(text)
        windows = hashes.windows(self.min_chars)
        with self._lock:
            positions, slots = self._candidates(windows)
            starts, lengths, slots = self._in_place(positions, slots, hashes)
            entries = [self._slots[slot] for slot in slots.tolist()]
        matches = _leftmost_longest(text, starts, lengths, entries)
        with self._lock:
            for match in matches:
                if match.document_key in self._entries:
                    self._entries.move_to_end(match.document_key)
        return matches

    def _candidates(self, windows: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """(position, slot) of every fingerprint in the prompt, at most `_MAX_CANDIDATES`."""
        positions = np.flatnonzero(self._filter[windows >> _FILTER_SHIFT])
        buckets = [self._buckets.get(value, ()) for value in windows[positions].tolist()]
        sizes = np.fromiter(map(len, buckets), np.int64, len(buckets))
        # So that crowded buckets use up the bound last, and never at the cost of ordinary documents.
        order = np.argsort(sizes, kind="stable")
        order = order[np.cumsum(sizes[order]) <= _MAX_CANDIDATES]
        slots = np.fromiter(chain.from_iterable(buckets[hit] for hit in order.tolist()), np.int64)
        return np.repeat(positions[order], sizes[order]), slots

    def _in_place(
        self, positions: Int64Array, slots: Int64Array, hashes: "_PrefixHashes"
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(start, length, slot) of the candidates that have room and, as a whole, the right hash."""
        starts = positions - self._columns[0, slots].astype(np.int64)
        lengths = self._columns[1, slots].astype(np.int64)
        room = np.flatnonzero((starts >= 0) & (starts + lengths <= hashes.length))
        starts, lengths, slots = starts[room], lengths[room], slots[room]
        right = np.flatnonzero(hashes.of(starts, starts + lengths) == self._columns[2, slots])
        return starts[right], lengths[right], slots[right]

    def _add(self, text: str, key: str) -> None:
        hashes = _PrefixHashes(text)
        windows = hashes.windows(self.min_chars)
        num_bytes = _entry_bytes(text)
        with self._lock:
            if key in self._entries or num_bytes > self.max_bytes:
                return
            # The window whose fingerprint the fewest other documents have: documents with a common header, or
            # that differ in a few characters only, still get fingerprints of their own.
            offset = int(np.argmin(self._filter[windows >> _FILTER_SHIFT]))
            fingerprint = int(windows[offset])
            slot = self._take_slot()
            entry = _Entry(text, key, fingerprint, slot)
            self._slots[slot] = self._entries[key] = entry
            self._columns[:, slot] = (offset, len(text), hashes.whole)
            self._buckets.setdefault(fingerprint, []).append(slot)
            self._filter[fingerprint >> int(_FILTER_SHIFT)] += 1
            self._num_bytes += num_bytes
            while self._num_bytes > self.max_bytes:
                self._remove(next(iter(self._entries)))

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._slots.append(None)
        if len(self._slots) > self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        return len(self._slots) - 1

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        bucket = self._buckets[entry.fingerprint]
        bucket.remove(entry.slot)
        if not bucket:
            del self._buckets[entry.fingerprint]
        self._filter[entry.fingerprint >> int(_FILTER_SHIFT)] -= 1
        self._slots[entry.slot] = None
        self._free_slots.append(entry.slot)
        self._num_bytes -= _entry_bytes(entry.text)


def _entry_bytes(text: str) -> int:
    return sys.getsizeof(text) + _ENTRY_OVERHEAD_BYTES


def _leftmost_longest(
    text: str, starts: Int64Array, lengths: Int64Array, entries: Sequence[_Entry | None]
) -> list[Match]:
    """Non-overlapping matches; the only place where a text is compared character by character."""
    matches: list[Match] = []
    position = 0
    for index in np.lexsort((-lengths, starts)).tolist():
        start, entry = int(starts[index]), entries[index]
        if start >= position and entry is not None and text.startswith(entry.text, start):
            position = start + len(entry.text)
            matches.append(Match(start, position, entry.key))
    return matches


class _PrefixHashes:
    """Hashes of any substrings of one text: sum of mixed(character k) * base^k, modulo 2^64, from k = 0."""

    def __init__(self, text: str) -> None:
        # "surrogatepass": a lone surrogate is a character like any other.
        characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        powers, self._inverse_powers = _POWERS.up_to(len(text))
        self.length = len(text)
        self._sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum(_mixed(characters) * powers, out=self._sums[1:])

    @property
    def whole(self) -> int:
        return int(self._sums[-1])

    def windows(self, width: int) -> UInt64Array:
        """Hashes of text[k:k + width] for every k; width is at most the text's length."""
        count = len(self._sums) - width
        return (self._sums[width:] - self._sums[:count]) * self._inverse_powers[:count]

    def of(self, starts: Int64Array, ends: Int64Array) -> UInt64Array:
        """Hashes of the non-empty substrings text[starts[k]:ends[k]]."""
        return (self._sums[ends] - self._sums[starts]) * self._inverse_powers[starts]


class _Powers:
    """base^0, base^1, ... and their inverses modulo 2^64, kept up to a bounded length."""

    def __init__(self) -> None:
        self._kept = self._compute(0)

    def up_to(self, length: int) -> tuple[UInt64Array, UInt64Array]:
        kept = self._kept  # one read: another thread may replace it
        if len(kept[0]) <= length:
            kept = self._compute(max(length, 2 * len(kept[0]) if length < _KEPT_POWERS else 0))
            if length < _KEPT_POWERS:
                self._kept = kept
        return kept[0][:length], kept[1]

    @staticmethod
    def _compute(length: int) -> tuple[UInt64Array, UInt64Array]:
        factors = np.empty((2, length + 1), np.uint64)
        factors[:, 0] = 1
        factors[0, 1:] = _HASH_BASE
        factors[1, 1:] = _HASH_BASE_INVERSE
        powers = np.cumprod(factors, axis=1, dtype=np.uint64)
        return powers[0], powers[1]


_POWERS = _Powers()


def _mixed(characters: UInt64Array) -> UInt64Array:
    """Spread character codes over 64 bits (the finaliser of SplitMix64), or short texts would hash alike."""
    x = (characters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64Array = x ^ (x >> np.uint64(31))
    return result
