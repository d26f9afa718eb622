"""Rules for combinations of options, by section."""
