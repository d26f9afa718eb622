"""Engines, which sample decisions for a batch of inputs."""
