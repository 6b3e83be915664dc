"""Adapters of other packages' attention; `make ecosystem` judges them against the packages
themselves.
"""
