"""Inference: how to build and call a plain module class, read from its names and shapes, and tried on small inputs."""
