"""Image operations that match the original data pipelines pixel for pixel."""
