"""Adapters: modules and kernels that know nothing of the contract, as implementations of it."""
