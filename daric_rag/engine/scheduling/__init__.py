"""What runs in the engine core: look-up, planning, and the index of what is stored."""
