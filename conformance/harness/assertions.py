"""The assertions of properties; each message has the value, the expectation, its bound, the place
and the reason.
"""

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
    """Every bit is equal (NaN equals NaN): both are the same operations on the same numbers,
    rounded alike.
    """
    value = (
        expected.tensor
        if isinstance(expected, RecordedTensor)
        else torch.full_like(result.tensor, expected)
    )
    name = (
        expected.code
        if isinstance(expected, RecordedTensor)
        else f"torch.full_like({result.code}, {expected!r})"
    )
    expect_shape(result, tuple(value.shape))
    same = (result.tensor == value) | (result.tensor.isnan() & value.isnan())
    if bool(same.all()):
        return
    error = (
        (result.tensor.double() - value.double())
        .abs()
        .nan_to_num(nan=float("inf"))
        .masked_fill(same, -1.0)
    )
    place = _place_of_largest(error)
    wording = "exactly {}"
    if isinstance(expected, RecordedTensor):
        wording = f"{{}}, to the bit, as in {expected[place].code}"
    assertion = f"torch.testing.assert_close({result.code}, {name}, rtol=0, atol=0, equal_nan=True)"
    raise Violation(_message(result, value, place, wording, because), (assertion,))


def expect_no_worse(
    code: str, result: Tensor, plain: Tensor, expected: Tensor, times: int = 2
) -> None:
    """The root mean square error is at most `times` that of the plain formula in the same dtype,
    NaN being an error.

    An error of less than one rounding of the result counts as one rounding: below that, a ratio is
    luck.
    """
    error, least = (
        _root_mean_square(result - expected),
        torch.finfo(plain.dtype).eps / 2 * _root_mean_square(expected),
    )
    allowed = max(_root_mean_square(plain - expected), least)
    than = "twice" if times == 2 else f"{times} times"
    message = (
        f"the root mean square error of {code} is {error:.3g}, more than {than} the {allowed:.3g}"
        " of the plain "
    )
    expect(error <= times * allowed, f"{message}formula in the same dtype")


def expect_close(result: RecordedTensor, expected: Ball, *, because: str) -> None:
    """Every element is within the radius of the expected ball, with NaN and infinity in the same
    places.
    """
    place = _outside(result, expected)
    if place is not None:
        bound = float(expected.rad[place])
        wording = f"{{}} (bound on rounding: {bound:.3g})"
        message = _message(result, expected.mid, place, wording, because)
        violation = Violation(
            message, _bound_assertion(result[place].code, float(expected.mid[place]), bound)
        )
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
    if place is not None:
        bound, code = float(reach.rad[place]), result[place].code
        actual, expected = _until_they_differ(result.tensor[place].item(), float(reach.mid[place]))
        message = (
            f"{code} is {actual}, but {other[place].code}, {because}, is {expected} (bound on the"
            f" rounding of both: {bound:.3g})"
        )
        both = f"{code}.double(), {other[place].code}.double()"
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
        note = (  # it could not load what had been accepted
            f" (only its adapter refused, afterwards: {failed.error})"
        )
    raise Violation(
        f"no exception was raised, though {because}{note}", (f"raise AssertionError({because!r})",)
    )


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
    """Return the place that is farthest outside the ball relative to its radius, or None, and note
    the margin.
    """
    expect_shape(result, tuple(expected.mid.shape))
    value, actual = expected.mid, result.tensor.detach().double()
    assume(
        not actual.numel() or not bool(expected.rad.isinf().all()),
        "a step may overflow, so nothing is known",
    )
    error = (actual - value).abs()
    ratio = (error / expected.rad).nan_to_num(nan=0.0, posinf=math.inf)
    if bool((error <= expected.rad).all()):  # and then no number is NaN
        result.note_margin(float(ratio.max()) if ratio.numel() else 0.0)
        return None
    finite = actual.isfinite() & value.isfinite()
    same = torch.where(
        finite, error <= expected.rad, (actual == value) | (actual.isnan() & value.isnan())
    )
    same |= expected.rad == float("inf")  # where a step may overflow, nothing is known
    ratio = ratio.where(finite, 0.0)
    if bool(same.all()):
        result.note_margin(float(ratio.max()))
        return None
    return _place_of_largest(torch.where(finite, ratio, float("inf")).masked_fill(same, -1.0))


def _is_rounding(actual: Tensor, expected: Ball, place: tuple[int, ...]) -> bool:
    """Return whether an element is off by a few times its bound, and by a few roundings of the
    largest number.
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
    """Return the message on one element; wording: of what it should be, with {} for the expected
    number.
    """
    actual, expected = _until_they_differ(result.tensor[place].item(), value[place].item())
    return f"{result[place].code} is {actual}, but should be {wording.format(expected)}: {because}"


def _until_they_differ(x: float, y: float) -> tuple[str, str]:
    """Return two numbers with three digits, or as many as tell them apart; all digits before the
    point, if few.

    >>> _until_they_differ(0.30462, 0.26649), _until_they_differ(1.23456, 1.23459), _until_they_differ(54321.0, 2.0)
    (('0.305', '0.266'), ('1.23456', '1.23459'), ('54321', '2'))
    """
    largest = max((abs(number) for number in (x, y) if math.isfinite(number)), default=0.0)
    least = max(3, len(str(int(largest)))) if largest < 1e6 else 3
    texts = ((f"{x:.{digits}g}", f"{y:.{digits}g}") for digits in range(least, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (repr(x), repr(y)))
