"""Where an implementation rounds: the profile that decides how large its error bound is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Accumulator = Literal["", "truncated", "float16"]
Cast = Literal["nearest", "toward_zero", "stochastic"]
Products = Literal["ieee", "bf16x3", "tf32", "bf16"]
Quantised = Literal["", "float8_e4m3fn", "float8_e5m2"]
# 32 ulp of float32; in half precision, a quarter of the roundoff of bfloat16.
LARGEST_EXP_ERROR, LARGEST_EXP_ERROR_IN_HALF = 64, 1 << 14
MOST_MERGES = 64
MOST_REDUCTIONS = 64


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where an implementation rounds: the profile behind its error bound, by default the loosest.

    What is stored:
        scores_stored: scores are stored in the dtype of the inputs between steps, not in the
            accumulator's.
        weights_stored: so are weights, or they are cast for their product with the values, as in
            FlashAttention.
        softmax_stored: so are the differences, exponentials and sums of the softmax; each sum
            itself is accumulated in the accumulator's dtype.
        scaling_roundings: how many of query and key are rounded after being scaled, before their
            product: 0, 1 or 2.
        heads_stored: the dtype in which projected queries, keys and values are stored, if it is not
            that of the inputs: a float8 format, with a scale for each head, row or tile, at most
            twice what its largest number needs. Gradients are those of the numbers before they are
            rounded.
        partials_stored: over ranks, partial results are stored in the dtype of the inputs: the
            contexts of parts of a row before they are merged and after each merge, and the parts of
            an output before and after each is added. Parts of a gradient may be in any case. A
            merge is differentiated as a whole, or in the accumulator.
        reductions: how many partial sums of a projection or a context are stored in the dtype of
            the inputs, and then added to another one: one less than the parts into which a product
            is split, at most 64. Directed tests, which have no model of them, are then not judged.

    Products and sums:
        products: what becomes of float32 numbers before they are multiplied. "tf32" keeps 10 bits
            of the fraction, rounded or not; "bf16" casts them to bfloat16; "bf16x3" multiplies each
            as the sum of two numbers in bfloat16, and leaves out the product of the smaller ones.
            "ieee" leaves them as they are.
        accumulator: "truncated" if the accumulator drops bits instead of rounding; "float16" if
            products of float16 are added up in float16.
        mode: how casts to bfloat16 and float16 round. One that is not to nearest may be off by two
            unit roundoffs; one that drops bits ("toward_zero") errs in one direction, and is not
            judged by directed tests.
        flushes: results below the smallest normal number of the dtype become zero when they are
            stored.

    The softmax:
        exp_error: error of the exponential, in unit roundoffs of the accumulator (4 for 1 ulp, 40
            for vectorised 20 ulp); at most 64, and in half precision at most 2^14.
        log_normaliser: weights are computed as exp(score - z), with z the row's log-sum-exp, all in
            the accumulator, or parts of a row are merged by their log-sum-exps (split keys). The
            sum of a row is then off by the rounding of z, which grows with the scores, and by the
            errors of two exponentials.
        heads_in_float32: float64 queries and keys are normed and rotated in float32, where they are
            (`Claims.qk_norm`, `Claims.rotary`), or by tables that are made in float32, which is
            usual; clause NUM-2 is then not claimed.
        softmax_in_float32: float64 scores are cast to float32 for the softmax; clause NUM-2 is then
            not claimed.
        merges: how many times a partial result of a row is rescaled again when parts of the row are
            merged: at most one less than there are parts. Over n ranks that hold the keys, n - 1
            more are counted without being declared.
        rescales: how many times at most an online softmax rescales a key's share because the
            maximum has grown: 0 for a softmax over whole rows. None for as many as the scores of
            each row make it, read from either end.

    ranks: over how many ranks partial results may be shared out. It is not declared: each case says
        so.

    Raises ValueError for a number outside its range, for which the bound would prove nothing, and
    for an unknown `products`, `accumulator`, `mode` or `heads_stored`.

    >>> plain = Rounding(softmax_stored=False, log_normaliser=False, rescales=0)  # torch.softmax
    >>> plain.exp_error
    40
    """

    scores_stored: bool = True
    softmax_stored: bool = True
    scaling_roundings: int = 2
    exp_error: int = 40
    log_normaliser: bool = True
    softmax_in_float32: bool = False
    heads_in_float32: bool = True
    merges: int = 0
    mode: Cast = "nearest"
    partials_stored: bool = True
    heads_stored: Quantised = ""
    ranks: int = 1
    weights_stored: bool = True
    products: Products = "ieee"
    accumulator: Accumulator = ""
    reductions: int = 0
    rescales: int | None = None
    flushes: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError unless the profile is one for which the bound proves something."""
        ranges = {
            "exp_error": LARGEST_EXP_ERROR_IN_HALF,
            "scaling_roundings": 2,
            "merges": MOST_MERGES,
            "reductions": MOST_REDUCTIONS,
        }
        for name, most in ranges.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"Rounding.{name} must be from 0 to {most}, but is {getattr(self, name)!r}"
                )
        words = {
            "products": Products,
            "accumulator": Accumulator,
            "mode": Cast,
            "heads_stored": Quantised,
        }
        for name, known in words.items():
            if getattr(self, name) not in get_args(known):
                options = ", ".join(repr(word) for word in get_args(known))
                raise ValueError(
                    f"Rounding.{name} must be one of {options}, but is {getattr(self, name)!r}"
                )
        if self.rescales is not None and self.rescales < 0:
            raise ValueError(
                f"Rounding.rescales must be None, 0 or positive, but is {self.rescales!r}"
            )
        if not self.ranks >= 1:
            raise ValueError(f"Rounding.ranks must be positive, but is {self.ranks!r}")

    @property
    def narrows(self) -> bool:
        """Whether a step of a float64 call is declared to be in a narrower dtype."""
        return self.softmax_in_float32 or bool(self.heads_stored)

    @property
    def of_plain_softmax(self) -> Rounding:
        """The same with a softmax over whole rows, in the accumulator."""
        return replace(self, softmax_stored=False, log_normaliser=False, rescales=0)

    @property
    def exponentials(self) -> int:
        """How many exponentials are on the way of a key, without those of `rescales`.

        One is its own, and each merge of parts has another one; where weights are made from
        log-sum-exps, parts of the row may have been merged once without being declared.
        """
        return 1 + self.merges + int(self.log_normaliser)

    @property
    def is_coarse(self) -> bool:
        """Whether results may be far less accurate than those of the plain formula."""
        coarse_sums = bool(self.reductions) or self.accumulator == "float16"
        return coarse_sums or self.products != "ieee" or self.exp_error > LARGEST_EXP_ERROR

    @property
    def others(self) -> int:
        """How many partial results are added to one that is stored: of parts of a sum and ranks."""
        of_ranks = self.ranks - 1 if self.partials_stored else 0
        return self.reductions + of_ranks

    def exponential(self, *, half: bool) -> int:
        """Return the error of the exponential in unit roundoffs of the accumulator.

        half: in half precision.

        >>> Rounding(exp_error=1024).exponential(half=False)
        64
        """
        return self.exp_error if half else min(self.exp_error, LARGEST_EXP_ERROR)
