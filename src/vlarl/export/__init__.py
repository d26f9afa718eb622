"""Checkpoints that leave: to the hub."""
