"""What pytest collects and runs: the selection that the options make, and one item for each clause."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mha.conformance.engine.judge import judge, versions
from mha.conformance.engine.search import PROFILES
from mha.conformance.harness import isolation
from mha.conformance.harness.integrity import put_back
from mha.conformance.properties.registry import properties
from mha.conformance.reports.files import validate_file
from mha.conformance.reports.text import describe
from mha.conformance.results import Verdict, now
from mha.conformance.settings import named_once, validate_choice, validate_devices
from mha.conformance.waivers import Waiver, built_in_waivers, read_waivers
from mha.implementations import Registered, Resolved, discover, resolve
from mha.spec import Implementation
from mha.spec.claims import DTYPES

isolation.STOPS += [pytest.fail.Exception, pytest.exit.Exception]
# The seconds that a clause may take, for each profile, where pytest-timeout has no other limit.
LIMITS = {"quick": 300, "default": 900, "thorough": 0}
# The dtypes of a run that names none; benchmarks take the first.
USUAL = ("float32", "float64")


@dataclass(frozen=True)
class Selection:
    """What the options select.

    unavailable: registered implementations of which none could be had. targets: how each was named. inferred: the
    names of those that were declared nowhere. started: when.
    """

    implementations: tuple[Implementation, ...]
    unavailable: tuple[Registered, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    profile: str
    seed: int
    waivers: tuple[Waiver, ...]
    strict: bool
    targets: tuple[tuple[str, str], ...] = ()
    inferred: tuple[str, ...] = ()
    started: str = ""

    def header(self) -> list[str]:
        """Return the lines that name what is judged, and how."""
        used = ", ".join(f"{name} {number}" for name, number in versions().items())
        names = ", ".join(implementation.name for implementation in self.implementations) or "nothing"
        return [
            f"judging: {names}",
            f"on: {', '.join(self.devices)} in {', '.join(self.dtypes)}; profile {self.profile}, seed {self.seed}"
            + (", SHOULD as MUST" if self.strict else ""),
            f"with: {used}",
            *(f"inferred: {name}; see mha check" for name in self.inferred),
            *(f"unavailable: {entry.name} ({entry.target}): {entry.error}" for entry in self.unavailable),
        ]


def select(config: pytest.Config) -> Selection:
    """Read the options; raises ValueError, in one line, for one that cannot be followed."""
    from mha.conformance.pytest_plugin import times

    option, timing = config.option, times(config)
    profile = option.mha_profile or ("quick" if timing else "default")
    devices, dtypes = _words(option.mha_device) or ("cpu",), _words(option.mha_dtype) or USUAL[: 1 if timing else 2]
    validate_choice("profile", [profile], PROFILES)
    validate_choice("dtype", dtypes, DTYPES)
    validate_devices(devices)
    if not str(option.mha_seed).isdecimal():
        raise ValueError(f"--mha-seed must be a whole number, 0 or more, but is {option.mha_seed!r}")
    targets = _words(option.mha_impl)
    if option.mha_impl and not targets:
        raise ValueError("--mha-impl names no implementation; leave it out to judge all that are registered")
    registered = discover() if not targets or "all" in targets else []
    loaded = [(entry, entry.implementation) for entry in registered]
    named = [Resolved(each, entry.name, entry.inference) for entry, each in loaded if each is not None]
    named += [resolved for target in targets if target != "all" for resolved in resolve(target)]
    if replaced := put_back():
        raise ValueError(f"an implementation replaced {replaced} while it was imported; import it without that")
    by_name = named_once(named)
    for file in option.mha_report:
        if timing:
            raise ValueError("--mha-report tells verdicts; for benchmarks there is --benchmark-json FILE")
        validate_file(Path(file), "--mha-report")
    waivers = [*built_in_waivers(), *(read_waivers(Path(option.mha_waivers), by_name) if option.mha_waivers else [])]
    unavailable = tuple(entry for entry in registered if entry.implementation is None)
    return Selection(
        implementations=tuple(resolved.implementation for resolved in by_name.values()),
        unavailable=unavailable,
        devices=devices,
        dtypes=dtypes,
        profile=profile,
        seed=int(option.mha_seed),
        waivers=tuple(waivers),
        strict=option.mha_strict,
        targets=tuple((name, resolved.target) for name, resolved in by_name.items()),
        inferred=tuple(name for name, resolved in by_name.items() if resolved.inference),
        started=now(),
    )


def _words(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for text in given for word in text.split(",") if word)


class ContractFile(pytest.File):
    """A module of properties, collected as the items of the clauses that it tests."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield an item for each clause, implementation, device and dtype."""
        from mha.conformance.pytest_plugin import selection

        chosen = selection(self.config)
        given = self.config.getoption("timeout", None)  # of pytest-timeout, if that is there
        limit = LIMITS[chosen.profile] if given is None and self.config.pluginmanager.hasplugin("timeout") else 0
        for implementation in chosen.implementations:
            for device in chosen.devices:
                for clause, (first, *_) in properties().items():
                    for dtype in chosen.dtypes:  # side by side, for they share the boundary cases
                        if first.module == self.path.stem:
                            item = ContractItem.from_parent(
                                self,
                                name=f"contract[{implementation.name}-{device}-{dtype}-{clause}]",
                                what=(implementation, clause, dtype, device),
                            )
                            if limit:
                                item.add_marker(pytest.mark.timeout(limit, method="thread"))
                            yield item


class BenchmarkFile(pytest.Module):
    """The module of benchmarks, under its own name: pytest would import it under another."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Yield the benchmarks; none in a run that did not ask for them."""
        from mha.conformance.pytest_plugin import times

        return super().collect() if times(self.config) else []

    def _getobj(self) -> ModuleType:
        return importlib.import_module("mha.conformance.pytest_plugin.benchmarks")


class ContractItem(pytest.Item):
    """One clause, held against one implementation in one dtype on one device."""

    def __init__(self, *, what: tuple[Implementation, str, str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.what = what

    def runtest(self) -> None:
        """Judge, and tell pytest the outcome in its own terms."""
        from mha.conformance.pytest_plugin import selection

        chosen = selection(self.config)
        implementation, clause, dtype, device = self.what
        verdict = judge(
            implementation,
            clause,
            dtype=dtype,
            device=device,
            profile=chosen.profile,
            seed=chosen.seed,
            waivers=chosen.waivers,
            strict=chosen.strict,
            target=dict(chosen.targets).get(implementation.name, ""),
        )
        self.user_properties.append(("mha", asdict(verdict)))
        if verdict.status == "not_claimed":
            pytest.skip(f"not claimed: {verdict.message}")
        if verdict.status == "harness_error" or not verdict.conforms:
            raise Nonconformance(verdict)
        if verdict.status != "pass":  # waived, or a SHOULD that is not kept
            pytest.xfail(verdict.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Describe a violation; anything else is ours, and keeps its traceback."""
        if isinstance(excinfo.value, Nonconformance):
            return describe(excinfo.value.verdict)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Name the item as it is written on the command line."""
        return self.path, None, self.name


class Nonconformance(Exception):
    """Carries a verdict that is not a pass to pytest."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.clause}: {verdict.message}")
        self.verdict = verdict
