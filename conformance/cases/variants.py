"""Variants: configurations that are not everyday ones, each as other fields of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mha.conformance.cases.case import Case
from mha.spec import Claims

Fields = dict[str, Any]
# Of heads, beside that of d_model / n_heads.
OWN_WIDTHS = (*range(1, 9), 16, 48)
# Models so wide that their tests are about many numbers, for which other widths of key and value
# must be many too.
WIDE = 64


@dataclass(frozen=True)
class Variant:
    """A variant of a configuration.

    claim: what it needs.
    fields: the fields of a case that differ, by the case's seed.
    """

    claim: str
    fields: Callable[[Case, Claims], Fields]


def _grouped(case: Case, claims: Claims) -> Fields:
    """Return fewer key/value heads than query heads; none for one head."""
    n_heads = case.n_heads
    if n_heads == 9 and 8 in (claims.sizes.n_heads or {8}):
        # 3 heads of 9 have as many query heads as there are, which hides exchanged numbers.
        n_heads = 8
    divisors = [count for count in range(1, n_heads) if n_heads % count == 0]
    if not divisors:
        return {}
    return {"n_heads": n_heads, "n_kv_heads": divisors[case.seed % len(divisors)]}


def _own_width(case: Case, claims: Claims) -> Fields:
    """Return heads of a claimed width other than d_model / n_heads.

    Up to 2 is added to d_model, so that `n_heads` need not divide it.
    """
    added, which = case.seed % 3, case.seed // 3
    d_model = case.n_heads * case.head_dim + added
    widths = _claimed_widths(claims)
    others = [width for width in widths if width * case.n_heads != d_model] or widths
    return {"d_model": d_model, "head_dim": others[which % len(others)]}


def _other_widths(case: Case, claims: Claims) -> Fields:
    """Return widths of key and value other than d_model; each is d_model one time in three."""
    d_model = case.n_heads * case.head_dim
    # Widths from 1 to 7: as small as those of most cases, and most of them odd.
    kdim, vdim = 1 + case.seed % 7, 1 + case.seed // 7 % 7
    if d_model >= WIDE:
        kdim, vdim = d_model // 2, 2 * d_model
    if case.inputs == "memory":
        return {"kdim": kdim, "vdim": kdim}
    if case.seed % 3 == 1:
        return {"kdim": None, "vdim": vdim}
    if case.seed % 3 == 2:
        return {"kdim": kdim, "vdim": None}
    return {"kdim": kdim, "vdim": vdim}


def _value_width(case: Case, claims: Claims) -> Fields:
    """Return values of a claimed width other than that of queries and keys."""
    pairs = sorted(claims.sizes.head_dim_pairs or ())
    if pairs:
        head_dim, d_value = pairs[case.seed % len(pairs)]
        return {"head_dim": head_dim, "d_value": d_value}
    widths = _claimed_widths(claims)
    others = [width for width in widths if width != case.head_dim] or widths
    return {"d_value": others[case.seed % len(others)]}


def _claimed_widths(claims: Claims) -> list[int]:
    """Return widths of heads that are claimed, the smallest first."""
    widths = claims.sizes.head_dims or OWN_WIDTHS
    return sorted({claims.sizes.fit_head_dim(width) for width in widths})


VARIANTS = {
    "grouped": Variant("grouped_query", _grouped),
    "own_width": Variant("own_head_dim", _own_width),
    "other_widths": Variant("kv_widths", _other_widths),
    "value_width": Variant("value_width", _value_width),
}


def as_variant(case: Case, name: str, claims: Claims) -> Case:
    """Return a variant of a case, of claimed sizes, or the case itself if there is none."""
    if name == "plain":
        return case
    fields = VARIANTS[name].fields(case, claims)
    return replace(case, variant=name, **fields) if fields else case
