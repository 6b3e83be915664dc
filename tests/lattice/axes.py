"""The axes of the lattice, and its points: which conventions are combined in one class."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product

from lattice.head_axes import (
    CONFIGS,
    HEAD_AXES,
    HEAD_RULES,
    ONE_INPUT,
    OWN_TABLES,
    has_head_axes,
)

# The values of each axis; each is an ordinary convention of published code.
AXES: dict[str, tuple[str, ...]] = {
    "layout": ("b l d", "l b d"),
    "inputs": (
        *("x", "hidden_states", "query_key_value", "q_k_v", "value_key_query", "query_key_default"),
        *("x_context", "x_memory"),
    ),
    "projection": (
        *(
            "q_proj",
            "W_q",
            "to_q",
            "query",
            "linears",
            "qkv",
            "qkv_by_head",
            "qkv_interleaved",
            "q_kv",
            "kv_by_head",
        ),
        *("heads", "role_lists", "matrices", "tensors", "conv1d", "in_proj"),
    ),
    "bias": ("all", "none", "option", "qvo", "qkv", "o"),
    "words": (
        "d_model",
        "embed_dim",
        "dim",
        "hidden_size",
        "n_embd",
        "h_d_model",
        "config",
        "hf_config",
    ),
    "mask": ("none", "keep", "drop", "additive", "numbers"),
    "shape": (
        "broadcast",
        "rank 4",
        "b s",
        "l s",
        "b l s",
        "b 1 1 s",
        "b 1 l s",
        "(b h) l s",
        "b h l s",
        "l s b",
    ),
    "padding": ("none", "keep", "drop"),
    "causal": ("none", "flag", "flag_bottom_right", "always", "buffer", "constructor"),
    "weights": ("none", "tuple", "need_weights", "output_attentions", "attribute", "mean"),
    "heads": ("equal", "grouped", "wide"),
    "core": ("matmul", "einsum", "baddbmm", "bmm", "sdpa", "loop", "chunked", "logsumexp"),
    "scale": ("divided", "multiplied", "query", "both", "unscaled"),
    "fill": (
        "inf",
        "rescued",
        "spread",
        "lowest",
        "lowest_times",
        "1e9",
        "1e9_times",
        "raises",
        "nan",
        "sdpa",
    ),
    "softmax": ("own", "float32"),
    "dropout": ("none", "weights", "output", "both"),
}
ONE_MEMORY = ("x_context", "x_memory")
FUSED = ("qkv", "qkv_by_head", "qkv_interleaved", "conv1d")
STACKED_KV = ("q_kv", "kv_by_head")
LAYERS = ("q_proj", "W_q", "to_q", "query")
# Projections whose biases are separate objects, so that one of them may be left out.
SEPARATE = (*LAYERS, "heads", "role_lists", "matrices", "tensors")
# Those of parameters, the output's too.
WITHOUT_LAYERS = ("matrices", "tensors")
# Shapes of masks that differ between queries.
PER_QUERY = ("broadcast", "rank 4", "l s", "b l s", "b 1 l s", "(b h) l s", "b h l s", "l s b")
CAUSAL_ALWAYS = ("always", "buffer", "constructor")
# The points of `AXES` alone come first, and then those that have `HEAD_AXES` too; and how many
# random points are compared for each new one, of which a run of the tests has the time.
PLAIN_POINTS, PLAIN_CANDIDATES = 400, 40
HEAD_POINTS, HEAD_CANDIDATES = 160, 8
FINITE = ("lowest", "lowest_times", "1e9", "1e9_times")


@dataclass(frozen=True)
class Point:
    """One value of each axis: a class that combines these conventions."""

    layout: str = "b l d"
    inputs: str = "query_key_value"
    projection: str = "q_proj"
    bias: str = "all"
    words: str = "d_model"
    mask: str = "none"
    shape: str = "broadcast"
    padding: str = "none"
    causal: str = "none"
    weights: str = "none"
    heads: str = "equal"
    core: str = "matmul"
    scale: str = "divided"
    fill: str = "inf"
    softmax: str = "own"
    dropout: str = "none"
    rotary: str = "none"
    part: str = "whole"
    tables: str = "inside"
    base: str = "fixed"
    decode: str = "none"
    norm: str = "none"
    over: str = "head"
    place: str = "before"
    norm_weight: str = "scale"
    eps: str = "1e-6"
    window: str = "none"

    def __str__(self) -> str:
        shown = (
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return ", ".join(shown) or "plain"

    @property
    def self_attention(self) -> bool:
        """Whether it takes one input."""
        return self.inputs in ONE_INPUT

    @property
    def memory(self) -> bool:
        """Whether key and value are one tensor."""
        return self.inputs in ONE_MEMORY

    @property
    def masked(self) -> bool:
        """Whether it takes a mask of any kind."""
        return self.mask != "none" or self.padding != "none"

    @property
    def may_be_empty(self) -> bool:
        """Whether a query may have no allowed key."""
        return self.masked or self.causal == "flag_bottom_right" or self.window_may_be_empty

    @property
    def window_may_be_empty(self) -> bool:
        """Whether a query may have no key in its window, as where there are fewer keys."""
        return self.window != "none" and not self.self_attention

    @property
    def tabled(self) -> bool:
        """Whether it has a table of so many positions, for which its constructor asks."""
        return self.causal == "buffer" or self.tables == "buffer"

    @property
    def turns(self) -> bool:
        """Whether queries and keys are rotated by their own positions, from any start."""
        return self.rotary != "none" and self.tables in OWN_TABLES

    @property
    def per_query(self) -> bool:
        """Whether masks may differ between queries."""
        return self.mask != "none" and self.shape in PER_QUERY

    @property
    def split(self) -> bool:
        """Whether queries differ in one mask only, and items in the other one."""
        return self.padding != "none" and self.shape == "l s"

    @property
    def per_item(self) -> bool:
        """Whether masks may differ between the items of a batch."""
        return (self.mask != "none" and self.shape != "l s") or self.padding != "none"

    @property
    def per_head(self) -> bool:
        """Whether masks may differ between heads."""
        return self.mask != "none" and self.shape in ("broadcast", "rank 4", "(b h) l s", "b h l s")

    @property
    def differentiates_twice(self) -> bool:
        """Whether it claims second gradients, which a kernel does not have."""
        return self.dropout != "none" and self.core != "sdpa"


def _inputs_and_projection(p: Mapping[str, str]) -> bool:
    """A fused projection has one input; stacked keys and values come from one tensor."""
    inputs, projection = p.get("inputs"), p.get("projection")
    if inputs is None or projection is None:
        return True
    if projection in FUSED:
        return inputs in ONE_INPUT
    return projection not in STACKED_KV or inputs in (*ONE_INPUT, *ONE_MEMORY)


def _bias(p: Mapping[str, str]) -> bool:
    """One bias is left out of separate objects, or of parameters added to a fused projection."""
    bias, projection = p.get("bias"), p.get("projection")
    if bias is None or projection is None:
        return True
    if projection == "linears":
        return bias in ("all", "option", "none")
    if projection == "conv1d":
        return bias in ("all", "option")
    return bias != "qvo" or projection in (*SEPARATE, "qkv")


def _heads(p: Mapping[str, str]) -> bool:
    """Fewer key/value heads, and heads of their own width, need separate projections."""
    heads, projection, words = p.get("heads"), p.get("projection"), p.get("words")
    if heads in (None, "equal"):
        return True
    if words in ("config", "hf_config", "h_d_model"):
        return False
    if projection is None:
        return True
    return projection in (*LAYERS, "q_kv") or (
        heads == "wide" and projection in ("qkv", "tensors", "matrices")
    )


def _mask(p: Mapping[str, str]) -> bool:
    """Without a mask there is no shape of one; beside padding, the mask is of pairs."""
    mask, shape, padding = p.get("mask"), p.get("shape"), p.get("padding")
    if mask == "none" and shape not in (None, "broadcast"):
        return False
    if mask == "numbers" and shape not in (None, "b s", "l s", "b l s", "b 1 1 s"):
        return False
    if padding in (None, "none") or shape is None or mask in (None, "none"):
        return True
    return shape in ("l s", "b l s", "(b h) l s", "b h l s")


def _fill_and_core(p: Mapping[str, str]) -> bool:
    """The kernel of torch fills masked scores itself; added masks have their own numbers."""
    fill, mask, core = p.get("fill"), p.get("mask"), p.get("core")
    if fill is None:
        return True
    if core is not None and (core == "sdpa") != (fill == "sdpa"):
        return False
    if core == "logsumexp" and fill in FINITE:
        return False
    return not (mask == "additive" and fill in (*FINITE, "nan", "inf"))


def _fill_and_masks(p: Mapping[str, str]) -> bool:
    """Empty rows need a fill that says what they get; without masks, nothing is filled."""
    fill, mask, padding, causal = (p.get(axis) for axis in ("fill", "mask", "padding", "causal"))
    if None in (fill, mask, padding, causal):
        return True
    if (mask, padding) != ("none", "none") or causal == "flag_bottom_right":
        return fill != "inf"
    if p.get("window", "none") != "none":
        return True  # `head_axes` has what windows ask for
    return fill in (("inf", "sdpa") if causal == "none" else ("inf", "lowest", "1e9", "sdpa"))


def _softmax(p: Mapping[str, str]) -> bool:
    """The kernel of torch has a softmax of its own, and returns no weights."""
    core, softmax, weights = p.get("core"), p.get("softmax"), p.get("weights")
    return core != "sdpa" or (softmax in (None, "own") and weights in (None, "none"))


def _causal(p: Mapping[str, str]) -> bool:
    """An alignment shows only where lengths may differ; a config has no word for a causal table."""
    causal, inputs, words = p.get("causal"), p.get("inputs"), p.get("words")
    if causal == "flag_bottom_right" and inputs in ONE_INPUT:
        return False
    return not (causal == "constructor" and words in CONFIGS)


RULES = (
    _inputs_and_projection,
    _bias,
    _heads,
    _mask,
    _fill_and_core,
    _fill_and_masks,
    _softmax,
    _causal,
    *HEAD_RULES,
)


Pair = tuple[tuple[str, str], tuple[str, str]]


def is_possible(values: Mapping[str, str]) -> bool:
    """Return whether the values of some axes can be combined in one class."""
    return all(rule(values) for rule in RULES)


def possible_pairs(axes: Mapping[str, tuple[str, ...]] = AXES) -> list[Pair]:
    """Return every two values of two axes that some class may combine."""
    columns = [list(product([axis], values)) for axis, values in axes.items()]
    pairs = (pair for one, other in combinations(columns, 2) for pair in product(one, other))
    return [pair for pair in pairs if is_possible(dict(pair))]


def head_pairs() -> list[Pair]:
    """Return every two values of which at least one is of `HEAD_AXES`."""
    pairs = possible_pairs(AXES | HEAD_AXES)
    return [pair for pair in pairs if any(axis in HEAD_AXES for axis, _ in pair)]


@cache
def points(plain: int = PLAIN_POINTS, with_heads: int = HEAD_POINTS) -> tuple[Point, ...]:
    """Return the points of the lattice, always the same: those without `HEAD_AXES` first.

    plain, with_heads: of each kind only so many, the first ones.
    """
    found = _covering(AXES, possible_pairs(), plain, PLAIN_CANDIDATES)
    found += _covering(AXES | HEAD_AXES, head_pairs(), with_heads, HEAD_CANDIDATES)
    return tuple(Point(**values) for values in found)


def _covering(
    axes: Mapping[str, tuple[str, ...]], pairs: list[Pair], count: int, compared: int
) -> list[dict[str, str]]:
    """Return so many points, as values of axes, that combine pairs of values.

    They are chosen one by one: of several random points that combine the next pair of values that
    no point combines, the one with the most such pairs. Once each pair is combined, the next round
    begins.
    """
    generator, found = random.Random(0), dict[tuple[str, ...], dict[str, str]]()
    wanted = dict.fromkeys(pairs)
    while len(found) < count:
        if not wanted:
            wanted = dict.fromkeys(pairs)
        pair = next(iter(wanted))
        candidates = list[dict[str, str]]()
        for _ in range(compared):
            drawn = _drawn(axes, dict(pair), generator)
            if drawn and (axes is AXES or has_head_axes(drawn)):
                candidates.append(drawn)
        if not candidates:  # of values that no class combines, because of a third axis
            del wanted[pair]
            continue
        best = max(candidates, key=lambda each: sum(pair in wanted for pair in _pairs(axes, each)))
        found[tuple(best[axis] for axis in axes)] = best
        for covered in _pairs(axes, best):
            wanted.pop(covered, None)
    return list(found.values())


def _pairs(axes: Mapping[str, tuple[str, ...]], values: Mapping[str, str]) -> Iterator[Pair]:
    return combinations(((axis, values[axis]) for axis in axes), 2)


def _drawn(
    axes: Mapping[str, tuple[str, ...]], values: dict[str, str], generator: random.Random
) -> dict[str, str] | None:
    """Return values of all axes that can be combined, some of them given; None after a dead end."""
    for axis in generator.sample(list(axes), len(axes)):
        if axis not in values:
            possible = [value for value in axes[axis] if is_possible(values | {axis: value})]
            if not possible:
                return None
            values[axis] = generator.choice(possible)
    return values
