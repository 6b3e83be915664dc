"""Inference: how a plain class is built and called, from names, shapes and trial runs."""
