"""The run of one property: where it applies, how far it goes, and on which layouts of inputs."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from dataclasses import replace

from mha.conformance.cases.domain import DENSE, Domain
from mha.conformance.cases.reasons import NotApplicable
from mha.conformance.cases.space import CaseSpace
from mha.conformance.engine.preconditions import plain_cases
from mha.conformance.engine.search import Budget, PropertyResult, Search
from mha.conformance.harness.errors import AdapterError, GpuLost
from mha.conformance.harness.global_state import observe_first_call
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.isolation import gpu_is_lost
from mha.conformance.properties.registry import Property, properties
from mha.conformance.settings import Settings
from mha.conformance.waivers import Waiver
from mha.implementations import UnsupportedCallError
from mha.implementations.process.torch_state import threads
from mha.spec import Implementation

CONTIGUOUS_ONLY = "judged on contiguous inputs alone, since others fail SHP-7"


def run_property(
    implementation: Implementation,
    prop: Property,
    dtype: str,
    device: str,
    settings: Settings,
    waivers: Collection[Waiver] = (),
) -> PropertyResult:
    """Search for a failure of a property.

    An exception of property, judge or adapter is a harness error. Raises GpuLost if a call ends the
    use of the GPU by this process.
    """
    limits = settings.limits
    domain = prop.within(implementation.claims, dtype)
    if not isinstance(domain, Domain):
        return PropertyResult(prop=prop, not_applicable=domain)
    if prop.slow and not limits.slow:
        slow = NotApplicable(f"{prop.name} is too slow for the profile {settings.profile}")
        return PropertyResult(prop=prop, not_applicable=slow)
    domain = domain.up_to(limits.ranks)
    longest = limits.long_rows if domain.scale == "long" else limits.longest
    space = CaseSpace(domain, implementation.claims, dtype, device, longest)
    try:
        return _searched(implementation, prop, space, settings, waivers).result()
    except AdapterError as error:
        unsupported = isinstance(error.error, UnsupportedCallError)
        hint = "; claim less, or pass call=..." if unsupported else ""
        return PropertyResult(prop=prop, harness_error=f"{prop.name}: {error.message}{hint}")
    except Exception as error:
        if gpu_is_lost():
            raise GpuLost(f"the judge raised {error!r}") from error
        trace = f"{error!r}\n{traceback.format_exc()}"
        return PropertyResult(prop=prop, harness_error=f"{prop.name}: {trace}")


def _searched(
    implementation: Implementation,
    prop: Property,
    space: CaseSpace,
    settings: Settings,
    waivers: Collection[Waiver],
) -> Search:
    """Return a search after its run: on contiguous inputs only, if just the other layouts fail."""
    dtype, device = space.dtype, space.device
    budget = _budget(implementation, prop, dtype, settings)
    search = Search(implementation, prop, space, budget, seed=settings.seed, waivers=waivers)
    with threads(1), judging(implementation):
        observe_first_call(implementation, plain_cases(implementation.claims, dtype, device)[0])
        search.run()
        if search.needs_contiguous_inputs and _layouts_fail(
            implementation, dtype, device, settings
        ):
            waived = search.waived
            space = replace(space, domain=replace(space.domain, layouts=DENSE))
            search = Search(
                implementation, prop, space, budget, seed=settings.seed, waivers=waivers
            )
            search.note, search.waived = CONTIGUOUS_ONLY, waived
            search.run()
    search.fail_if_tampered()
    return search


def _budget(
    implementation: Implementation, prop: Property, dtype: str, settings: Settings
) -> Budget:
    """Return the budget: smaller in float64 where float32 is judged in the same run."""
    has_float32 = "float32" in settings.dtypes and "float32" in implementation.claims.dtypes
    limits = settings.limits
    every = limits.float64_every if dtype == "float64" and has_float32 else 1
    return Budget.of(prop, limits, every)


# Whether SHP-7 fails, by what is judged; implementations are kept alive, so that no id is used
# again.
_failing_layouts: dict[tuple[int, str, str, str, int], tuple[Implementation, bool]] = {}


def _layouts_fail(
    implementation: Implementation, dtype: str, device: str, settings: Settings
) -> bool:
    """Return whether SHP-7 is judged in the same run, and fails."""
    if "SHP-7" not in settings.judged_clauses:
        return False
    key = id(implementation), dtype, device, settings.profile, settings.seed
    if key not in _failing_layouts:
        results = (
            run_property(implementation, prop, dtype, device, settings)
            for prop in properties()["SHP-7"]
        )
        failing = any(result.failure and not result.blocked_by for result in results)
        _failing_layouts[key] = implementation, failing
    return _failing_layouts[key][1]
