"""Evaluation: what is requested, how it is run, what is recorded, and how two records compare."""
