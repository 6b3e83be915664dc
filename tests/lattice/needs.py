"""Which clauses a class of the lattice must be judged on, in float32: all that have a form."""

from __future__ import annotations

from collections.abc import Callable

from lattice.axes import CAUSAL_ALWAYS, WITHOUT_LAYERS, Point
from mha.spec import CLAUSES

Need = Callable[[Point], bool]


def _never(point: Point) -> bool:
    return False


def _per_head_weights(point: Point) -> bool:
    return point.weights in ("tuple", "need_weights", "output_attentions", "attribute")


def _causal(point: Point) -> bool:
    return point.causal != "none" or point.per_query


def _cross(point: Point) -> bool:
    return not point.self_attention


def _separate(point: Point) -> bool:
    return not (point.self_attention or point.memory)


def _masked(point: Point) -> bool:
    return point.masked


def _plain(point: Point) -> bool:
    return point.causal not in CAUSAL_ALWAYS


def _not_turned(point: Point) -> bool:
    """Whether a key has no position, so that an exchange of keys changes nothing."""
    return point.rotary == "none"


def _dropout(point: Point) -> bool:
    return point.dropout != "none"


# Families of what no class of the lattice claims.
OF_OTHERS = (
    *("ALB-", "CAP-", "CHK-", "CMP-", "DET-", "DST-", "LEN-", "LSE-", "MEM-"),
    *("PAK-", "SNK-"),
)
OF_DECODING = ("INC-1", "INC-2", "INC-3")
# What a clause needs, where it is not judged for all.
NEEDS: dict[str, Need] = {
    "CFG-1": lambda point: point.heads != "wide",
    "CFG-2": lambda point: point.heads != "wide",
    "CFG-5": lambda point: point.bias == "option",
    "CFG-6": _dropout,
    "SHP-2": _per_head_weights,
    "SHP-8": _cross,
    "SMX-3": lambda point: _has_bias(point, "k") and _not_turned(point) and point.norm == "none",
    "HED-2": lambda point: point.over != "width",
    **dict.fromkeys(
        ("MSK-3", "MSK-4", "MSK-5", "MSK-6", "MSK-7", "MSK-8", "MSK-10", "MSK-12"), _masked
    ),
    "MSK-1": lambda point: point.masked or _causal(point),
    "MSK-2": lambda point: point.masked or _causal(point),
    "MSK-9": lambda point: point.masked and point.fill != "raises",
    **dict.fromkeys(
        ("MSK-11", "MSK-14"), lambda point: point.mask == "additive" and not point.split
    ),
    **dict.fromkeys(("CAU-1", "CAU-2", "CAU-5"), _causal),
    "CAU-3": lambda point: _causal(point) and _cross(point),
    "CAU-4": lambda point: _causal(point) and point.masked,
    "PTH-1": _per_head_weights,
    "PTH-3": _masked,
    "PTH-4": lambda point: _causal(point) and point.masked,
    "PTH-5": _never,
    "STA-9": lambda point: point.projection not in WITHOUT_LAYERS,
    "EQV-2": lambda point: _plain(point) and _not_turned(point),
    **dict.fromkeys(("EQV-3", "EQV-7"), _not_turned),
    "EQV-8": _cross,
    **dict.fromkeys(("NUM-2", "NUM-3", "NUM-4", "NUM-7", "NUM-8", "GRD-2", "GRD-8"), _never),
    "GRD-3": _masked,
    "GRD-6": lambda point: point.mask == "additive" and not point.split,
    "GRD-7": lambda point: _has_bias(point, "k") and _not_turned(point) and point.norm == "none",
    "GRD-9": lambda point: point.differentiates_twice,
    **dict.fromkeys(("DRP-1", "DRP-2", "DRP-3"), _dropout),
    "DRP-5": lambda point: point.dropout == "weights",
    "DRP-4": lambda point: _dropout(point) and _per_head_weights(point),
    **{clause: _never for clause in CLAUSES if clause.startswith(OF_OTHERS)},
    **dict.fromkeys(("SCL-1", "VAL-1", "XAT-1"), _never),
    "GQA-1": lambda point: point.heads == "grouped",
    "ROT-1": lambda point: point.rotary != "none",
    "QKN-1": lambda point: point.norm != "none",
    **dict.fromkeys(("WIN-1", "WIN-2", "EFF-1"), lambda point: point.window != "none"),
    **dict.fromkeys(OF_DECODING, lambda point: point.decode != "none"),
    "INC-2": lambda point: point.decode == "chunks",
    "INC-3": _never,
}


def _has_bias(point: Point, role: str) -> bool:
    return point.bias in ("all", "option") or (point.bias != "none" and role in point.bias)


def needed_clauses(point: Point) -> set[str]:
    """Return the clauses that a point must be judged on."""
    return {clause for clause in CLAUSES if NEEDS.get(clause, lambda point: True)(point)}


def kind_of(point: Point) -> str:
    """Return what kind of subject a point is, by what its calls can express."""
    inputs, masks, causal = "cross", "no mask", "not causal"
    if point.self_attention:
        inputs = "self"
    elif point.memory:
        inputs = "memory"
    if point.masked:
        masks = "masks" if point.per_query else "padding"
    if point.causal in CAUSAL_ALWAYS:
        causal = "always causal"
    elif _causal(point):
        causal = "causal"
    return f"{inputs}, {masks}, {causal}"
