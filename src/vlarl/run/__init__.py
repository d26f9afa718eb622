"""A run: its parts, how they are put together, and its session."""
