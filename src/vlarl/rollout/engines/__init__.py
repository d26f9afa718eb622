"""Engines: what samples decisions for a batch of inputs."""
