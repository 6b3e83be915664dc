"""The named assertions of properties. Each says what was seen, what should have been, and where."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.implementations import ImplementationError
from mha.spec.bounds import Ball


def expect(condition: bool, message: str, *check: str) -> None:
    """Raise a Violation with this message and these lines of script unless the condition holds."""
    if not condition:
        raise Violation(message, check)


def assume(condition: bool, why: str) -> None:
    """Leave a case out, uncounted, unless the condition holds: it says nothing of the clause."""
    if not condition:
        raise Discard(why)


def expect_shape(got: RecordedTensor, shape: tuple[int, ...]) -> None:
    """The shape is exactly this."""
    seen = tuple(got.tensor.shape)
    expect(
        seen == shape,
        f"{got.code} has the shape {seen}, but should have {shape}",
        f"assert {got.code}.shape == {shape}, {got.code}.shape",
    )


def expect_equal(got: RecordedTensor, expected: RecordedTensor | float, *, because: str) -> None:
    """Every bit is equal (NaN equals NaN): the operations behind both are the same, so rounding is no excuse."""
    value = expected.tensor if isinstance(expected, RecordedTensor) else torch.full_like(got.tensor, expected)
    named = expected.code if isinstance(expected, RecordedTensor) else f"torch.full_like({got.code}, {expected!r})"
    expect_shape(got, tuple(value.shape))
    same = (got.tensor == value) | (got.tensor.isnan() & value.isnan())
    if bool(same.all()):
        return
    error = (got.tensor.double() - value.double()).abs().nan_to_num(nan=float("inf")).masked_fill(same, -1.0)
    wanted = f"exactly {{}}, as in {named}" if isinstance(expected, RecordedTensor) else "exactly {}"
    check = f"torch.testing.assert_close({got.code}, {named}, rtol=0, atol=0, equal_nan=True)"
    raise Violation(_told(got, value, _worst(error), wanted, because), (check,))


def expect_no_worse(code: str, seen: Tensor, plain: Tensor, right: Tensor) -> None:
    """The root mean square error is at most twice that of the plain formula in the same dtype, NaN being an error.

    Below one rounding of the result, "twice as large" would tell luck, not method.
    """
    error, least = _root_mean_square(seen - right), torch.finfo(plain.dtype).eps / 2 * _root_mean_square(right)
    allowed = max(_root_mean_square(plain - right), least)
    told = f"the root mean square error of {code} is {error:.3g}, more than twice the {allowed:.3g} of the plain "
    expect(error <= 2 * allowed, f"{told}formula in the same dtype")


def _root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def expect_close(got: RecordedTensor, expected: Ball, *, because: str) -> None:
    """Every element is within the radius of the expected ball; NaN and infinity stand in the same places."""
    expect_shape(got, tuple(expected.mid.shape))
    value, seen = expected.mid, got.tensor.detach().double()
    assume(not seen.numel() or not bool(expected.rad.isinf().all()), "a step may overflow, so nothing is known")
    error = (seen - value).abs()
    ratio = (error / expected.rad).nan_to_num(nan=0.0, posinf=math.inf)
    if bool((error <= expected.rad).all()):  # and then no number is NaN
        got.note_margin(float(ratio.max()) if ratio.numel() else 0.0)
        return
    plain = seen.isfinite() & value.isfinite()
    same = torch.where(plain, error <= expected.rad, (seen == value) | (seen.isnan() & value.isnan()))
    same |= expected.rad == float("inf")  # where a step may overflow, nothing is known
    ratio = ratio.where(plain, 0.0)
    if bool(same.all()):
        got.note_margin(float(ratio.max()))
        return
    worst = _worst(torch.where(plain, ratio, float("inf")).masked_fill(same, -1.0))
    at = got[worst].code
    wanted, bound = float(value[worst]), float(expected.rad[worst])
    message = _told(got, value, worst, f"{{}} within {bound:.3g} (the bound on rounding)", because)
    if bool(value[worst].isnan()):
        check = [f"assert {at}.isnan(), {at}.item()"]
    else:
        check = [f"error = abs({at}.item() - {wanted!r})", f"assert error <= {bound!r}, error"]
    raise Violation(message, tuple(check))


def expect_agree(got: RecordedTensor, expected: RecordedTensor, *, bounds: tuple[Ball, Ball], because: str) -> None:
    """Two results agree within the sum of the bounds of both: neither needs to be near the oracle's value."""
    reach = bounds[0].rad + bounds[1].rad
    expect_close(got, Ball(expected.tensor.detach().double(), reach), because=f"{because} ({expected.code})")


def expect_unchanged(
    session: Session, got: RecordedTensor, expected: RecordedTensor, *, bound: Callable[[], Ball], because: str
) -> None:
    """Two results of the same operations are equal to the bit.

    On other devices than the CPU, and for an implementation that retiles, they agree within twice the bound.
    """
    if session.case.device == "cpu" and not session.claims.retiles:
        expect_equal(got, expected, because=because)
    else:
        reach = bound()
        expect_agree(got, expected, bounds=(reach, reach), because=because)


def expect_raises(call: Callable[[], Any], *, because: str) -> BaseException:
    """The call is refused with an exception, which is returned."""
    later = ""
    try:
        call()
    except Violation as violation:
        if isinstance(violation, CallRaised) and not isinstance(violation.error, ImplementationError):
            return violation.error
        if isinstance(violation, CallRaised):  # the implementation had accepted what its adapter could not load
            later = f" (only its adapter refused, afterwards: {violation.error})"
    raise Violation(f"no exception was raised, though {because}{later}", (f"raise AssertionError({because!r})",))


def _worst(error: Tensor) -> tuple[int, ...]:
    place = torch.unravel_index(error.argmax(), error.shape)
    return tuple(int(index) for index in place)


def _told(got: RecordedTensor, value: Tensor, at: tuple[int, ...], wanted: str, because: str) -> str:
    seen, expected = got.tensor[at].item(), value[at].item()
    return f"{got[at].code} is {seen:.9g}, but should be {wanted.format(f'{expected:.9g}')}: {because}"
