"""Inference: how to build and call a plain module class, from its names and shapes and from trial
runs.
"""
