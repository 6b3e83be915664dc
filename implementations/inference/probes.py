"""Trial runs: small inputs of many sizes, and the formulas that an output is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from mha.implementations.formula import allowed_by, capped, normed, rotated, weights_of
from mha.spec import Config, MaskConvention, Options, QkNorm, Rotary, Scores, Weights
from mha.spec.claims import Alignment

# Two heads of 16 columns, since kernels need such widths; no other size of a probe is one of these.
CONFIG = Config(d_model=32, n_heads=2)
# Of the largest output. Formulas differ by far more; rounding in float64, and a fill value of -1e4,
# by far less.
TOLERANCE = 1e-3
# For modules that take half precision alone, in which several roundings add up.
HALF_TOLERANCE = 4e-2
# For modules that raise in float64, in which trial runs are otherwise.
FEW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# By their name, from d_k and d_model.
SCALES: dict[str, Callable[[int, int], float]] = {
    "1/sqrt(d_k)": lambda head_dim, d_model: head_dim**-0.5,
    "1/sqrt(d_model)": lambda head_dim, d_model: d_model**-0.5,
    "none": lambda head_dim, d_model: 1.0,
    "1/d_k": lambda head_dim, d_model: 1 / head_dim,
}
# Those of kernels that have the heads in the batch.
OF_MERGED_HEADS: dict[str | None, str] = {
    "(b h) 1 s": "bhs",
    "(b h) s": "bhs",
    "(b h) l": "bhls",
    "(b h)": "bhs",
}
# The shapes of masks to try, the most general first, each with the axes along which such a mask may
# differ.
SHAPES: dict[str | None, str] = {
    None: "bhls",
    "b h l s": "bhls",
    "(b h) l s": "bhls",
    "b 1 l s": "bls",
    "b l s": "bls",
    "l s b": "bls",
    "b 1 1 s": "bs",
    "b 1 s": "bs",
    "b s": "bs",
    "s b": "bs",
    "l s": "ls",
    # Of numbers of keys.
    "b l": "bls",
    "b": "bs",
    **OF_MERGED_HEADS,
}
CONVENTIONS: tuple[MaskConvention, ...] = ("keep", "drop", "additive")
# Of n_heads * d_k = 8 columns, for modules that take the width of a head.
OWN_HEAD_DIM = 4


Inputs = tuple[Tensor, Tensor, Tensor]
Multiply = Callable[[Tensor, Tensor], Tensor]
NO_OPTIONS, NO_CLAIMS = Options(), Scores()


@dataclass(frozen=True)
class Formula:
    """A formula that may give a module's output: the contract's, or a variant of it.

    scale: a key of `SCALES`, or a number.
    causal: how the causal mask is aligned, if it is always causal.
    projected: whether W_o is applied.
    n_heads: of the query.
    softmax: the dtype that scores are cast to.
    multiply, project: the product of two tensors, in the heads and in projections.
    options: what the call says of the scores beside a mask: a scale, a window, a cap, sinks or
        slopes.
    claimed: what these mean.
    rotary, norm: what becomes of queries and keys, if anything does.
    A row without an allowed key is NaN, or zeros with sinks.
    """

    scale: str | float = "1/sqrt(d_k)"
    causal: Alignment | None = None
    projected: bool = True
    n_heads: int = CONFIG.n_heads
    softmax: torch.dtype = torch.float64
    multiply: Multiply = torch.matmul
    project: Multiply = torch.matmul
    options: Options = NO_OPTIONS
    claimed: Scores = NO_CLAIMS
    rotary: Rotary | None = None
    norm: QkNorm | None = None

    def __call__(self, inputs: Inputs, weights: Weights, mask: Tensor | None) -> Tensor:
        """Return the output (B, L, D) for inputs (B, L, D) and a canonical mask.

        mask: broadcastable to (B, H, L, S).
        """
        query, key, value = inputs
        total, allowed = self._masked(self.scores(query, key, weights), mask)
        v = heads_of(value, weights, "v", self.n_heads, self.project)
        if self.options.sinks is None:
            p = total.softmax(-1, dtype=self.softmax).to(v.dtype)
        else:
            p = weights_of(total, allowed, sinks=torch.tensor(self.options.sinks))
        context = self.multiply(p, v).transpose(1, 2).flatten(2)
        if not self.projected:
            return context
        output = self.project(context, weights.w_o.T)
        return output if weights.b_o is None else output + weights.b_o

    def _masked(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scores with cap, bias and mask, and which of them are allowed."""
        options = self.options.change(mask=mask, is_causal=self.causal is not None)
        alignment = self.causal or self.claimed.alignment or "top_left"
        form = self.claimed.alibi.form if self.claimed.alibi else "signed"
        allowed, bias = allowed_by(options, scores, alignment, form)
        if self.claimed.softcap == "after_bias":
            total = capped(scores + bias, options.softcap)
        else:
            total = capped(scores, options.softcap) + bias
        return total.masked_fill(~allowed, -math.inf), allowed

    def scores(self, query: Tensor, key: Tensor, weights: Weights) -> Tensor:
        """Return the scores (B, H, L, S), before any mask."""
        q = heads_of(query, weights, "q", self.n_heads, self.project)
        k = heads_of(key, weights, "k", self.n_heads, self.project)
        q, k = self._on_the_way(q, weights.q_norm), self._on_the_way(k, weights.k_norm)
        scale = self.options.scale
        if scale is None:
            scale = self.scale_for(q.shape[-1])
        scores: Tensor = self.multiply(q, k.mT) * scale
        return scores

    def scale_for(self, head_dim: int) -> float:
        """Return what the scores are multiplied by."""
        if isinstance(self.scale, str):
            return SCALES[self.scale](head_dim, CONFIG.d_model)
        return self.scale

    def _on_the_way(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        """Return queries or keys (B, H, length, d_k), normed and rotated."""
        norm, rotary = self.norm, self.rotary
        if norm and norm.before_rotary:
            heads = normed(heads, norm, weight)
        if rotary:
            heads = rotated(heads, rotary, torch.arange(heads.shape[2]))
        if norm and not norm.before_rotary:
            heads = normed(heads, norm, weight)
        return heads


def heads_of(
    x: Tensor,
    weights: Weights,
    role: str,
    n_heads: int = CONFIG.n_heads,
    project: Multiply = torch.matmul,
) -> Tensor:
    """Return the heads (B, H, L, d_k) of an input (B, L, D), those of key and value repeated."""
    named, head_dim = dict(weights.named()), len(weights.w_q) // n_heads
    if role == "v":
        head_dim = len(weights.w_v) * head_dim // len(weights.w_k)
    projected = project(x, named[f"w_{role}"].T)
    if f"b_{role}" in named:
        projected = projected + named[f"b_{role}"]
    heads = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    repeated: Tensor = heads.repeat_interleave(n_heads // heads.shape[1], 1)
    return repeated


def formulas() -> Iterator[Formula]:
    """Yield the contract's formula, then its variants."""
    alignments: tuple[Alignment | None, ...] = (None, "top_left", "bottom_right")
    for projected, causal, scale in product((True, False), alignments, SCALES):
        yield Formula(scale, causal, projected)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far outputs in a dtype may be from those of a formula, relative to the largest."""
    return HALF_TOLERANCE if dtype.itemsize == 2 else TOLERANCE


def is_close(output: object, expected: Tensor, tolerance: float | None = None) -> bool:
    """Return whether an output is what a formula gives.

    tolerance: by default that of its dtype.
    """
    return share_close(output, expected, tolerance) == 1.0


def share_close(output: object, expected: Tensor, tolerance: float | None = None) -> float:
    """Return the share of the rows of an output that are what a formula gives; NaN is anything."""
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return 0.0
    if tolerance is None:
        tolerance = tolerance_of(output.dtype)
    distance = (output.detach().double() - expected).abs()
    close = distance <= tolerance * expected.nan_to_num().abs().max()
    return float((close | expected.isnan()).all(-1).double().mean())


def changed(output: Tensor, other: Tensor) -> Tensor:
    """Return which elements of two outputs differ in the first half of their digits.

    NaN is equal to NaN.
    """
    dtype = output.dtype if output.is_floating_point() else torch.float32
    digits = math.sqrt(torch.finfo(dtype).eps)
    scale = torch.stack([output, other]).nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    near = (output - other).abs() <= digits * scale
    return ~((output == other) | (output.isnan() & other.isnan()) | near)


@dataclass(frozen=True)
class Probe:
    """Small random inputs: query (B, L, D), key and value (B, S, D).

    cross_attention: as in `Claims`.
    last_is_zero: whether the last position of each input is all zeros.
    value_is_key: whether they are one tensor, even if they need not be.
    n_heads: of masks.
    """

    batch: int
    queries: int
    keys: int
    cross_attention: bool | Literal["memory"]
    last_is_zero: bool = False
    value_is_key: bool = False
    n_heads: int = CONFIG.n_heads

    @property
    def inputs(self) -> Inputs:
        """Query, key and value in float64."""
        generator = torch.Generator().manual_seed(0)

        def draw(length: int) -> Tensor:
            shape = self.batch, length, CONFIG.d_model
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn * (torch.arange(length) < length - self.last_is_zero)[:, None]

        query = draw(self.queries)
        if not self.cross_attention:
            return query, query, query
        key = draw(self.keys)
        if self.cross_attention == "memory" or self.value_is_key:
            return query, key, key
        return query, key, draw(self.keys)

    @property
    def lengths(self) -> tuple[int, int]:
        """L and S of the inputs."""
        if not self.cross_attention:
            return self.queries, self.queries
        return self.queries, self.keys

    def mask(self, axes: str, *, causal: bool) -> Tensor:
        """Return a boolean mask (B, H, L, S), True = may attend: each row has keys of both kinds.

        axes: of "bhls", those along which it differs.
        causal: allow the first key in each row, so that the causal mask leaves no row empty.
        """
        queries, keys = self.lengths
        sizes = {"b": self.batch, "h": self.n_heads, "l": queries, "s": keys}
        shape = [size if axis in axes else 1 for axis, size in sizes.items()]
        order = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        if causal:
            order[..., 0] = -1.0
        kept = torch.randint(1, keys, (*shape[:-1], 1), generator=torch.Generator().manual_seed(2))
        return (order.argsort(-1).argsort(-1) < kept).expand(tuple(sizes.values()))


Change = Callable[[Weights], Weights]


@dataclass(frozen=True)
class SpecialCase:
    """Trial runs in which a fault may not show, so that the rest of the class does.

    name: what is special, to be read after "explains its output only".
    weights: what becomes of random weights.
    sizes: B, L and S of two probes.
    last_is_zero, value_is_key: as of `Probe`.
    """

    name: str
    weights: Change = lambda weights: weights
    sizes: tuple[tuple[int, int, int], ...] = ((3, 4, 6), (7, 6, 4))
    last_is_zero: bool = False
    value_is_key: bool = False

    def probes(
        self,
        cross_attention: bool | Literal["memory"],
        multiple: int = 1,
        n_heads: int = CONFIG.n_heads,
    ) -> tuple[Probe, ...]:
        """Return two probes whose sizes are ordered differently, so that nothing fits by chance.

        multiple: what lengths must be multiples of; two of them are as long as four positions.
        n_heads: of masks.
        """

        def multiplied(length: int) -> int:
            return length if multiple == 1 else -(-length // 2) * multiple

        kind = cross_attention, self.last_is_zero, self.value_is_key, n_heads
        probes = []
        for batch, queries, keys in self.sizes:
            probes.append(Probe(batch, multiplied(queries), multiplied(keys), *kind))
        return tuple(probes)

    def weights_of(self, config: Config) -> Weights:
        """Return the weights of trial runs with this configuration."""
        return self.weights(Weights.random(config, 0))


def _each_weight(change: Callable[[str, Tensor], Tensor]) -> Change:
    """Return what changes each weight, given its name, into another one."""

    def changed_weights(weights: Weights) -> Weights:
        named = {name: change(name, tensor) for name, tensor in weights.named()}
        return replace(weights, **named)

    return changed_weights


def _zeros(names: str) -> Change:
    """Return what sets weights to zero whose names begin with one of these words."""
    return _each_weight(lambda name, tensor: tensor * (not name.startswith(tuple(names.split()))))


def scaled_weights(names: str, factor: float) -> Change:
    """Return what multiplies weights whose names are among these words."""
    return _each_weight(lambda name, tensor: tensor * (factor if name in names.split() else 1.0))


def _values_as_keys(weights: Weights) -> Weights:
    return replace(_zeros("b_k b_v")(weights), w_v=weights.w_k)


def _one_head_repeated(name: str, tensor: Tensor) -> Tensor:
    axis = 1 if name == "w_o" else 0
    is_shared = tensor.shape[axis] % CONFIG.n_heads > 0  # one key or value for all heads
    if name == "b_o" or is_shared:
        return tensor
    first = tensor.narrow(axis, 0, tensor.shape[axis] // CONFIG.n_heads)
    return torch.cat([first] * CONFIG.n_heads, axis)


def _one_column_repeated(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.endswith("o") else tensor[:1].expand_as(tensor).clone()


GENERAL = SpecialCase("")
# Scores do not depend on the queries: a change at one position shows in the outputs that read it,
# and nowhere else.
WITHOUT_QUERIES = SpecialCase("where all scores are equal", _zeros("w_q b_q"))
EQUAL_LENGTHS = SpecialCase("with as many keys as queries", sizes=((3, 5, 5), (7, 4, 4)))
SPECIAL_CASES = (
    SpecialCase("without biases", _zeros("b_")),
    SpecialCase("where key and value are equal", _values_as_keys, value_is_key=True),
    SpecialCase("where all heads are alike", _each_weight(_one_head_repeated)),
    SpecialCase("where all columns of a projection are alike", _each_weight(_one_column_repeated)),
    SpecialCase("where the last key is zero", _zeros("b_"), last_is_zero=True),
    EQUAL_LENGTHS,
    SpecialCase("with a batch of 1", sizes=((1, 4, 6), (1, 6, 4))),
    WITHOUT_QUERIES,
)
# In these, the scores do not matter; no mask can be tried in them. Without values, only the bias of
# W_o shows.
NO_VALUES = SpecialCase("where all values are zero", _zeros("w_v b_v"))
QUICK_CASES = (SpecialCase("with one query and one key", sizes=((3, 1, 1), (7, 1, 1))), NO_VALUES)


def each_once(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return query, key and value after a change; what is one tensor stays one tensor."""
    query, key, value = inputs
    of_tensor = {id(query): change(query)}
    for x in (key, value):
        if id(x) not in of_tensor:
            of_tensor[id(x)] = change(x)
    return of_tensor[id(query)], of_tensor[id(key)], of_tensor[id(value)]


def additive(mask: Tensor) -> Tensor:
    """Return a boolean mask as one of -infinity and small numbers, which vary along the keys."""
    numbers = mask.cumsum(-1, dtype=torch.float64) / 7
    return numbers.masked_fill(~mask, -math.inf)
