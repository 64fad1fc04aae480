"""Everything that touches vLLM, and the pure logic beneath it."""
