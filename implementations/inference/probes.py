"""Trial runs: small inputs whose sizes all differ, and the formulas that an output is compared
with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from mha.implementations.formula import allowed_by, capped, weights_of
from mha.spec import Config, MaskConvention, Options, Weights
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
}
CONVENTIONS: tuple[MaskConvention, ...] = ("keep", "drop", "additive")
# Of n_heads * d_k = 8 columns, for modules that take the width of a head.
OWN_HEAD_DIM = 4


Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Formula:
    """A formula that may give a module's output: the contract's, or a variant of it.

    scale: a key of `SCALES`. causal: how the causal mask is aligned, if it is always causal.
    projected: whether W_o is applied. n_heads: of the query. softmax: the dtype that scores are
    cast to. multiply, project: the product of two tensors, in the heads and in projections.
    softcap: the cap of the scores, and of their sum with a float mask if caps_bias. sinks: those of
    the heads. A row without an allowed key is NaN, or zeros with sinks.
    """

    scale: str = "1/sqrt(d_k)"
    causal: Alignment | None = None
    projected: bool = True
    n_heads: int = CONFIG.n_heads
    softmax: torch.dtype = torch.float64
    multiply: Multiply = torch.matmul
    project: Multiply = torch.matmul
    softcap: float | None = None
    caps_bias: bool = False
    sinks: tuple[float, ...] | None = None

    def __call__(
        self, inputs: tuple[Tensor, Tensor, Tensor], weights: Weights, mask: Tensor | None
    ) -> Tensor:
        """Return the output (B, L, D) for inputs (B, L, D) and a canonical mask, broadcastable to
        (B, H, L, S).
        """
        scores, v = (
            self.scores(*inputs[:2], weights),
            heads_of(inputs[2], weights, "v", self.n_heads, self.project),
        )
        options = Options(mask, is_causal=self.causal is not None)
        allowed, bias = allowed_by(options, scores, self.causal or "top_left")
        total = (
            capped(scores + bias, self.softcap)
            if self.caps_bias
            else capped(scores, self.softcap) + bias
        )
        total = total.masked_fill(~allowed, -math.inf)
        if self.sinks is None:
            p = total.softmax(-1, dtype=self.softmax).to(v.dtype)
        else:
            p = weights_of(total, allowed, sinks=torch.tensor(self.sinks))
        context = self.multiply(p, v).transpose(1, 2).flatten(2)
        if not self.projected:
            return context
        output = self.project(context, weights.w_o.T)
        return output if weights.b_o is None else output + weights.b_o

    def scores(self, query: Tensor, key: Tensor, weights: Weights) -> Tensor:
        """Return the scores (B, H, L, S), before any mask."""
        q = heads_of(query, weights, "q", self.n_heads, self.project)
        k = heads_of(key, weights, "k", self.n_heads, self.project)
        scores: Tensor = self.multiply(q, k.mT) * SCALES[self.scale](q.shape[-1], CONFIG.d_model)
        return scores


def heads_of(
    x: Tensor,
    weights: Weights,
    role: str,
    n_heads: int = CONFIG.n_heads,
    project: Multiply = torch.matmul,
) -> Tensor:
    """Return an input (B, L, D), projected and split, with key and value heads repeated: (B, H, L,
    d_k).
    """
    named, head_dim = dict(weights.named()), len(weights.w_q) // n_heads
    if role == "v":
        head_dim = len(weights.w_v) * head_dim // len(weights.w_k)
    projected, bias = project(x, named[f"w_{role}"].T), named.get(f"b_{role}")
    projected = projected if bias is None else projected + bias
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
    """Return whether an output is what a formula gives, up to a tolerance, by default that of its
    dtype.
    """
    return share_close(output, expected, tolerance) == 1.0


def share_close(output: object, expected: Tensor, tolerance: float | None = None) -> float:
    """Return the share of the rows of an output that are what a formula gives, as for `is_close`;
    NaN for anything.
    """
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return 0.0
    tolerance = tolerance_of(output.dtype) if tolerance is None else tolerance
    close = (
        output.detach().double() - expected
    ).abs() <= tolerance * expected.nan_to_num().abs().max()
    return float((close | expected.isnan()).all(-1).double().mean())


def changed(output: Tensor, other: Tensor) -> Tensor:
    """Return which elements of two outputs differ in the first half of their digits; NaN is equal
    to NaN.
    """
    digits = math.sqrt(
        torch.finfo(output.dtype if output.is_floating_point() else torch.float32).eps
    )
    scale = torch.stack([output, other]).nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    same = (
        (output == other)
        | (output.isnan() & other.isnan())
        | ((output - other).abs() <= digits * scale)
    )
    return ~same


@dataclass(frozen=True)
class Probe:
    """Small random inputs: query (B, L, D), key and value (B, S, D).

    cross_attention: as in `Claims`. last_is_zero: whether the last position of each input is all
    zeros. value_is_key: whether they are one tensor, even if they need not be.
    """

    batch: int
    queries: int
    keys: int
    cross_attention: bool | Literal["memory"]
    last_is_zero: bool = False
    value_is_key: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value in float64."""
        generator = torch.Generator().manual_seed(0)

        def draw(length: int) -> Tensor:
            drawn = torch.randn(
                self.batch, length, CONFIG.d_model, generator=generator, dtype=torch.float64
            )
            return drawn * (torch.arange(length) < length - self.last_is_zero)[:, None]

        query = draw(self.queries)
        key = draw(self.keys) if self.cross_attention else query
        return (
            query,
            key,
            draw(self.keys) if self.cross_attention is True and not self.value_is_key else key,
        )

    def mask(self, axes: str, *, causal: bool) -> Tensor:
        """Return a boolean mask (B, H, L, S), True = may attend, that differs along the given axes
        of "bhls".

        Each row has a key that is allowed and one that is not. causal: allow the first key in each
        row, so that the causal mask leaves no row empty.
        """
        keys = self.keys if self.cross_attention else self.queries
        sizes = {"b": self.batch, "h": CONFIG.n_heads, "l": self.queries, "s": keys}
        shape = tuple(size if axis in axes else 1 for axis, size in sizes.items())
        order = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        if causal:
            order[..., 0] = -1.0
        kept = torch.randint(1, keys, (*shape[:-1], 1), generator=torch.Generator().manual_seed(2))
        return (order.argsort(-1).argsort(-1) < kept).expand(tuple(sizes.values()))


