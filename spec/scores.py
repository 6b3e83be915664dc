"""What a call may say about the scores and ask of them, and what an implementation claims of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ScaleRange = Literal["positive", "any"]
AlibiForm = Literal["signed", "symmetric"]
AlibiOrigin = Literal["query", "any"]
SinkDtype = Literal["float32", "input"]
SoftcapPlace = Literal["before_bias", "after_bias"]
WindowForm = Literal["left_right", "left", "count", "symmetric", "count_right"]
Alignment = Literal["top_left", "bottom_right"]
Base = Literal["e", "2"]
EmptyLse = Literal["-inf", "+inf", "undefined"]
LseLayout = Literal["b h l", "b l h", "b h l 1", "(b h) l", "h t", "t h"]
# t is the axis of all tokens, those of the first item first.
TOKENS = {"h t": "h (b l)", "t h": "(b l) h"}
LseDtype = Literal["float32", "input"]
TailPolicy = Literal["refused", "zero", "undefined"]
# What else is in a row of packed sequences, or is wrong with the offsets that say where they are.
Packing = Literal["gaps", "tail", "late", "falling", "beyond"]
# How many keys before and after its own place a query sees, itself not counted; None for all of
# them.
Bounds = tuple[int | None, int | None]
# A bound that is beyond every key, for functions that take a number only.
NO_BOUND = 2**20
# A cap that changes no score: tanh(s / c) is s / c then, and a power of two leaves all bits, but
# not in float16, whose s / c is 0.
NO_CAP = 2.0**60
# Of the heads, or of the heads of each item.
Slopes = tuple[float, ...] | tuple[tuple[float, ...], ...]
# The options that every attention takes.
EVERY_CALL = ("mask", "is_causal", "need_weights")


@dataclass(frozen=True, slots=True)
class Window:
    """How an argument says which keys are in the window of a query (clause WIN-1).

    form: for a query at p, the place that the causal mask would end at,
        "left_right": two numbers, p - left <= t <= p + right, as in flash-attention;
        "left": one number, t >= p - left, so that left + 1 keys are seen with the query's own;
        "count": one number of keys, the query's own among them, none after it, as in transformers;
        "symmetric": one number, p - w <= t <= p + w;
        "count_right": two numbers, p - left < t <= p + right, as in cuDNN.
    unbounded: what stands for a side without a bound: -1, None, or a number of keys beyond any
        length, at least `NO_BOUND`.

    Raises ValueError for an unknown word.

    >>> Window("left_right").numbers((3, None)), Window("count").numbers((3, 0))
    ((3, -1), (4,))
    >>> Window("left").nearest((2, 5))
    (2, None)
    """

    form: WindowForm
    unbounded: int | None = -1

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        if self.form not in get_args(WindowForm):
            words = ", ".join(map(repr, get_args(WindowForm)))
            raise ValueError(f"Window.form must be one of {words}, but is {self.form!r}")
        is_far = isinstance(self.unbounded, int) and self.unbounded >= NO_BOUND
        if self.unbounded not in (-1, None) and not is_far:
            raise ValueError(
                f"Window.unbounded must be -1, None, or {NO_BOUND} or more, but is"
                f" {self.unbounded!r}"
            )

    def nearest(self, bounds: Bounds) -> Bounds:
        """Return the window that this form can say, nearest to one of these bounds."""
        left, _ = bounds
        if self.form == "left":
            return left, None
        if self.form == "count":
            return left, None if left is None else 0
        if self.form == "symmetric":
            return left, left
        return bounds

    def numbers(self, bounds: Bounds) -> tuple[int | None, ...]:
        """Return the numbers that say a window, of bounds that this form can say."""
        left, right = bounds
        counted = None if left is None else left + 1
        said: dict[str, tuple[int | None, ...]] = {
            "left_right": (left, right),
            "count": (counted,),
            "count_right": (counted, right),
        }
        numbers = said.get(self.form, (left,))
        return tuple(self.unbounded if each is None else each for each in numbers)


@dataclass(frozen=True, slots=True)
class Alibi:
    """How slopes become a bias of the scores (clause ALB-1).

    form: for a query at place p, "signed" is m (t - p) for key t, and "symmetric" -m |t - p|.
    origin: a signed bias is counted from the query's own place, or from "any", which changes no
        weight.
    per_item: slopes may be a tensor (B, H), for each item, as well as (H,).
    built_in: slopes are not given, but switched on; they are those of `alibi_slopes` (clause
        ALB-2).

    Raises ValueError for an unknown word, or for slopes that are built in and given.

    >>> Alibi("signed").origin
    'query'
    """

    form: AlibiForm
    origin: AlibiOrigin = "query"
    per_item: bool = False
    built_in: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word, or for slopes that are built in and given."""
        if self.per_item and self.built_in:
            raise ValueError("Alibi.per_item is of slopes that are given, and built_in of others")
        for name, known in (("form", AlibiForm), ("origin", AlibiOrigin)):
            if getattr(self, name) not in get_args(known):
                words = ", ".join(map(repr, get_args(known)))
                raise ValueError(
                    f"Alibi.{name} must be one of {words}, but is {getattr(self, name)!r}"
                )


