"""Rules that options must follow together, by section."""
