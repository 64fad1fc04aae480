"""Which blocks vLLM has promised to others before their KV is there. Pure logic.

vLLM enters a block in its prefix cache when it schedules the tokens of the block. That is right for a plain
prefill, which computes them in the same step. A request with reuse that is stopped inside a chunk leaves the
blocks of that chunk to a later step, and until then nobody may read them.
"""

from __future__ import annotations

from collections.abc import Sequence


class UnfilledBlocks:
    """The blocks that requests hold but no plan has filled in yet; shared ones are filled once, by the first.

    A block leaves by `fill`, whoever fills it, or with the last of its holders.
    """

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        # Per request its blocks that were unfilled after its last step, in prompt order.
        self._pending: dict[str, tuple[int, ...]] = {}

    def num_filled(self, block_ids: Sequence[int]) -> int:
        """Leading blocks of a prefix hit that may be read."""
        for number, block in enumerate(block_ids):
            if block in self._holders:
                return number
        return len(block_ids)

    def num_filled_by_others(self, request_id: str) -> int:
        """Blocks, from the first that the request left unfilled, that others have filled in since."""
        return self.num_filled(self._pending.get(request_id, ()))

    def fill(self, block_ids: Sequence[int]) -> None:
        """A plan of this step fills these blocks: plans made after it may read them."""
        for block in block_ids:
            self._holders.pop(block, None)

    def hold(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The blocks that the request holds and leaves unfilled after its step, in prompt order."""
        pending = tuple(block_ids)
        self.drop(request_id)
        if pending:
            self._pending[request_id] = pending
        for block in pending:
            self._holders.setdefault(block, set()).add(request_id)

    def drop(self, request_id: str) -> list[int]:
        """The request gives its blocks back; returns those that nobody is going to fill in any more."""
        orphans = []
        for block in self._pending.pop(request_id, ()):
            holders = self._holders.get(block)
            if holders is None or request_id not in holders:
                continue
            holders.discard(request_id)
            if not holders:
                del self._holders[block]
                orphans.append(block)
        return orphans

    def __len__(self) -> int:
        return len(self._holders)
