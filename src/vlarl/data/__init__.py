"""Data: demonstrations, and supervised training on them."""
