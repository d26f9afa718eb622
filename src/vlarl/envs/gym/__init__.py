"""Any Gymnasium environment, single or batched."""
