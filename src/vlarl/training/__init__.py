"""Training: from batches of trajectories to updated weights, and checkpoints."""
