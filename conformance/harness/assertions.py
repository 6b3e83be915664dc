"""The assertions of properties, with messages of value, expectation, bound, place and reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.implementations import UnsupportedCallError
from mha.spec.bounds import Ball

# An error of so many roundings, relative to the largest number beside it, and so many times its
# bound, is one of accuracy (NUM-1).
ROUNDINGS, TIMES_THE_BOUND = 64, 16


def expect(condition: bool, message: str, *assertion: str) -> None:
    """Raise a Violation with this message and these lines of script unless the condition holds."""
    if not condition:
        raise Violation(message, assertion)


def assume(condition: bool, reason: str) -> None:
    """Discard the case, so that it is not counted, unless the condition holds."""
    if not condition:
        raise Discard(reason)


def expect_shape(result: RecordedTensor, shape: tuple[int, ...]) -> None:
    """The shape is exactly this."""
    actual = tuple(result.tensor.shape)
    expect(
        actual == shape,
        f"{result.code} has shape {actual}, but should have {shape}",
        f"assert {result.code}.shape == {shape}, {result.code}.shape",
    )


def expect_equal(result: RecordedTensor, expected: RecordedTensor | float, *, because: str) -> None:
    """Every bit is equal (NaN equals NaN): the same operations on the same numbers round alike."""
    if isinstance(expected, RecordedTensor):
        value, name = expected.tensor, expected.code
    else:
        value = torch.full_like(result.tensor, expected)
        name = f"torch.full_like({result.code}, {expected!r})"
    expect_shape(result, tuple(value.shape))
    same = (result.tensor == value) | (result.tensor.isnan() & value.isnan())
    if bool(same.all()):
        return
    error = (result.tensor.double() - value.double()).abs().nan_to_num(nan=float("inf"))
    place = _place_of_largest(error.masked_fill(same, -1.0))
    wording = "exactly {}"
    if isinstance(expected, RecordedTensor):
        wording = f"{{}}, to the bit, as in {expected[place].code}"
    assertion = f"torch.testing.assert_close({result.code}, {name}, rtol=0, atol=0, equal_nan=True)"
    raise Violation(_message(result, value, place, wording, because), (assertion,))


def expect_no_worse(
    code: str, result: Tensor, plain: Tensor, expected: Tensor, times: int = 2
) -> None:
    """The root mean square error is at most `times` that of the plain formula in the same dtype.

    NaN is an error. An error of less than one rounding of the result counts as one rounding: below
    that, a ratio is luck.
    """
    error = _root_mean_square(result - expected)
    least = torch.finfo(plain.dtype).eps / 2 * _root_mean_square(expected)
    allowed = max(_root_mean_square(plain - expected), least)
    than = "twice" if times == 2 else f"{times} times"
    message = (
        f"the root mean square error of {code} is {error:.3g}, more than {than} the {allowed:.3g}"
        " of the plain formula in the same dtype"
    )
    expect(error <= times * allowed, message)


def expect_close(result: RecordedTensor, expected: Ball, *, because: str) -> None:
    """Every element is in the expected ball, with NaN and infinity in the same places."""
    place = _outside(result, expected)
    if place is None:
        return
    value, bound = float(expected.mid[place]), float(expected.rad[place])
    wording = f"{{}} (bound on rounding: {bound:.3g})"
    message = _message(result, expected.mid, place, wording, because)
    violation = Violation(message, _bound_assertion(result[place].code, value, bound))
    violation.is_rounding = _is_rounding(result.tensor.detach(), expected, place)
    raise violation


def expect_agree(
    result: RecordedTensor, other: RecordedTensor, *bounds: Callable[[], Ball], because: str
) -> None:
    """Two results differ by at most the sum of the bounds of both; neither is compared with the
    oracle.

    bounds: make the bound of each, or one that both have; none is needed where every bit is equal,
        as it often is.
    because: what the other result is.
    """
    if result.tensor.dtype == other.tensor.dtype and torch.equal(result.tensor, other.tensor):
        return
    radii = [bound().rad for bound in bounds]
    reach = Ball(other.tensor.detach().double(), radii[0] + radii[-1])
    place = _outside(result, reach)
    if place is None:
        return
    bound, code, other_code = float(reach.rad[place]), result[place].code, other[place].code
    actual, expected = _until_they_differ(result.tensor[place].item(), float(reach.mid[place]))
    message = (
        f"{code} is {actual}, but {other_code}, {because}, is {expected} (bound on the"
        f" rounding of both: {bound:.3g})"
    )
    both = f"{code}.double(), {other_code}.double()"
    assertion = f"torch.testing.assert_close({both}, rtol=0, atol={bound!r}, equal_nan=True)"
    raise Violation(message, (assertion,))


def expect_unchanged(
    session: Session,
    result: RecordedTensor,
    expected: RecordedTensor,
    *,
    bound: Callable[[], Ball],
    because: str,
) -> None:
    """Two results of the same operations are equal to the bit.

    On devices other than the CPU, and for an implementation that retiles, they agree within twice
    the bound.
    """
    if session.case.device == "cpu" and not session.claims.retiles:
        expect_equal(result, expected, because=because)
    else:
        expect_agree(result, expected, bound, because=because)


def expect_raises(call: Callable[[], Any], *, because: str) -> BaseException:
    """The implementation refuses the call with an exception, which is returned.

    Raises Discard where its adapter cannot express the call: that refusal counts for nothing.
    """
    note = ""
    try:
        call()
    except Violation as violation:
        if isinstance(violation, CallRaised):
            return violation.error
    except AdapterError as failed:
        assume(not isinstance(failed.error, UnsupportedCallError), f"{because}: {failed.message}")
        # It could not load what the implementation had accepted.
        note = f" (only its adapter refused, afterwards: {failed.error})"
    message = f"no exception was raised, though {because}{note}"
    raise Violation(message, (f"raise AssertionError({because!r})",))


def expect_each_raises(calls: Mapping[str, Callable[[], Any]]) -> None:
    """The implementation refuses each call, for the reason that is its key.

    Calls that its adapter cannot express do not count. Raises Discard if no other is left.
    """
    discarded: list[Discard] = []
    for because, call in calls.items():
        try:
            expect_raises(call, because=because)
        except Discard as reason:
            discarded.append(reason)
    if discarded and len(discarded) == len(calls):
        raise discarded[0]


def _root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _outside(result: RecordedTensor, expected: Ball) -> tuple[int, ...] | None:
    """Return the place that is farthest outside the ball, or None, and note the margin.

    That is relative to the radius of the place.
    """
    expect_shape(result, tuple(expected.mid.shape))
    value, radius, actual = expected.mid, expected.rad, result.tensor.detach().double()
    nothing_known = bool(actual.numel()) and bool(radius.isinf().all())
    assume(not nothing_known, "a step may overflow, so nothing is known")
    error = (actual - value).abs()
    ratio = (error / radius).nan_to_num(nan=0.0, posinf=math.inf)
    within = error <= radius
    if bool(within.all()):  # and then no number is NaN
        result.note_margin(float(ratio.max()) if ratio.numel() else 0.0)
        return None
    finite = actual.isfinite() & value.isfinite()
    identical = (actual == value) | (actual.isnan() & value.isnan())
    same = torch.where(finite, within, identical)
    same |= radius == float("inf")  # where a step may overflow, nothing is known
    ratio = ratio.where(finite, 0.0)
    if bool(same.all()):
        result.note_margin(float(ratio.max()))
        return None
    return _place_of_largest(torch.where(finite, ratio, float("inf")).masked_fill(same, -1.0))


def _is_rounding(actual: Tensor, expected: Ball, place: tuple[int, ...]) -> bool:
    """Return whether an element is off by no more than a few roundings.

    These are a few times its bound, and a few roundings of the largest number.
    """
    error = abs(float(actual[place]) - float(expected.mid[place]))
    largest = float(expected.mid.nan_to_num(0.0, 0.0, 0.0).abs().max())
    few = ROUNDINGS * torch.finfo(actual.dtype).eps * largest
    return error <= min(few, TIMES_THE_BOUND * float(expected.rad[place]))


def _bound_assertion(code: str, value: float, bound: float) -> tuple[str, ...]:
    """Return the lines of script that compare an element with a value within a bound."""
    if math.isnan(value):
        return (f"assert {code}.isnan(), {code}.item()",)
    return (f"error = abs({code}.item() - {value!r})", f"assert error <= {bound!r}, error")


def _place_of_largest(error: Tensor) -> tuple[int, ...]:
    flat, place = int(error.argmax()), []
    for size in reversed(error.shape):  # `torch.unravel_index` imports SymPy, which takes a second
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))


def _message(
    result: RecordedTensor, value: Tensor, place: tuple[int, ...], wording: str, because: str
) -> str:
    """Return the message on one element.

    wording: of what it should be, with {} for the expected number.
    """
    actual, expected = _until_they_differ(result.tensor[place].item(), value[place].item())
    return f"{result[place].code} is {actual}, but should be {wording.format(expected)}: {because}"


def _until_they_differ(x: float, y: float) -> tuple[str, str]:
    """Return two numbers with three digits, or as many as tell them apart.

    Numbers below a million have all digits before the point.

    >>> _until_they_differ(0.30462, 0.26649), _until_they_differ(1.23456, 1.23459)
    (('0.305', '0.266'), ('1.23456', '1.23459'))
    >>> _until_they_differ(54321.0, 2.0)
    ('54321', '2')
    """
    largest = max((abs(number) for number in (x, y) if math.isfinite(number)), default=0.0)
    least = 3
    if largest < 1e6:
        least = max(3, len(str(int(largest))))
    for digits in range(least, 18):
        one, other = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if one != other:
            return one, other
    return repr(x), repr(y)
