"""Clauses as parameters of a test in a user's own file."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import product

import pytest
import torch

from mha.conformance.engine.judge import judge, resolve_object
from mha.conformance.pytest_plugin.items import Nonconformance, report_outcome
from mha.conformance.reports.text import describe
from mha.conformance.settings import Settings
from mha.conformance.waivers import Waiver
from mha.implementations import Resolved


def parametrize_with_clauses(  # noqa: PLR0913  the public options
    implementation: object,
    profile: str | None = None,
    seed: int = 0,
    *,
    clauses: str | Collection[str] = (),
    dtypes: str | torch.dtype | Collection[str | torch.dtype] | None = None,
    devices: str | Collection[str] | None = None,
    waivers: Collection[Waiver] | None = None,
    strict: bool = False,
    require: str | Collection[str] = (),
) -> pytest.MarkDecorator:
    """Make a test for each clause, dtype and device; its argument `check_clause` judges the clause.

    A clause that is not claimed is skipped; a waived one, and a SHOULD that fails, is an expected
    failure. The options are those of `mha.conformance.check`, which raises the same errors.

    >>> @parametrize_with_clauses("sdpa", profile="quick", clauses="MSK", dtypes="float32")
    ... def test_attention(check_clause):
    ...     check_clause()
    """
    given = Settings.of(
        profile, seed, clauses, dtypes, devices, waivers, strict=strict, require=require
    )
    resolved = resolve_object(implementation)
    settings = given.of_target(resolved)
    checks, names = [], []
    for device, clause, dtype in product(
        settings.devices, settings.judged_clauses, settings.dtypes
    ):
        checks.append(partial(_expect, resolved, clause, dtype, device, settings))
        names.append(f"{resolved.implementation.name}-{device}-{dtype}-{clause}")
    return pytest.mark.parametrize("check_clause", checks, ids=names)


def _expect(resolved: Resolved, clause: str, dtype: str, device: str, settings: Settings) -> None:
    """Judge a clause, and fail with everything about the failure in the place of a traceback."""
    try:
        report_outcome(judge(resolved, clause, dtype, device, settings))
    except Nonconformance as failure:
        pytest.fail(describe(failure.verdict), pytrace=False)