@dataclass(frozen=True, slots=True)
class Scores:
    """What a call may say about the scores.

    scale: an explicit scale takes the place of the usual one (clause SCL-1): "positive" ones, or
        "any", zero and negative ones too; None if there is no such argument.
    window: the form of an argument for a window.
    chunk: a query sees only keys of its own chunk, of as many places as a call says (clause CHK-1).
    alignment: of the window, the chunks and ALiBi where `Claims.causal` is None; otherwise it is
        that of the causal mask.
    softcap: scores s become c tanh(s / c), for a cap c of the call, before a float mask is added,
        or after it.
    sinks: each head has a sink z: exp(z) is added to the denominator of its weights. The dtype of
        the tensor (H,) in which they are passed: float32, or that of the inputs.
    alibi: how slopes of the heads, in float32, become a bias.

    Raises ValueError for an unknown word.

    >>> Scores(scale="positive").takes("scale"), Scores().takes("scale")
    (True, False)
    """

    scale: ScaleRange | None = None
    window: Window | None = None
    chunk: bool = False
    alignment: Alignment | None = None
    softcap: SoftcapPlace | None = None
    sinks: SinkDtype | None = None
    alibi: Alibi | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        words_of = {
            "scale": ScaleRange,
            "alignment": Alignment,
            "softcap": SoftcapPlace,
            "sinks": SinkDtype,
        }
        for name, known in words_of.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(known):
                words = ", ".join(map(repr, get_args(known)))
                raise ValueError(f"Scores.{name} must be one of {words} or None, but is {value!r}")
        if not isinstance(self.window, Window | None):
            raise ValueError(f"Scores.window must be a Window, or None, but is {self.window!r}")
        if not isinstance(self.alibi, Alibi | None):
            raise ValueError(f"Scores.alibi must be an Alibi, or None, but is {self.alibi!r}")

    def takes(self, option: str) -> bool:
        """Return whether a field of `Options` may be given."""
        return getattr(self, option) not in (None, False)


