"""The axes of what changes queries and keys, and of windows, which later points have too."""

from __future__ import annotations

from collections.abc import Mapping

# The values of each axis; the first one is that of a class without it.
HEAD_AXES: dict[str, tuple[str, ...]] = {
    "rotary": ("none", "half", "half_backward", "interleaved", "complex"),
    "part": ("whole", "half", "quarter"),
    "tables": ("inside", "inv_freq", "buffer", "cos_sin", "pair", "freqs", "places"),
    "base": ("fixed", "option"),
    "decode": ("none", "one", "chunks"),
    "norm": ("none", "rms", "layer"),
    "over": ("head", "width"),
    "place": ("before", "after"),
    "norm_weight": ("scale", "offset", "none"),
    "eps": ("1e-6", "1e-5", "option", "dtype"),
    "window": ("none", "built_count", "built_left", "call_count", "call_pair"),
}
# Tables that each call is given.
GIVEN_TABLES = ("cos_sin", "pair", "freqs")
GIVEN = (*GIVEN_TABLES, "places")
# Tables that the class makes, for any position.
OWN_TABLES = ("inside", "inv_freq", "buffer")
BUILT_WINDOWS = ("built_count", "built_left")
# Values of the axes of `axes`.
ONE_INPUT = ("x", "hidden_states")
CONFIGS = ("config", "hf_config")
NORMED_AS_ONE = ("q_proj", "W_q", "to_q", "query", "linears")


def _rotary(p: Mapping[str, str]) -> bool:
    """Without a rotation there is nothing to say of one."""
    if p.get("rotary") != "none":
        return True
    plain = {"part": "whole", "tables": "inside", "base": "fixed", "place": "before"}
    return all(p.get(axis, value) == value for axis, value in plain.items())


def _tables(p: Mapping[str, str]) -> bool:
    """Complex numbers are tables of their own; given ones are of one input, and of one call."""
    rotary, tables = p.get("rotary"), p.get("tables")
    if rotary is not None and tables is not None:
        if rotary == "complex" and tables not in ("inside", "buffer", "freqs"):
            return False
        if rotary != "complex" and tables == "freqs":
            return False
    if tables not in GIVEN:
        return True
    return p.get("inputs", "x") in ONE_INPUT and p.get("decode", "none") == "none"


def _base(p: Mapping[str, str]) -> bool:
    """A base is an argument of a constructor, of a class that makes its own tables."""
    if p.get("base") != "option":
        return True
    return p.get("tables") not in GIVEN_TABLES and p.get("words") not in CONFIGS


def _norm(p: Mapping[str, str]) -> bool:
    """Without a norm there is nothing to say of one; a layer norm has no offset."""
    norm, weight, eps = p.get("norm"), p.get("norm_weight"), p.get("eps")
    if norm == "none":
        plain = {"over": "head", "place": "before", "norm_weight": "scale", "eps": "1e-6"}
        return all(p.get(axis, value) == value for axis, value in plain.items())
    if norm == "layer" and (weight == "offset" or eps == "dtype"):
        return False
    if eps == "option" and p.get("words") in CONFIGS:
        return False
    return not (eps == "dtype" and weight == "offset")


def _norm_of_all_heads(p: Mapping[str, str]) -> bool:
    """All heads are normed at once before they are split, with a weight for each column."""
    if p.get("over") != "width":
        return True
    return (
        p.get("projection", "q_proj") in NORMED_AS_ONE
        and p.get("place", "before") == "before"
        and p.get("norm_weight", "scale") == "scale"
    )


def _decode(p: Mapping[str, str]) -> bool:
    """What is decoded is causal; its inputs are as in the contract, and there is no window."""
    if p.get("decode") in (None, "none"):
        return True
    return (
        p.get("causal") not in ("none", "flag_bottom_right")
        and p.get("layout", "b l d") == "b l d"
        and p.get("window", "none") == "none"
    )


def _window(p: Mapping[str, str]) -> bool:
    """A window is an argument of a constructor, or of a call; with it, a row may be empty."""
    window = p.get("window")
    if window in (None, "none"):
        return True
    if window in BUILT_WINDOWS and p.get("words") in CONFIGS:
        return False
    return p.get("inputs", "x") in ONE_INPUT or p.get("fill") != "inf"


HEAD_RULES = (_rotary, _tables, _base, _norm, _norm_of_all_heads, _decode, _window)


def has_head_axes(p: Mapping[str, str]) -> bool:
    """Return whether the values of all axes are of a class with a rotation, a norm or a window."""
    return any(p[axis] != "none" for axis in ("rotary", "norm", "window"))