Change = Callable[[Weights], Weights]


@dataclass(frozen=True)
class SpecialCase:
    """Trial runs in which a fault may not show, so that the rest of the class does.

    name: what is special, to be read after "explains its output only". weights: what becomes of
    random weights. sizes: B, L and S of two probes. last_is_zero, value_is_key: as of `Probe`.
    """

    name: str
    weights: Change = lambda weights: weights
    sizes: tuple[tuple[int, int, int], ...] = ((3, 4, 6), (7, 6, 4))
    last_is_zero: bool = False
    value_is_key: bool = False

    def probes(
        self, cross_attention: bool | Literal["memory"], multiple: int = 1
    ) -> tuple[Probe, ...]:
        """Return two probes whose sizes are ordered differently, so that nothing fits both by
        coincidence.

        multiple: what lengths must be multiples of; two of them are as long as four positions.
        """
        kind = cross_attention, self.last_is_zero, self.value_is_key

        def multiplied(length: int) -> int:
            return length if multiple == 1 else -(-length // 2) * multiple

        return tuple(
            Probe(batch, multiplied(queries), multiplied(keys), *kind)
            for batch, queries, keys in self.sizes
        )

    def weights_of(self, config: Config) -> Weights:
        """Return the weights of trial runs with this configuration."""
        return self.weights(Weights.random(config, 0))


def _zeros(names: str) -> Change:
    """Return the change that sets weights to zero whose names begin with one of these words."""
    return lambda weights: _changed(
        weights, lambda name, tensor: tensor * (not name.startswith(tuple(names.split())))
    )


def _changed(weights: Weights, change: Callable[[str, Tensor], Tensor]) -> Weights:
    return replace(weights, **{name: change(name, tensor) for name, tensor in weights.named()})


def _values_as_keys(weights: Weights) -> Weights:
    return replace(_zeros("b_k b_v")(weights), w_v=weights.w_k)


def _one_head_repeated(name: str, tensor: Tensor) -> Tensor:
    axis = 1 if name == "w_o" else 0
    if (
        name == "b_o" or tensor.shape[axis] % CONFIG.n_heads
    ):  # or one key or value that all heads share
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
    SpecialCase("where all heads are alike", lambda weights: _changed(weights, _one_head_repeated)),
    SpecialCase(
        "where all columns of a projection are alike",
        lambda weights: _changed(weights, _one_column_repeated),
    ),
    SpecialCase("where the last key is zero", _zeros("b_"), last_is_zero=True),
    EQUAL_LENGTHS,
    SpecialCase("with a batch of 1", sizes=((1, 4, 6), (1, 6, 4))),
    WITHOUT_QUERIES,
)
# In these, the scores do not matter; no mask can be tried in them. Without values, only the bias of
# W_o shows.
NO_VALUES = SpecialCase("where all values are zero", _zeros("w_v b_v"))
QUICK_CASES = (SpecialCase("with one query and one key", sizes=((3, 1, 1), (7, 1, 1))), NO_VALUES)


def most_biases(biases: Collection[bool | str]) -> bool | str:
    """Return the value of `Config.bias`, of those given, with which most projections have a bias.

    >>> most_biases({False, "qvo"})
    'qvo'
    """
    counts = {
        bias: sum(Config(1, 1, bias=bias).has_bias(role) for role in "qkvo") for bias in biases
    }
    return max(counts, key=counts.__getitem__, default=False)


def additive(mask: Tensor) -> Tensor:
    """Return a boolean mask as an additive one: -infinity, and small numbers that vary along the
    last axis.
    """
    numbers = mask.cumsum(-1, dtype=torch.float64) / 7
    return numbers.masked_fill(~mask, -math.inf)
