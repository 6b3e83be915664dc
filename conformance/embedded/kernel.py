"""`judge_kernel`: a kernel on cases of its claims, in seconds, with the probes that it needs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import torch

from mha.conformance.embedded.calling import Call, Kernel, NotExpressed
from mha.conformance.embedded.cases import KernelCase
from mha.conformance.embedded.plan import kernel_cases
from mha.conformance.embedded.repeats import probe_calls
from mha.conformance.embedded.trial import Trial
from mha.conformance.results import Report, now, this_host
from mha.spec.claims import Claims

# The probes that take many calls come after so many cases, which more wrong kernels fail.
PROBES_AFTER = 10
# What the tensors of a case cannot say.
NOT_TRIED = ("lengths", "packed")


def judge_kernel(  # noqa: PLR0913  the options, each by name
    kernel: Callable[..., Any],
    claims: Claims,
    *,
    seed: int = 0,
    seconds: float = 5.0,
    device: str = "cpu",
    layout: str = "b h l d",
    call: Call | None = None,
    name: str | None = None,
    cases: Sequence[KernelCase] | None = None,
    until_failure: bool = False,
) -> Report:
    """Judge a kernel on cases of its claims, the most telling first, with torch alone.

    It writes no files and prints nothing. The kernel runs in this process, so that one that
    crashes or never ends takes the process with it; give each candidate a process of its own.

    kernel: called with query, key and value in `layout`, and with the options of a case by the
        names that its parameters have, as `scale` or `softmax_scale`; a boolean mask is True where
        a query may attend. It returns the context, or that and the log-sum-exp.
    claims: what it supports; it is judged on nothing else. `causal` says the alignment, `scores`
        the options, `lse` that it returns one, `dtypes`, `sizes` and `rounding` what they say.
    seed: of all numbers: the same seed makes the same cases everywhere.
    seconds: no case is started later. The report is incomplete if a clause was not reached, or if
        a claim is about what the kernel has no parameter for.
    layout: of the tensors, as for `from_kernel`.
    call: a function (kernel, query, key, value, options) that calls it, where its parameters have
        other names.
    name: in the report; by default that of the function.
    cases: other cases than `kernel_cases` makes, in this order.
    until_failure: whether to stop at the first failure that decides.

    Returns a report with a verdict for each clause and dtype; `to_json` gives it by the published
    schema.

    Raises ValueError for a kernel with parameters that no case gives, or that cannot be read, and
    for a claim that no case tries.

    >>> def attend(q, k, v, is_causal=False):
    ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    >>> claims = Claims(projections=False, masks=(), returns_weights=False, dtypes={"float32"})
    >>> judge_kernel(attend, claims, seconds=30).conforms
    True
    """
    _require_judged(claims)
    if cases is None:
        cases = kernel_cases(claims, seed=seed)
    place = torch.device(device)
    trial = Trial(Kernel.read(kernel, claims, layout, call), claims, place)
    _try_all(trial, cases, seconds, until_failure=until_failure)
    label = name or str(getattr(kernel, "__name__", "kernel"))
    claimed = {(case.clause, case.dtype) for case in cases}
    is_incomplete = not claimed <= trial.findings.found.keys()
    is_incomplete = is_incomplete or trial.findings.has_unasked_claims
    verdicts = tuple(trial.findings.verdicts(label, place.type))
    report = Report(verdicts=verdicts, profile="embedded", seed=seed, versions=_versions())
    return replace(
        report,
        targets={label: label},
        # What decided at once needs no other clause.
        incomplete=is_incomplete and not (until_failure and trial.findings.decided),
        started=now(),
        host=this_host(),
    )


def _require_judged(claims: Claims) -> None:
    """Raise ValueError for a claim about whole calls that no case tries: it would pass unseen."""
    for name in NOT_TRIED:
        if getattr(claims, name):
            raise ValueError(
                f"Claims.{name} is not tried here, and would pass unseen: judge it by `mha check`,"
                " or leave it out of these claims"
            )


def _try_all(
    trial: Trial, cases: Sequence[KernelCase], seconds: float, *, until_failure: bool
) -> None:
    """Try the cases in their order, as long as there is time."""
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(cases):
            if time.monotonic() - start > seconds:
                break
            _try(trial, case)
            if number + 1 == min(PROBES_AFTER, len(cases)):
                probe_calls(trial, cases[0])
            if until_failure and trial.findings.decided:
                break
        trial.look_again()


def _try(trial: Trial, case: KernelCase) -> None:
    """Try a case, unless its clause has failed already."""
    if trial.findings.has_failed(case.clause, case):
        return
    start = time.monotonic()
    try:
        trial.judge(case)
    except NotExpressed as reason:
        trial.findings.of(case.clause, case).not_expressed = str(reason)
        return
    trial.findings.of(case.clause, case).seconds += time.monotonic() - start


def _versions() -> dict[str, str]:
    """Return the versions of what a verdict may depend on, as far as they are known."""
    found = {"torch": str(torch.__version__), "python": python_version()}
    try:
        found["mha-conformance"] = version("mha-conformance")
    except PackageNotFoundError:  # it was copied, not installed
        found["mha-conformance"] = "unknown"
    return found
