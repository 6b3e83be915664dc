"""Sharded implementations: the ranks that run them, and an attention that gathers what they return."""
