"""Which blocks of vLLM's prefix cache hold a document's approximate KV. Pure logic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daric_rag.engine.scheduling.plan import ChunkLayout


@dataclass(frozen=True)
class PrefixHit:
    """The first `num_tokens` tokens of a request, found in vLLM's prefix cache.

    `block_hashes`: of the request's full blocks, in order; under them the prefix cache finds blocks, and equal ones
    stand at the same place.
    """

    layout: ChunkLayout
    num_tokens: int
    block_hashes: Sequence[bytes]

    def writes_document(self, start: int) -> bool:
        """Whether the request writes a document's own KV to the full block that begins at token `start`."""
        for (first, end), is_live in zip(self.layout.bounds, self.layout.live, strict=True):
            if first <= start < end:
                # At position 0 a chunk's own KV is exact.
                return not is_live and first > 0 and self.num_tokens <= start
        return False


class ApproximateBlocks:
    """Keeps live text from being served with KV that was written for a document of the same tokens.

    Requests of equal settings share prefix-cache blocks by their tokens alone. What is a document in one prompt,
    and approximate there, may be a `Live` piece or part of the question in another, which is promised KV in full
    context. The cache salt cannot tell them apart: vLLM mixes it into a prompt's first block, so prompts that share
    a beginning and go on differently would share nothing any more. Hence the blocks themselves are told apart. The
    other way round nothing is needed: KV in full context is better than what a document asks for.

    A block is known by its id and its hash, so one that was given to somebody else meanwhile is not mistaken. What
    requests in flight are still to write counts as well: vLLM shares a block from the moment that it is allocated.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._written: dict[int, bytes] = {}
        self._in_flight: dict[str, PrefixHit] = {}

    def arrives(
        self, request_id: str, hit: PrefixHit, cached_block: Callable[[bytes], int | None]
    ) -> set[int]:
        """The blocks of a request's prefix hit that lie under its live text and hold, or will hold, a document's KV.

        `cached_block`: the id of the block that the prefix cache has for a hash.
        """
        self._in_flight[request_id] = hit
        others = [other for name, other in self._in_flight.items() if name != request_id]
        found = set()
        for (start, end), is_live in zip(hit.layout.bounds, hit.layout.live, strict=True):
            if not is_live or start >= hit.num_tokens:
                continue
            for number in self._blocks(start, min(end, hit.num_tokens)):
                block_hash = hit.block_hashes[number]
                block_id = cached_block(block_hash)
                if block_id is not None and (
                    self._written.get(block_id) == block_hash
                    or any(self._writes(other, number, block_hash) for other in others)
                ):
                    found.add(block_id)
        return found

    def allocated(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Note what a request in its prefill writes to the blocks that it has behind its prefix hit."""
        hit = self._in_flight[request_id]
        # A block that is not full has no hash: nobody finds it.
        limit = min(len(block_ids), len(hit.block_hashes)) * self._block_size
        for (start, end), is_live in zip(hit.layout.bounds, hit.layout.live, strict=True):
            is_document = not is_live and start > 0
            for number in self._blocks(max(start, hit.num_tokens), min(end, limit)):
                if is_document:
                    self._written[block_ids[number]] = hit.block_hashes[number]
                else:
                    self._written.pop(block_ids[number], None)

    def finished(self, request_id: str) -> None:
        """Drop a request that ended or was aborted."""
        self._in_flight.pop(request_id, None)

    def _writes(self, other: PrefixHit, number: int, block_hash: bytes) -> bool:
        return (
            number < len(other.block_hashes)
            and other.block_hashes[number] == block_hash
            and other.writes_document(number * self._block_size)
        )

    def _blocks(self, start: int, end: int) -> range:
        return range(start // self._block_size, -(-end // self._block_size))
