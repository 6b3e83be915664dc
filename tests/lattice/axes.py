"""The axes of the lattice, and its points: which conventions are combined in one class."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product

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
ONE_INPUT = ("x", "hidden_states")
ONE_MEMORY = ("x_context", "x_memory")
FUSED = ("qkv", "qkv_by_head", "qkv_interleaved", "conv1d")
STACKED_KV = ("q_kv", "kv_by_head")
LAYERS = ("q_proj", "W_q", "to_q", "query")
# Projections whose biases are separate objects, so that one of them may be left out.
SEPARATE = (*LAYERS, "heads", "role_lists", "matrices", "tensors")
CONFIGS = ("config", "hf_config")
# Shapes of masks that differ between queries.
PER_QUERY = ("broadcast", "rank 4", "l s", "b l s", "b 1 l s", "(b h) l s", "b h l s", "l s b")
CAUSAL_ALWAYS = ("always", "buffer", "constructor")
# Random points that are compared for each new one.
CANDIDATES = 40
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
        return self.masked or self.causal == "flag_bottom_right"

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
)


Pair = tuple[tuple[str, str], tuple[str, str]]


def is_possible(values: Mapping[str, str]) -> bool:
    """Return whether the values of some axes can be combined in one class."""
    return all(rule(values) for rule in RULES)


def possible_pairs() -> list[Pair]:
    """Return every two values of two axes that some class may combine."""
    columns = [list(product([axis], values)) for axis, values in AXES.items()]
    pairs = (pair for one, other in combinations(columns, 2) for pair in product(one, other))
    return [pair for pair in pairs if is_possible(dict(pair))]


@cache
def points(count: int = 400) -> tuple[Point, ...]:
    """Return the points of the lattice, always the same.

    They are chosen one by one: of several random points that combine the next pair of values that
    no point combines, the one with the most such pairs. Once each pair is combined, the next round
    begins.
    """
    generator, found = random.Random(0), dict[Point, None]()
    wanted = dict.fromkeys(possible_pairs())
    while len(found) < count:
        if not wanted:
            wanted = dict.fromkeys(possible_pairs())
        pair = next(iter(wanted))
        candidates = [drawn for _ in range(CANDIDATES) if (drawn := _drawn(dict(pair), generator))]
        if not candidates:  # of values that no class combines, because of a third axis
            del wanted[pair]
            continue
        best = max(candidates, key=lambda each: sum(pair in wanted for pair in _pairs(each)))
        found[Point(**best)] = None
        for covered in _pairs(best):
            wanted.pop(covered, None)
    return tuple(found)


def _pairs(values: Mapping[str, str]) -> Iterator[Pair]:
    return combinations(((axis, values[axis]) for axis in AXES), 2)


def _drawn(values: dict[str, str], generator: random.Random) -> dict[str, str] | None:
    """Return values of all axes that can be combined, some of them given; None after a dead end."""
    for axis in generator.sample(list(AXES), len(AXES)):
        if axis not in values:
            possible = [value for value in AXES[axis] if is_possible(values | {axis: value})]
            if not possible:
                return None
            values[axis] = generator.choice(possible)
    return values
