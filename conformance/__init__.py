"""The judge: holds implementations of multi-head attention to the contract of `mha.spec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha.conformance.cases.case import Case
    from mha.conformance.embedded.cases import KernelCase
    from mha.conformance.embedded.kernel import judge_kernel
    from mha.conformance.embedded.output import judge_output
    from mha.conformance.embedded.plan import kernel_cases
    from mha.conformance.embedded.verdict import OutputVerdict
    from mha.conformance.engine.judge import check
    from mha.conformance.pytest_plugin.parametrize import parametrize_with_clauses
    from mha.conformance.results import Report, Verdict
    from mha.conformance.waivers import Waiver

__all__ = [
    "Case",
    "KernelCase",
    "OutputVerdict",
    "Report",
    "Verdict",
    "Waiver",
    "check",
    "judge_kernel",
    "judge_output",
    "kernel_cases",
    "parametrize_with_clauses",
]

_PLACES = {
    "Case": "cases.case",
    "check": "engine.judge",
    "judge_kernel": "embedded.kernel",
    "judge_output": "embedded.output",
    "kernel_cases": "embedded.plan",
    "KernelCase": "embedded.cases",
    "OutputVerdict": "embedded.verdict",
    "parametrize_with_clauses": "pytest_plugin.parametrize",
    "Report": "results",
    "Verdict": "results",
    "Waiver": "waivers",
}


def __getattr__(name: str) -> Any:
    # Every pytest run of an environment loads the plugin of this package: torch must wait until it
    # is needed.
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"mha.conformance.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
