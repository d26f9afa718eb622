"""Training: estimates in, better weights out."""
