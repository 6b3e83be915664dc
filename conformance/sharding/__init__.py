"""Sharded implementations: the ranks that run them, and how their results are gathered."""
