"""Adapters: what others wrote, seen through the protocol of `mha.spec`."""
