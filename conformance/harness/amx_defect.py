"""A defect of torch, not of implementations: products of bfloat16 on a CPU with AMX.

There `F.linear` and `torch.bmm` read beyond the end of a row, multiply by zero, and so make the row
before one of NaN NaN as well: of more than 16 rows, for many widths. Source:
https://github.com/uxlfoundation/oneDNN/issues/5717
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from mha.spec import Claims, Problem
from mha.spec.claims import Alignment
from mha.spec.dtypes import traits_of

# Up to so many rows there is no defect.
ROWS = 16
# The product of two numbers as large may overflow, and its difference to another one is NaN.
LARGE = 1e15


@cache
def products_mix_rows(dtype: torch.dtype) -> bool:
    """Return whether torch has the defect for a dtype on this CPU."""
    rows = torch.ones(2 * ROWS + 1, 27, dtype=dtype)
    rows[ROWS] = float("nan")
    return bool(F.linear(rows, rows[:ROWS])[ROWS - 1].isnan().any())


def may_mix_rows(problem: Problem, claims: Claims, mode: str) -> bool:
    """Return whether the defect may show in a call, since a row of some numbers may be NaN."""
    query, dtype = problem.query, problem.query.dtype
    if mode == "autocast":
        dtype = torch.bfloat16
    if query.device.type != "cpu" or not traits_of(dtype).half or not products_mix_rows(dtype):
        return False
    inputs = problem.distinct().values()
    if max(x.shape[:-1].numel() for x in inputs) <= ROWS:
        return False
    if not all(bool((x.abs() < LARGE).all()) for x in inputs):
        return True
    return _has_empty_row(problem, claims.alignment)


def _has_empty_row(problem: Problem, alignment: Alignment | None) -> bool:
    """Return whether a query may attend to no key.

    Of a causal call, that is only found where the inputs have their usual layout.
    """
    mask = problem.mask
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
        if not allowed.any(-1).all():
            return True
    usual = problem.query.dim() == 3 and not problem.config.length_first
    is_cut = problem.is_causal or bool(problem.options.window or problem.options.chunk)
    if not (is_cut and alignment is not None and usual):
        return False
    try:
        return bool(problem.empty_rows(alignment).any())
    except RuntimeError:  # the mask has a wrong shape, so the call should raise
        return False
