"""What runs in the worker: the passes of a step, and KV on its way between blocks and records."""
