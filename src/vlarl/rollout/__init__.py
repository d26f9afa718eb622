"""Rollout: tasks in, trajectories out."""
