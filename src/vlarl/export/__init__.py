"""Export of checkpoints: merging adapters, model cards, pushing to the hub."""
