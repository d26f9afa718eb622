"""Evaluation: what is asked for, how it is run, what is recorded, and how two records compare."""
