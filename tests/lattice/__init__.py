"""A lattice of right classes: attention as published code writes it, generated from combinations of
conventions.
"""
