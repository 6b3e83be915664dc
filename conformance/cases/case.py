"""A case: everything that determines one example, written as one line of code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.mask_kinds import make_mask
from mha.conformance.cases.memory_layouts import MIXED, lay_out
from mha.conformance.cases.values import make_inputs
from mha.spec import Config, Options, Problem, alibi_slopes, to_convention
from mha.spec.claims import Alignment
from mha.spec.scores import Bounds, Slopes

# How query, key and value share tensors: for each, the index of the tensor that it takes.
SHARING = {
    "cross": (0, 1, 2),
    "self": (0, 0, 0),
    "memory": (0, 1, 1),
    "query_key": (0, 0, 2),
    "query_value": (0, 1, 0),
}


# Sinks, from a number of each head in [-3, 3]: multiples of 1/4, which every dtype has.
SINKS: dict[str, Callable[[float], float]] = {
    "mixed": lambda number: number,
    "zeros": lambda number: 0.0,
    "high": lambda number: 20.0 + number,
    "low": lambda number: number - 20.0,
    "infinite": lambda number: -math.inf,
}

# The fields of `Options` that say lengths.
LENGTHS = {"none": (), "keys": ("key_lengths",), "both": ("key_lengths", "query_lengths")}
# The slopes of `alibi_slopes`, and others for each item.
BUILT_IN, OF_ITEMS = "built_in", "items"
# Slopes, from the place of a head and a number in [-3, 3]; as they are usually made, and others.
SLOPES: dict[str, Callable[[int, float], float]] = {
    "falling": lambda head, number: 2.0 ** -(head + 1),
    "equal": lambda head, number: 0.25,
    "mixed": lambda head, number: number,
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One example: a configuration, sizes, and how the tensors and the call are made.

    The same case always makes the same tensors. Its repr omits fields that have their default, and
    runs as code.

    n_heads, head_dim, bias, n_kv_heads, d_value, kdim, vdim: the configuration.
    B, L, S: the sizes: items in the batch, queries, keys.
    dtype, device: names, as in torch.
    mask: a kind of mask, see `mha.conformance.cases.mask_kinds`.
    causal: the `is_causal` flag of the call.
    alignment: of the causal mask where L != S.
    inputs: "cross" (three tensors), "self" (one tensor passed three times), "memory" (key and value
        are one tensor), "query_key" (query and key are), or "query_value" (query and value are).
    layout: the memory layout of the inputs, see `mha.conformance.cases.memory_layouts`; "mixed"
        gives each a different one.
    values: the distribution of the numbers, see `mha.conformance.cases.values`.
    mode: train or eval and the gradient mode of the call, see `mha.conformance.cases.modes`.
    need_weights, return_lse: whether the call asks for the weights, and for the log-sum-exp.
    seed: of all random numbers.
    mask_axes: the axes along which the mask may differ, whatever its kind.
    additive: a boolean mask is given as 0 and -infinity.
    ranks: on how many ranks a sharded implementation runs; 0 for the implementation without ranks.
    projected: whether there are projections; otherwise the inputs are what they would give, as for
        a kernel.
    variant: what is not everyday about it, "plain" or a name in `mha.conformance.cases.variants`.
    d_model: n_heads * head_dim if None.
    scale: an explicit scale of the call, as a multiple of 1/sqrt(d_k); None for none.
    window: as in `Options`.
    softcap: the cap of the call, None for none.
    sinks: a kind of sinks in `SINKS`, or "none".
    slopes: a kind of slopes in `SLOPES`, "built_in", or "items" for other slopes of each item; or
        "none".
    chunk: how many places a chunk has, None for no chunks.
    norm_weights: those of the configuration, see `Config`.
    lengths: "keys" if items have numbers of keys of their own, "both" if of queries too, or "none".

    >>> Case(L=2, values="large").problem().query.shape
    torch.Size([1, 2, 1])
    """

    n_heads: int = 1
    head_dim: int = 1
    bias: bool | str = True
    B: int = 1
    L: int = 1
    S: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    mask: str = "none"
    causal: bool = False
    alignment: Alignment = "top_left"
    inputs: str = "cross"
    layout: str = "contiguous"
    values: str = "normal"
    mode: str = "eval"
    need_weights: bool = False
    seed: int = 0
    mask_axes: str = "BHLS"
    additive: bool = False
    ranks: int = 0
    n_kv_heads: int | None = None
    projected: bool = True
    variant: str = "plain"
    d_model: int | None = None
    d_value: int | None = None
    kdim: int | None = None
    vdim: int | None = None
    scale: float | None = None
    return_lse: bool = False
    window: Bounds | None = None
    softcap: float | None = None
    sinks: str = "none"
    slopes: str = "none"
    chunk: int | None = None
    norm_weights: str = ""
    lengths: str = "none"

    def __repr__(self) -> str:
        shown = list[str]()
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"Case({', '.join(shown)})"

    @property
    def config(self) -> Config:
        """The configuration of the attention."""
        config = self._of_projections
        return config if self.projected else config.of_heads()

    @property
    def _of_projections(self) -> Config:
        """The configuration of the projections, those of a kernel's inputs too."""
        # With d_model, the width of a head is its own; without, it is d_model / n_heads.
        d_model, d_head = self.n_heads * self.head_dim, None
        if self.d_model is not None:
            d_model, d_head = self.d_model, self.head_dim
        return Config(
            d_model=d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            kdim=self.kdim,
            vdim=self.vdim,
            bias=self.bias,
            d_head=d_head,
            d_value=self.d_value,
            norm_weights=self.norm_weights,
        )

    @property
    def _of_scores(self) -> dict[str, Any]:
        """What the call says about the scores, and asks of them; see `Options`."""
        scale = None if self.scale is None else self.scale * self.head_dim**-0.5
        given = {
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
            "sinks": make_sinks(self),
            "alibi": make_slopes(self),
            **make_lengths(self),
        }
        return given | {"scale": scale, "return_lse": self.return_lse or None}

    @property
    def generator(self) -> torch.Generator:
        """A new generator of the case's random numbers, the same each time."""
        return torch.Generator().manual_seed(self.seed)

    def problem(self, **changes: Any) -> Problem:
        """Make the tensors, in the dtype of the case: implementation and oracle see the same,
        rounded numbers.

        changes: see `Problem.change`.
        """
        generator = self.generator
        dtype: torch.dtype = getattr(torch, self.dtype)
        sizes = self.B, self.L, self.S
        config = self._of_projections
        weights, *made = make_inputs(self.values, config, sizes, generator, dtype)
        mask = self._mask(generator, dtype)
        options = Options(mask, self.causal, **self._of_scores)
        # In their layout before the projections of a kernel's inputs too, whose last bits depend on
        # it in float64.
        query, key, value = self._laid_out([x.to(self.device, dtype) for x in made])
        problem = Problem(config, weights.to(dtype, self.device), query, key, value, options)
        if not self.projected:
            problem = self.without_projections(problem)
        return problem.change(**changes) if changes else problem

    def _mask(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor | None:
        """Make the mask, or None."""
        scores, causal = (self.B, self.n_heads, self.L, self.S), None
        if self.causal:
            causal = self.alignment
        mask = make_mask(self.mask, scores, causal, generator, self.mask_axes)
        if mask is None:
            return None
        if self.additive:
            mask = to_convention(mask, "additive", torch.float64)
        if mask.is_floating_point():
            # A finite entry, however low, must not become -infinity in a narrow dtype, nor with a
            # score added to it.
            lowest = torch.finfo(dtype).min / 8
            mask = torch.where(mask.isinf(), mask, mask.clamp(min=lowest)).to(dtype)
        return mask.to(self.device)

    def without_projections(self, problem: Problem) -> Problem:
        """Return the attention of the projected heads, in the layout of the case.

        They are three tensors, whatever shares one before.
        """
        direct = problem.of_heads()
        query, key, value = self._laid_out([direct.query, direct.key, direct.value], "cross")
        return direct.change(query=query, key=key, value=value, square=self.inputs == "self")

    def _laid_out(self, inputs: Sequence[Tensor], sharing: str = "") -> tuple[Tensor, ...]:
        """Return query, key and value in the layout of the case.

        sharing: which of them are one tensor, a name in `SHARING`; by default as in the case.
        """
        layouts = MIXED if self.layout == "mixed" else (self.layout,) * 3
        laid_out = list(map(lay_out, layouts, inputs))
        return tuple(laid_out[index] for index in SHARING[sharing or self.inputs])


def make_sinks(case: Case) -> tuple[float, ...] | None:
    """Return the sinks of a case, one for each head, or None."""
    if case.sinks == "none":
        return None
    make = SINKS[case.sinks]
    return tuple(make(number) for number in _of_heads(case, 1))


def make_slopes(case: Case) -> Slopes | None:
    """Return the slopes of a case, one for each head, or for each item and head; or None."""
    if case.slopes == "none":
        return None
    if case.slopes == BUILT_IN:
        return alibi_slopes(case.n_heads)
    if case.slopes == OF_ITEMS:
        return tuple(tuple(_of_heads(case, 2 + item)) for item in range(case.B))
    make = SLOPES[case.slopes]
    return tuple(make(head, number) for head, number in enumerate(_of_heads(case, 2)))


def make_lengths(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the lengths of the items of a case, by the field of `Options`.

    One item has all keys, and all queries; others have any number, some of them none.
    """
    lengths: dict[str, tuple[int, ...]] = {}
    for place, name in enumerate(LENGTHS[case.lengths]):
        # In self-attention the queries are the keys.
        stream = 3 if case.inputs == "self" else 3 + place
        generator = torch.Generator().manual_seed(case.seed + stream)
        longest = case.S if name == "key_lengths" else case.L
        drawn = torch.randint(0, longest + 1, (case.B,), generator=generator)
        drawn[case.seed % case.B] = longest
        lengths[name] = tuple(drawn.tolist())
    return lengths


def _of_heads(case: Case, stream: int) -> list[float]:
    """Return a multiple of 1/4 in [-3, 3] for each head.

    stream: another one gives other numbers.
    """
    generator = torch.Generator().manual_seed(case.seed + stream)
    drawn = torch.randint(-12, 13, (case.n_heads,), generator=generator)
    return [number / 4 for number in drawn.tolist()]
