"""Live text never lies on blocks that a document's KV was written to; all other sharing stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.scheduling.approximate_blocks import ApproximateBlocks, PrefixHit
from daric_rag.engine.scheduling.plan import ChunkLayout
from daric_rag.engine.selection import SelectionSettings

BLOCK = 4
# A prompt: chunks of one to three blocks with a letter as their tokens, each live or not.
CHUNKS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.booleans()), min_size=1, max_size=4)


class PrefixCache:
    """vLLM's: block ids by the hash of all tokens up to the block's end; what is evicted is found no more."""

    def __init__(self) -> None:
        self.by_hash: dict[bytes, int] = {}
        self.contents: dict[int, bool] = {}  # whether the KV in a block is approximate
        self.next_id = 0

    def hit(self, hashes: list[bytes]) -> list[int]:
        found = []
        for one in hashes:
            if one not in self.by_hash:
                break
            found.append(self.by_hash[one])
        return found


@given(st.lists(st.tuples(CHUNKS, st.integers(0, 3)), min_size=1, max_size=6))
def test_live_text_is_never_served_with_a_documents_kv(
    prompts: list[tuple[list[tuple[str, int, bool]], int]],
) -> None:
    """Each prompt is computed `late` prompts after it was given its blocks, as in a chunked prefill."""
    cache, blocks = PrefixCache(), ApproximateBlocks(BLOCK)
    waiting: list[tuple[int, str, list[int]]] = []
    for moment, (chunks, late) in enumerate(prompts):
        name = str(moment)
        layout, tokens = lay_out(chunks)
        hashes = [bytes(tokens[: end + BLOCK]) for end in range(0, len(tokens), BLOCK)]
        hit = cache.hit(hashes)
        before = len(hit)
        while under := blocks.arrives(name, prefix_hit(layout, hit, hashes), cache.by_hash.get):
            cache.by_hash = {key: block for key, block in cache.by_hash.items() if block not in under}
            hit = cache.hit(hashes)
        for number in range(len(hit)):
            assert not (is_live(layout, number) and cache.contents[hit[number]])
        # What it does share is not given up: only live text on approximate blocks shortens a hit.
        assert len(hit) == before or is_live(layout, len(hit))
        table = [*hit, *range(cache.next_id, cache.next_id + len(hashes) - len(hit))]
        cache.next_id += len(hashes)
        for number in range(len(hit), len(hashes)):
            cache.by_hash[hashes[number]] = table[number]
            cache.contents[table[number]] = (
                not is_live(layout, number) and number * BLOCK >= layout.bounds[0][1]
            )
        waiting.append((moment + late, name, table))
        for _, done, blocks_of in [item for item in waiting if item[0] <= moment]:
            blocks.allocated(done, blocks_of)
            blocks.finished(done)
        waiting = [item for item in waiting if item[0] > moment]


def prefix_hit(layout: ChunkLayout, hit: list[int], hashes: list[bytes]) -> PrefixHit:
    return PrefixHit(layout, len(hit) * BLOCK, hashes)


def lay_out(chunks: list[tuple[str, int, bool]]) -> tuple[ChunkLayout, list[int]]:
    bounds, tokens = [], []
    for letter, size, _ in chunks:
        bounds.append((len(tokens), len(tokens) + size * BLOCK))
        tokens += [ord(letter)] * (size * BLOCK)
    live = tuple(live for _, _, live in chunks)
    return ChunkLayout.select(tuple(bounds), live, SelectionSettings("none")), tokens


def is_live(layout: ChunkLayout, block: int) -> bool:
    return any(
        live and start <= block * BLOCK < end
        for (start, end), live in zip(layout.bounds, layout.live, strict=True)
    )


def test_a_block_that_somebody_else_has_now_is_not_mistaken() -> None:
    blocks = ApproximateBlocks(BLOCK)
    layout, _ = lay_out([("a", 1, False), ("b", 1, False), ("b", 1, True)])
    blocks.arrives("first", PrefixHit(layout, 0, [b"1", b"2", b"3"]), {}.get)
    blocks.allocated("first", [7, 8, 9])
    blocks.finished("first")
    other, _ = lay_out([("a", 1, False), ("b", 2, True)])
    table = {b"1": 7, b"2": 8, b"other": 8}
    for num_tokens, hashes, expected in (
        (2 * BLOCK, [b"1", b"2"], {8}),
        (2 * BLOCK, [b"1", b"other"], set()),
        (BLOCK, [b"1", b"2"], set()),
    ):
        assert blocks.arrives("other", PrefixHit(other, num_tokens, hashes), table.get) == expected
