"""How a defect fits what was returned: whether its formula reproduces that, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mha.conformance.cases.modes import MODES
from mha.conformance.diagnosis.evidence import Evidence
from mha.conformance.harness.known_bad.defect import Defect
from mha.conformance.harness.textbook import TextbookAttention
from mha.spec import Claims

# Of one defect: the modules that have been made of it, by the call's attention and the dtype.
Made = dict[tuple[int, torch.dtype], TextbookAttention]

# How much larger an error may be than that of the defective formula in the same dtype, both as root
# mean squares, and how much larger its difference from the right answer must be.
SLACK, CLEAR = 16.0, 8.0
# An error this large is not one of rounding, relative to the answer.
GROSS = 0.05
# In so many sessions a defect must explain something, unless there are fewer.
LEAST_EXPLAINED = 3


@dataclass(frozen=True, eq=False)
class Fit:
    """How a defect fits a call.

    fits: whether it reproduces the answer.
    clear: whether only an incorrect answer would be reproduced.
    whole: whether it does so in every row, also in those that it leaves without a key.
    """

    call: Evidence
    fits: bool
    clear: bool
    whole: bool = True

    @property
    def explains(self) -> bool:
        """Whether the answer is incorrect, and as explained."""
        return self.fits and self.clear and self.call.is_wrong

    @property
    def contradicts(self) -> bool:
        """Whether the answer is right, where the defect has another one."""
        return not self.fits and not self.call.is_wrong


def fits_of(
    defect: Defect, evidence: Sequence[Sequence[Evidence]], claims: Claims
) -> list[Fit] | None:
    """Return how a defect fits each call; None as soon as one is neither right nor as explained.

    None also where the first session, that of the failure, is not explained, or too few are.
    """
    fits: list[Fit] = []
    explained = 0
    for calls in evidence:
        own = _fits_in(defect, calls, claims)
        if own is None:
            return None
        is_explained = any(fit.explains for fit in own)
        if not fits and not is_explained:
            return None
        explained += is_explained
        fits += own
    return fits if explained >= min(LEAST_EXPLAINED, len(evidence)) else None


def _fits_in(defect: Defect, calls: Sequence[Evidence], claims: Claims) -> list[Fit] | None:
    """Return how a defect fits each call of a session; None if it does not fit an incorrect one."""
    made: Made = {}
    fits = []
    for call in calls:
        try:
            fit = _fit(defect, call, claims, made)
        except (RuntimeError, IndexError, ValueError, ArithmeticError):
            fit = Fit(call, False, False)  # the defect means nothing for such shapes
        if not fit.fits and call.is_wrong:
            return None
        fits.append(fit)
    return fits


def _fit(defect: Defect, call: Evidence, claims: Claims, made: Made) -> Fit:
    """Compare a call with that of the defective formula.

    Where they differ, rows that the defect leaves without a key are left out: what those give is a
    matter of its own.
    """
    formula = _Formula(defect, call, claims, made)
    if formula.exact.shape != call.output.shape:
        return Fit(call, False, False)
    known = call.right.rad.isfinite().all(-1)
    fit = Fit(call, False, False)
    for rows in (known, known & formula.filled):
        if not bool(rows.any()):
            return Fit(call, True, False)
        fit = formula.fit(rows, whole=rows is known)
        if fit.fits:
            break
    return fit


class _Formula:
    """The defective formula in place of a call: in float64, and rounded as the call is."""

    def __init__(self, defect: Defect, call: Evidence, claims: Claims, made: Made) -> None:
        self.defect, self.call, self.claims, self.made = defect, call, claims, made
        self.exact, self.filled = answer(defect, call, claims, made, torch.float64)
        self.dtype = call.step.problem.query.dtype
        # In float64 the rounding is that of float32, scaled.
        self.rounded_to = torch.float32 if self.dtype == torch.float64 else self.dtype

    @cached_property
    def rounded(self) -> Tensor:
        """Its answer in the dtype of the call, or in float32 in place of float64."""
        return answer(self.defect, self.call, self.claims, self.made, self.rounded_to)[0]

    def fit(self, rows: Tensor, *, whole: bool) -> Fit:
        """Return how the defect fits these rows (B, L) of the call."""
        output, right = self.call.output[rows], self.call.right.mid[rows]
        exact = self.exact[rows]
        size, error = _rms(exact), difference(output, exact)
        eps = torch.finfo(self.dtype).eps
        allowed = eps / 2 * size
        # More than one rounding gives, and not beyond what many may; infinity may be an overflow.
        if error > SLACK * allowed and not GROSS * size < error < math.inf:
            rounded = self.rounded[rows]
            factor = eps / torch.finfo(self.rounded_to).eps
            allowed = max(allowed, factor * min(difference(rounded, exact), size))
            if self.dtype == self.rounded_to:
                error = min(error, difference(output, rounded))
        clear = difference(exact, right) > CLEAR * SLACK * allowed
        most, whole_error = SLACK * allowed, difference(output, right)
        if math.isfinite(whole_error):  # of NaN and infinity, no share is left unexplained
            most = max(most, self.defect.unexplained * whole_error)
        is_wrong = bool(self.call.wrong[rows].any())
        return Fit(self.call, error <= most, clear and is_wrong, whole)


def answer(
    defect: Defect,
    call: Evidence,
    claims: Claims,
    made: Made,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the answer of the defective formula in a dtype, and the rows (B, L) that keep a key.

    The answer is converted to float64.
    """
    key, problem = (call.step.build, dtype), call.step.problem
    if key not in made:
        weights = call.weights.to(dtype, "cpu")
        made[key] = defect.attention(claims, call.config, weights, torch.Generator())
    mask = problem.mask
    if mask is not None:
        mask = mask.cpu()
        mask = mask.to(dtype) if mask.is_floating_point() else mask
    inputs = (x.cpu().to(dtype) for x in (problem.query, problem.key, problem.value))
    attention = made[key].train(MODES[call.step.mode].training)
    output = attention(*inputs, **problem.options.change(mask=mask).arguments).output.double()
    return output, (attention.allowed.any(-1) | ~call.filled).all(1)


def difference(one: Tensor, other: Tensor) -> float:
    """Return the root mean square of a difference.

    It is infinite where only one of the two is NaN, or has an infinity.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    left = (one - other).masked_fill(same, 0.0)
    return _rms(left.nan_to_num(nan=math.inf, posinf=math.inf))


def _rms(x: Tensor) -> float:
    finite = x.masked_fill(x.isnan(), 0.0)
    return float(finite.square().mean().sqrt()) if x.numel() else 0.0