@dataclass(frozen=True, slots=True)
class Lse:
    """What the log-sum-exp of the scores is that a call returns beside its context (clause LSE-1).

    base: of the logarithm, and of the exponentials in the sum.
    empty: that of a query without an allowed key.
    layout: its axes; the contract's own is (B, H, L).
    dtype: that of the inputs, or float32, and float64 for inputs in float64.
    gradient: it can be differentiated (clause LSE-3).
    sink: a sink of the head is a part of the sum.

    Raises ValueError for an unknown word.

    >>> Lse(base="2").empty
    '-inf'
    """

    base: Base = "e"
    empty: EmptyLse = "-inf"
    layout: LseLayout = "b h l"
    dtype: LseDtype = "float32"
    gradient: bool = False
    sink: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        words = {"base": Base, "empty": EmptyLse, "layout": LseLayout, "dtype": LseDtype}
        for name, known in words.items():
            if getattr(self, name) not in get_args(known):
                options = ", ".join(map(repr, get_args(known)))
                raise ValueError(
                    f"Lse.{name} must be one of {options}, but is {getattr(self, name)!r}"
                )

    @property
    def axes(self) -> str:
        """The layout as an einops pattern of b, h and l.

        >>> Lse(layout="t h").axes
        '(b l) h'
        """
        return TOKENS.get(self.layout, self.layout)

    @property
    def log_base(self) -> float:
        """What a natural log-sum-exp is divided by.

        >>> Lse().log_base
        1.0
        """
        return math.log(2) if self.base == "2" else 1.0

    def dtypes_for(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes that it may have for inputs in another one, the least accurate first.

        >>> import torch
        >>> Lse().dtypes_for(torch.bfloat16), Lse().dtypes_for(torch.float64)
        ((torch.float32,), (torch.float32, torch.float64))
        """
        import torch  # not above: claims are read without it

        if self.dtype == "input":
            return (dtype,)
        return tuple(dict.fromkeys([torch.float32, torch.promote_types(dtype, torch.float32)]))


@dataclass(frozen=True, slots=True)
class Packed:
    """How a kernel takes sequences that are packed one after another (the PAK clauses).

    tail: what becomes of tokens after the last offset: they are "refused", their rows are "zero",
        or "undefined".
    gaps: there may be tokens between one sequence and the next that are in none.

    Raises ValueError for an unknown word.

    >>> Packed().tail
    'undefined'
    """

    tail: TailPolicy = "undefined"
    gaps: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown word."""
        if self.tail not in get_args(TailPolicy):
            words = ", ".join(map(repr, get_args(TailPolicy)))
            raise ValueError(f"Packed.tail must be one of {words}, but is {self.tail!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a call says beside its inputs: each field is an argument of `mha.spec.Attention`.

    A field that is None is not passed, except for the mask.

    mask: boolean (True = may attend) or floating-point (added to the scores), broadcastable to
        (B, H, L, S), or None.
    is_causal: whether the causal mask applies as well.
    need_weights: whether the weights are returned too.
    scale: what the scores are multiplied by; None for the usual scale.
    return_lse: whether the log-sum-exp is returned too; None where it is not claimed.
    window: how many keys before and after its own place each query sees, None for all on that side;
        None for no window.
    chunk: c: a query at place p sees the keys t with floor(t / c) = floor(p / c); None for all.
    softcap: c, of scores that become c tanh(s / c), or None.
    sinks: a number z for each head, whose exponential is added to the denominator of its weights;
        None for none.
    key_lengths, query_lengths: how many keys, and queries, each item has, from the first one on;
        None for all. Places count from these.
    packing: where sequences are packed, what else is in the row, or is wrong with the offsets: see
        `mha.implementations.adapters.packing`; None for nothing.
    batch_invariant: whether an item's bits must not depend on the other items; None where that is
        not asked for.
    alibi: a slope for each head, or for each item and head, of a bias that grows with the distance
        of a key; None for none.

    >>> Options(scale=0.5).arguments
    {'mask': None, 'is_causal': False, 'need_weights': False, 'scale': 0.5}
    """

    mask: Tensor | None = None
    is_causal: bool = False
    need_weights: bool = False
    scale: float | None = None
    return_lse: bool | None = None
    window: Bounds | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    alibi: Slopes | None = None
    chunk: int | None = None
    key_lengths: tuple[int, ...] | None = None
    query_lengths: tuple[int, ...] | None = None
    packing: Packing | None = None
    batch_invariant: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call, by name: those of every attention, and others if given."""
        every = {name: getattr(self, name) for name in EVERY_CALL}
        return every | self.of_scores

    def lengths_of(self, batch: int, queries: int, keys: int) -> list[tuple[int, int]] | None:
        """Return how many queries and keys each item has; None where all have all.

        >>> Options(key_lengths=(3, 1)).lengths_of(2, 4, 5)
        [(4, 3), (4, 1)]
        """
        if self.key_lengths is None and self.query_lengths is None:
            return None
        of_queries = self.query_lengths or (queries,) * batch
        of_keys = self.key_lengths or (keys,) * batch
        return list(zip(of_queries, of_keys, strict=True))

    @property
    def of_scores(self) -> dict[str, Any]:
        """The arguments that an attention has only where it claims them, if they are given."""
        others = [field.name for field in fields(self) if field.name not in EVERY_CALL]
        given = {name: getattr(self, name) for name in others}
        return {name: value for name, value in given.items() if value is not None}

    def change(self, **changes: Any) -> Options:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


def stand_in(option: str, query: Tensor, n_heads: int) -> Any:
    """Return the value by which an option changes nothing; None for one that has none.

    query: whose dtype and device the numbers of heads have, those of slopes in float32.
    """
    if option == "softcap":
        return NO_CAP
    if option == "sinks":
        return query.new_full((n_heads,), -math.inf)
    if option == "alibi":
        return query.new_zeros(n_heads).float()
    return None
