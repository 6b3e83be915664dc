"""The layouts that a weight or a bias of a role may have in its shape, as einops patterns."""

from __future__ import annotations

from itertools import permutations

from mha.implementations.adapters.loading import groups_of
from mha.implementations.inference.roles import Held
from mha.spec import Config

# Of the rows of stacked projections, beside the contract's (r h e): by heads.
STACKED_ORDERS = ("(h r e)", "(h e r)")


def layouts_of(held: Held, role: str, config: Config) -> list[str]:
    """Return the layouts that a weight or bias of a role may have in its shape.

    The most common is first; an empty pattern is the contract's own layout.
    """
    stacked, d = len(role), config.d_model
    shared = rows_if_shared(role, config)
    if shared:
        return _of_shared(held, shared, d)
    if held.kind == "b":
        return _of_bias(held.shape, stacked, config)
    if held.shape in ((stacked * d, d), (d, stacked * d)):
        return _of_matrix(held, stacked, d)
    return _of_split(held.shape, role, config)


def rows_if_shared(role: str, config: Config) -> int:
    """Return the rows of what holds a key or value that all heads share; 0 if it holds none."""
    if config.kv_heads == config.n_heads or {"k", "v"}.isdisjoint(role):
        return 0
    key_heads = (role.count("k") + role.count("v")) * config.kv_heads
    return (key_heads + role.count("q") * config.n_heads) * config.head_dim


def _of_shared(held: Held, rows: int, d: int) -> list[str]:
    """Return the layouts of what has so many rows.

    It may be transposed if it is a parameter of one role.
    """
    if held.shape in ((rows,), (rows, d)):
        return [""]
    if held.shape == (d, rows) and held.kind == "w" and not held.is_layer:
        return ["o i -> i o"]
    return []


def _of_bias(shape: tuple[int, ...], stacked: int, config: Config) -> list[str]:
    h, e, d = config.n_heads, config.head_dim, config.d_model
    contract = "(r h e)" if stacked > 1 else "(h e)"
    known = {
        (stacked * d,): contract,
        (stacked, d): "r (h e)",
        (stacked, h, e): "r h e",
        (h, e): "h e",
    }
    axes = known.get(tuple(size for size in shape if size != 1))
    if axes is None:
        return []
    if axes == contract and len(shape) == 1:
        if stacked == 1:
            return [""]
        return ["", *(f"{contract} -> {order}" for order in STACKED_ORDERS)]
    named, order = iter(groups_of(axes)), []
    for size in shape:
        order.append("1" if size == 1 else next(named))
    return [f"{contract} -> {' '.join(order)}"]


def _of_matrix(held: Held, stacked: int, d: int) -> list[str]:
    """Return the layouts of a matrix of one projection, or of the rows of several."""
    as_it_is = held.shape == (stacked * d, d)
    # A parameter may be multiplied from either side.
    is_transposed = held.shape == (d, stacked * d) and not held.is_layer
    patterns = []
    if as_it_is:
        patterns.append("")
        if stacked > 1:
            patterns += [f"(r h e) d -> {order} d" for order in STACKED_ORDERS]
    if is_transposed and stacked == 1:
        patterns.append("o i -> i o")
    elif is_transposed:
        patterns += [f"(r h e) d -> d {order}" for order in ("(r h e)", *STACKED_ORDERS)]
    return patterns


def _of_split(shape: tuple[int, ...], role: str, config: Config) -> list[str]:
    """Return the layouts of a weight with an axis for heads, for stacked projections, or both."""
    contract = "d (h e)" if role == "o" else "(h e) d"
    orders = [*permutations(["h", "e", "d"])]
    if len(role) > 1:
        contract = "(r h e) d"
        orders = [*permutations(["r", "h", "e", "d"]), *permutations(["r", "(h e)", "d"])]
    sizes = {
        "d": config.d_model,
        "h": config.n_heads,
        "e": config.head_dim,
        "(h e)": config.d_model,
        "r": len(role),
    }
    patterns = []
    for order in orders:
        if shape == tuple(sizes[axis] for axis in order):
            patterns.append(f"{contract} -> {' '.join(order)}")
    return patterns
