"""What each class of the lattice claims, and the one line that declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lattice.axes import CAUSAL_ALWAYS, Point
from lattice.head_axes import GIVEN_TABLES
from lattice.projections import projections_of
from lattice.source import target_name
from mha.implementations.adapters.construction import MAX_LENGTH
from mha.spec import QkNorm, Rotary, Rounding, Scores, Sizes, Window

EMPTY_ROWS = {
    "spread": "uniform",
    "lowest": "uniform",
    "1e9": "uniform",
    "raises": "error",
    "nan": "nan",
}
IN_SINGLE = Rounding(softmax_in_float32=True)
# Claims that inference does not find; it leaves them at their defaults.
NOT_INFERRED = ("second_gradients", "rounding", "scale", "dtypes", "decodes")
ROTATION_LAYOUTS = {"cos_sin": "l r", "pair": "b l r"}
PARTS = {"whole": 1.0, "half": 0.5, "quarter": 0.25}
WINDOWS = {
    "built_count": Window("count", unbounded=None),
    "built_left": Window("left"),
    "call_count": Window("count", unbounded=None),
    "call_pair": Window("left_right"),
}


def claims_of(point: Point) -> dict[str, Any]:
    """Return the claims of a point that differ from `Claims()`."""
    claims = _mask_claims(point) if point.masked else {"masks": ()}
    if point.self_attention or point.memory:
        claims["cross_attention"] = "memory" if point.memory else False
    if point.causal in CAUSAL_ALWAYS:
        claims["always_causal"] = True
    elif point.causal == "none" and not point.per_query:
        claims["causal"] = None
    elif point.causal == "flag_bottom_right":
        claims["causal"] = "bottom_right"
    claims |= _head_claims(point)
    if point.tabled and not point.self_attention:  # a table of so many keys
        claims["sizes"] = Sizes(max_length=MAX_LENGTH)
    if point.may_be_empty and point.fill in EMPTY_ROWS:
        claims["empty_row"] = EMPTY_ROWS[point.fill]
    if point.weights not in ("tuple", "need_weights", "output_attentions", "attribute"):
        claims["returns_weights"] = False
    if point.scale == "unscaled":
        claims["scale"] = 1.0
    claims |= (
        {}
        if point.bias == "option"
        else {"bias": {{"all": True, "none": False}.get(point.bias, point.bias)}}
    )
    claims |= {"none": {}, "weights": {"dropout": True}}.get(
        point.dropout, {"dropout": point.dropout}
    )
    claims |= {"equal": {}, "grouped": {"grouped_query": True}, "wide": {"own_head_dim": True}}[
        point.heads
    ]
    if point.differentiates_twice:
        claims["second_gradients"] = True
    return claims | ({"rounding": IN_SINGLE} if point.softmax == "float32" else {})


def _head_claims(point: Point) -> dict[str, Any]:
    """Return the claims about what becomes of queries and keys, and about windows."""
    claims: dict[str, Any] = {}
    if point.rotary != "none":
        claims["rotary"] = rotary_of(point)
    if point.norm != "none":
        claims["qk_norm"] = norm_of(point)
    if point.window != "none":
        alignment = "top_left" if point.causal == "none" and not point.per_query else None
        claims["scores"] = Scores(window=WINDOWS[point.window], alignment=alignment)
    if point.decode != "none":
        claims["decodes"] = "chunks" if point.decode == "chunks" else True
    return claims


def rotary_of(point: Point) -> Rotary:
    """Return the rotation of a point that has one."""
    rotary = Rotary(part=PARTS[point.part])
    if point.base == "option":
        rotary = replace(rotary, base=500000.0)
    if point.rotary in ("interleaved", "complex"):
        rotary = replace(rotary, pairs="interleaved")
    if point.rotary == "half_backward":
        rotary = replace(rotary, direction="backward")
    if point.tables in GIVEN_TABLES:
        rotary = replace(rotary, tables="given")
    return rotary


def norm_of(point: Point) -> QkNorm:
    """Return the norm of a point that has one."""
    eps = {"1e-6": 1e-6, "1e-5": 1e-5, "option": 1e-5, "dtype": None}[point.eps]
    weight: dict[str, Any] = {"scale": "scale", "offset": "offset", "none": None}
    return QkNorm(
        "layer" if point.norm == "layer" else "rms",
        "width" if point.over == "width" else "head",
        before_rotary=point.place == "before",
        eps=eps,
        weight=weight[point.norm_weight],
    )


def _mask_claims(point: Point) -> dict[str, Any]:
    """Return the claims about masks of a point that takes one."""
    claims: dict[str, Any] = (
        {"masks": {"bool", "float"}} if point.mask == "additive" and not point.split else {}
    )
    if point.mask != "none" and point.shape == "rank 4":
        claims["mask_ranks"] = {4}
    differs = {
        "per_head_mask": point.per_head,
        "per_query_mask": point.per_query,
        "joint_masks": not point.split,
        "per_item_mask": point.per_item,
    }
    return claims | {name: False for name, free in differs.items() if not free}


def options_of(point: Point) -> dict[str, Any]:
    """Return the arguments for `from_module`, except the claims."""
    options: dict[str, Any] = {"parameters": projections_of(point).paths}
    if point.mask in ("drop", "additive"):
        options["mask"] = point.mask
    if point.mask == "numbers":
        options["mask_numbers"] = True
    if not point.masked:
        options["mask"] = None
    if point.mask != "none" and point.shape not in ("broadcast", "rank 4"):
        options["mask_shape"] = point.shape
    if point.mask == "none" and point.padding != "none":
        options |= {"mask_shape": "b s"} | ({"mask": "drop"} if point.padding == "drop" else {})
    elif point.padding != "none":
        options["padding"] = point.padding
    if point.layout != "b l d":
        options["layout"] = point.layout
    if point.tables in ROTATION_LAYOUTS:
        options["rotation_layout"] = ROTATION_LAYOUTS[point.tables]
    if point.weights == "attribute":
        options["weights"] = "attn"
    return options


def declaration_of(point: Point) -> str:
    """Return the line that declares the class, below it."""
    options = {**options_of(point), "claims": _Call("Claims", claims_of(point))}
    return f"implementation = {_Call('from_module', options, (target_name(point),))}"


class _Call:
    """A call, as code."""

    def __init__(
        self, name: str, options: Mapping[str, object], arguments: tuple[str, ...] = ()
    ) -> None:
        self.name, self.options, self.arguments = name, options, arguments

    def __repr__(self) -> str:
        options = (f"{name}={_code(value)}" for name, value in self.options.items())
        return f"{self.name}({', '.join([*self.arguments, *options])})"


def _code(value: object) -> str:
    """Return the code of a value, with sets in a fixed order."""
    if value is IN_SINGLE:
        return "Rounding(softmax_in_float32=True)"
    if isinstance(value, set):
        return f"{{{', '.join(map(repr, sorted(value, key=str)))}}}"
    return repr(value)
