"""Prompts as one-step environments: an episode is one prompt and one text."""
